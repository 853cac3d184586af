//! Shared receive queues.

use std::sync::atomic::Ordering;

use pvrdma_verbs::{AsyncEvent, QpEvent, QpState, QpType, QueuePair, RecvWr, SharedReceiveQueue, SrqEvent, WcStatus};

use crate::testing::*;

struct Shared {
    world: World,
    a: Node,
    b: Node,
    srq: crate::RxeSrq,
    ring: std::sync::Arc<Ring<RecvWr>>,
    pairs: Vec<(End, End)>,
}

fn shared(limit: u32, count: usize) -> Shared {
    let world = World::new();
    let (a, b) = (world.node(1), world.node(2));
    let (srq, ring) = b.srq(limit);
    let pairs = (0..count)
        .map(|_| {
            let (left, right) = (a.qp(QpType::Rc), b.qp_with(QpType::Rc, Some(&srq), |_| {}));
            left.connect(&right, |_| {});
            right.connect(&left, |_| {});
            (left, right)
        })
        .collect();
    Shared { world, a, b, srq, ring, pairs }
}

impl Shared {
    fn post(&self, wr_ids: std::ops::Range<u64>) {
        self.ring.posted.lock().extend(wr_ids.map(|wr_id| RecvWr { wr_id, ..RecvWr::default() }));
        self.srq.notify_recv();
    }
}

#[test]
pub(super) fn several_qps_share_the_receives_in_order() {
    let s = shared(0, 3);
    s.post(0..6);
    for round in 0..2 {
        for (i, (left, right)) in (0..).zip(&s.pairs) {
            left.send(0, &[]);
            assert_eq!(right.rcq.statuses(), [(round * 3 + i, WcStatus::Success)]);
        }
    }
    assert!(s.b.events.poll().is_empty());
}

#[test]
pub(super) fn waiting_senders_are_woken_as_receives_come() {
    let s = shared(0, 4);
    for (left, _) in &s.pairs {
        left.send(1, &[]);
        left.send(2, &[]);
    }
    s.world.rxe.run_ready();
    let done = || s.pairs.iter().map(|(left, _)| left.scq.poll().len()).sum::<usize>();
    assert_eq!(done(), 0);
    for i in 0..8 {
        s.post(i..i + 1);
        s.world.rxe.run_ready();
        assert_eq!(done(), 1, "{i}");
    }
    assert_eq!(s.a.counter("rnr_retries"), 0);
    s.world.settle();
}

#[test]
pub(super) fn the_limit_fires_once_for_each_arming() {
    let s = shared(3, 1);
    let (left, _) = &s.pairs[0];
    s.post(0..10);
    let event = [AsyncEvent::Srq(SrqEvent::LimitReached, 77)];
    for i in 0..10 {
        left.send(i, &[]);
        // Fewer than three are left after the eighth.
        assert_eq!(s.b.events.poll().as_slice(), if i == 7 { &event[..] } else { &[] }, "{i}");
        assert_eq!(s.srq.limit(), if i < 7 { 3 } else { 0 });
    }
    s.srq.set_limit(1);
    s.post(10..11);
    left.send(10, &[]);
    assert_eq!(s.b.events.poll(), event);
}

#[test]
pub(super) fn an_error_leaves_the_receives_to_the_others() {
    let s = shared(0, 2);
    s.post(0..3);
    let (left, right) = &s.pairs[0];
    left.submit(1, write(Default::default()), &[s.a.buffer(8).all()]);
    s.world.settle();
    assert_eq!(left.scq.statuses(), [(1, WcStatus::RemoteAccess)]);
    assert_eq!(right.state(), QpState::Error);
    assert!(right.rcq.poll().is_empty());
    let event = |event| AsyncEvent::Qp(event, right.cookie);
    assert_eq!(s.b.events.poll(), [event(QpEvent::AccessError), event(QpEvent::LastWqeReached)]);
    right.to(QpState::Error);
    right.qp.notify_recv();
    assert!(s.b.events.poll().is_empty(), "once");
    let (left, right) = &s.pairs[1];
    left.send(1, &[]);
    assert_eq!(right.rcq.statuses(), [(0, WcStatus::Success)]);
}

#[test]
pub(super) fn a_broken_ring_is_told_once_and_ends_who_uses_it() {
    let s = shared(0, 2);
    s.ring.broken.store(1, Ordering::SeqCst);
    for (left, right) in &s.pairs {
        left.send(1, &[]);
        s.world.settle();
        assert_eq!(left.scq.statuses(), [(1, WcStatus::RemoteOperation)]);
        assert_eq!(right.state(), QpState::Error);
    }
    let (srq, qp): (Vec<_>, Vec<_>) = s.b.events.poll().into_iter().partition(|e| matches!(e, AsyncEvent::Srq(..)));
    assert_eq!(srq, [AsyncEvent::Srq(SrqEvent::Error, 77)]);
    assert_eq!(qp.len(), 2);
}

#[test]
pub(super) fn a_destroyed_srq_is_left_alone() {
    let s = shared(0, 1);
    s.srq.destroy();
    s.post(0..1);
    let (left, _) = &s.pairs[0];
    left.send(1, &[]);
    s.world.settle();
    assert_eq!(left.scq.statuses(), [(1, WcStatus::RemoteOperation)]);
    assert_eq!(s.ring.posted.lock().len(), 1);
}
