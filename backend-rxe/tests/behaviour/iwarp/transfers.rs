//! Messages over established connections.

use pvrdma_verbs::{AsyncEvent, MemoryRegion, QpEvent};
use pvrdma_verbs_types::{QpAttrMask, QpState, SendFlags, SendOp, WcOpcode, WcStatus};

use super::*;
use crate::world::{SEND, pattern, post_shared, write};

#[test]
fn sends_writes_and_reads_both_ways() {
    const LEN: u64 = 1 << 20;
    let net = Net::new();
    let Ends { left, right, .. } = net.connect();
    let buffers = net.guests.each_ref().map(|guest| guest.node.buffer(4 * LEN));
    for (number, [from, to]) in [[&left, &right], [&right, &left]].into_iter().enumerate() {
        let (mine, theirs) = (&buffers[number], &buffers[1 - number]);
        let [sent, written, read] = [1, 2, 3].map(|seed| pattern(seed + 10 * number as u64, LEN));
        mine.write(0, &sent);
        mine.write(LEN, &written);
        theirs.write(3 * LEN, &read);
        to.recv(1, &[theirs.sge(0, LEN)]);
        from.post(1, SEND, &[mine.sge(0, LEN)]);
        from.post(2, write(theirs.remote(LEN)), &[mine.sge(LEN, LEN)]);
        from.post(3, SendOp::Read { remote: theirs.remote(3 * LEN) }, &[mine.sge(2 * LEN, LEN)]);
        from.qp.notify_send();
        net.wait(&from.scq, 3 * (number as u64 + 1) - 3 * number as u64);
        net.wait(&to.rcq, 1);
        assert_eq!(from.scq.poll_statuses(), [1, 2, 3].map(|id| (id, WcStatus::Success)));
        let received = to.rcq.one();
        assert_eq!((received.status, u64::from(received.byte_len)), (WcStatus::Success, LEN));
        assert!(theirs.read(0, LEN) == sent && theirs.read(LEN, LEN) == written && mine.read(2 * LEN, LEN) == read);
    }
    assert_eq!(net.counter(0, "rc_read_bytes"), LEN);
}

#[test]
fn a_read_scatters_to_sixteen_elements() {
    let net = Net::new();
    let Ends { left, right: _right, .. } = net.connect();
    let (mine, theirs) = (net.guests[0].node.buffer(64 << 10), net.guests[1].node.buffer(16_000));
    theirs.write(0, &pattern(4, 16_000));
    let sges: Vec<_> = (0..16).map(|at| mine.sge(at * 2000, 1000)).collect();
    left.submit(1, SendOp::Read { remote: theirs.remote(0) }, &sges);
    net.wait(&left.scq, 1);
    let read = left.scq.one();
    assert_eq!((read.status, read.opcode, read.byte_len), (WcStatus::Success, WcOpcode::RdmaRead, 16_000));
    let scattered: Vec<u8> = (0..16).flat_map(|at| mine.read(at * 2000, 1000)).collect();
    assert!(scattered == pattern(4, 16_000));
}

#[test]
fn as_many_reads_are_outstanding_as_the_ends_have_agreed_on() {
    const READS: u64 = 300;
    let net = Net::new();
    let Ends { left, right: _right, .. } = net.connect();
    let (mine, theirs) = (net.guests[0].node.buffer(READS * 64), net.guests[1].node.buffer(READS * 64));
    theirs.write(0, &pattern(5, READS * 64));
    for at in 0..READS {
        left.post(at, SendOp::Read { remote: theirs.remote(at * 64) }, &[mine.sge(at * 64, 64)]);
    }
    left.qp.notify_send();
    let stream = left.qp.inspect()["requester"]["route"]["stream"].clone();
    assert_eq!((&stream["reads"], &stream["ord"]), (&128.into(), &128.into()), "{stream}");
    net.wait(&left.scq, READS);
    assert!(left.scq.poll().iter().all(|completion| completion.status == WcStatus::Success));
    assert!(mine.read(0, READS * 64) == pattern(5, READS * 64));
}

/// A SEND that finds no receive is not refused: the peer waits, and nothing behind the SEND is lost.
#[test]
fn a_receive_may_be_posted_late() {
    const MESSAGES: u64 = 40;
    const LEN: u64 = 100_000;
    let net = Net::new();
    let Ends { left, right, .. } = net.connect();
    let (mine, theirs) = (net.guests[0].node.buffer(LEN), net.guests[1].node.buffer(2 * LEN));
    mine.write(0, &pattern(6, LEN));
    for id in 0..MESSAGES {
        left.post(id, SEND, &[mine.all()]);
    }
    left.post(MESSAGES, write(theirs.remote(LEN)), &[mine.all()]);
    left.qp.notify_send();
    net.until("the wait", || net.counter(1, "iwarp_waited_for_receive") > 0);
    assert_eq!(right.rcq.total(), 0);
    // The reason is inspected: the stream waits.
    assert_eq!(right.qp.inspect()["requester"]["route"]["stream"]["waits_for_receive"], true);
    for id in 0..MESSAGES {
        right.recv(id, &[theirs.sge(0, LEN)]);
        net.wait(&right.rcq, id + 1);
    }
    net.wait(&left.scq, MESSAGES + 1);
    net.until("the write", || theirs.read(LEN, LEN) == pattern(6, LEN));
    assert!(left.scq.poll().into_iter().chain(right.rcq.poll()).all(|it| it.status == WcStatus::Success));
}

#[test]
fn a_send_invalidates_a_key_of_the_peer() {
    let net = Net::new();
    let Ends { left, right, .. } = net.connect();
    let (mine, theirs) = (net.guests[0].node.buffer(8), net.guests[1].node.buffer(8));
    right.recv(1, &[theirs.all()]);
    let data = pvrdma_verbs_types::SendData::Invalidate(theirs.mr.rkey() ^ 0xff);
    left.post_with(1, SendOp::Send { data, to: None }, &[mine.all()], SendFlags::SIGNALED | SendFlags::SOLICITED);
    left.qp.notify_send();
    // Only keys of fast registrations can be invalidated by a peer: both ends fail.
    net.wait(&right.rcq, 1);
    assert_eq!(right.rcq.one().status, WcStatus::RemoteInvalidRequest);
}

#[test]
fn messages_without_data() {
    let net = Net::new();
    let Ends { left, right, .. } = net.connect();
    right.recv(1, &[]);
    left.post(1, write(Default::default()), &[]);
    left.post(2, SendOp::Read { remote: Default::default() }, &[]);
    left.post(3, SEND, &[]);
    left.qp.notify_send();
    net.wait(&left.scq, 3);
    net.wait(&right.rcq, 1);
    assert_eq!(left.scq.poll_statuses(), [1, 2, 3].map(|id| (id, WcStatus::Success)));
}

/// The budget of a doorbell ends within a transfer, and workers continue.
#[test]
fn without_crc_and_with_many_requests() {
    const REQUESTS: u64 = 1000;
    let net = Net::with(0, |config| config.with_crc(false));
    let Ends { left, right: _right, .. } = net.connect();
    let (mine, theirs) = (net.guests[0].node.buffer(1 << 16), net.guests[1].node.buffer(1 << 16));
    mine.write(0, &pattern(7, 1 << 16));
    for id in 0..REQUESTS {
        left.post(id, write(theirs.remote((id * 64) % (1 << 16))), &[mine.sge((id * 64) % (1 << 16), 64)]);
    }
    left.qp.notify_send();
    net.wait(&left.scq, REQUESTS);
    assert!(left.scq.poll().iter().all(|completion| completion.status == WcStatus::Success));
    let last = REQUESTS * 64 % (1 << 16);
    net.until("the data", || theirs.read(0, last) == pattern(7, 1 << 16)[..usize::try_from(last).unwrap()]);
    assert_eq!(left.qp.inspect()["requester"]["route"]["stream"]["crc"], false);
}

/// Receives of a shared queue, which are posted late.
#[test]
fn a_shared_receive_queue() {
    let net = Net::new();
    let (srq, ring) = net.guests[1].node.srq(0);
    let right = net.guests[1].node.qp_with(QpType::Rc, Some(&srq), |_| {});
    let left = net.qp(0);
    let request = net.guests[0].request(gid(2), PORT, left.qp.qpn());
    net.guests[0].send(gid(2), Message::Req(Box::new(request)));
    let req = net.next_req(1);
    net.accept(&right, &req, |rep| rep.srq = true);
    let rep = net.next_rep(0);
    to_rts(&left, 2, rep.qpn);
    left.send(1, &[]);
    left.send(2, &[]);
    net.until("the wait", || net.counter(1, "iwarp_waited_for_receive") > 0);
    post_shared(&srq, &ring, 5..7);
    net.wait(&right.rcq, 2);
    assert_eq!(right.rcq.poll_statuses(), [(5, WcStatus::Success), (6, WcStatus::Success)]);
}

/// A queue pair may receive before it can send.
#[test]
fn a_queue_pair_in_rtr_receives() {
    let net = Net::new();
    let (left, right) = (net.qp(0), net.qp(1));
    let request = net.guests[0].request(gid(2), PORT, left.qp.qpn());
    net.guests[0].send(gid(2), Message::Req(Box::new(request)));
    let req = net.next_req(1);
    right.rtr(&right, |attrs| (attrs.dest_qpn, attrs.av.dgid) = (req.qpn, gid(1)));
    net.guests[1].send(gid(1), Message::Rep(net.guests[1].accept(&req, right.qp.qpn())));
    let rep = net.next_rep(0);
    to_rts(&left, 2, rep.qpn);
    right.recv(1, &[]);
    left.send(1, &[]);
    net.wait(&right.rcq, 1);
    assert_eq!(net.guests[1].node.events.poll(), [AsyncEvent::Qp(QpEvent::CommunicationEstablished, right.cookie)]);
}

#[test]
fn requests_that_were_started_end_in_sqd() {
    let net = Net::new();
    let Ends { left, right, .. } = net.connect();
    let (mine, theirs) = (net.guests[0].node.buffer(8), net.guests[1].node.buffer(8));
    left.post(1, SendOp::Read { remote: theirs.remote(0) }, &[mine.all()]);
    left.qp.notify_send();
    let notify = QpAttrs { en_sqd_async_notify: true, ..QpAttrs::default() };
    left.change(QpState::Sqd, notify, QpAttrMask::EN_SQD_ASYNC_NOTIFY);
    left.submit(2, SEND, &[]);
    net.wait(&left.scq, 1);
    assert_eq!(net.guests[0].node.events.poll(), [AsyncEvent::Qp(QpEvent::SendQueueDrained, left.cookie)]);
    assert_eq!(left.scq.poll_statuses(), [(1, WcStatus::Success)]);
    // It still answers its peer.
    right.submit(1, SendOp::Read { remote: mine.remote(0) }, &[theirs.all()]);
    net.wait(&right.scq, 1);
    right.recv(1, &[]);
    left.to(QpState::Rts);
    net.wait(&right.rcq, 1);
}
