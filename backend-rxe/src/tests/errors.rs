//! Every status, at both ends.

use std::sync::atomic::Ordering;

use pvrdma_verbs::{
    Access, AsyncEvent, FastRegister, Hca, Invalidate, MemoryRegion, MrRequest, QpAttrs, QpEvent, QpState, QueuePair,
    RecvWr, RemoteAddress, SendData, SendFlags, SendOp, SendWr, Sge, WcStatus,
};

use crate::testing::*;

/// A failing request with a neighbour in each queue: gives the statuses of requester and responder, and the responder's
/// events.
struct Outcome {
    requester: WcStatus,
    /// Status of the first receive.
    receive: WcStatus,
    events: Vec<AsyncEvent>,
}

/// Has `left` run the request of `op`. All queues must end flushed.
fn fail(pair: &Pair, op: SendOp, sges: &[Sge], receive: RecvWr) -> Outcome {
    pair.right.receives.posted.lock().push_back(receive);
    pair.right.recv(101, &[]);
    pair.right.post(102, SEND, &[]);
    pair.left.recv(103, &[]);
    pair.left.post(1, op, sges);
    pair.left.submit(2, SEND, &[]);
    pair.settle();
    let left = pair.left.scq.statuses();
    assert_eq!(left.len(), 2, "{left:?}");
    assert_eq!(left[1], (2, WcStatus::Flushed));
    assert_eq!(pair.left.rcq.statuses(), [(103, WcStatus::Flushed)]);
    assert_eq!(pair.left.state(), QpState::Error);
    // Later posts are flushed, too.
    pair.left.send(3, &[]);
    pair.left.recv(104, &[]);
    assert_eq!(pair.left.scq.statuses(), [(3, WcStatus::Flushed)]);
    assert_eq!(pair.left.rcq.statuses(), [(104, WcStatus::Flushed)]);
    assert!(pair.a.events.poll().is_empty());
    let right = pair.right.rcq.statuses();
    let receive = right.first().map_or(WcStatus::General, |r| r.1);
    if pair.right.state() == QpState::Error {
        assert_eq!(right, [(100, receive), (101, WcStatus::Flushed)]);
        assert_eq!(pair.right.scq.statuses(), [(102, WcStatus::Flushed)]);
    }
    Outcome { requester: left[0].1, receive, events: pair.b.events.poll() }
}

fn receive(sges: &[Sge]) -> RecvWr {
    RecvWr { wr_id: 100, sges: sges.to_vec(), malformed: false }
}

/// The responder took part: it is in the error state as well.
fn both(pair: &Pair, op: SendOp, sges: &[Sge]) -> Outcome {
    let outcome = fail(pair, op, sges, receive(&[]));
    assert_eq!(pair.right.state(), QpState::Error);
    outcome
}

#[test]
pub(super) fn local_errors_leave_the_peer_alone() {
    let other_pd = |pair: &Pair| {
        let pd = pair.a.hca.create_pd().unwrap();
        let request = MrRequest::Dma { access: ALL };
        pair.a.hca.register_mr(&pd, request).unwrap()
    };
    type Make = fn(&Pair, &Buffer, &Buffer) -> (SendOp, Vec<Sge>);
    let cases: &[(&str, WcStatus, Make)] = &[
        ("unknown key", WcStatus::LocalProtection, |_, mine, theirs| {
            (write(theirs.remote(0)), vec![Sge { lkey: 0xbad, ..mine.sge(0, 8) }])
        }),
        ("past the end", WcStatus::LocalProtection, |_, mine, _| (SEND, vec![mine.sge(4090, 7)])),
        ("wraps", WcStatus::LocalProtection, |_, mine, _| (SEND, vec![Sge { addr: u64::MAX - 1, ..mine.sge(0, 8) }])),
        ("second element", WcStatus::LocalProtection, |_, mine, _| {
            (SEND, vec![mine.sge(0, 8), Sge { lkey: 0, ..mine.sge(0, 1) }])
        }),
        ("read into read-only", WcStatus::LocalProtection, |pair, _, theirs| {
            let mine = pair.a.buffer_at(0, 64, Access::empty());
            let sge = mine.sge(0, 8);
            std::mem::forget(mine.mr);
            (SendOp::Read { remote: theirs.remote(0) }, vec![sge])
        }),
        ("short atomic", WcStatus::LocalLength, |_, mine, theirs| {
            (SendOp::FetchAdd { remote: theirs.remote(0), add: 1 }, vec![mine.sge(0, 4), mine.sge(8, 3)])
        }),
        ("long message", WcStatus::LocalLength, |_, mine, _| {
            (SEND, vec![Sge { length: 1 << 31, ..mine.sge(0, 1) }, mine.sge(0, 1)])
        }),
        ("unsupported", WcStatus::LocalQpOperation, |_, _, _| (SendOp::Unsupported { opcode: 14 }, vec![])),
        ("malformed", WcStatus::LocalQpOperation, |_, _, _| (SendOp::Malformed, vec![])),
        ("invalidating a plain key", WcStatus::LocalQpOperation, |_, mine, _| {
            (SendOp::LocalInvalidate(Invalidate { key: mine.mr.lkey() }), vec![])
        }),
        ("registering a plain key", WcStatus::LocalQpOperation, |_, mine, _| {
            let request = FastRegister { key: mine.mr.lkey(), iova: 0, length: 0, access: ALL, pages: None };
            (SendOp::FastRegister(Box::new(request)), vec![])
        }),
    ];
    for (name, status, make) in cases {
        let pair = Pair::new();
        let (mine, theirs) = (pair.a.buffer(4096), pair.b.buffer(4096));
        let (op, sges) = make(&pair, &mine, &theirs);
        let outcome = fail(&pair, op, &sges, receive(&[]));
        assert_eq!(outcome.requester, *status, "{name}");
        assert_eq!(pair.right.state(), QpState::Rts, "{name}");
        assert!(outcome.events.is_empty(), "{name}");
        assert_eq!(theirs.read(0, 4096), vec![0; 4096]);
    }
    let pair = Pair::new();
    let foreign = other_pd(&pair);
    let outcome = fail(&pair, SEND, &[Sge { addr: 0x1000_0000, length: 1, lkey: foreign.lkey() }], receive(&[]));
    assert_eq!(outcome.requester, WcStatus::LocalProtection);
    let pair = Pair::with(World::new(), |a| a.max_rd_atomic = 0, |_| {});
    let outcome = fail(&pair, SendOp::Read { remote: RemoteAddress::default() }, &[], receive(&[]));
    assert_eq!(outcome.requester, WcStatus::LocalQpOperation);
}

#[test]
pub(super) fn remote_access_errors() {
    type Make = fn(&Pair, &Buffer) -> RemoteAddress;
    let cases: &[(&str, Make)] = &[
        ("unknown key", |_, _| RemoteAddress { addr: 0, rkey: 0x1234 }),
        ("stale byte", |_, theirs| RemoteAddress { rkey: theirs.mr.rkey() ^ 1, ..theirs.remote(0) }),
        ("past the end", |_, theirs| theirs.remote(4089)),
        ("before the start", |_, theirs| RemoteAddress { addr: theirs.start - 8, ..theirs.remote(0) }),
        ("no rights", |pair, _| {
            let buffer = pair.b.buffer_at(0, 4096, Access::LOCAL_WRITE);
            let remote = buffer.remote(0);
            std::mem::forget(buffer.mr);
            remote
        }),
        ("another PD", |pair, theirs| {
            let pd = pair.b.hca.create_pd().unwrap();
            let mut pages = pvrdma_guest_memory::PageListBuilder::default();
            pages.push(0x1000_0000).unwrap();
            let (start, pages) = (theirs.start & !4095, pages.finish());
            let request = MrRequest::User { start, length: 4096, pages, access: ALL };
            let mr = pair.b.hca.register_mr(&pd, request).unwrap();
            let rkey = mr.rkey();
            std::mem::forget(mr);
            RemoteAddress { addr: start, rkey }
        }),
        ("deregistered", |pair, _| pair.b.buffer(4096).remote(0)),
    ];
    for (name, make) in cases {
        for op in 0..4 {
            let pair = Pair::new();
            let (mine, theirs) = (pair.a.buffer(4096), pair.b.buffer(4096));
            mine.write(0, &[7; 8]);
            let remote = make(&pair, &theirs);
            // Past the end by one byte: eight bytes from 4089. Atomics need alignment, so they go a word further.
            let aligned = RemoteAddress { addr: remote.addr.next_multiple_of(8), ..remote };
            let op = match op {
                0 => write(remote),
                1 => SendOp::Read { remote },
                2 => SendOp::CompareSwap { remote: aligned, compare: 0, swap: 1 },
                _ => SendOp::FetchAdd { remote: aligned, add: 1 },
            };
            let outcome = both(&pair, op, &[mine.sge(0, 8)]);
            assert_eq!(outcome.requester, WcStatus::RemoteAccess, "{name}");
            assert_eq!(outcome.receive, WcStatus::Flushed, "{name}");
            assert_eq!(outcome.events, [AsyncEvent::Qp(QpEvent::AccessError, pair.right.cookie)], "{name}");
            assert_eq!(theirs.read(0, 4096), vec![0; 4096], "{name}");
            assert_eq!(mine.read(0, 8), [7; 8]);
        }
    }
}

#[test]
pub(super) fn operations_that_the_qp_does_not_enable_are_invalid_requests() {
    let atomic = |remote| SendOp::FetchAdd { remote, add: 1 };
    type Set = fn(&mut QpAttrs);
    type MakeOp = fn(RemoteAddress) -> SendOp;
    let cases: &[(Set, MakeOp)] = &[
        (|a| a.access = Access::REMOTE_READ, write),
        (|a| a.access = Access::REMOTE_WRITE, |remote| SendOp::Read { remote }),
        (|a| a.access = Access::REMOTE_WRITE, atomic),
        (|a| a.max_dest_rd_atomic = 0, |remote| SendOp::Read { remote }),
        (|a| a.max_dest_rd_atomic = 0, atomic),
        (|_| {}, |remote| SendOp::FetchAdd { remote: RemoteAddress { addr: remote.addr + 4, ..remote }, add: 1 }),
    ];
    for (set, make) in cases {
        let pair = Pair::with(World::new(), |_| {}, set);
        let (mine, theirs) = (pair.a.buffer(64), pair.b.buffer(64));
        let outcome = both(&pair, make(theirs.remote(0)), &[mine.sge(0, 8)]);
        assert_eq!(outcome.requester, WcStatus::RemoteInvalidRequest);
        assert_eq!(outcome.receive, WcStatus::Flushed);
        assert_eq!(outcome.events, [AsyncEvent::Qp(QpEvent::RequestError, pair.right.cookie)]);
    }
}

#[test]
pub(super) fn receives_that_do_not_fit() {
    let pair = Pair::new();
    let (mine, theirs) = (pair.a.buffer(64), pair.b.buffer(64));
    let outcome = fail(&pair, SEND, &[mine.sge(0, 9)], receive(&[theirs.sge(0, 8)]));
    assert_eq!((outcome.requester, outcome.receive), (WcStatus::RemoteInvalidRequest, WcStatus::LocalLength));
    assert_eq!(theirs.read(0, 64), vec![0; 64]);

    for bad in 0..3 {
        let pair = Pair::new();
        let mine = pair.a.buffer(64);
        let theirs = pair.b.buffer_at(0, 64, if bad == 0 { Access::empty() } else { ALL });
        let sge = match bad {
            0 => theirs.all(),
            1 => Sge { lkey: 3, ..theirs.all() },
            _ => Sge { length: 65, ..theirs.all() },
        };
        let outcome = fail(&pair, SEND, &[mine.sge(0, 8)], receive(&[sge]));
        assert_eq!((outcome.requester, outcome.receive), (WcStatus::RemoteOperation, WcStatus::LocalProtection));
    }

    let pair = Pair::new();
    let work = RecvWr { wr_id: 100, sges: Vec::new(), malformed: true };
    let outcome = fail(&pair, SEND, &[], work);
    assert_eq!((outcome.requester, outcome.receive), (WcStatus::RemoteOperation, WcStatus::LocalQpOperation));

    let pair = Pair::new();
    let key = pair.b.buffer(8).mr.rkey();
    let outcome = both(&pair, SendOp::Send { data: SendData::Invalidate(key), to: None }, &[]);
    assert_eq!((outcome.requester, outcome.receive), (WcStatus::RemoteOperation, WcStatus::RemoteInvalidRequest));
}

#[test]
pub(super) fn a_write_with_immediate_and_a_bad_key_flushes_the_receive_it_waited_for() {
    let pair = Pair::new();
    let mine = pair.a.buffer(64);
    let op = SendOp::Write { remote: RemoteAddress::default(), immediate: Some([0; 4]) };
    let outcome = both(&pair, op, &[mine.sge(0, 8)]);
    assert_eq!((outcome.requester, outcome.receive), (WcStatus::RemoteAccess, WcStatus::Flushed));
}

#[test]
pub(super) fn memory_that_goes_away_is_an_error_and_not_a_crash() {
    let pair = Pair::new();
    let (mine, theirs) = (pair.a.buffer(64), pair.b.buffer(64));
    pair.b.memory.unmap_all();
    let outcome = both(&pair, write(theirs.remote(0)), &[mine.sge(0, 8)]);
    assert_eq!(outcome.requester, WcStatus::RemoteAccess);
    let pair = Pair::new();
    let (mine, theirs) = (pair.a.buffer(64), pair.b.buffer(64));
    pair.a.memory.unmap_all();
    let outcome = fail(&pair, write(theirs.remote(0)), &[mine.sge(0, 8)], receive(&[]));
    assert_eq!(outcome.requester, WcStatus::LocalProtection);
}

#[test]
pub(super) fn broken_rings_end_their_qp() {
    let pair = Pair::new();
    pair.left.recv(1, &[]);
    pair.left.sends.broken.store(1, Ordering::SeqCst);
    pair.left.qp.notify_send();
    assert_eq!(pair.left.state(), QpState::Error);
    assert_eq!(pair.a.events.poll(), [AsyncEvent::Qp(QpEvent::Fatal, pair.left.cookie)]);
    assert_eq!(pair.left.rcq.statuses(), [(1, WcStatus::Flushed)]);
    pair.left.qp.notify_send();
    assert!(pair.a.events.poll().is_empty());

    let pair = Pair::new();
    pair.right.receives.broken.store(1, Ordering::SeqCst);
    pair.left.send(1, &[]);
    pair.settle();
    assert_eq!(pair.left.scq.statuses(), [(1, WcStatus::RemoteOperation)]);
    assert_eq!(pair.right.state(), QpState::Error);
    assert_eq!(pair.b.events.poll(), [AsyncEvent::Qp(QpEvent::Fatal, pair.right.cookie)]);
}

#[test]
pub(super) fn a_full_completion_queue_ends_every_qp_of_it() {
    let pair = Pair::new();
    let (cq, sink) = pair.a.cq();
    let make = || pair.a.qp_on(pvrdma_verbs::QpType::Rc, None, (Some(&cq), None), |_| {});
    let (x, y) = (make(), make());
    let (px, py) = (pair.b.qp(pvrdma_verbs::QpType::Rc), pair.b.qp(pvrdma_verbs::QpType::Rc));
    for (end, peer) in [(&x, &px), (&y, &py)] {
        end.connect(peer, |_| {});
        peer.connect(end, |_| {});
        end.recv(50, &[]);
    }
    sink.size.store(3, Ordering::SeqCst);
    for i in 0..3 {
        x.submit(i, write(RemoteAddress::default()), &[]);
    }
    assert_eq!(sink.total.load(Ordering::SeqCst), 3);
    x.submit(3, write(RemoteAddress::default()), &[]);
    pair.settle();
    assert_eq!((x.state(), y.state()), (QpState::Error, QpState::Error));
    assert_eq!(x.rcq.statuses(), [(50, WcStatus::Flushed)]);
    assert_eq!(y.rcq.statuses(), [(50, WcStatus::Flushed)]);
    assert_eq!(pair.a.counter("cq_overruns"), 1);
    assert_eq!(pair.left.state(), QpState::Rts);

    // Who comes to the dead queue later follows with its first entry.
    y.to(QpState::Reset);
    y.connect(&py, |_| {});
    sink.size.store(100, Ordering::SeqCst);
    y.submit(9, write(RemoteAddress::default()), &[]);
    pair.settle();
    assert_eq!((y.state(), sink.total.load(Ordering::SeqCst)), (QpState::Error, 3));

    // At the receiver the message is lost, and its sender hears of it.
    let pair = Pair::new();
    pair.right.rcq.size.store(0, Ordering::SeqCst);
    pair.right.recv(1, &[]);
    pair.left.send(1, &[]);
    pair.settle();
    assert_eq!(pair.right.state(), QpState::Error);
    assert_eq!(pair.left.scq.statuses(), [(1, WcStatus::RemoteOperation)]);
}

#[test]
pub(super) fn flushes_are_in_ring_order_and_longer_than_one_budget() {
    let pair = Pair::new();
    pair.right.to(QpState::Reset);
    for i in 0..2000 {
        pair.left.post(i, SEND, &[]);
        pair.left.receives.posted.lock().push_back(RecvWr { wr_id: i, ..RecvWr::default() });
    }
    pair.left.qp.notify_send();
    pair.left.to(QpState::Error);
    pair.settle();
    let expected: Vec<_> = (0..2000).map(|i| (i, WcStatus::Flushed)).collect();
    assert_eq!(pair.left.scq.statuses(), expected);
    assert_eq!(pair.left.rcq.statuses(), expected);
    assert_eq!(pair.left.sends.retired.load(Ordering::SeqCst), 2000);
}

#[test]
pub(super) fn a_batch_that_the_receivers_queue_had_no_room_for_fails_from_there_on() {
    for flags in [SendFlags::SIGNALED, SendFlags::empty()] {
        let pair = Pair::new();
        pair.right.rcq.size.store(3, Ordering::SeqCst);
        for wr_id in 0..12 {
            pair.right.recv(wr_id, &[]);
            pair.left.sends.posted.lock().push_back(SendWr { wr_id, op: SEND, flags, sges: Vec::new() });
        }
        pair.left.qp.notify_send();
        pair.settle();
        assert_eq!(pair.right.rcq.statuses(), [0, 1, 2].map(|wr_id| (wr_id, WcStatus::Success)));
        let statuses = pair.left.scq.statuses();
        let (told, lost): (Vec<_>, Vec<_>) = statuses.iter().partition(|(wr_id, _)| *wr_id < 3);
        assert!(told.iter().all(|(_, status)| *status == WcStatus::Success), "{statuses:?}");
        assert_eq!(told.len(), if flags.is_empty() { 0 } else { 3 });
        assert_eq!(lost[0], (3, WcStatus::RemoteOperation));
        assert!(lost[1..].iter().copied().eq((4..12).map(|wr_id| (wr_id, WcStatus::Flushed))), "{statuses:?}");
        assert_eq!((pair.left.state(), pair.right.state()), (QpState::Error, QpState::Error));
    }
}

#[test]
pub(super) fn a_receiver_learns_of_what_came_before_an_error_first() {
    let pair = Pair::new();
    let target = pair.b.buffer(64);
    for wr_id in 0..4 {
        pair.right.recv(wr_id, &[target.sge(0, 4)]);
    }
    let source = pair.a.buffer(64);
    for (wr_id, len) in [(0, 4), (1, 4), (2, 5), (3, 4)] {
        pair.left.post(wr_id, SEND, &[source.sge(0, len)]);
    }
    pair.left.qp.notify_send();
    pair.settle();
    let (good, flushed) = (WcStatus::Success, WcStatus::Flushed);
    assert_eq!(pair.right.rcq.statuses(), [(0, good), (1, good), (2, WcStatus::LocalLength), (3, flushed)]);
    assert_eq!(pair.left.scq.statuses(), [(0, good), (1, good), (2, WcStatus::RemoteInvalidRequest), (3, flushed)]);
}
