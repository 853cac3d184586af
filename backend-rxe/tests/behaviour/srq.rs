//! Shared receive queues.

use pvrdma_verbs::{AsyncEvent, QpEvent, QueuePair, SharedReceiveQueue, SrqEvent};
use pvrdma_verbs_types::{QpState, QpType, RecvWr, WcStatus};

use crate::world::*;

struct Shared {
    world: World,
    a: Node,
    b: Node,
    srq: pvrdma_rxe::RxeSrq,
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
        post_shared(&self.srq, &self.ring, wr_ids);
    }
}

#[test]
fn waiting_senders_are_woken_as_receives_come() {
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

/// A waiting sender is reset and connected to a peer with another SRQ. It waits there, and a receive in that SRQ wakes
/// it.
#[test]
fn a_sender_waits_where_it_is_and_not_where_it_was() {
    let s = shared(0, 2);
    let [(first, _), (second, _)] = &s.pairs[..] else { unreachable!() };
    first.send(1, &[]);
    s.world.rxe.run_ready();
    let (other_srq, other_ring) = s.b.srq(0);
    let other = s.b.qp_with(QpType::Rc, Some(&other_srq), |_| {});
    first.to(QpState::Reset);
    first.connect(&other, |_| {});
    other.connect(first, |_| {});
    for sender in [first, second] {
        sender.send(2, &[]);
    }
    s.world.rxe.run_ready();
    // A receive in the first SRQ is used by the QP that waits there, not by the one that waited there earlier.
    s.post(0..1);
    s.world.rxe.run_ready();
    assert_eq!((first.scq.poll_statuses(), second.scq.poll_statuses()), (vec![], vec![(2, WcStatus::Success)]));
    post_shared(&other_srq, &other_ring, 0..1);
    s.world.rxe.run_ready();
    assert_eq!(first.scq.poll_statuses(), [(2, WcStatus::Success)]);
}

#[test]
fn the_last_receive_is_announced_once_and_behind_the_error() {
    let s = shared(0, 1);
    s.post(0..3);
    let (left, right) = &s.pairs[0];
    left.submit(1, write(Default::default()), &[s.a.buffer(8).all()]);
    s.world.settle();
    assert_eq!(left.scq.poll_statuses(), [(1, WcStatus::RemoteAccess)]);
    let event = |event| AsyncEvent::Qp(event, right.cookie);
    assert_eq!(s.b.events.poll(), [event(QpEvent::AccessError), event(QpEvent::LastWqeReached)]);
    right.to(QpState::Error);
    right.qp.notify_recv();
    assert!(s.b.events.poll().is_empty());
}

#[test]
fn a_broken_ring_is_reported_once_and_fails_its_queue_pairs() {
    let s = shared(0, 2);
    s.ring.break_off();
    for (left, right) in &s.pairs {
        left.send(1, &[]);
        s.world.settle();
        assert_eq!(left.scq.poll_statuses(), [(1, WcStatus::RemoteOperation)]);
        assert_eq!(right.state(), QpState::Error);
    }
    let (srq, qp): (Vec<_>, Vec<_>) = s.b.events.poll().into_iter().partition(|e| matches!(e, AsyncEvent::Srq(..)));
    assert_eq!(srq, [AsyncEvent::Srq(SrqEvent::Error, 77)]);
    assert_eq!(qp.len(), 2);
}

#[test]
fn a_destroyed_srq_is_left_alone() {
    let s = shared(0, 1);
    s.srq.destroy();
    s.post(0..1);
    let (left, _) = &s.pairs[0];
    left.send(1, &[]);
    s.world.settle();
    assert_eq!(left.scq.poll_statuses(), [(1, WcStatus::RemoteOperation)]);
    assert_eq!(s.ring.posted.lock().len(), 1);
}

over_a_cable! {
    the_last_receive_is_announced_once_and_behind_the_error
    a_broken_ring_is_reported_once_and_fails_its_queue_pairs
    a_destroyed_srq_is_left_alone
}

on_slow_memory! {
    the_last_receive_is_announced_once_and_behind_the_error
    a_broken_ring_is_reported_once_and_fails_its_queue_pairs
    a_destroyed_srq_is_left_alone
}
