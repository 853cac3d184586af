//! What one device, process or peer costs its neighbours: time and bandwidth, on virtual time.

use std::time::Duration;

use pvrdma_ether_link::Clock;
use pvrdma_ether_link::fault::Faults;
use pvrdma_verbs::{QpType, QueuePair, SendOp, WcStatus};

use crate::world::*;

const MS: Duration = Duration::from_millis(1);

/// Queue pairs whose peer never posts a receive and asks for the shortest wait, with retries without end.
fn deaf_to_receives(world: &World, count: usize, cable: bool) -> (Node, Node, Vec<(End, End)>) {
    let (a, b) = (world.node(1), world.node(if cable { 2 } else { 3 }));
    let ends: Vec<_> = (0..count).map(|_| (a.qp(QpType::Rc), b.qp(QpType::Rc))).collect();
    for (left, right) in &ends {
        left.connect(right, |a| a.rnr_retry = 7);
        right.connect(left, |b| b.min_rnr_timer = 1);
        left.post(1, SEND, &[]);
        left.qp.notify_send();
    }
    (a, b, ends)
}

/// Lets time pass on the clock, and runs what is due.
fn pass(world: &World, time: Duration) {
    let end = world.clock.now() + time;
    world.run();
    while world.next_deadline().is_some_and(|next| next <= end) {
        world.step();
    }
    world.clock.advance(end - world.clock.now());
}

#[test]
fn sec_c7_rnr_timers_of_an_idle_guest_fire_rarely() {
    const QPS: u64 = 4000;
    let world = World::new();
    let (a, _b, ends) = deaf_to_receives(&world, 4000, false);
    pass(&world, 1000 * MS);
    let first = a.counter("rnr_retries");
    pass(&world, 1000 * MS);
    let fired = a.counter("rnr_retries") - first;
    assert!(fired > 0 && fired < 10 * QPS, "{fired} in a second");
    // A receive still ends the wait at once.
    let (left, right) = &ends[17];
    right.recv(1, &[]);
    world.run();
    assert_eq!(left.scq.poll_statuses(), [(1, WcStatus::Success)]);
}

#[test]
fn sec_c7_rnr_timers_on_the_wire_fire_rarely() {
    const QPS: u64 = 400;
    on_the_wire(Faults::default(), 1, || {
        let world = World::new();
        let (a, _b, ends) = deaf_to_receives(&world, 400, true);
        pass(&world, 1000 * MS);
        let first = a.counter("wire_rnr_naks");
        pass(&world, 1000 * MS);
        let fired = a.counter("wire_rnr_naks") - first;
        assert!(fired > 0 && fired < 10 * QPS, "{fired} in a second");
        // A message comes at most so late, and the next waits from the beginning.
        let (left, right) = &ends[17];
        right.recv(1, &[]);
        pass(&world, 200 * MS);
        assert_eq!(left.scq.poll_statuses(), [(1, WcStatus::Success)]);
        left.send(2, &[]);
        world.run();
        right.recv(2, &[]);
        pass(&world, MS);
        assert_eq!(left.scq.poll_statuses(), [(2, WcStatus::Success)]);
    });
}

/// A connection whose peer does not exist, with a window full of packets on their way and no ACK timer.
fn deaf(node: &Node, buffer: &Buffer) -> End {
    let end = node.qp(QpType::Rc);
    end.connect(&end, |a| {
        (a.av.dgid, a.av.dmac, a.timeout) = (gid(2), mac(2), 0);
        a.dest_qpn = pvrdma_verbs::Qpn::new(0x7777);
    });
    end.post(1, write(buffer.remote(0)), &[buffer.all()]);
    end.post(2, write(buffer.remote(0)), &[buffer.all()]);
    end.qp.notify_send();
    end
}

#[test]
fn wire_c1_deaf_qps_without_timeout_stop_nobody() {
    on_the_wire(Faults::default(), 1, || {
        let world = World::new();
        let (a, b) = (world.node(1), world.node(2));
        let (mine, theirs) = (a.buffer(1 << 20), b.buffer(1 << 20));
        let _deaf: Vec<_> = (0..4).map(|_| deaf(&a, &mine)).collect();
        let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
        left.connect(&right, |_| {});
        right.connect(&left, |_| {});
        for wr_id in 0..10 {
            left.submit(wr_id, write(theirs.remote(0)), &[mine.all()]);
            pass(&world, 10 * MS);
            assert_eq!(left.scq.poll_statuses(), [(wr_id, WcStatus::Success)]);
        }
    });
}

/// As many deaf ones as a process likes: another process of the guest has its share of the turns.
#[test]
fn sec_c10_a_process_cannot_keep_the_window_to_a_host() {
    on_the_wire(Faults::default(), 1, || {
        let world = World::new();
        let (mut a, b) = (world.node(1), world.node(2));
        let (foreign, theirs) = (a.buffer(1 << 20), b.buffer(1 << 20));
        let _deaf: Vec<_> = (0..200).map(|_| deaf(&a, &foreign)).collect();
        a.pd = pvrdma_verbs::Hca::create_pd(&a.hca).unwrap();
        let mine = a.buffer(1 << 20);
        let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
        left.connect(&right, |_| {});
        right.connect(&left, |_| {});
        left.submit(1, write(theirs.remote(0)), &[mine.all()]);
        // Nobody else asks for turns but for those 200, of whom none answers.
        pass(&world, 10 * MS);
        assert_eq!(left.scq.poll_statuses(), [(1, WcStatus::Success)]);
    });
}

/// Queue pairs that owe much READ data do not keep the port from its socket.
#[test]
fn wire_c4_reception_goes_on_beside_readers() {
    const READERS: u64 = 50;
    let (world, taps) = crate::tap::tapped([pvrdma_rxe::PortRules::default(), pvrdma_rxe::PortRules::default()]);
    let (a, b) = (world.node(1), world.node(2));
    let (mine, theirs) = (a.buffer(1 << 20), b.buffer(1 << 20));
    let connected = || {
        let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
        left.connect(&right, |_| {});
        right.connect(&left, |_| {});
        (left, right)
    };
    let readers: Vec<_> = (0..READERS).map(|_| connected()).collect();
    let (writer, _target) = connected();
    for (left, _) in &readers {
        left.post(1, SendOp::Read { remote: theirs.remote(0) }, &[mine.all()]);
        left.qp.notify_send();
    }
    writer.post(1, write(theirs.remote(0)), &[mine.all()]);
    writer.qp.notify_send();
    world.run();
    for (left, _) in &readers {
        assert_eq!(left.scq.poll_statuses(), [(1, WcStatus::Success)]);
    }
    assert_eq!(writer.scq.poll_statuses(), [(1, WcStatus::Success)]);
    // Both sides: the one that answers, and the one whose requests follow answers.
    for tap in &taps {
        let most = tap.most_between_reads.load(std::sync::atomic::Ordering::SeqCst);
        assert!(most < 1 << 20, "{most} bytes were sent between two reads");
    }
}
