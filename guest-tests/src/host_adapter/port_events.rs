//! Events of the host's adapter while guests use it: change of MTU, loss of link, loss of the adapter.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use pvrdma_dev::testing::{Driver, Placement, RecvWr, SendWr, state, status, wait_for};
use pvrdma_ibverbs::Ibverbs;
use pvrdma_verbs::testing::gid;

use crate::device_pair::connected;

/// Types of asynchronous events.
const QP_FATAL: u32 = 1;
const PORT_ACTIVE: u32 = 9;
const PORT_ERROR: u32 = 10;
/// States of a port.
const DOWN: u32 = 1;
const ACTIVE: u32 = 4;
/// Writes in flight when the adapter disappears.
const WRITES: u64 = 20;
const MIB: usize = 1 << 20;

/// Runs all tests on an interface of this machine, which is restored afterwards.
pub(super) fn check(backend: &Ibverbs, device: &str) -> Result<()> {
    port_changes(backend, device)?;
    // All devices are notified of the loss, one after the other.
    for order in [[1, 2], [2, 1]] {
        lost(backend, order).with_context(|| format!("guest {} loses its adapter first", order[0]))?;
    }
    println!("lost adapter: ok");
    Ok(())
}

fn port_changes(backend: &Ibverbs, device: &str) -> Result<()> {
    let interface = std::fs::read_to_string(format!("/sys/class/infiniband/{device}/parent"))
        .context("the adapter has no network interface")?;
    let link = |change: &str| ip(&format!("link set dev {} {change}", interface.trim()));
    let [mut a, b] = connected(backend, MIB, Placement::Scattered)?;
    // Path MTUs by their codes: 2 is 512 bytes, 3 is 1024.
    for (mtu, code) in [(1500, 3), (700, 2), (1500, 3)] {
        link(&format!("mtu {mtu}"))?;
        for side in [&a, &b] {
            wait_for("the other MTU", || (port(&side.driver) == (ACTIVE, code)).then_some(()));
        }
    }
    println!("MTU: ok");
    link("down")?;
    for side in [&a, &b] {
        wait_for_events(&side.driver, &[PORT_ERROR]);
        ensure!(port(&side.driver).0 == DOWN, "the port is not down");
    }
    link("up")?;
    for side in [&a, &b] {
        wait_for_events(&side.driver, &[PORT_ACTIVE]);
        ensure!(port(&side.driver).0 == ACTIVE, "the port is not active");
    }
    a.qp.post_send(&[SendWr::write(1, &[a.buffer.sge(&a.mr, 0, MIB)], b.buffer.va(), b.mr.rkey)])?;
    let cqe = a.cq.wait();
    ensure!(cqe.status == status::SUCCESS, "a write once the link is back: {cqe:?}");
    println!("link: ok");
    Ok(())
}

/// Returns state and MTU as the guest queries them.
fn port(driver: &Driver) -> (u32, u32) {
    let attributes = driver.query_port().unwrap_or([0; 48]);
    let word =
        |at: usize| attributes.get(at..at + 4).and_then(|word| word.try_into().ok()).map_or(0, u32::from_le_bytes);
    (word(0), word(8))
}

fn wait_for_events(driver: &Driver, wanted: &[u32]) {
    let mut seen = BTreeSet::new();
    wait_for("asynchronous events", || {
        seen.extend(driver.async_events().into_iter().map(|event| event.kind));
        wanted.iter().all(|kind| seen.contains(kind)).then_some(())
    });
}

/// The driver of the adapter reports its removal: all outstanding requests complete with an error, and so do later
/// ones. `rdma_rxe` cannot be removed while a process has it open, so the test injects the notification. The second
/// device continues to work until it gets the notification as well.
fn lost(backend: &Ibverbs, order: [u8; 2]) -> Result<()> {
    let [mut a, mut b] = connected(backend, MIB, Placement::Scattered)?;
    let write = |wr_id| SendWr::write(wr_id, &[a.buffer.sge(&a.mr, 0, MIB)], b.buffer.va(), b.mr.rkey);
    let writes: Vec<_> = (0..=WRITES).map(write).collect();
    let (last, before) = writes.split_last().context("no writes")?;
    b.qp.post_recv(&[RecvWr::new(50, &[])])?;
    a.qp.post_send(before)?;
    backend.pretend_loss(gid(order[0]));
    a.qp.post_send(std::slice::from_ref(last))?;
    let done = a.cq.wait_many(writes.len());
    backend.pretend_loss(gid(order[1]));
    ensure!(done.iter().map(|cqe| cqe.wr_id).eq(0..=WRITES), "not each write in its turn: {done:?}");
    let mut failed = done.iter().map(|cqe| cqe.status).skip_while(|&code| code == status::SUCCESS);
    if order[0] == b.host {
        // The peer's memory is gone, and the adapter, which still works for the writer, reports that.
        ensure!(failed.next() == Some(status::REM_ACCESS), "{done:?}");
    } else {
        ensure!(failed.next() == Some(status::WR_FLUSH), "{done:?}");
    }
    ensure!(failed.all(|code| code == status::WR_FLUSH), "{done:?}");
    ensure!(b.cq.wait().status == status::WR_FLUSH, "the receive is not flushed");
    for side in [&a, &b] {
        wait_for_events(&side.driver, &[QP_FATAL, PORT_ERROR]);
        ensure!(side.qp.query()?.get_state() == state::ERR, "the QP is not in its error state");
    }
    Ok(())
}

fn ip(arguments: &str) -> Result<()> {
    let status = Command::new("ip").args(arguments.split_whitespace()).status().context("cannot run ip")?;
    ensure!(status.success(), "ip {arguments}: {status}");
    Ok(())
}
