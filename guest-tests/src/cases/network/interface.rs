//! The interface is moved to another namespace, driver or bridge, and back.

use std::net::IpAddr;

use anyhow::{Context, Result, ensure};

use super::super::case::Case;
use super::steps::{CARD, PATIENCE, and_then_restore, checked_traffic, rdma, rdma_between, started};
use crate::pair::{Link, Pair};

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("network/other-namespace", other_namespace),
        Case::new("network/unbound-and-bound", unbound),
        Case::new("network/bridge", bridge),
        Case::new("network/xdp", xdp),
    ]
}

/// Moves the interface to another network namespace, where it works, and back.
fn other_namespace(pair: &mut Pair, link: &Link) -> Result<String> {
    let address = link.ip[1];
    let work = || {
        pair.b().run(&format!(
            "ip netns add other && ip link set {CARD} netns other &&
             ip -n other addr add {address}/24 dev {CARD} && ip -n other link set {CARD} up"
        ))?;
        checked_traffic(pair, 1, &address.to_string(), "ip netns exec other")?;
        Ok(String::new())
    };
    let note = and_then_restore(work, || {
        pair.b().run(&format!("ip -n other link set {CARD} netns 1; ip netns del other"))?;
        pair.load_pvrdma(1)
    })?;
    checked_traffic(pair, 1, &address.to_string(), "")?;
    rdma(pair)?;
    Ok(note)
}

/// Unbinds each function from its driver and binds it again. The interface is unbound while the RDMA device is bound.
fn unbound(pair: &mut Pair, link: &Link) -> Result<String> {
    let slot = pair.b().run(&format!("basename $(readlink /sys/class/net/{CARD}/device)"))?;
    let slot = slot.trim().strip_suffix(".0").context("the network function is not function 0")?;
    for (function, driver) in [(0, "vmxnet3"), (1, "vmw_pvrdma")] {
        let directory = format!("/sys/bus/pci/drivers/{driver}");
        pair.b().run(&format!("echo {slot}.{function} > {directory}/unbind"))?;
        pair.b().run(&format!("echo {slot}.{function} > {directory}/bind"))?;
        pair.load_pvrdma(1)?;
        checked_traffic(pair, 1, &link.ip[1].to_string(), "")?;
        rdma(pair).with_context(|| format!("{driver} has let its function go and taken it again"))?;
    }
    Ok(String::new())
}

/// The interface is a port of a bridge, which has the address.
fn bridge(pair: &mut Pair, link: &Link) -> Result<String> {
    let address = link.ip[1];
    let work = || {
        pair.b().run(&format!(
            "ip link add br0 type bridge && ip addr flush dev {CARD} && ip link set {CARD} master br0 &&
             ip addr add {address}/24 dev br0 && ip link set br0 up"
        ))?;
        checked_traffic(pair, 1, &address.to_string(), "")?;
        checked_traffic(pair, 0, &link.ip[0].to_string(), "")?;
        rdma(pair)?;
        Ok(String::new())
    };
    and_then_restore(work, || {
        pair.b().run("ip link del br0")?;
        pair.load_pvrdma(1)
    })
}

/// An XDP program in the driver passes most packets, and sends some back to their source.
fn xdp(pair: &mut Pair, link: &Link) -> Result<String> {
    const SENT: usize = 20;
    let ip = link.ip.map(IpAddr::V4);
    let attached = started(pair, 1, &format!("xdp {CARD}"), "attached")?;
    checked_traffic(pair, 1, &link.ip[1].to_string(), "")?;
    rdma_between(pair, ip, 1)?;
    let filter = format!("udp dst port 9 and dst host {}", link.ip[1]);
    let dump = format!("tcpdump -l -n -vvv -Q in -i {CARD} -c {SENT} '{filter}' 2>&1");
    let dump = started(pair, 0, &dump, "listening on")?;
    pair.a().run(&format!("bash -c 'for i in $(seq {SENT}); do echo $RANDOM > /dev/udp/{}/9; done'", link.ip[1]))?;
    let text = dump.wait_success(PATIENCE)?;
    let returned = text.matches("udp sum ok").count();
    ensure!(returned == SENT, "{returned} of {SENT} datagrams came back as they were:\n{text}");
    drop(attached);
    pair.b().wait_until(&format!("! ip link show {CARD} | grep -q xdp"), PATIENCE)?;
    pair.b().run(&format!("ethtool -K {CARD} lro on"))?;
    checked_traffic(pair, 1, &link.ip[1].to_string(), "")?;
    Ok(format!("{returned} datagrams sent back"))
}
