//! Shared receive queues.

use std::sync::Arc;

use pvrdma_verbs_types::{QpState, QpType, RecvWr, RemoteAddress, WcStatus};

use super::Subject;
use crate::testing::{End, Node, Ring, post_shared, write};
use crate::{AsyncEvent, Backend, Hca, QpEvent, SharedReceiveQueue, SrqEvent};

const OK: WcStatus = WcStatus::Success;

/// Sender, and receiver on the shared queue.
type Ends<H> = (End<H>, End<H>);

struct Shared<B: Backend> {
    pairs: Vec<Ends<B::Hca>>,
    srq: <B::Hca as Hca>::Srq,
    ring: Arc<Ring<RecvWr>>,
    a: Node<B::Hca>,
    b: Node<B::Hca>,
}

fn shared<B: Backend>(subject: &Subject<'_, B>, limit: u32, count: usize) -> Shared<B> {
    let (a, b) = (subject.node(1), subject.node(2));
    let (srq, ring) = b.srq(limit);
    let pairs = (0..count)
        .map(|_| {
            let (left, right) = (a.qp(QpType::Rc), b.qp_with(QpType::Rc, Some(&srq), |_| {}));
            left.connect(&right, |_| {});
            right.connect(&left, |_| {});
            (left, right)
        })
        .collect();
    Shared { pairs, srq, ring, a, b }
}

pub(super) fn several_qps_share_the_receives<B: Backend>(subject: &Subject<'_, B>) {
    let s = shared(subject, 0, 3);
    post_shared(&s.srq, &s.ring, 0..6);
    for round in 0..2 {
        for (i, (left, right)) in (0..).zip(&s.pairs) {
            left.send(0, &[]);
            assert_eq!(right.rcq.statuses(1), [(round * 3 + i, OK)]);
            assert_eq!(left.scq.statuses(1), [(0, OK)]);
        }
    }
    // More receives than any queue holds.
    post_shared(&s.srq, &s.ring, 6..306);
    for round in 0..100 {
        for (left, right) in &s.pairs {
            left.send(round, &[]);
            assert_eq!(left.scq.statuses(1), [(round, OK)]);
            right.rcq.one();
        }
    }
    assert!(s.b.events.poll().is_empty());
}

pub(super) fn the_limit_fires_once_for_each_arming<B: Backend>(subject: &Subject<'_, B>) {
    let s = shared(subject, 3, 1);
    let (left, right) = &s.pairs[0];
    post_shared(&s.srq, &s.ring, 0..10);
    let event = [AsyncEvent::Srq(SrqEvent::LimitReached, 77)];
    for i in 0..10 {
        left.send(i, &[]);
        assert_eq!(right.rcq.statuses(1), [(i, OK)]);
        left.scq.one();
        // After the eighth, fewer than three receives are left.
        if i == 7 {
            assert_eq!(s.b.events.wait(1), event);
        } else {
            assert!(s.b.events.poll().is_empty(), "{i}");
        }
        assert_eq!(s.srq.limit(), if i < 7 { 3 } else { 0 });
    }
    post_shared(&s.srq, &s.ring, 10..12);
    s.srq.set_limit(2);
    assert_eq!(s.srq.limit(), 2);
    left.send(10, &[]);
    assert_eq!(right.rcq.statuses(1), [(10, OK)]);
    assert_eq!(s.b.events.wait(1), event);
}

pub(super) fn the_last_receive_is_announced<B: Backend>(subject: &Subject<'_, B>) {
    let s = shared(subject, 0, 2);
    post_shared(&s.srq, &s.ring, 0..3);
    let (left, right) = &s.pairs[0];
    let mine = s.a.buffer(8);
    left.submit(1, write(RemoteAddress::default()), &[mine.all()]);
    assert_eq!(left.scq.statuses(1), [(1, WcStatus::RemoteAccess)]);
    let last = AsyncEvent::Qp(QpEvent::LastWqeReached, right.cookie);
    let mut seen = s.b.events.wait(1);
    while !seen.contains(&last) {
        seen.extend(s.b.events.wait(1));
    }
    assert_eq!(right.state(), QpState::Error);
    assert!(right.rcq.poll().is_empty());
    // The receives are still available to the others.
    let (left, right) = &s.pairs[1];
    left.send(1, &[]);
    assert_eq!(right.rcq.statuses(1), [(0, OK)]);
}
