//! Every status, at both ends.

use pvrdma_verbs::{AsyncEvent, Hca, MemoryRegion, MrRequest, QpEvent, QueuePair};
use pvrdma_verbs_types::{
    Access, QpAttrs, QpState, QpType, RecvWr, RemoteAddress, SendData, SendFlags, SendOp, Sge, WcStatus,
};

use crate::world::*;

/// Outcome of a request that fails while each queue holds another one.
struct Outcome {
    requester: WcStatus,
    /// Status of the first receive.
    receive: WcStatus,
    events: Vec<AsyncEvent>,
}

/// Makes `left` execute the request `op`. All queues must end flushed.
fn fail(pair: &Pair, op: SendOp, sges: &[Sge], receive: RecvWr) -> Outcome {
    pair.right.receives.posted.lock().push_back(receive);
    pair.right.recv(101, &[]);
    pair.right.post(102, SEND, &[]);
    pair.left.recv(103, &[]);
    pair.left.post(1, op, sges);
    pair.left.submit(2, SEND, &[]);
    pair.settle();
    let left = pair.left.scq.poll_statuses();
    assert_eq!(left.len(), 2, "{left:?}");
    assert_eq!(left[1], (2, WcStatus::Flushed));
    assert_eq!(pair.left.rcq.poll_statuses(), [(103, WcStatus::Flushed)]);
    assert_eq!(pair.left.state(), QpState::Error);
    // Later posts are flushed, too.
    pair.left.send(3, &[]);
    pair.left.recv(104, &[]);
    assert_eq!(pair.left.scq.poll_statuses(), [(3, WcStatus::Flushed)]);
    assert_eq!(pair.left.rcq.poll_statuses(), [(104, WcStatus::Flushed)]);
    assert!(pair.a.events.poll().is_empty());
    let right = pair.right.rcq.poll_statuses();
    let receive = right.first().map_or(WcStatus::General, |r| r.1);
    if pair.right.state() == QpState::Error {
        assert_eq!(right, [(100, receive), (101, WcStatus::Flushed)]);
        assert_eq!(pair.right.scq.poll_statuses(), [(102, WcStatus::Flushed)]);
    }
    Outcome { requester: left[0].1, receive, events: pair.b.events.poll() }
}

fn receive(sges: &[Sge]) -> RecvWr {
    RecvWr { wr_id: 100, sges: sges.to_vec(), malformed: false }
}

/// Also checks that the responder, which took part, is in the error state.
fn both(pair: &Pair, op: SendOp, sges: &[Sge]) -> Outcome {
    let outcome = fail(pair, op, sges, receive(&[]));
    assert_eq!(pair.right.state(), QpState::Error);
    outcome
}

/// Local errors that the conformance suite does not cover.
#[test]
fn local_errors() {
    let read_only = |pair: &Pair| {
        let (mine, theirs) = (pair.a.buffer_at(0, 64, Access::empty()), pair.b.buffer(64));
        let op = SendOp::Read { remote: theirs.remote(0) };
        fail(pair, op, &[mine.sge(0, 8)], receive(&[]))
    };
    let long_message = |pair: &Pair| {
        let mine = pair.a.buffer(64);
        fail(pair, SEND, &[Sge { length: 1 << 31, ..mine.sge(0, 1) }, mine.sge(0, 1)], receive(&[]))
    };
    let dma_key_of_another_pd = |pair: &Pair| {
        let pd = pair.a.hca.create_pd().unwrap();
        let dma = pair.a.hca.register_mr(&pd, MrRequest::Dma { access: ALL }).unwrap();
        fail(pair, SEND, &[Sge { addr: 0x1000_0000, length: 1, lkey: dma.lkey() }], receive(&[]))
    };
    let no_reads = |pair: &Pair| {
        let attrs = QpAttrs { max_rd_atomic: 0, ..End::toward(&pair.right) };
        pair.left.to(QpState::Reset);
        pair.left.connect(&pair.right, |a| *a = attrs);
        fail(pair, SendOp::Read { remote: RemoteAddress::default() }, &[], receive(&[]))
    };
    type Case = fn(&Pair) -> Outcome;
    let cases: [(Case, WcStatus); 4] = [
        (read_only, WcStatus::LocalProtection),
        (long_message, WcStatus::LocalLength),
        (dma_key_of_another_pd, WcStatus::LocalProtection),
        (no_reads, WcStatus::LocalQpOperation),
    ];
    for (index, (case, status)) in cases.into_iter().enumerate() {
        let pair = Pair::new();
        let outcome = case(&pair);
        assert_eq!(outcome.requester, status, "{index}");
        assert_eq!(pair.right.state(), QpState::Rts, "{index}");
        assert!(outcome.events.is_empty(), "{index}");
    }
}

/// Remote errors that the conformance suite does not cover.
#[test]
fn remote_errors() {
    type Set = fn(&mut QpAttrs);
    type MakeOp = fn(RemoteAddress) -> SendOp;
    let atomic: MakeOp = |remote| SendOp::FetchAdd { remote, add: 1 };
    let misaligned: MakeOp =
        |remote| SendOp::FetchAdd { remote: RemoteAddress { addr: remote.addr + 4, ..remote }, add: 1 };
    let (invalid, access) =
        ((WcStatus::RemoteInvalidRequest, QpEvent::RequestError), (WcStatus::RemoteAccess, QpEvent::AccessError));
    let cases: [(Set, MakeOp, _); 4] = [
        (|a| a.max_dest_rd_atomic = 0, |remote| SendOp::Read { remote }, invalid),
        (|a| a.max_dest_rd_atomic = 0, atomic, invalid),
        (|_| {}, misaligned, invalid),
        // The low byte of a key is part of it.
        (|_| {}, |remote| write(RemoteAddress { rkey: remote.rkey ^ 1, ..remote }), access),
    ];
    for (index, (set, make, (status, event))) in cases.into_iter().enumerate() {
        let pair = Pair::with(World::new(), |_| {}, set);
        let (mine, theirs) = (pair.a.buffer(64), pair.b.buffer(64));
        let outcome = both(&pair, make(theirs.remote(0)), &[mine.sge(0, 8)]);
        assert_eq!((outcome.requester, outcome.receive), (status, WcStatus::Flushed), "{index}");
        assert_eq!(outcome.events, [AsyncEvent::Qp(event, pair.right.cookie)], "{index}");
        assert_eq!(theirs.read(0, 64), [0; 64], "{index}");
    }
    // Memory that went away.
    let pair = Pair::new();
    let (mine, theirs) = (pair.a.buffer(64), pair.b.buffer(64));
    pair.b.memory.unmap_all();
    assert_eq!(both(&pair, write(theirs.remote(0)), &[mine.sge(0, 8)]).requester, WcStatus::RemoteAccess);
}

#[test]
fn receives_that_take_nothing() {
    let pair = Pair::new();
    let outcome = fail(&pair, SEND, &[], RecvWr { wr_id: 100, sges: Vec::new(), malformed: true });
    assert_eq!((outcome.requester, outcome.receive), (WcStatus::RemoteOperation, WcStatus::LocalQpOperation));

    let pair = Pair::new();
    let key = pair.b.buffer(8).mr.rkey();
    let outcome = both(&pair, SendOp::Send { data: SendData::Invalidate(key), to: None }, &[]);
    assert_eq!((outcome.requester, outcome.receive), (WcStatus::RemoteOperation, WcStatus::RemoteInvalidRequest));
}

#[test]
fn broken_rings_end_their_qp() {
    let pair = Pair::new();
    pair.left.recv(1, &[]);
    pair.left.sends.break_off();
    pair.left.qp.notify_send();
    assert_eq!(pair.left.state(), QpState::Error);
    assert_eq!(pair.a.events.poll(), [AsyncEvent::Qp(QpEvent::Fatal, pair.left.cookie)]);
    assert_eq!(pair.left.rcq.poll_statuses(), [(1, WcStatus::Flushed)]);
    pair.left.qp.notify_send();
    assert!(pair.a.events.poll().is_empty());

    let pair = Pair::new();
    pair.right.receives.break_off();
    pair.left.send(1, &[]);
    pair.settle();
    assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::RemoteOperation)]);
    assert_eq!(pair.right.state(), QpState::Error);
    assert_eq!(pair.b.events.poll(), [AsyncEvent::Qp(QpEvent::Fatal, pair.right.cookie)]);
}

#[test]
fn a_full_completion_queue_ends_every_qp_of_it() {
    let pair = Pair::new();
    let (cq, sink) = pair.a.cq();
    let make = || pair.a.qp_on(QpType::Rc, None, [Some(&cq), None], |_| {}).unwrap();
    let (x, y) = (make(), make());
    let (px, py) = (pair.b.qp(QpType::Rc), pair.b.qp(QpType::Rc));
    for (end, peer) in [(&x, &px), (&y, &py)] {
        end.connect(peer, |_| {});
        peer.connect(end, |_| {});
        end.recv(50, &[]);
    }
    sink.limit(3);
    for i in 0..3 {
        x.submit(i, write(RemoteAddress::default()), &[]);
    }
    assert_eq!(sink.total(), 3);
    x.submit(3, write(RemoteAddress::default()), &[]);
    pair.settle();
    assert_eq!((x.state(), y.state()), (QpState::Error, QpState::Error));
    assert_eq!(x.rcq.poll_statuses(), [(50, WcStatus::Flushed)]);
    assert_eq!(y.rcq.poll_statuses(), [(50, WcStatus::Flushed)]);
    assert_eq!(pair.a.counter("cq_overruns"), 1);
    assert_eq!(pair.left.state(), QpState::Rts);

    // A QP that uses the broken queue later fails with its first completion.
    y.to(QpState::Reset);
    y.connect(&py, |_| {});
    sink.limit(100);
    y.submit(9, write(RemoteAddress::default()), &[]);
    pair.settle();
    assert_eq!((y.state(), sink.total()), (QpState::Error, 3));

    // The receiver loses the message, and the sender gets an error.
    let pair = Pair::new();
    pair.right.rcq.limit(0);
    pair.right.recv(1, &[]);
    pair.left.send(1, &[]);
    pair.settle();
    assert_eq!(pair.right.state(), QpState::Error);
    assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::RemoteOperation)]);
}

#[test]
fn flushes_are_in_ring_order_and_longer_than_one_budget() {
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
    assert_eq!(pair.left.scq.poll_statuses(), expected);
    assert_eq!(pair.left.rcq.poll_statuses(), expected);
    assert_eq!(pair.left.sends.retired(), 2000);
}

#[test]
fn a_batch_that_the_receivers_queue_had_no_room_for_fails_from_there_on() {
    for flags in [SendFlags::SIGNALED, SendFlags::empty()] {
        let pair = Pair::new();
        pair.right.rcq.limit(3);
        for wr_id in 0..12 {
            pair.right.recv(wr_id, &[]);
            pair.left.post_with(wr_id, SEND, &[], flags);
        }
        pair.left.qp.notify_send();
        pair.settle();
        assert_eq!(pair.right.rcq.poll_statuses(), [0, 1, 2].map(|wr_id| (wr_id, WcStatus::Success)));
        let statuses = pair.left.scq.poll_statuses();
        let (told, lost): (Vec<_>, Vec<_>) = statuses.iter().partition(|(wr_id, _)| *wr_id < 3);
        assert!(told.iter().all(|(_, status)| *status == WcStatus::Success), "{statuses:?}");
        assert_eq!(told.len(), if flags.is_empty() { 0 } else { 3 });
        assert_eq!(lost[0], (3, WcStatus::RemoteOperation));
        assert!(lost[1..].iter().copied().eq((4..12).map(|wr_id| (wr_id, WcStatus::Flushed))), "{statuses:?}");
        assert_eq!((pair.left.state(), pair.right.state()), (QpState::Error, QpState::Error));
    }
}

#[test]
fn completions_precede_a_later_error() {
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
    assert_eq!(pair.right.rcq.poll_statuses(), [(0, good), (1, good), (2, WcStatus::LocalLength), (3, flushed)]);
    assert_eq!(
        pair.left.scq.poll_statuses(),
        [(0, good), (1, good), (2, WcStatus::RemoteInvalidRequest), (3, flushed)]
    );
}

over_a_cable! {
    local_errors
    remote_errors
    receives_that_take_nothing
    broken_rings_end_their_qp
    a_full_completion_queue_ends_every_qp_of_it
    flushes_are_in_ring_order_and_longer_than_one_budget
}

on_slow_memory! {
    local_errors
    remote_errors
    receives_that_take_nothing
    broken_rings_end_their_qp
    a_full_completion_queue_ends_every_qp_of_it
    flushes_are_in_ring_order_and_longer_than_one_budget
}
