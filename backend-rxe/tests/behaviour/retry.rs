//! Retries on virtual time: receivers that are not ready, and peers that do not answer.

use std::time::Duration;

use pvrdma_verbs::{Hca, QueuePair};
use pvrdma_verbs_types::{QpState, QpType, SendOp, WcStatus};

use crate::world::*;

const MS: Duration = Duration::from_millis(1);

#[test]
fn a_posted_receive_ends_the_wait() {
    let pair = Pair::new();
    let (mine, theirs) = (pair.a.buffer(64), pair.b.buffer(64));
    pair.left.send(1, &[mine.all()]);
    pair.left.send(2, &[]);
    assert!(pair.left.scq.poll().is_empty());
    pair.right.recv(8, &[theirs.all()]);
    pair.world.rxe.run_ready();
    assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Success)]);
    pair.right.recv(9, &[]);
    pair.world.rxe.run_ready();
    assert_eq!(pair.left.scq.poll_statuses(), [(2, WcStatus::Success)]);
    assert_eq!(pair.right.rcq.poll_statuses(), [(8, WcStatus::Success), (9, WcStatus::Success)]);
    assert_eq!((pair.a.counter("rnr_waits"), pair.a.counter("rnr_retries")), (2, 0));
}

#[test]
fn rnr_retries_are_counted_and_last_as_the_responder_says() {
    for (retries, code, delay) in
        [(0, 12, MS), (1, 1, 10 * MS / 1000), (3, 12, 640 * MS / 1000), (6, 0, 655_360 * MS / 1000)]
    {
        let pair = Pair::with(World::new(), |a| a.rnr_retry = retries, |a| a.min_rnr_timer = code);
        pair.left.post(1, SEND, &[]);
        pair.left.send(2, &[]);
        let passed = pair.settle();
        assert_eq!(passed, delay * u32::from(retries), "code {code}");
        assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::RnrRetryExceeded), (2, WcStatus::Flushed)]);
        assert_eq!(pair.left.state(), QpState::Error);
        assert_eq!(pair.right.state(), QpState::Rts);
        assert_eq!(pair.a.counter("rnr_retries"), u64::from(retries));
    }
}

#[test]
fn seven_rnr_retries_are_endless_and_progress_refills() {
    let pair = Pair::new();
    pair.left.send(1, &[]);
    for _ in 0..1000 {
        pair.world.clock.advance(655_360 * MS / 1000);
        pair.world.rxe.run_ready();
    }
    assert!(pair.left.scq.poll().is_empty());
    pair.right.recv(1, &[]);
    pair.settle();
    assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Success)]);

    let pair = Pair::with(World::new(), |a| a.rnr_retry = 2, |a| a.min_rnr_timer = 12);
    for i in 0..10 {
        pair.left.send(i, &[]);
        pair.world.clock.advance(MS);
        pair.world.rxe.run_ready();
        assert!(pair.left.scq.poll().is_empty(), "{i}");
        pair.right.recv(i, &[]);
        pair.world.rxe.run_ready();
        assert_eq!(pair.left.scq.poll_statuses(), [(i, WcStatus::Success)]);
    }
}

#[test]
fn an_early_look_costs_no_retry() {
    let pair = Pair::with(World::new(), |a| a.rnr_retry = 1, |_| {});
    pair.left.send(1, &[]);
    for _ in 0..100 {
        // A doorbell of the peer without a new receive.
        pair.right.qp.notify_recv();
        assert!(pair.world.rxe.run_ready() > 0, "no thread has looked");
        pair.left.qp.notify_send();
    }
    assert!(pair.left.scq.poll().is_empty());
    assert_eq!(pair.a.counter("rnr_waits"), 1);
    let passed = pair.settle();
    assert_eq!(passed, 640 * MS / 1000);
    assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::RnrRetryExceeded)]);
}

#[test]
fn a_write_of_one_packet_with_a_bad_key_waits_for_a_receive_first() {
    let pair = Pair::with(World::new(), |a| a.rnr_retry = 0, |_| {});
    let mine = pair.a.buffer(4096);
    let op = SendOp::Write { remote: Default::default(), immediate: Some([0; 4]) };
    pair.left.submit(1, op.clone(), &[mine.sge(0, 1024)]);
    pair.settle();
    assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::RnrRetryExceeded)]);
    let pair = Pair::with(World::new(), |a| a.rnr_retry = 0, |_| {});
    let mine = pair.a.buffer(4096);
    pair.left.submit(1, op, &[mine.sge(0, 1025)]);
    pair.settle();
    assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::RemoteAccess)]);
}

#[test]
fn a_long_write_with_immediate_waits_with_its_last_packet() {
    let pair = Pair::new();
    let (mine, theirs) = (pair.a.buffer(4096), pair.b.buffer(4096));
    mine.write(0, &pattern(1, 4096));
    pair.left.submit(1, SendOp::Write { remote: theirs.remote(0), immediate: Some([0; 4]) }, &[mine.all()]);
    assert_eq!(theirs.read(0, 4096), pattern(1, 4096));
    assert!(pair.left.scq.poll().is_empty());
    pair.right.recv(5, &[]);
    pair.world.rxe.run_ready();
    assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Success)]);
    assert_eq!(pair.right.rcq.one().byte_len, 4096);
}

#[test]
fn an_unanswered_request_is_sent_retry_cnt_times_more() {
    for (timeout, retries) in [(14, 7), (8, 3), (1, 0), (20, 1)] {
        let set = |a: &mut pvrdma_verbs_types::QpAttrs| (a.timeout, a.retry_cnt) = (timeout, retries);
        let pair = Pair::with(World::new(), set, |_| {});
        pair.right.qp.destroy();
        pair.left.send(1, &[]);
        pair.left.post(2, SEND, &[]);
        pair.left.recv(3, &[]);
        let passed = pair.settle();
        assert_eq!(passed, Duration::from_nanos(4096 << timeout) * (u32::from(retries) + 1));
        assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::RetryExceeded), (2, WcStatus::Flushed)]);
        assert_eq!(pair.left.rcq.poll_statuses(), [(3, WcStatus::Flushed)]);
        assert_eq!(pair.a.counter("unanswered"), u64::from(retries) + 1);
    }
}

#[test]
fn without_a_timeout_the_wait_is_endless() {
    let pair = Pair::with(World::new(), |a| (a.timeout, a.retry_cnt) = (0, 0), |_| {});
    pair.right.to(QpState::Reset);
    pair.left.send(1, &[]);
    for _ in 0..100 {
        pair.world.clock.advance(500 * MS);
        pair.world.rxe.run_ready();
    }
    assert!(pair.left.scq.poll().is_empty());
    pair.right.connect(&pair.left, |_| {});
    pair.right.recv(1, &[]);
    pair.settle();
    assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Success)]);
}

#[test]
fn a_peer_that_comes_in_time_gets_the_request() {
    let world = World::new();
    let (a, b) = (world.node(1), world.node(2));
    let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    left.connect(&right, |_| {});
    left.send(1, &[]);
    right.rtr(&left, |_| {});
    right.recv(1, &[]);
    world.settle();
    assert_eq!(left.scq.poll_statuses(), [(1, WcStatus::Success)]);
    assert_eq!(right.rcq.poll_statuses(), [(1, WcStatus::Success)]);
}

#[test]
fn peers_of_another_connection_do_not_answer() {
    let world = World::new();
    let (a, b, c) = (world.node(1), world.node(2), world.node(3));
    let fail = |left: &End, why: &str| {
        left.send(1, &[]);
        world.settle();
        assert_eq!(left.scq.poll_statuses(), [(1, WcStatus::RetryExceeded)], "{why}");
    };
    let (left, right, other) = (a.qp(QpType::Rc), b.qp(QpType::Rc), c.qp(QpType::Rc));
    left.connect(&right, |_| {});
    right.connect(&other, |_| {});
    right.recv(1, &[]);
    fail(&left, "connected to another GID");
    let (left, right, other) = (a.qp(QpType::Rc), b.qp(QpType::Rc), a.qp(QpType::Rc));
    left.connect(&right, |_| {});
    right.connect(&other, |_| {});
    fail(&left, "connected to another QPN");
    let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Ud));
    right.start_datagrams(1);
    left.connect(&right, |_| {});
    fail(&left, "another service");
    let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    left.connect(&right, |_| {});
    right.connect(&left, |_| {});
    right.to(QpState::Error);
    fail(&left, "in error");
    let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    b.hca.bind_gid(1, gid(9), pvrdma_verbs_types::GidType::RoceV1).unwrap();
    left.connect(&right, |attrs| attrs.av.dgid = gid(9));
    right.connect(&left, |attrs| attrs.av.sgid_index = 1);
    fail(&left, "another encapsulation");
    let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    left.connect(&right, |attrs| attrs.av.sgid_index = 5);
    right.connect(&left, |_| {});
    fail(&left, "no source GID");
    let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    left.connect(&right, |_| {});
    right.connect(&left, |_| {});
    right.recv(2, &[]);
    left.send(7, &[]);
    assert_eq!(left.scq.poll_statuses(), [(7, WcStatus::Success)]);
    b.hca.unbind_gid(0);
    fail(&left, "unbound");
    let (left, right) = (a.qp(QpType::Rc), c.qp(QpType::Rc));
    left.connect(&right, |_| {});
    right.connect(&left, |_| {});
    drop(c);
    fail(&left, "the device is gone");
}

#[test]
fn a_qp_has_one_timer_and_takes_it_along() {
    let pair = Pair::new();
    let count = || std::iter::from_fn(|| pair.world.rxe.next_deadline()).take(1).count();
    for i in 0..1000 {
        pair.left.send(i, &[]);
        pair.right.recv(i, &[]);
        pair.world.rxe.run_ready();
    }
    assert_eq!(pair.left.scq.poll().len(), 1000);
    // The timer of the last wait is still armed, and its expiry has no effect.
    assert_eq!(count(), 1);
    pair.settle();
    assert_eq!(count(), 0);
    for end in [|end: &End| end.qp.destroy(), |end: &End| end.to(QpState::Reset)] {
        let (left, right) = (pair.a.qp(QpType::Rc), pair.b.qp(QpType::Rc));
        left.connect(&right, |_| {});
        left.send(1, &[]);
        assert_eq!(count(), 1);
        end(&left);
        assert_eq!(count(), 0);
    }
}

over_a_cable! {
    a_write_of_one_packet_with_a_bad_key_waits_for_a_receive_first
    a_peer_that_comes_in_time_gets_the_request
    peers_of_another_connection_do_not_answer
}

on_slow_memory! {
    a_write_of_one_packet_with_a_bad_key_waits_for_a_receive_first
    a_peer_that_comes_in_time_gets_the_request
}
