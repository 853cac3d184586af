//! Quick measurements of the engine alone: `cargo test --release -p backend-rxe -- --ignored --nocapture bench`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use rdma_backend::memory::DmaView;
use rdma_backend::{
    Completion, CompletionSink, CqOverrun, Hca, QpType, QueueError, QueuePair, RecvSource, RecvWork, SendFlags, SendOp,
    SendSource, SendWork, Sge,
};

use crate::testing::*;

/// A queue of equal requests that costs next to nothing.
struct Repeat {
    left: Arc<AtomicU64>,
    op: SendOp,
    sges: Vec<Sge>,
}

impl SendSource for Repeat {
    fn pop(&mut self, _view: &DmaView<'_>, work: &mut SendWork) -> Result<bool, QueueError> {
        let left = self.left.load(Ordering::Relaxed);
        if left == 0 {
            return Ok(false);
        }
        self.left.store(left - 1, Ordering::Relaxed);
        work.wr_id = left;
        work.op = self.op.clone();
        work.flags = SendFlags::SIGNALED;
        work.sges.clear();
        work.sges.extend_from_slice(&self.sges);
        Ok(true)
    }

    fn retire(&mut self, _view: &DmaView<'_>) {}

    fn reset(&mut self) {}
}

impl RecvSource for Repeat {
    fn pop(&mut self, _view: &DmaView<'_>, work: &mut RecvWork) -> Result<bool, QueueError> {
        work.sges.clear();
        work.sges.extend_from_slice(&self.sges);
        Ok(true)
    }

    fn posted(&mut self, _view: &DmaView<'_>) -> Result<u32, QueueError> {
        Ok(1)
    }

    fn reset(&mut self) {}
}

struct Count(AtomicU64);

impl CompletionSink for Count {
    fn complete(&self, _view: &DmaView<'_>, completion: &Completion) -> Result<(), CqOverrun> {
        assert_eq!(completion.status, rdma_backend::WcStatus::Success);
        self.0.store(self.0.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        Ok(())
    }
}

/// Nanoseconds an operation takes.
fn measure(op: impl Fn(&Buffer) -> SendOp, size: u64, batch: u64) -> f64 {
    let world = World::new();
    let (a, b) = (world.node(1), world.node(2));
    let (mine, theirs) = (a.flat(size.max(1)), b.flat(size.max(1)));
    mine.write(0, &vec![1; usize::try_from(size).unwrap()]);
    theirs.write(0, &vec![2; usize::try_from(size).unwrap()]);
    let posted = Arc::new(AtomicU64::new(0));
    let done = Arc::new(Count(AtomicU64::new(0)));
    let cq = a.hca.create_cq(Arc::clone(&done) as Arc<dyn CompletionSink>).unwrap();
    let rcq = b.hca.create_cq(Arc::new(Count(AtomicU64::new(0)))).unwrap();
    let (op, sges) = (op(&theirs), vec![mine.all()]);
    let left = a.qp_on(QpType::Rc, None, (Some(&cq), None), |init| {
        init.send_queue = Box::new(Repeat { left: Arc::clone(&posted), op, sges });
    });
    let right = b.qp_on(QpType::Rc, None, (None, Some(&rcq)), |init| {
        init.recv_queue = Some(Box::new(Repeat { left: Arc::default(), op: SEND, sges: vec![theirs.all()] }));
    });
    left.connect(&right, |_| {});
    right.connect(&left, |_| {});
    // The best of many short rounds: others may be using this machine.
    let rounds = ((1 << 29) / (size * batch + 2000 * batch)).clamp(200, 20_000);
    let mut best = f64::MAX;
    for _ in 0..rounds {
        let start = Instant::now();
        posted.store(batch, Ordering::Relaxed);
        left.qp.notify_send();
        world.rxe.run_ready();
        #[expect(clippy::cast_precision_loss, reason = "a measurement")]
        let each = start.elapsed().as_nanos() as f64 / batch as f64;
        best = best.min(each);
    }
    assert_eq!(done.0.load(Ordering::Relaxed), rounds * batch);
    best
}

fn memcpy(size: u64) -> f64 {
    let size = usize::try_from(size).unwrap();
    let (from, mut to) = (vec![1_u8; size], vec![2_u8; size]);
    let mut best = f64::MAX;
    for _ in 0..200 {
        let start = Instant::now();
        std::hint::black_box(&mut to).copy_from_slice(std::hint::black_box(&from));
        best = best.min(start.elapsed().as_secs_f64() * 1e9);
    }
    best
}

#[test]
#[ignore = "a measurement"]
fn bench() {
    for size in [8, 64, 1024, 4096] {
        println!(
            "{size:>8}: write {:.0} ns (batch 64), {:.0} ns (single), send {:.0}, read {:.0}",
            measure(|b| write(b.remote(0)), size, 64),
            measure(|b| write(b.remote(0)), size, 1),
            measure(|_| SEND, size, 64),
            measure(|b| SendOp::Read { remote: b.remote(0) }, size, 64),
        );
    }
    println!("       8: fetch and add {:.0} ns", measure(|b| SendOp::FetchAdd { remote: b.remote(0), add: 1 }, 8, 64));
    for size in [64 << 10, 256 << 10, 1 << 20, 4 << 20] {
        let (copy, write) = (memcpy(size), measure(|b| write(b.remote(0)), size, 1));
        println!("{size:>8}: write {write:.0} ns, memcpy {copy:.0} ns, ratio {:.2}", copy / write);
    }
}

#[test]
#[ignore = "a measurement"]
fn bench_memory() {
    const COUNT: usize = 10_000;
    let resident = || -> u64 {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
    };
    let world = World::new();
    let a = world.node(1);
    let ((send_cq, _), (recv_cq, _)) = (a.cq(), a.cq());
    let before = resident();
    let make = |qpn: usize| {
        a.empty_qp(QpType::Rc, rdma_backend::Qpn::new(u32::try_from(qpn).unwrap() + 2), (&send_cq, &recv_cq))
    };
    let qps: Vec<_> = (0..COUNT).map(make).collect();
    let with_qps = resident();
    let mrs: Vec<_> = (0..COUNT).map(|_| a.flat(4096).mr).collect();
    let count = u64::try_from(COUNT).unwrap();
    println!("{} octets a QP, {} a region", (with_qps - before) / count, (resident() - with_qps) / count);
    drop((qps, mrs));
}
