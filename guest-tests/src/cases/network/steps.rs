//! Steps and constants that the cases of the network interface share.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, Result};

use super::super::pingpong::pingpong;
use crate::endpoints::Endpoints;
use crate::pair::{LinkKind, PVRDMA_DEVICE, Pair};
use crate::vm::Job;

/// The interface beside the RDMA device.
pub(super) const CARD: &str = "eth0";
/// Checked traffic in a guest, see [`crate::net_peer`].
pub(super) const PEER: &str = "/run/guest-tests net-peer";
/// The port where it listens.
pub(super) const PORT: u16 = 7000;
/// Time limit of a program.
pub(super) const PATIENCE: Duration = Duration::from_secs(120);

/// Starts the other side of checked traffic in a guest, behind `prefix` (`ip netns exec NAME`).
pub(super) fn serve(pair: &Pair, end: usize, prefix: &str) -> Result<Job> {
    let vm = &pair.vms()[end];
    let server = vm.spawn(&format!("{prefix} {PEER} serve --port {PORT}"))?;
    let listens = crate::endpoints::listens(PORT);
    vm.wait_until(&format!("{prefix} {listens}"), PATIENCE)?;
    Ok(server)
}

/// Sends pings, datagrams and a stream to an address of a guest, and compares each byte.
pub(super) fn checked_traffic(pair: &Pair, to: usize, address: &str, prefix: &str) -> Result<()> {
    let from = &pair.vms()[1 - to];
    let _server = serve(pair, to, prefix)?;
    for command in [
        format!("ping -n -q -c 5 -i 0.01 -s 1000 -W 20 {address}"),
        format!("{PEER} datagrams {address}:{PORT} --from 1 --to 3000 --step 97"),
        format!("{PEER} stream {address}:{PORT} --bytes {} --connections 2", 2 << 20),
    ] {
        from.spawn(&command)?.wait_success(PATIENCE).with_context(|| format!("to {address}"))?;
    }
    Ok(())
}

/// A ping-pong with its server at an address of a guest and its client at one of the other guest. Every byte is
/// compared.
pub(super) fn rdma_between(pair: &Pair, ip: [IpAddr; 2], server: usize) -> Result<String> {
    // The parameters go from and to the first addresses, which every case leaves in place or restores.
    let tcp = pair.link(LinkKind::Pvrdma)?.ip;
    let endpoints = Endpoints::new([pair.a(), pair.b()], PVRDMA_DEVICE, tcp, PATIENCE).with_gids(ip)?;
    pingpong(&endpoints, server, "ibv_rc_pingpong", "-c")
}

/// RDMA in both directions, with the addresses that the guests have had from the beginning.
pub(super) fn rdma(pair: &Pair) -> Result<()> {
    let ip = pair.link(LinkKind::Pvrdma)?.ip.map(IpAddr::V4);
    (0..2).try_for_each(|server| rdma_between(pair, ip, server).map(drop))
}

/// Runs a case, and restores the guests' settings even if it fails.
pub(super) fn and_then_restore(
    work: impl FnOnce() -> Result<String>,
    restore: impl FnOnce() -> Result<()>,
) -> Result<String> {
    let result = work();
    let restored = restore().context("the guests cannot be put back in order");
    let note = result?;
    restored.map(|()| note)
}

/// Starts a program and waits until it has printed a text.
pub(super) fn started(pair: &Pair, end: usize, command: &str, text: &str) -> Result<Job> {
    let job = pair.vms()[end].spawn(command)?;
    job.wait_for_output(text, PATIENCE)?;
    Ok(job)
}
