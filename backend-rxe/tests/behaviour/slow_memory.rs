//! Devices whose memory makes others wait.

use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock, Weak};
use std::thread;
use std::time::Duration;

use pvrdma_guest_memory::{Backing, DmaRange, DmaSpace, MemoryLimits, PinPolicy, StallMeter};
use pvrdma_verbs::{QpType, SendOp, WcStatus};

use crate::world::*;

/// Longer than anything takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// The stall meter of slow memory, called for each view and each access. At each call, another device's memory can be
/// unmapped without a wait.
#[derive(Clone, Debug, Default)]
struct Neighbour(Arc<OnceLock<Weak<DmaSpace>>>);

impl StallMeter for Neighbour {
    fn now(&self) -> Duration {
        if let Some(space) = self.0.get().and_then(Weak::upgrade) {
            let (done, taken) = channel();
            thread::spawn(move || {
                space.barrier();
                done.send(()).unwrap();
            });
            taken.recv_timeout(PATIENCE).unwrap();
        }
        Duration::from_secs(1)
    }

    fn sleeps(&self) -> u64 {
        0
    }
}

/// N6: while one VMM's memory is slow because of punched holes, another VMM can unmap its own memory without waiting.
#[test]
fn the_neighbours_memory_is_not_held_while_slow_memory_is_used() {
    let world = World::new();
    let meter = Neighbour::default();
    let slow = DmaSpace::with_meter(PinPolicy::Off, MemoryLimits::default(), Box::new(meter.clone()));
    let mapping = pvrdma_verbs::testing::shared_memory(16 << 20);
    let backing = Some(Backing { mapping, offset: 0 });
    slow.map(DmaRange { iova: 0x10_0000, len: 16 << 20, writable: true, backing }).unwrap();
    // Only observed memory asks the meter at each view.
    slow.observe_stalls(|_| {});
    slow.note_stall(Duration::from_secs(1));
    let (a, b) = (world.node(1), Node::on(&world.rxe, 2, Arc::clone(&slow), 0x40_0000..0x100_0000));
    let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    left.connect(&right, |_| {});
    right.connect(&left, |_| {});
    let (mine, theirs) = (a.buffer(200_000), b.buffer(200_000));
    meter.0.set(Arc::downgrade(&a.memory)).unwrap();

    for (from, to, here, there) in [(&left, &right, &mine, &theirs), (&right, &left, &theirs, &mine)] {
        here.write(0, &pattern(1, 200_000));
        to.recv(1, &[there.all()]);
        from.send(2, &[here.all()]);
        world.settle();
        assert_eq!(there.read(0, 200_000), pattern(1, 200_000));
        here.write(0, &pattern(2, 200_000));
        from.submit(3, write(there.remote(3)), &[here.sge(1, 150_001)]);
        world.settle();
        assert_eq!(there.read(3, 150_001), pattern(2, 200_000)[1..150_002]);
        there.write(0, &pattern(3, 200_000));
        from.submit(4, SendOp::Read { remote: there.remote(0) }, &[here.sge(5, 100_000), here.sge(120_000, 80_000)]);
        world.settle();
        assert_eq!([here.read(5, 100_000), here.read(120_000, 80_000)].concat(), pattern(3, 200_000)[..180_000]);
        there.write(8, &7_u64.to_le_bytes());
        from.submit(5, SendOp::FetchAdd { remote: there.remote(8), add: 3 }, &[here.sge(16, 8)]);
        world.settle();
        assert_eq!((there.read(8, 8), here.read(16, 8)), (10_u64.to_le_bytes().into(), 7_u64.to_le_bytes().into()));
        let ended: Vec<_> = [2, 3, 4, 5].map(|id| (id, WcStatus::Success)).into();
        assert_eq!(from.scq.poll_statuses(), ended);
        assert_eq!(to.rcq.poll_statuses(), [(1, WcStatus::Success)]);
    }
}
