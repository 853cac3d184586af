//! Drivers that are unloaded and loaded, and a cable that is unplugged.

use anyhow::{Context, Result, ensure};

use super::super::case::Case;
use super::super::pingpong::pingpong;
use super::cards::{Both, CARD, Cards, PATIENCE};
use crate::pair::{LinkKind, PVRDMA_DEVICE};

/// Memory in KiB that the daemon may keep after all resources of a guest were released: overhead of the allocator.
const SLACK_KIB: u64 = 4096;

pub(super) fn cases(cards: &Both) -> Vec<Case> {
    vec![cards.case("nic/reload-driver-20-times", reload), cards.case("nic/link-down-and-up", link_down_and_up)]
}

/// Reloads both drivers, because that of the RDMA function looks up the interface of the other one.
fn reload(cards: &Cards) -> Result<String> {
    let [_, b] = cards.addresses()?;
    let again = || -> Result<()> {
        cards.vm(0).run("rmmod vmw_pvrdma && rmmod vmxnet3")?;
        cards.0.load_pvrdma(0)?;
        cards.vm(0).run(&format!("ping -n -q -c 3 -i 0.01 -W 20 {b}")).map(drop)
    };
    let memory = || cards.0.daemon().context("there is no daemon")?.memory_kib();
    // The first run fills the daemon's pools.
    again()?;
    let (before, starts) = (memory()?, cards.counter(0, "vmxnet3_activations")?);
    for number in 0..20 {
        again().with_context(|| format!("time {number}"))?;
    }
    let (after, started) = (memory()?, cards.counter(0, "vmxnet3_activations")? - starts);
    ensure!(after <= before + SLACK_KIB, "the daemon has grown from {before} to {after} KiB");
    ensure!(started >= 20, "the driver started the vNIC {started} times");
    cards.both_ways(2 << 20, 4)?;
    let link = cards.0.link(LinkKind::Pvrdma)?;
    pingpong(&cards.0.endpoints(&link), 1, "ibv_rc_pingpong", "-c")?;
    Ok(format!("daemon memory {before} -> {after} KiB"))
}

/// Both functions notice, and traffic in progress completes when the cable is back.
fn link_down_and_up(cards: &Cards) -> Result<String> {
    let [a, b] = cards.addresses()?;
    let daemon = cards.0.daemon().context("there is no daemon")?;
    let vm = cards.vm(1);
    let carrier = |on: u8| vm.wait_until(&format!("grep -qsx {on} /sys/class/net/{CARD}/carrier"), PATIENCE);
    let events = vm.spawn(&format!("stdbuf -oL ibv_asyncwatch -d {PVRDMA_DEVICE}"))?;
    events.wait_for_output("async event FD", PATIENCE)?;
    let _server = cards.serve(1)?;
    let command =
        format!("{} stream {b}:{} --bytes {} --connections 2", super::cards::PEER, super::cards::PORT, 64 << 20);
    let stream = cards.vm(0).spawn(&command)?;
    // The stream has begun.
    let before = cards.counter(1, "vmxnet3_received_bytes")?;
    while cards.counter(1, "vmxnet3_received_bytes")? < before + (1 << 20) {
        ensure!(stream.is_running(), "the stream ended before the link went down:\n{}", stream.output());
    }
    for _ in 0..3 {
        daemon.set_link("vm1", false)?;
        carrier(0)?;
        cards.wait_port(1, "DOWN")?;
        let text = vm.run(&format!("ethtool {CARD}; ip link show {CARD}"))?;
        ensure!(text.contains("Link detected: no") && text.contains("NO-CARRIER"), "{text}");
        // The other guest's link is still up.
        cards.vm(0).run(&format!("grep -qx 1 /sys/class/net/{CARD}/carrier"))?;
        ensure!(cards.vm(0).exec(&format!("ping -n -q -c 1 -W 0.2 {b}"), PATIENCE)?.code != 0, "a ping came through");
        daemon.set_link("vm1", true)?;
        carrier(1)?;
        cards.wait_port(1, "ACTIVE")?;
        cards.vm(1).run(&format!("ping -n -q -c 3 -i 0.01 -W 20 {a}"))?;
    }
    for event in ["IBV_EVENT_PORT_ERR", "IBV_EVENT_PORT_ACTIVE"] {
        events.wait_for_output(event, PATIENCE)?;
    }
    stream.wait_success(PATIENCE)?;
    let link = cards.0.link(LinkKind::Pvrdma)?;
    pingpong(&cards.0.endpoints(&link), 1, "ibv_rc_pingpong", "-c")?;
    Ok(String::new())
}
