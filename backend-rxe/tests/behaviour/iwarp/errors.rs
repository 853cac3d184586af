//! Requests that fail, and their effect on both ends.

use pvrdma_verbs::{AsyncEvent, QpEvent, QueuePair};
use pvrdma_verbs_types::{QpState, RemoteAddress, SendData, SendOp, WcStatus};

use super::*;
use crate::world::{SEND, write};

fn in_error(net: &Net, ends: &[&End]) {
    net.until("the error state", || ends.iter().all(|end| end.state() == QpState::Error));
}

#[test]
fn operations_that_iwarp_lacks_fail_their_queue_pair_only() {
    let net = Net::new();
    let other = net.connect();
    let (mine, theirs) = (net.guests[0].node.buffer(8), net.guests[1].node.buffer(8));
    let remote = theirs.remote(0);
    let operations = [
        SendOp::Send { data: SendData::Immediate([1; 4]), to: None },
        SendOp::Write { remote, immediate: Some([1; 4]) },
        SendOp::CompareSwap { remote, compare: 0, swap: 1 },
        SendOp::FetchAdd { remote, add: 1 },
    ];
    for (number, operation) in (1..).zip(operations) {
        let Ends { left, right, .. } = net.connect();
        right.recv(1, &[theirs.all()]);
        left.post(1, write(remote), &[mine.all()]);
        left.post(2, operation, &[mine.all()]);
        left.post(3, SEND, &[mine.all()]);
        left.qp.notify_send();
        net.wait(&left.scq, 3);
        let expected = [(1, WcStatus::Success), (2, WcStatus::LocalQpOperation), (3, WcStatus::Flushed)];
        assert_eq!(left.scq.poll_statuses(), expected);
        in_error(&net, &[&left, &right]);
        assert_eq!(net.counter(0, "iwarp_unsupported"), number);
        // The guests are told, too.
        for guest in [0, 1] {
            net.expect_disconnect(guest);
        }
    }
    other.right.recv(1, &[]);
    other.left.send(1, &[]);
    net.wait(&other.right.rcq, 1);
    assert_eq!(other.right.rcq.one().status, WcStatus::Success);
}

#[test]
fn a_read_of_memory_that_is_not_readable() {
    let net = Net::new();
    let Ends { left, right, .. } = net.connect();
    let mine = net.guests[0].node.buffer(8);
    left.post(1, SendOp::Read { remote: RemoteAddress { addr: 0, rkey: 0x1234 } }, &[mine.all()]);
    left.post(2, SEND, &[]);
    left.qp.notify_send();
    net.wait(&left.scq, 2);
    assert_eq!(left.scq.poll()[0].status, WcStatus::RemoteAccess);
    in_error(&net, &[&left, &right]);
    assert_eq!(net.guests[1].node.events.poll(), [AsyncEvent::Qp(QpEvent::AccessError, right.cookie)]);
}

/// The request was complete when the socket had taken it, so only an event can report its failure.
#[test]
fn a_write_that_is_refused_after_its_completion() {
    let net = Net::new();
    let Ends { left, right, .. } = net.connect();
    let mine = net.guests[0].node.buffer(8);
    left.submit(1, write(RemoteAddress { addr: 0, rkey: 0x1234 }), &[mine.all()]);
    net.wait(&left.scq, 1);
    assert_eq!(left.scq.one().status, WcStatus::Success);
    in_error(&net, &[&left, &right]);
    assert_eq!(net.guests[0].node.events.poll(), [AsyncEvent::Qp(QpEvent::Fatal, left.cookie)]);
    assert_eq!(net.guests[1].node.events.poll(), [AsyncEvent::Qp(QpEvent::AccessError, right.cookie)]);
}

#[test]
fn a_send_that_is_longer_than_the_receive() {
    let net = Net::new();
    let Ends { left, right, .. } = net.connect();
    let (mine, theirs) = (net.guests[0].node.buffer(100), net.guests[1].node.buffer(99));
    right.recv(1, &[theirs.all()]);
    right.recv(2, &[]);
    left.send(1, &[mine.all()]);
    net.wait(&right.rcq, 2);
    assert_eq!(right.rcq.poll_statuses(), [(1, WcStatus::LocalLength), (2, WcStatus::Flushed)]);
    in_error(&net, &[&left, &right]);
}

#[test]
fn memory_of_this_end_that_is_invalid() {
    let net = Net::new();
    let Ends { left, right, .. } = net.connect();
    let (mine, theirs) = (net.guests[0].node.buffer(8), net.guests[1].node.buffer(8));
    let mut sge = mine.all();
    sge.lkey ^= 0x100;
    left.submit(1, write(theirs.remote(0)), &[sge]);
    net.wait(&left.scq, 1);
    assert_eq!(left.scq.one().status, WcStatus::LocalProtection);
    in_error(&net, &[&left, &right]);
}

/// The peer waits for some seconds, and then both ends have an error.
#[test]
fn a_receive_that_is_never_posted() {
    let net = Net::new();
    let Ends { left, right, .. } = net.connect();
    left.send(1, &[]);
    net.until("the wait", || net.counter(1, "iwarp_waited_for_receive") > 0);
    net.pass(Duration::from_millis(4900));
    assert_eq!(right.state(), QpState::Rts);
    net.pass(Duration::from_millis(200));
    in_error(&net, &[&left, &right]);
}

#[test]
fn a_queue_pair_in_its_error_state_flushes_its_requests() {
    let net = Net::new();
    let Ends { left, right, .. } = net.connect();
    let mine = net.guests[0].node.buffer(8);
    // The peer has no receive, so the responses to the READs behind the SEND do not come.
    left.post(1, SEND, &[mine.all()]);
    left.post(2, SendOp::Read { remote: RemoteAddress::default() }, &[]);
    left.post(3, SEND, &[mine.all()]);
    left.qp.notify_send();
    net.until("the wait", || net.counter(1, "iwarp_waited_for_receive") > 0);
    left.to(QpState::Error);
    let expected = [(1, WcStatus::Success), (2, WcStatus::Flushed), (3, WcStatus::Flushed)];
    assert_eq!(left.scq.poll_statuses(), expected);
    assert_eq!(right.state(), QpState::Rts);
}
