//! Latency from a post to the notification of the adapter, with a polling thread that has its own processor.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use pvrdma_dev::{
    DoorbellMode, Processors, WindowPolicy,
    testing::{Driver, Encoded, GuestMemory, MockBackend, Path, QpInit, SendWr, TestDevice, WindowPages, access},
};
use pvrdma_pci_function::PciFunction;
use pvrdma_verbs::testing::gid;

use super::sides::Place;
use crate::bench::figure::{Figure, median};

const POSTS: usize = 20_000;
/// Iterations that warm up the library and the caches.
const WARM_UP: usize = 1_000;

/// Posts one request at a time, and compares the two timestamps, which come from the same clock.
pub(super) fn measure(runs: usize) -> Result<Figure> {
    let rounds = (0..runs).map(|_| round()).collect::<Result<_>>()?;
    Ok(Figure::against_target(
        "doorbells/to-device",
        "post to device, in process, with a processor to spare (median)".to_owned(),
        "µs",
        true,
        rounds,
        1.0,
    ))
}

/// Returns the median of a round in microseconds.
fn round() -> Result<f64> {
    let backend = MockBackend::new();
    let test = TestDevice::new(&backend, TestDevice::<MockBackend>::config(1), GuestMemory::new(64 << 20));
    let processors = Processors { available: 2, virtual_processors: 1, watchers: 1 };
    let policy = WindowPolicy::choose(DoorbellMode::Mapped, processors).context("no policy")?;
    let pages = WindowPages::new(&test.device, policy);
    let driver = Driver::probe(Arc::<WindowPages>::clone(&pages) as Arc<dyn PciFunction>, &test.memory, &test.irqs)?;
    driver.bind_gid(0, gid(1))?;
    let context = driver.open()?;
    let pd = driver.create_pd(Some(&context))?;
    let cq = driver.create_cq(Some(&context), 256)?;
    let mut qp = driver.create_qp(&QpInit::rc(&pd, &cq))?;
    qp.connect(&Path::to(gid(1), qp.qpn))?;
    let (buffer, mr) = driver.registered_buffer(&pd, 4096, access::ALL)?;
    let write = SendWr::write(0, &[buffer.sge(&mr, 0, 8)], buffer.va() + 8, mr.rkey);
    let element: Vec<Encoded> = vec![qp.encode(&write)];

    let (start, told, ends) = (Instant::now(), AtomicU64::new(0), AtomicBool::new(false));
    let (mock, number) = (backend.device(), qp.handle);
    let times = thread::scope(|scope| {
        let watcher = scope.spawn(|| -> Result<()> {
            Place::Spare.of_this_thread()?;
            let mut heard = 0;
            while !ends.load(Ordering::Relaxed) {
                pages.turn();
                let now = mock.notified(number).0;
                if now != heard {
                    let time = start.elapsed();
                    heard = now;
                    while mock.pop_send(number)?.is_some() {
                        mock.retire(number);
                    }
                    told.store(u64::try_from(time.as_nanos())?, Ordering::SeqCst);
                }
            }
            Ok(())
        });
        let posted = post(&mut qp, &element, start, &told);
        ends.store(true, Ordering::Relaxed);
        watcher.join().map_err(|_| anyhow::anyhow!("the watcher panicked"))??;
        posted
    })?;
    ensure!(pages.silent() >= POSTS as u64, "doorbells were heard");
    Ok(median(&times))
}

/// Microseconds from each post to its end.
#[expect(clippy::cast_precision_loss, reason = "microseconds")]
fn post(qp: &mut pvrdma_dev::testing::Qp, element: &[Encoded], start: Instant, told: &AtomicU64) -> Result<Vec<f64>> {
    let caller = thread::scope(|scope| {
        let poster = scope.spawn(|| -> Result<Vec<f64>> {
            Place::Guest.of_this_thread()?;
            let mut times = Vec::with_capacity(POSTS);
            for number in 0..WARM_UP + POSTS {
                told.store(0, Ordering::SeqCst);
                let posted = start.elapsed();
                ensure!(qp.post_encoded(element, 1) == 1, "the send ring is full");
                let mut heard = 0;
                while heard == 0 {
                    std::hint::spin_loop();
                    heard = told.load(Ordering::SeqCst);
                }
                if number >= WARM_UP {
                    times.push((heard as f64 - posted.as_nanos() as f64) / 1e3);
                }
            }
            Ok(times)
        });
        poster.join()
    });
    caller.map_err(|_| anyhow::anyhow!("the posting thread panicked"))?
}
