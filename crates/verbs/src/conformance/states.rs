//! Transitions, attributes and destruction of a QP.

use pvrdma_verbs_types::{Access, Mtu, QpAttrMask as M, QpAttrs, QpState, QpType, RemoteAddress, WcStatus, qp_state};

use super::Subject;
use crate::testing::{ALL, End, SEND, gid, write};
use crate::{AsyncEvent, Backend, Hca, QpEvent, QueuePair, VerbsError};

const OK: WcStatus = WcStatus::Success;
const FLUSHED: WcStatus = WcStatus::Flushed;

pub(super) fn transitions_follow_the_table<B: Backend>(subject: &Subject<'_, B>) {
    const STATES: [QpState; 7] =
        [QpState::Reset, QpState::Init, QpState::Rtr, QpState::Rts, QpState::Sqd, QpState::Sqe, QpState::Error];
    let (a, b) = (subject.node(1), subject.node(2));
    let (end, peer) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    type Bring<H> = fn(&End<H>, &End<H>);
    let starts: [(QpState, Bring<B::Hca>); 5] = [
        (QpState::Reset, |_, _| {}),
        (QpState::Init, |end, peer| {
            end.change(QpState::Init, End::toward(peer), M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS)
        }),
        (QpState::Rtr, |end, peer| end.rtr(peer, |_| {})),
        (QpState::Rts, |end, peer| end.connect(peer, |_| {})),
        (QpState::Error, |end, _| end.to(QpState::Error)),
    ];
    for (from, bring) in starts {
        for to in STATES {
            end.to(QpState::Reset);
            bring(&end, &peer);
            assert_eq!(end.state(), from);
            // A change of state without attributes is allowed exactly where the table says so.
            let allowed = qp_state::check(QpType::Rc, from, to, M::STATE).is_ok();
            let result = end.qp.modify(&QpAttrs { state: to, ..End::toward(&peer) }, M::STATE);
            assert_eq!(result.is_ok(), allowed, "{from:?} to {to:?}: {result:?}");
            assert_eq!(end.state(), if allowed { to } else { from }, "{from:?} to {to:?}");
        }
    }
}

pub(super) fn refused_changes_change_nothing<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair();
    let before = pair.left.qp.query();
    let modify = |attrs: QpAttrs, mask| pair.left.qp.modify(&attrs, mask);
    assert!(matches!(modify(QpAttrs { min_rnr_timer: 32, ..before }, M::MIN_RNR_TIMER), Err(VerbsError::Invalid(_))));
    assert!(matches!(modify(before, M::TIMEOUT), Err(VerbsError::Transition(_))));
    let wrong = QpAttrs { cur_state: QpState::Sqd, ..before };
    assert!(matches!(modify(wrong, M::CUR_STATE), Err(VerbsError::Invalid(_))));
    assert_eq!(pair.left.qp.query(), before);
    modify(QpAttrs { min_rnr_timer: 31, ..before }, M::MIN_RNR_TIMER).unwrap();
    assert_eq!(pair.left.qp.query().min_rnr_timer, 31);
    let fresh = pair.a.qp(QpType::Rc);
    let init = M::STATE | M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS;
    let port = QpAttrs { state: QpState::Init, port_num: 2, ..QpAttrs::default() };
    assert!(matches!(fresh.qp.modify(&port, init), Err(VerbsError::Invalid(_))));
    assert_eq!(fresh.state(), QpState::Reset);
}

pub(super) fn error_flushes_both_queues<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair();
    // No receive is posted, so the message waits.
    pair.right.to(QpState::Reset);
    for i in 0..20 {
        pair.left.post(i, SEND, &[]);
        pair.left.recv(i, &[]);
    }
    pair.left.qp.notify_send();
    pair.left.to(QpState::Error);
    let expected: Vec<_> = (0..20).map(|i| (i, FLUSHED)).collect();
    assert_eq!(pair.left.scq.statuses(20), expected);
    assert_eq!(pair.left.rcq.statuses(20), expected);
    assert_eq!(pair.left.sends.retired(), 20);
    // A QP that was never started flushes posted requests, too.
    let fresh = pair.a.qp(QpType::Rc);
    fresh.to(QpState::Error);
    fresh.recv(1, &[]);
    fresh.send(2, &[]);
    assert_eq!((fresh.rcq.statuses(1), fresh.scq.statuses(1)), (vec![(1, FLUSHED)], vec![(2, FLUSHED)]));
}

pub(super) fn reset_is_silent_and_starts_over<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair();
    pair.right.to(QpState::Reset);
    pair.left.recv(1, &[]);
    pair.left.send(1, &[]);
    pair.left.post(2, SEND, &[]);
    pair.left.to(QpState::Reset);
    assert_eq!((pair.left.sends.resets(), pair.left.receives.resets()), (1, 1));
    let attrs = pair.left.qp.query();
    assert_eq!((attrs.state, attrs.dest_qpn), (QpState::Reset, pvrdma_verbs_types::Qpn::default()));
    pair.left.connect(&pair.right, |_| {});
    pair.right.connect(&pair.left, |_| {});
    pair.right.recv(2, &[]);
    pair.left.send(3, &[]);
    // Earlier requests have not completed, and do not complete now.
    assert_eq!(pair.left.scq.statuses(1), [(3, OK)]);
    assert_eq!(pair.right.rcq.statuses(1), [(2, OK)]);
    pair.left.recv(4, &[]);
    pair.right.send(4, &[]);
    assert_eq!(pair.left.rcq.statuses(1), [(4, OK)]);
    pair.left.to(QpState::Error);
    pair.left.to(QpState::Reset);
    pair.left.to(QpState::Reset);
}

pub(super) fn draining_finishes_what_was_started<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair();
    let (mine, theirs) = (pair.a.buffer(4096), pair.b.buffer(4096));
    pair.left.submit(1, write(theirs.remote(0)), &[mine.all()]);
    let drain = QpAttrs { en_sqd_async_notify: true, ..QpAttrs::default() };
    pair.left.change(QpState::Sqd, drain, M::EN_SQD_ASYNC_NOTIFY);
    assert_eq!(pair.left.scq.statuses(1), [(1, OK)]);
    if subject.profile.drained_event {
        assert_eq!(pair.a.events.wait(1), [AsyncEvent::Qp(QpEvent::SendQueueDrained, pair.left.cookie)]);
    }
    assert_eq!(pair.left.state(), QpState::Sqd);
    // It still processes requests of the peer, and starts none of its own.
    pair.left.submit(2, write(theirs.remote(0)), &[mine.sge(0, 8)]);
    pair.right.submit(3, write(mine.remote(0)), &[theirs.sge(0, 10)]);
    assert_eq!(pair.right.scq.statuses(1), [(3, OK)]);
    assert!(pair.left.scq.poll().is_empty());
    pair.left.to(QpState::Rts);
    assert_eq!(pair.left.scq.statuses(1), [(2, OK)]);
}

pub(super) fn attributes_are_those_that_were_set<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair_with(
        |a| {
            (a.path_mtu, a.access) = (Mtu::M512, Access::REMOTE_READ);
            (a.timeout, a.retry_cnt, a.rnr_retry, a.min_rnr_timer) = (15, 3, 5, 17);
            (a.max_rd_atomic, a.max_dest_rd_atomic) = (2, 4);
            (a.av.traffic_class, a.av.hop_limit) = (8, 63);
        },
        |_| {},
    );
    let got = pair.left.qp.query();
    assert_eq!((got.state, got.path_mtu, got.access), (QpState::Rts, Mtu::M512, Access::REMOTE_READ));
    assert_eq!((got.timeout, got.retry_cnt, got.rnr_retry, got.min_rnr_timer), (15, 3, 5, 17));
    assert_eq!((got.max_rd_atomic, got.max_dest_rd_atomic, got.port_num), (2, 4, 1));
    assert_eq!((got.dest_qpn, got.rq_psn.get(), got.sq_psn.get()), (pair.right.qp.qpn(), 5, 5));
    assert_eq!((got.av.dgid, got.av.sgid_index), (gid(2), 0));
    assert_eq!((got.av.traffic_class, got.av.hop_limit), (8, 63));
    pair.left.change(QpState::Rts, QpAttrs { access: ALL, ..QpAttrs::default() }, M::ACCESS_FLAGS);
    assert_eq!(pair.left.qp.query().access, ALL);
    let ud = pair.a.qp(QpType::Ud);
    ud.start_datagrams(0x4321);
    assert_eq!((ud.qp.query().qkey, ud.state()), (0x4321, QpState::Rts));
}

pub(super) fn a_destroyed_qp_publishes_nothing<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair_with(|_| {}, |a| (a.timeout, a.retry_cnt) = (8, 1));
    pair.left.recv(1, &[]);
    pair.left.send(1, &[]);
    pair.left.qp.destroy();
    pair.left.qp.destroy();
    pair.left.send(2, &[]);
    pair.left.recv(3, &[]);
    assert!(matches!(pair.left.qp.modify(&QpAttrs::default(), M::STATE), Err(VerbsError::Gone)));
    // The request of its peer gets no answer.
    pair.right.submit(4, write(RemoteAddress::default()), &[]);
    assert_eq!(pair.right.scq.statuses(1), [(4, WcStatus::RetryExceeded)]);
    assert!(pair.left.scq.poll().is_empty() && pair.left.rcq.poll().is_empty());
    assert_eq!(pair.left.sends.posted.lock().len(), 1);
}

pub(super) fn the_first_request_establishes_the_communication<B: Backend>(subject: &Subject<'_, B>) {
    let (a, b) = (subject.node(1), subject.node(2));
    let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    right.rtr(&left, |_| {});
    left.connect(&right, |_| {});
    right.recv(1, &[]);
    right.recv(2, &[]);
    left.send(1, &[]);
    left.send(2, &[]);
    assert_eq!(right.rcq.statuses(2), [(1, OK), (2, OK)]);
    if subject.profile.established_event {
        assert_eq!(b.events.wait(1), [AsyncEvent::Qp(QpEvent::CommunicationEstablished, right.cookie)]);
    }
    assert!(a.hca.limits().max_qp > 1);
}
