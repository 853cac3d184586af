//! Time that one guest costs another one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pvrdma_dev::testing::{Encoded, Path, Placement, Qp, QpInit, SendWr};
use pvrdma_rxe::{Rxe, RxeConfig};
use pvrdma_verbs::testing::gid;

use super::sides::DEPTH;
use crate::bench::figure::Figure;
use crate::bench::wire::processor_time;
use crate::device_pair::{Side, SideOptions, connect, spin};

/// Number of queue pairs of the busy guest.
const BUSY: usize = 500;
/// Number of queue pairs of the guest that waits for receives which are never posted.
const WAITING: usize = 4000;
/// Size of the measured write in bytes.
const WRITE: usize = 16 << 20;
/// Time for which an idle guest is observed.
const WATCH: Duration = Duration::from_secs(2);

/// Creates a side without a peer, with room for many queue pairs.
fn guest(backend: &Rxe, host: u8, bytes: usize) -> Result<Side> {
    let options = SideOptions {
        other_memory: 512 << 20,
        depth: DEPTH,
        cq_entries: 16 * 1024,
        ..SideOptions::new(bytes, Placement::Contiguous)
    };
    Side::private(backend, host, &options)
}

/// Creates queue pairs of a side that are connected to themselves.
fn loops(side: &Side, count: usize, change: impl Fn(&mut Path)) -> Result<Vec<Qp>> {
    let one = || -> Result<Qp> {
        let init = QpInit { max_send_wr: 8, max_recv_wr: 8, ..QpInit::rc(&side.pd, &side.cq) };
        let mut qp = side.driver.create_qp(&init)?;
        let mut path = Path::to(gid(side.host), qp.qpn);
        change(&mut path);
        qp.connect(&path).context("connecting")?;
        Ok(qp)
    };
    (0..count).map(|_| one()).collect()
}

/// Measures a write of 16 MiB beside a guest with 500 busy queue pairs, and alone.
pub(super) fn write_beside_busy_guest(runs: usize) -> Result<Figure> {
    let backend = Rxe::new(RxeConfig::default())?;
    let [mut a, b] = connect(guest(&backend, 1, WRITE)?, guest(&backend, 2, WRITE)?)?;
    let mut busy = guest(&backend, 3, 1 << 20)?;
    let mut qps = loops(&busy, BUSY, |_| {})?;
    let write = SendWr::write(0, &[busy.buffer.sge(&busy.mr, 0, 1 << 20)], busy.buffer.va(), busy.mr.rkey);
    let load: Vec<Encoded> = vec![busy.qp.encode(&write)];
    let element: Vec<Encoded> = a.writes(&b, WRITE).take(1).collect();
    let mut rounds = Vec::new();
    for _ in 0..runs {
        let alone = milliseconds(|| a.post_and_reap(&element, 8, 1, spin))?;
        let (stop, started) = (AtomicBool::new(false), AtomicBool::new(false));
        let beside = thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    for qp in &mut qps {
                        qp.post_encoded(&load, 1);
                    }
                    started.store(true, Ordering::Relaxed);
                    busy.cq.reap(u32::MAX);
                }
            });
            while !started.load(Ordering::Relaxed) {
                thread::yield_now();
            }
            let beside = milliseconds(|| a.post_and_reap(&element, 8, 1, spin));
            stop.store(true, Ordering::Relaxed);
            beside
        })?;
        // Requests that are still outstanding would disturb the next round.
        while busy.cq.reap(u32::MAX).0 > 0 {
            thread::sleep(Duration::from_millis(20));
        }
        rounds.push([beside, alone]);
    }
    let title = format!("RDMA write of 16 MiB beside {BUSY} busy QPs of another guest");
    Ok(Figure::of_rounds("in-process/write-beside-busy", title, "ms", true, &rounds, "alone"))
}

/// Measures the processor time of queue pairs that wait for receives, with the shortest timer, while nothing is posted.
pub(super) fn idle_guest_without_receives() -> Result<Figure> {
    let backend = Rxe::new(RxeConfig::default())?;
    let side = guest(&backend, 1, 4096)?;
    let mut qps = loops(&side, WAITING, |path| (path.min_rnr_timer, path.rnr_retry) = (1, 7))?;
    let send: Vec<Encoded> = vec![side.qp.encode(&SendWr::send(0, &[]))];
    for qp in &mut qps {
        anyhow::ensure!(qp.post_encoded(&send, 1) == 1, "the send ring is full");
    }
    // The first waits are short.
    thread::sleep(WATCH);
    let (from, start) = (processor_time(), Instant::now());
    thread::sleep(WATCH);
    let percent = (processor_time() - from) * 100.0 / start.elapsed().as_secs_f64();
    let title = format!("processor time of {WAITING} idle QPs that wait for receives");
    Ok(Figure::against_target("in-process/idle-rnr", title, "% of a core", true, vec![percent], 2.0))
}

fn milliseconds(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64() * 1e3 / 8.0)
}
