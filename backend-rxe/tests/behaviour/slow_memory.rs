//! Devices with slow memory, whose accesses stall.

use std::collections::BTreeSet;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread;
use std::time::Duration;

use pvrdma_guest_memory::{Backing, DmaRange, DmaSpace, MemoryLimits, PinPolicy, StallMeter};
use pvrdma_verbs::{PauseHca, QueuePair, SaveHca, VerbsError, testing::DEADLINE};
use pvrdma_verbs_types::{QpAttrMask, QpAttrs, QpState, QpType, SendOp, WcStatus};

use crate::threads::{threaded, wait};
use crate::ud::{QKEY, send, to as destination};
use crate::world::*;

/// Name of the threads of devices with slow memory.
const OWN: &str = "rxe-own";

/// The stall meter of slow memory. It asks for the number of sleeps before and after each access.
#[derive(Clone, Debug, Default)]
struct Accesses(Arc<Seen>);

#[derive(Debug, Default)]
struct Seen {
    /// Memory and queue pairs of a device with other memory.
    neighbour: OnceLock<(Weak<DmaSpace>, Vec<Weak<End>>)>,
    /// Names of the threads that have accessed the memory.
    threads: Mutex<BTreeSet<String>>,
}

impl Accesses {
    fn take_threads(&self) -> BTreeSet<String> {
        std::mem::take(&mut *self.0.threads.lock().unwrap())
    }
}

impl StallMeter for Accesses {
    fn now(&self) -> Duration {
        Duration::from_secs(1)
    }

    /// The peer's memory can be unmapped during an access, and its queue pairs can be changed.
    fn sleeps(&self) -> u64 {
        self.0.threads.lock().unwrap().insert(thread::current().name().unwrap_or_default().to_owned());
        if let Some((space, ends)) = self.0.neighbour.get() {
            let (space, ends) = (space.upgrade(), ends.iter().filter_map(Weak::upgrade).collect::<Vec<_>>());
            let (done, taken) = channel();
            thread::spawn(move || {
                space.inspect(|space| space.barrier());
                let attrs = QpAttrs { min_rnr_timer: 1, ..QpAttrs::default() };
                ends.iter().for_each(|end| end.qp.modify(&attrs, QpAttrMask::MIN_RNR_TIMER).unwrap());
                done.send(()).unwrap();
            });
            taken.recv_timeout(DEADLINE).unwrap();
        }
        0
    }
}

/// A device, and another one with slow memory, each with a queue pair.
struct Neighbours {
    a: Node,
    b: Node,
    left: Arc<End>,
    right: Arc<End>,
    seen: Accesses,
    _world: World,
}

impl Neighbours {
    fn new(of: QpType) -> Self {
        let world = threaded(2);
        let seen = Accesses::default();
        let slow = DmaSpace::with_meter(PinPolicy::Off, MemoryLimits::default(), Box::new(seen.clone()));
        let mapping = pvrdma_verbs::testing::shared_memory(16 << 20);
        let backing = Some(Backing { mapping, offset: 0 });
        slow.map(DmaRange { iova: 0x10_0000, len: 16 << 20, writable: true, backing }).unwrap();
        // Only the accesses to observed memory are measured.
        slow.observe_stalls(|_| {});
        slow.note_stall(Duration::from_secs(1));
        let (a, b) = (world.node(1), Node::on(&world.rxe, 2, slow, 0x40_0000..0x100_0000));
        let (left, right) = (Arc::new(a.qp(of)), Arc::new(b.qp(of)));
        if of == QpType::Rc {
            left.connect(&right, |_| {});
            right.connect(&left, |_| {});
        } else {
            left.start_datagrams(QKEY);
            right.start_datagrams(QKEY);
        }
        let changed = Vec::from_iter((of == QpType::Rc).then(|| Arc::downgrade(&left)));
        seen.0.neighbour.set((Arc::downgrade(&a.memory), changed)).unwrap();
        Self { a, b, left, right, seen, _world: world }
    }
}

/// N6: while one VMM's memory is slow because of punched holes, the thread of its own device accesses it. Another VMM
/// can unmap its memory meanwhile, and its guest can change a queue pair whose request waits for the slow memory.
#[test]
fn slow_memory_is_accessed_by_its_own_thread_without_a_lock_of_others() {
    let Neighbours { a, b, left, right, seen, .. } = &Neighbours::new(QpType::Rc);
    let (mine, theirs) = (a.buffer(200_000), b.buffer(200_000));
    let own_thread = || BTreeSet::from([OWN.to_owned()]);
    let this_thread = thread::current().name().unwrap().to_owned();

    for (from, to, here, there) in [(left, right, &mine, &theirs), (right, left, &theirs, &mine)] {
        let ends = |count| wait("the end of a request", || from.scq.total() == count);
        // Checks which threads access slow memory for a request: those of the slow device, of which this is one when
        // it posts the request.
        let runs = |submit: &dyn Fn(), count| {
            seen.take_threads();
            submit();
            ends(count);
            let mut threads = seen.take_threads();
            if Arc::ptr_eq(from, right) {
                threads.remove(&this_thread);
            }
            assert_eq!(threads, own_thread());
        };
        here.write(0, &pattern(1, 200_000));
        to.recv(1, &[there.all()]);
        runs(&|| from.send(2, &[here.all()]), 1);
        assert_eq!(there.read(0, 200_000), pattern(1, 200_000));
        here.write(0, &pattern(2, 200_000));
        runs(&|| from.submit(3, write(there.remote(3)), &[here.sge(1, 150_001)]), 2);
        assert_eq!(there.read(3, 150_001), pattern(2, 200_000)[1..150_002]);
        there.write(0, &pattern(3, 200_000));
        let read = || SendOp::Read { remote: there.remote(0) };
        runs(&|| from.submit(4, read(), &[here.sge(5, 100_000), here.sge(120_000, 80_000)]), 3);
        assert_eq!([here.read(5, 100_000), here.read(120_000, 80_000)].concat(), pattern(3, 200_000)[..180_000]);
        there.write(8, &7_u64.to_le_bytes());
        from.submit(5, SendOp::FetchAdd { remote: there.remote(8), add: 3 }, &[here.sge(16, 8)]);
        ends(4);
        assert_eq!((there.read(8, 8), here.read(16, 8)), (10_u64.to_le_bytes().into(), 7_u64.to_le_bytes().into()));
        let ended: Vec<_> = [2, 3, 4, 5].map(|id| (id, WcStatus::Success)).into();
        assert_eq!(from.scq.poll_statuses(), ended);
        assert_eq!(to.rcq.poll_statuses(), [(1, WcStatus::Success)]);
    }
}

/// As with connections. A datagram may be lost, but not because one of the two devices is slow.
#[test]
fn datagrams_reach_slow_memory_by_its_own_thread() {
    let Neighbours { a, b, left, right, seen, .. } = &Neighbours::new(QpType::Ud);
    let (mine, theirs) = (a.buffer(8192), b.buffer(8192));
    for (from, to, here, there) in [(left, right, &mine, &theirs), (right, left, &theirs, &mine)] {
        here.write(0, &pattern(1, 1000));
        to.recv(1, &[there.sge(0, 2000)]);
        seen.take_threads();
        from.submit(2, send(destination(to)), &[here.sge(0, 1000)]);
        wait("a datagram", || to.rcq.total() == 1);
        if Arc::ptr_eq(from, left) {
            assert_eq!(seen.take_threads(), BTreeSet::from([OWN.to_owned()]));
        }
        assert_eq!(to.rcq.poll_statuses(), [(1, WcStatus::Success)]);
        assert_eq!(there.read(40, 1000), pattern(1, 1000));
    }
}

/// Two devices with a message in flight whose receiver has slow memory. `executed`: the receiver's thread has executed
/// it, and the sender does not know that yet.
fn in_flight(executed: bool) -> Pair {
    let pair = Pair::new();
    pair.b.memory.note_stall(Duration::from_secs(1));
    pair.right.recv(1, &[]);
    pair.left.send(2, &[]);
    assert!(!executed || pair.world.run_one());
    assert_eq!(pair.right.rcq.total(), u64::from(executed));
    pair
}

/// A restored queue pair would repeat a request that the peer has executed, so the state is refused until the requester
/// knows the result.
#[test]
fn a_request_that_the_peer_may_have_executed_is_not_saved() {
    for executed in [false, true] {
        let pair = in_flight(executed);
        assert!(pair.a.hca.pause());
        for _ in 0..2 {
            let saved = pair.a.hca.save_qp(&pair.left.qp);
            assert!(matches!(saved, Err(VerbsError::NotAllowed(_))), "{saved:?}");
            pair.world.run();
        }
        assert!(pair.a.hca.resume());
        pair.world.run();
        assert_eq!(pair.left.scq.poll_statuses(), [(2, WcStatus::Success)]);
        assert_eq!(pair.right.rcq.poll_statuses(), [(1, WcStatus::Success)]);
        assert!(pair.a.hca.pause() && pair.a.hca.save_qp(&pair.left.qp).is_ok());
    }
}

/// The result of a request is not taken for that of a later one.
#[test]
fn a_queue_pair_may_end_while_its_peer_executes_a_request() {
    for executed in [false, true] {
        let pair = in_flight(executed);
        pair.left.qp.destroy();
        pair.settle();
        assert!(pair.left.scq.poll().is_empty());

        let pair = in_flight(executed);
        pair.right.qp.destroy();
        pair.settle();
        let status = if executed { WcStatus::Success } else { WcStatus::RetryExceeded };
        assert_eq!(pair.left.scq.poll_statuses(), [(2, status)]);

        let pair = in_flight(executed);
        pair.left.to(QpState::Error);
        pair.world.run();
        assert_eq!(pair.left.scq.poll_statuses(), [(2, WcStatus::Flushed)]);
        assert_eq!(pair.right.rcq.poll_statuses(), [(1, WcStatus::Success)]);

        let pair = in_flight(executed);
        for (end, peer) in [(&pair.left, &pair.right), (&pair.right, &pair.left)] {
            end.to(QpState::Reset);
            end.connect(peer, |_| {});
        }
        pair.left.send(3, &[]);
        pair.world.run();
        assert!(pair.left.scq.poll().is_empty());
        pair.right.recv(4, &[]);
        pair.settle();
        assert_eq!(pair.left.scq.poll_statuses(), [(3, WcStatus::Success)]);
        assert_eq!(pair.right.rcq.poll_statuses().last(), Some(&(4, WcStatus::Success)));
    }
}
