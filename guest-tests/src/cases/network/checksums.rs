//! Checksums in a guest that inspects or forwards whole packets.

use anyhow::{Context, Result, ensure};

use super::super::case::Case;
use super::steps::{CARD, PATIENCE, PEER, PORT, and_then_restore, serve, started};
use crate::pair::{Link, Pair};

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("network/checksums-of-packet-socket", packet_socket),
        Case::new("network/checksums-forwarded", forwarded),
    ]
}

/// Datagrams of a check, small enough for single packets.
const DATAGRAMS: usize = 20;

/// Sends datagrams and a stream to an address while `tcpdump` in the other guest verifies the checksums of the packets
/// that arrive at an interface.
fn check_sums(pair: &Pair, to: usize, address: &str, interface: &str, prefix: &str) -> Result<String> {
    let _server = serve(pair, to, prefix)?;
    // Segments longer than a packet never existed on the wire in this form.
    let filter = format!("dst host {address} and dst port {PORT} and less 1515");
    let dump = format!("{prefix} tcpdump -l -n -vvv -Q in -i {interface} -c 30 '{filter}' 2>&1");
    let dump = started(pair, to, &dump, "listening on")?;
    let step = 1400 / DATAGRAMS;
    for command in [
        format!("datagrams {address}:{PORT} --from 1 --to 1400 --step {step}"),
        format!("stream {address}:{PORT} --bytes 20000 --connections 10"),
    ] {
        pair.vms()[1 - to].spawn(&format!("{PEER} {command}"))?.wait_success(PATIENCE)?;
    }
    let text = dump.wait_success(PATIENCE)?;
    let (datagrams, segments) = (text.matches("udp sum ok").count(), text.matches("(correct)").count());
    ensure!(!text.contains("bad udp cksum") && !text.contains("incorrect"), "a checksum is wrong:\n{text}");
    ensure!(datagrams >= DATAGRAMS && segments > 0, "too few checksums were looked at:\n{text}");
    Ok(format!("{datagrams} datagrams, {segments} segments"))
}

fn packet_socket(pair: &mut Pair, link: &Link) -> Result<String> {
    check_sums(pair, 0, &link.ip[0].to_string(), CARD, "")?;
    check_sums(pair, 1, &link.ip[1].to_string(), CARD, "")
}

/// Guest b is the router of a network namespace. Forwarded packets keep the checksums with which they arrived.
fn forwarded(pair: &mut Pair, link: &Link) -> Result<String> {
    let work = || {
        pair.b().run(
            "ip netns add behind && ip link add veth0 type veth peer name veth1 netns behind &&
             ip addr add 10.3.0.1/24 dev veth0 && ip link set veth0 up &&
             ip -n behind addr add 10.3.0.2/24 dev veth1 && ip -n behind link set veth1 up &&
             ip -n behind route add default via 10.3.0.1 && echo 1 > /proc/sys/net/ipv4/ip_forward",
        )?;
        pair.a().run(&format!("ip route add 10.3.0.0/24 via {}", link.ip[1]))?;
        check_sums(pair, 1, "10.3.0.2", "veth1", "ip netns exec behind")
    };
    and_then_restore(work, || {
        pair.a().run("ip route del 10.3.0.0/24")?;
        // The kernel disables LRO on a router.
        let undo = format!("echo 0 > /proc/sys/net/ipv4/ip_forward; ethtool -K {CARD} lro on; ip netns del behind");
        pair.b().run(&undo).context("no host again").map(drop)
    })
}
