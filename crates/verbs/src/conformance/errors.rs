//! Every error status of a request.

use pvrdma_verbs_types::{Access, Invalidate, QpAttrs, QpState, QpType, RemoteAddress, SendOp, Sge, WcStatus};

use super::{Pair, Subject};
use crate::testing::{ALL, Buffer, SEND, write};
use crate::{AsyncEvent, Backend, Hca, MemoryRegion, QpEvent, QueuePair};

/// Lets `left` execute a failing request with others around it in its queues. Returns its status.
fn fail<B: Backend>(pair: &Pair<B>, op: SendOp, sges: &[Sge]) -> WcStatus {
    pair.left.recv(103, &[]);
    pair.left.post(1, op, sges);
    pair.left.send(2, &[]);
    let left = pair.left.scq.wait(2);
    assert_eq!((left[0].wr_id, left[1].wr_id), (1, 2));
    assert_eq!(left[1].status, WcStatus::Flushed);
    assert_eq!(pair.left.rcq.statuses(1), [(103, WcStatus::Flushed)]);
    assert_eq!(pair.left.state(), QpState::Error);
    assert!(pair.a.events.poll().is_empty());
    left[0].status
}

/// Lets the peer execute a request, which checks that its QP still works.
fn peer_is_well<B: Backend>(pair: &Pair<B>) {
    assert_eq!(pair.right.state(), QpState::Rts);
    assert!(pair.b.events.poll().is_empty());
}

/// Checks the responder of a refused request.
fn responder<B: Backend>(subject: &Subject<'_, B>, pair: &Pair<B>, event: QpEvent) {
    assert_eq!(pair.right.rcq.statuses(1), [(101, WcStatus::Flushed)]);
    assert_eq!(pair.right.state(), QpState::Error);
    if subject.profile.responder_events {
        assert_eq!(pair.b.events.wait(1), [AsyncEvent::Qp(event, pair.right.cookie)]);
    }
}

pub(super) fn local_errors<B: Backend>(subject: &Subject<'_, B>) {
    type Make<B> = fn(&Pair<B>, &Buffer<<B as Backend>::Hca>, &Buffer<<B as Backend>::Hca>) -> (SendOp, Vec<Sge>);
    let cases: [(&str, WcStatus, Make<B>); 8] = [
        ("unknown key", WcStatus::LocalProtection, |_, mine, theirs| {
            (write(theirs.remote(0)), vec![Sge { lkey: 0xbad, ..mine.sge(0, 8) }])
        }),
        ("past the end", WcStatus::LocalProtection, |_, mine, _| (SEND, vec![mine.sge(4090, 7)])),
        ("wraps", WcStatus::LocalProtection, |_, mine, _| (SEND, vec![Sge { addr: u64::MAX - 1, ..mine.sge(0, 8) }])),
        ("second element", WcStatus::LocalProtection, |_, mine, _| {
            (SEND, vec![mine.sge(0, 8), Sge { lkey: 0, ..mine.sge(0, 1) }])
        }),
        ("unsupported", WcStatus::LocalQpOperation, |_, _, _| (SendOp::Unsupported { opcode: 14 }, vec![])),
        ("malformed", WcStatus::LocalQpOperation, |_, _, _| (SendOp::Malformed, vec![])),
        ("invalidating a plain key", WcStatus::LocalQpOperation, |_, mine, _| {
            (SendOp::LocalInvalidate(Invalidate { key: mine.mr.lkey() }), vec![])
        }),
        ("registering a plain key", WcStatus::LocalQpOperation, |_, mine, _| {
            let key = mine.mr.lkey();
            let request = pvrdma_verbs_types::FastRegister { key, iova: 0, length: 0, access: ALL, pages: None };
            (SendOp::FastRegister(Box::new(request)), vec![])
        }),
    ];
    for (name, status, make) in cases {
        let pair = subject.pair();
        let (mine, theirs) = (pair.a.buffer(4096), pair.b.buffer(4096));
        let (op, sges) = make(&pair, &mine, &theirs);
        assert_eq!(fail(&pair, op, &sges), status, "{name}");
        peer_is_well(&pair);
        assert_eq!(theirs.read(0, 4096), vec![0; 4096], "{name}");
    }
    // The key belongs to another protection domain.
    let pair = subject.pair();
    let pd = pair.a.hca.create_pd().unwrap();
    let foreign = pair.a.register(&pd, &pair.a.pages(1), 0, 64, ALL);
    assert_eq!(fail(&pair, SEND, &[foreign.sge(0, 8)]), WcStatus::LocalProtection);
}

pub(super) fn an_atomic_has_room_for_eight_bytes_and_no_more<B: Backend>(subject: &Subject<'_, B>) {
    let lists: [&[(u64, u64)]; 6] =
        [&[], &[(0, 7)], &[(0, 4), (8, 3)], &[(0, 9)], &[(0, 8), (8, 1)], &[(0, 4), (8, 8)]];
    for list in lists {
        for swaps in [false, true] {
            let pair = subject.pair();
            let (mine, theirs) = (pair.a.buffer(64), pair.b.buffer(64));
            let remote = theirs.remote(0);
            let add = SendOp::FetchAdd { remote, add: 1 };
            let op = if swaps { SendOp::CompareSwap { remote, compare: 0, swap: 1 } } else { add };
            let sges: Vec<Sge> = list.iter().map(|&(offset, length)| mine.sge(offset, length)).collect();
            assert_eq!(fail(&pair, op, &sges), WcStatus::LocalLength, "{list:?} {swaps}");
            peer_is_well(&pair);
            assert_eq!(theirs.read(0, 64), [0; 64], "{list:?} {swaps}");
        }
    }
    // The result may be scattered over several SGEs.
    let pair = subject.pair();
    let (mine, theirs) = (pair.a.buffer(64), pair.b.buffer(64));
    theirs.write(0, &[1, 2, 3, 4, 5, 6, 7, 8]);
    let pieces = [mine.sge(0, 3), mine.sge(60, 0), mine.sge(16, 5)];
    pair.left.submit(1, SendOp::FetchAdd { remote: theirs.remote(0), add: 1 }, &pieces);
    assert_eq!(pair.left.scq.statuses(1), [(1, WcStatus::Success)]);
    assert_eq!((mine.read(0, 4), mine.read(16, 6)), (vec![1, 2, 3, 0], vec![4, 5, 6, 7, 8, 0]));
}

/// The peer executes a READ or an atomic before the local key of its result is checked (IBA 9.7.5.1), so errors of the
/// peer are reported first.
pub(super) fn the_peers_checks_come_before_the_key_of_a_result<B: Backend>(subject: &Subject<'_, B>) {
    for kind in 0..3 {
        for (name, bad_remote, unaligned) in
            [("both keys", true, false), ("unaligned", false, true), ("own", false, false)]
        {
            if unaligned && kind == 0 {
                continue;
            }
            let pair = subject.pair();
            let (mine, theirs) = (pair.a.buffer(64), pair.b.buffer(64));
            let mut remote = theirs.remote(if unaligned { 4 } else { 0 });
            remote.rkey ^= if bad_remote { 1 } else { 0 };
            let op = match kind {
                0 => SendOp::Read { remote },
                1 => SendOp::CompareSwap { remote, compare: 0, swap: 1 },
                _ => SendOp::FetchAdd { remote, add: 1 },
            };
            let expected = match (bad_remote, unaligned) {
                (true, _) if subject.profile.peer_first => WcStatus::RemoteAccess,
                (_, true) => WcStatus::RemoteInvalidRequest,
                _ => WcStatus::LocalProtection,
            };
            let status = fail(&pair, op, &[Sge { lkey: 0xbad, ..mine.sge(0, 8) }]);
            assert_eq!(status, expected, "{name} {kind}");
            assert_eq!(mine.read(0, 64), [0; 64], "{name} {kind}");
            if expected == WcStatus::LocalProtection {
                peer_is_well(&pair);
            }
        }
    }
}

/// IBA C9-222.1: the receive that an RDMA WRITE with immediate data consumed completes with the status that its memory
/// cannot be accessed.
pub(super) fn a_write_with_immediate_to_a_bad_key_ends_its_receive<B: Backend>(subject: &Subject<'_, B>) {
    for name in ["unknown key", "past the end", "no rights"] {
        let pair = subject.pair();
        let (mine, theirs) = (pair.a.buffer(4096), pair.b.buffer(4096));
        let local_only = pair.b.buffer_at(0, 4096, Access::LOCAL_WRITE);
        let remote = match name {
            "unknown key" => RemoteAddress { addr: 0, rkey: 0x1234 },
            "past the end" => theirs.remote(4089),
            _ => local_only.remote(0),
        };
        pair.right.recv(101, &[]);
        pair.right.recv(102, &[]);
        let op = SendOp::Write { remote, immediate: Some([1, 2, 3, 4]) };
        assert_eq!(fail(&pair, op, &[mine.sge(0, 8)]), WcStatus::RemoteAccess, "{name}");
        let got = pair.right.rcq.statuses(2);
        if subject.profile.receive_errors {
            assert_eq!(got, [(101, WcStatus::LocalAccess), (102, WcStatus::Flushed)], "{name}");
        } else {
            assert!(got[0].0 == 101 && got[0].1 != WcStatus::Success, "{name} {got:?}");
            assert_eq!(got[1], (102, WcStatus::Flushed), "{name}");
        }
        assert_eq!(pair.right.state(), QpState::Error, "{name}");
        // The error is reported by the completion, not by an event.
        assert!(pair.b.events.poll().is_empty(), "{name}");
    }
}

/// A message of several packets is refused with its first one, which consumes no receive.
pub(super) fn a_long_write_with_immediate_to_a_bad_key_takes_no_receive<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair();
    let mine = pair.a.buffer(4096);
    pair.right.recv(101, &[]);
    let op = SendOp::Write { remote: RemoteAddress { addr: 0, rkey: 0x1234 }, immediate: Some([1, 2, 3, 4]) };
    assert_eq!(fail(&pair, op, &[mine.sge(0, 3000)]), WcStatus::RemoteAccess);
    responder(subject, &pair, QpEvent::AccessError);
}

pub(super) fn remote_access_errors<B: Backend>(subject: &Subject<'_, B>) {
    let cases = ["unknown key", "past the end", "before the start", "no rights", "another PD", "deregistered"];
    for name in cases {
        for kind in 0..4 {
            let pair = subject.pair();
            let (mine, theirs) = (pair.a.buffer(4096), pair.b.buffer(4096));
            let local_only = pair.b.buffer_at(0, 4096, Access::LOCAL_WRITE);
            let pd = pair.b.hca.create_pd().unwrap();
            let foreign = pair.b.register(&pd, &pair.b.pages(1), 0, 4096, ALL);
            mine.write(0, &[7; 8]);
            let remote = match name {
                "unknown key" => RemoteAddress { addr: 0, rkey: 0x1234 },
                // By one byte; atomics must be aligned, so they exceed it by a word.
                "past the end" => theirs.remote(if kind < 2 { 4089 } else { 4096 }),
                "before the start" => RemoteAddress { addr: theirs.start - 8, ..theirs.remote(0) },
                "no rights" => local_only.remote(0),
                "another PD" => foreign.remote(0),
                _ => pair.b.buffer(4096).remote(0),
            };
            let op = match kind {
                0 => write(remote),
                1 => SendOp::Read { remote },
                2 => SendOp::CompareSwap { remote, compare: 0, swap: 1 },
                _ => SendOp::FetchAdd { remote, add: 1 },
            };
            pair.right.recv(101, &[]);
            assert_eq!(fail(&pair, op, &[mine.sge(0, 8)]), WcStatus::RemoteAccess, "{name} {kind}");
            responder(subject, &pair, QpEvent::AccessError);
            assert_eq!(theirs.read(0, 4096), vec![0; 4096], "{name} {kind}");
            assert_eq!(local_only.read(0, 64), [0; 64], "{name} {kind}");
            assert_eq!(mine.read(0, 8), [7; 8], "{name} {kind}");
        }
    }
}

pub(super) fn operations_that_a_qp_does_not_enable_are_refused<B: Backend>(subject: &Subject<'_, B>) {
    type Set = fn(&mut QpAttrs);
    type MakeOp = fn(RemoteAddress) -> SendOp;
    let cases: [(Set, MakeOp); 3] = [
        (|a| a.access = Access::REMOTE_READ, write),
        (|a| a.access = Access::REMOTE_WRITE, |remote| SendOp::Read { remote }),
        (|a| a.access = Access::REMOTE_WRITE, |remote| SendOp::FetchAdd { remote, add: 1 }),
    ];
    for (set, make) in cases {
        let pair = subject.pair_with(|_| {}, set);
        let (mine, theirs) = (pair.a.buffer(64), pair.b.buffer(64));
        pair.right.recv(101, &[]);
        assert_eq!(fail(&pair, make(theirs.remote(0)), &[mine.sge(0, 8)]), WcStatus::RemoteInvalidRequest);
        responder(subject, &pair, QpEvent::RequestError);
        assert_eq!(theirs.read(0, 64), [0; 64]);
    }
}

pub(super) fn receives_that_do_not_fit<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair();
    let (mine, theirs) = (pair.a.buffer(64), pair.b.buffer(64));
    pair.right.recv(100, &[theirs.sge(0, 8)]);
    let status = fail(&pair, SEND, &[mine.sge(0, 9)]);
    if subject.profile.receive_errors {
        assert_eq!(status, WcStatus::RemoteInvalidRequest);
        assert_eq!(pair.right.rcq.statuses(1), [(100, WcStatus::LocalLength)]);
    } else {
        assert!(matches!(status, WcStatus::RemoteInvalidRequest | WcStatus::RemoteOperation), "{status:?}");
        assert_ne!(pair.right.rcq.one().status, WcStatus::Success);
    }
    assert_eq!(theirs.read(8, 56), [0; 56]);
    drop((mine, theirs, pair));
    // The receive names memory that its owner must not use in this way.
    for bad in 0..3 {
        let pair = subject.pair();
        let mine = pair.a.buffer(64);
        let theirs = pair.b.buffer_at(0, 64, if bad == 0 { Access::empty() } else { ALL });
        let sge = match bad {
            0 => theirs.all(),
            1 => Sge { lkey: 3, ..theirs.all() },
            _ => Sge { addr: theirs.start + 60, ..theirs.all() },
        };
        pair.right.recv(100, &[sge]);
        assert_eq!(fail(&pair, SEND, &[mine.sge(0, 8)]), WcStatus::RemoteOperation, "{bad}");
        let got = pair.right.rcq.one();
        assert_eq!(got.wr_id, 100);
        if subject.profile.receive_errors {
            assert_eq!(got.status, WcStatus::LocalProtection, "{bad}");
        } else {
            assert_ne!(got.status, WcStatus::Success, "{bad}");
        }
        assert_eq!(theirs.read(0, 60), [0; 60]);
    }
}

pub(super) fn a_receive_is_not_ready<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair_with(|a| a.rnr_retry = 1, |_| {});
    assert_eq!(fail(&pair, SEND, &[]), WcStatus::RnrRetryExceeded);
    peer_is_well(&pair);
}

pub(super) fn a_peer_that_does_not_answer_exhausts_the_retries<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair_with(|a| (a.timeout, a.retry_cnt) = (8, 1), |_| {});
    pair.right.to(QpState::Reset);
    assert_eq!(fail(&pair, SEND, &[]), WcStatus::RetryExceeded);
}

pub(super) fn requests_behind_an_error_are_flushed<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair();
    assert_eq!(fail(&pair, SendOp::Malformed, &[]), WcStatus::LocalQpOperation);
    pair.left.send(3, &[]);
    pair.left.recv(104, &[]);
    assert_eq!(pair.left.scq.statuses(1), [(3, WcStatus::Flushed)]);
    assert_eq!(pair.left.rcq.statuses(1), [(104, WcStatus::Flushed)]);
    // More requests than any queue holds, including unsignaled ones, in ring order.
    for i in 0..300 {
        pair.left.post_with(i, SEND, &[], pvrdma_verbs_types::SendFlags::empty());
    }
    pair.left.qp.notify_send();
    assert_eq!(pair.left.scq.statuses(300), (0..300).map(|i| (i, WcStatus::Flushed)).collect::<Vec<_>>());
    // The QP works again after a reset.
    let other = pair.b.qp(QpType::Rc);
    pair.left.to(QpState::Reset);
    pair.left.connect(&other, |_| {});
    other.connect(&pair.left, |_| {});
    other.recv(5, &[]);
    pair.left.send(5, &[]);
    assert_eq!(pair.left.scq.statuses(1), [(5, WcStatus::Success)]);
    assert_eq!(other.rcq.statuses(1), [(5, WcStatus::Success)]);
}
