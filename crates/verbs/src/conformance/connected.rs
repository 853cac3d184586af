//! Operations of a connected QP without errors.

use pvrdma_verbs_types::{
    Access, QpType, RemoteAddress, SendData, SendFlags, SendOp, Sge, WcFlags, WcOpcode, WcStatus,
};

use super::Subject;
use crate::testing::{ALL, SEND, pattern, write};
use crate::{Backend, MemoryRegion, QueuePair};

const OK: WcStatus = WcStatus::Success;

pub(super) fn send_and_receive<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair();
    let source = pair.a.buffer_at(100, 5000, Access::empty());
    let target = pair.b.buffer_at(7, 6000, Access::LOCAL_WRITE);
    let data = pattern(1, 5000);
    source.write(0, &data);
    pair.right.recv(9, &[target.sge(0, 4000), target.sge(4000, 2000)]);
    pair.left.send(4, &[source.sge(0, 4500), source.sge(4500, 500)]);
    let sent = pair.left.scq.one();
    assert_eq!((sent.wr_id, sent.status, sent.opcode, sent.qp), (4, OK, WcOpcode::Send, pair.left.cookie));
    let got = pair.right.rcq.one();
    assert_eq!((got.wr_id, got.status, got.opcode, got.qp), (9, OK, WcOpcode::Recv, pair.right.cookie));
    assert_eq!((got.byte_len, got.flags), (5000, WcFlags::empty()));
    assert_eq!(target.read(0, 5000), data);
    assert_eq!(target.read(5000, 1000), vec![0; 1000]);
}

pub(super) fn only_signaled_requests_complete<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair();
    let nothing = write(RemoteAddress::default());
    // More requests than the ring holds, so that their slots must be returned without completions.
    for wr_id in 0..200 {
        pair.left.post_with(wr_id, nothing.clone(), &[], SendFlags::empty());
        pair.left.qp.notify_send();
    }
    pair.left.submit(200, nothing.clone(), &[]);
    assert_eq!(pair.left.scq.statuses(1), [(200, OK)]);
    assert_eq!(pair.left.sends.retired(), 201);
    let all = pair.a.qp_with(QpType::Rc, None, |init| init.signal_all = true);
    let peer = pair.b.qp(QpType::Rc);
    all.connect(&peer, |_| {});
    peer.connect(&all, |_| {});
    all.post_with(3, nothing, &[], SendFlags::empty());
    all.qp.notify_send();
    assert_eq!(all.scq.statuses(1), [(3, OK)]);
}

pub(super) fn immediate_data_and_solicited<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair();
    let (source, target) = (pair.a.buffer(64), pair.b.buffer(64));
    source.write(0, &pattern(3, 64));
    pair.right.recv(1, &[target.all()]);
    pair.right.recv(2, &[]);
    let data = SendData::Immediate([1, 2, 3, 4]);
    pair.left.submit(1, SendOp::Send { data, to: None }, &[source.sge(0, 8)]);
    let op = SendOp::Write { remote: target.remote(8), immediate: Some([9, 8, 7, 6]) };
    pair.left.post_with(2, op, &[source.sge(0, 16)], SendFlags::SOLICITED);
    pair.left.qp.notify_send();
    let got = pair.right.rcq.wait(2);
    assert_eq!((got[0].wr_id, got[0].opcode, got[0].byte_len), (1, WcOpcode::Recv, 8));
    assert_eq!((got[0].flags, got[0].immediate), (WcFlags::IMMEDIATE, [1, 2, 3, 4]));
    assert!(!got[0].solicited || !subject.profile.exact_solicited);
    assert_eq!((got[1].wr_id, got[1].opcode, got[1].byte_len), (2, WcOpcode::RecvRdmaWithImmediate, 16));
    assert_eq!((got[1].flags, got[1].immediate, got[1].solicited), (WcFlags::IMMEDIATE, [9, 8, 7, 6], true));
    assert_eq!(target.read(8, 16), pattern(3, 64)[..16]);
}

pub(super) fn write_and_read<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair();
    let (mine, theirs) = (pair.a.buffer_at(1, 20_000, ALL), pair.b.buffer_at(4095, 20_000, ALL));
    let data = pattern(2, 20_000);
    mine.write(0, &data);
    pair.left.submit(1, write(theirs.remote(3)), &[mine.sge(5, 9000), mine.sge(100, 0), mine.sge(9005, 999)]);
    let wc = pair.left.scq.one();
    assert_eq!((wc.opcode, wc.status), (WcOpcode::RdmaWrite, OK));
    assert_eq!(theirs.read(3, 9999), data[5..10_004]);
    assert_eq!((theirs.read(0, 3), theirs.read(10_002, 100)), (vec![0; 3], vec![0; 100]));
    mine.write(0, &vec![0; 20_000]);
    pair.left.submit(2, SendOp::Read { remote: theirs.remote(3) }, &[mine.sge(10_000, 4000), mine.sge(0, 5999)]);
    let wc = pair.left.scq.one();
    assert_eq!((wc.opcode, wc.status, wc.byte_len), (WcOpcode::RdmaRead, OK, 9999));
    assert_eq!(mine.read(10_000, 4000), data[5..4005]);
    assert_eq!(mine.read(0, 5999), data[4005..10_004]);
    assert!(pair.right.rcq.poll().is_empty());
}

pub(super) fn empty_operations_look_at_no_key<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair();
    let nowhere = RemoteAddress { addr: 12_345, rkey: 0xdead_beef };
    let nothing = Sge { addr: 99, length: 0, lkey: 0xdead_beef };
    pair.left.submit(1, write(nowhere), &[nothing]);
    pair.left.submit(2, SendOp::Read { remote: nowhere }, &[]);
    pair.right.recv(3, &[nothing]);
    pair.left.send(3, &[nothing]);
    assert_eq!(pair.left.scq.statuses(3), [(1, OK), (2, OK), (3, OK)]);
    assert_eq!(pair.right.rcq.one().byte_len, 0);
}

pub(super) fn a_qp_may_be_its_own_peer<B: Backend>(subject: &Subject<'_, B>) {
    let a = subject.node(1);
    let own = a.qp(QpType::Rc);
    own.connect(&own, |_| {});
    let (x, y) = (a.qp(QpType::Rc), a.qp(QpType::Rc));
    x.connect(&y, |_| {});
    y.connect(&x, |_| {});
    let buffer = a.buffer(4096);
    buffer.write(0, b"hello");
    for (from, to) in [(&own, &own), (&x, &y), (&y, &x)] {
        buffer.write(100, &[0; 5]);
        to.recv(1, &[buffer.sge(100, 5)]);
        from.send(2, &[buffer.sge(0, 5)]);
        assert_eq!(from.scq.one().status, OK);
        assert_eq!(to.rcq.one().byte_len, 5);
        assert_eq!(buffer.read(100, 5), b"hello");
    }
}

pub(super) fn requests_complete_in_order<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair();
    let (mine, theirs) = (pair.a.buffer(8192), pair.b.buffer(8192));
    for i in 0..40 {
        pair.right.recv(100 + i, &[theirs.sge(4096, 8)]);
    }
    let kinds = [
        SEND,
        write(theirs.remote(0)),
        SendOp::Read { remote: theirs.remote(8) },
        SendOp::FetchAdd { remote: theirs.remote(64), add: 1 },
    ];
    for (wr_id, op) in (0..40).zip(kinds.iter().cycle()) {
        let flags = if wr_id % 3 == 0 { SendFlags::SIGNALED | SendFlags::FENCE } else { SendFlags::SIGNALED };
        pair.left.post_with(wr_id, op.clone(), &[mine.sge(wr_id * 8, 8)], flags);
    }
    pair.left.qp.notify_send();
    let done = pair.left.scq.statuses(40);
    assert_eq!(done, (0..40).map(|i| (i, OK)).collect::<Vec<_>>());
    assert_eq!(pair.right.rcq.statuses(10), (100..110).map(|i| (i, OK)).collect::<Vec<_>>());
    assert_eq!(theirs.read(64, 8), 10_u64.to_le_bytes());
}

pub(super) fn more_requests_than_the_ring_holds<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair();
    let (mine, theirs) = (pair.a.buffer(4096), pair.b.buffer(4096));
    // The ring of the test is unbounded; the adapter must take as many requests as it has room for, and the rest later.
    for i in 0..500 {
        pair.right.recv(i, &[theirs.sge(0, 64)]);
    }
    for i in 0..500 {
        pair.left.post(i, SEND, &[mine.sge(0, 64)]);
    }
    pair.left.qp.notify_send();
    let expected: Vec<_> = (0..500).map(|i| (i, OK)).collect();
    assert_eq!(pair.left.scq.statuses(500), expected);
    assert_eq!(pair.right.rcq.statuses(500), expected);
}

pub(super) fn large_messages<B: Backend>(subject: &Subject<'_, B>) {
    const LEN: u64 = 1_000_003;
    let pair = subject.pair();
    let (mine, theirs) = (pair.a.buffer_at(17, LEN, ALL), pair.b.buffer_at(4001, LEN, ALL));
    let data = pattern(7, LEN);
    mine.write(0, &data);
    pair.left.submit(1, write(theirs.remote(0)), &[mine.all()]);
    assert_eq!(pair.left.scq.statuses(1), [(1, OK)]);
    assert!(theirs.read(0, LEN) == data);
    mine.write(0, &vec![0; data.len()]);
    pair.left.submit(2, SendOp::Read { remote: theirs.remote(0) }, &[mine.all()]);
    assert_eq!(pair.left.scq.statuses(1), [(2, OK)]);
    assert!(mine.read(0, LEN) == data);
    theirs.write(0, &vec![0; data.len()]);
    pair.right.recv(3, &[theirs.all()]);
    pair.left.send(3, &[mine.all()]);
    assert_eq!(pair.left.scq.statuses(1), [(3, OK)]);
    assert_eq!(u64::from(pair.right.rcq.one().byte_len), LEN);
    assert!(theirs.read(0, LEN) == data);
    assert_ne!(mine.mr.lkey(), 0);
}

pub(super) fn a_receive_that_comes_late<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair();
    let (mine, theirs) = (pair.a.buffer(64), pair.b.buffer(64));
    pair.left.send(1, &[mine.sge(0, 8)]);
    // The request in the other direction may arrive before or after the refusal of the first attempt: both are correct.
    pair.right.submit(2, write(mine.remote(32)), &[theirs.sge(32, 8)]);
    assert_eq!(pair.right.scq.statuses(1), [(2, OK)]);
    pair.right.recv(3, &[theirs.all()]);
    assert_eq!(pair.left.scq.statuses(1), [(1, OK)]);
    assert_eq!(pair.right.rcq.statuses(1), [(3, OK)]);
}
