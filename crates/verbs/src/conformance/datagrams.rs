//! Unreliable datagrams.

use pvrdma_verbs_types::{
    NetworkType, QpState, QpType, Qpn, RecvWr, SendData, SendOp, Sge, UdDestination, WcFlags, WcOpcode, WcStatus,
};

use super::Subject;
use crate::testing::{Buffer, End, Node, SEND, gid, mac, pattern, write};
use crate::{Backend, Hca, QueuePair, SharedReceiveQueue};

const QKEY: u32 = 0x1234;
const OK: WcStatus = WcStatus::Success;

struct Datagrams<B: Backend> {
    left: End<B::Hca>,
    right: End<B::Hca>,
    mine: Buffer<B::Hca>,
    theirs: Buffer<B::Hca>,
    b: Node<B::Hca>,
    _a: Node<B::Hca>,
}

fn datagrams<B: Backend>(subject: &Subject<'_, B>) -> Datagrams<B> {
    let (a, b) = (subject.node(1), subject.node(2));
    let (left, right) = (a.qp(QpType::Ud), b.qp(QpType::Ud));
    left.start_datagrams(QKEY);
    right.start_datagrams(QKEY);
    let (mine, theirs) = (a.buffer(8192), b.buffer(8192));
    mine.write(0, &pattern(1, 8192));
    Datagrams { left, right, mine, theirs, b, _a: a }
}

fn to<H: Hca>(end: &End<H>) -> UdDestination {
    let (dgid, dmac) = (gid(end.node), mac(end.node));
    UdDestination { qpn: end.qp.qpn(), qkey: QKEY, dgid, dmac, hop_limit: 64, ..UdDestination::default() }
}

const fn send(to: UdDestination) -> SendOp {
    SendOp::Send { data: SendData::None, to: Some(to) }
}

pub(super) fn a_datagram_brings_its_header<B: Backend>(subject: &Subject<'_, B>) {
    let d = datagrams(subject);
    d.right.recv(5, &[d.theirs.sge(0, 30), d.theirs.sge(100, 30)]);
    let op = SendOp::Send { data: SendData::Immediate([1, 2, 3, 4]), to: Some(to(&d.right)) };
    d.left.submit(1, op, &[d.mine.sge(0, 5), d.mine.sge(5, 6)]);
    let sent = d.left.scq.one();
    assert_eq!((sent.wr_id, sent.status, sent.opcode), (1, OK, WcOpcode::Send));
    let got = d.right.rcq.one();
    assert_eq!((got.opcode, got.status, got.byte_len, got.wr_id), (WcOpcode::Recv, OK, 51, 5));
    assert_eq!((got.flags, got.immediate), (WcFlags::GRH | WcFlags::IMMEDIATE, [1, 2, 3, 4]));
    assert_eq!((got.src_qpn, got.network), (d.left.qp.qpn(), Some(NetworkType::Ipv4)));
    let ip: Vec<u8> = [d.theirs.read(20, 10), d.theirs.read(100, 10)].concat();
    assert_eq!(ip[0], 0x45);
    if subject.profile.guest_addresses {
        assert_eq!(ip[12..], [10, 0, 0, 1, 10, 0, 0, 2]);
    }
    assert_eq!(d.theirs.read(110, 11), pattern(1, 8192)[..11]);
}

pub(super) fn datagrams_without_a_receiver_are_dropped<B: Backend>(subject: &Subject<'_, B>) {
    let d = datagrams(subject);
    let rc = d.b.qp(QpType::Rc);
    let good = to(&d.right);
    // No receive is posted yet.
    d.left.submit(0, send(good), &[d.mine.sge(0, 8)]);
    assert_eq!(d.left.scq.statuses(1), [(0, OK)]);
    // The completion of another datagram shows that the one above has been processed.
    let other = d.b.qp(QpType::Ud);
    other.start_datagrams(QKEY);
    other.recv(1, &[d.theirs.sge(4096, 100)]);
    d.left.submit(1, send(to(&other)), &[d.mine.sge(0, 8)]);
    assert_eq!((d.left.scq.statuses(1), other.rcq.statuses(1)), (vec![(1, OK)], vec![(1, OK)]));
    d.right.recv(1, &[d.theirs.sge(0, 100)]);
    let wrong = [
        UdDestination { qpn: Qpn::new(0x0077_7777), ..good },
        UdDestination { qkey: QKEY + 1, ..good },
        UdDestination { qpn: rc.qp.qpn(), ..good },
    ];
    for (wr_id, destination) in (2..).zip(wrong) {
        d.left.submit(wr_id, send(destination), &[d.mine.sge(0, 8)]);
        assert_eq!(d.left.scq.statuses(1), [(wr_id, OK)]);
    }
    d.left.submit(9, send(good), &[d.mine.sge(50, 10)]);
    assert_eq!(d.left.scq.statuses(1), [(9, OK)]);
    let got = d.right.rcq.one();
    assert_eq!((got.wr_id, got.status, got.byte_len), (1, OK, 50));
    assert_eq!(d.theirs.read(40, 10), pattern(1, 8192)[50..60]);
}

/// Class D responder faults of IBA 9.9.3: the datagram is dropped, and its receive stays for the next one.
pub(super) fn a_datagram_that_does_not_fit_takes_no_receive<B: Backend>(subject: &Subject<'_, B>) {
    let d = datagrams(subject);
    d.right.recv(1, &[d.theirs.sge(0, 40 + 7)]);
    d.right.recv(2, &[d.theirs.sge(100, 40 + 8)]);
    // No adapter has a shorter path MTU than 1024 bytes.
    for (wr_id, length) in [(1, 8), (2, 1024), (3, 7), (4, 8), (5, 9)] {
        d.left.submit(wr_id, send(to(&d.right)), &[d.mine.sge(0, length)]);
        assert_eq!(d.left.scq.statuses(1), [(wr_id, OK)]);
    }
    let got = d.right.rcq.wait(2);
    assert_eq!((got[0].wr_id, got[0].status, got[0].byte_len), (1, OK, 47));
    assert_eq!((got[1].wr_id, got[1].status, got[1].byte_len), (2, OK, 48));
    assert_eq!(d.theirs.read(47, 53), [0; 53]);
    assert_eq!(d.right.state(), QpState::Rts);
    // A receive that is still posted when the queue pair ends is flushed once.
    d.right.recv(3, &[d.theirs.sge(0, 40)]);
    d.right.recv(4, &[d.theirs.sge(0, 40)]);
    let other = d.b.qp(QpType::Ud);
    other.start_datagrams(QKEY);
    other.recv(9, &[d.theirs.sge(4096, 100)]);
    d.left.submit(6, send(to(&d.right)), &[d.mine.sge(0, 1)]);
    d.left.submit(7, send(to(&other)), &[d.mine.sge(0, 1)]);
    // The completion of another datagram shows that the one before it has been processed.
    assert_eq!(other.rcq.statuses(1), [(9, OK)]);
    d.right.to(QpState::Error);
    assert_eq!(d.right.rcq.statuses(2), [(3, WcStatus::Flushed), (4, WcStatus::Flushed)]);
}

/// Class E: a receive taken from a shared queue cannot be returned, so it completes in error, and the queue pair
/// continues.
pub(super) fn a_datagram_that_does_not_fit_ends_a_shared_receive<B: Backend>(subject: &Subject<'_, B>) {
    let d = datagrams(subject);
    let (srq, ring) = d.b.srq(0);
    let shared = d.b.qp_with(QpType::Ud, Some(&srq), |_| {});
    shared.start_datagrams(QKEY);
    for (wr_id, room) in [(1, 47), (2, 48)] {
        let sges = vec![d.theirs.sge(0, room)];
        ring.posted.lock().push_back(RecvWr { wr_id, sges, malformed: false });
    }
    srq.notify_recv();
    for wr_id in 1..3 {
        d.left.submit(wr_id, send(to(&shared)), &[d.mine.sge(0, 8)]);
        assert_eq!(d.left.scq.statuses(1), [(wr_id, OK)]);
    }
    let got = shared.rcq.wait(2);
    assert_eq!((got[0].wr_id, got[1].wr_id, got[1].status, got[1].byte_len), (1, 2, OK, 48));
    if subject.profile.receive_errors {
        assert_eq!(got[0].status, WcStatus::LocalLength);
    } else {
        assert_ne!(got[0].status, OK);
    }
    assert_eq!(shared.state(), QpState::Rts);
    assert!(d.b.events.poll().is_empty());
}

pub(super) fn local_datagram_errors<B: Backend>(subject: &Subject<'_, B>) {
    type Make<B> = fn(&Datagrams<B>) -> (SendOp, Sge);
    let cases: [(&str, WcStatus, Make<B>); 5] = [
        ("long", WcStatus::LocalLength, |d| (send(to(&d.right)), d.mine.sge(0, 4097))),
        ("key", WcStatus::LocalProtection, |d| (send(to(&d.right)), Sge { lkey: 0, ..d.mine.sge(0, 1) })),
        ("write", WcStatus::LocalQpOperation, |d| (write(d.theirs.remote(0)), d.mine.sge(0, 1))),
        ("no address", WcStatus::LocalQpOperation, |d| (SEND, d.mine.sge(0, 1))),
        ("unbound source", WcStatus::LocalQpOperation, |d| {
            (send(UdDestination { sgid_index: 9, ..to(&d.right) }), d.mine.sge(0, 1))
        }),
    ];
    for (name, status, make) in cases {
        let d = datagrams(subject);
        let (op, sge) = make(&d);
        d.left.post(1, op, &[sge]);
        d.left.submit(2, send(to(&d.right)), &[]);
        assert_eq!(d.left.scq.statuses(2), [(1, status), (2, WcStatus::Flushed)], "{name}");
        if subject.profile.send_queue_error {
            assert_eq!(d.left.state(), QpState::Sqe, "{name}");
            d.left.change(
                QpState::Rts,
                pvrdma_verbs_types::QpAttrs::default(),
                pvrdma_verbs_types::QpAttrMask::empty(),
            );
        } else {
            assert_eq!(d.left.state(), QpState::Error, "{name}");
            d.left.to(QpState::Reset);
            d.left.start_datagrams(QKEY);
        }
        d.right.recv(4, &[d.theirs.all()]);
        d.left.submit(4, send(to(&d.right)), &[d.mine.sge(0, 1024)]);
        assert_eq!(d.right.rcq.one().byte_len, 1064, "{name}");
    }
}
