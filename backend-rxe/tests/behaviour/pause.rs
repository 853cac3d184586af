//! A paused device: it does no work and loses none, and its peers wait for the end of the pause.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pvrdma_link::{MonotonicClock, fault::Faults, memory};
use pvrdma_rxe::PortRules;
use pvrdma_verbs::{Hca, PauseHca, QueuePair, VerbsError};
use pvrdma_verbs_types::{QpAttrMask, QpAttrs, QpState, QpType, RecvWr, SendData, SendOp, UdDestination, WcStatus};

use crate::world::*;

const HOUR: Duration = Duration::from_secs(3600);
const MS: Duration = Duration::from_millis(1);
const QKEY: u32 = 0x1234;

on_slow_memory! {
    the_peer_of_a_paused_device_waits_without_a_timer
    both_ends_pause
    a_loop_through_a_paused_device
}

/// A paused device. Any access to its memory fails meanwhile, which ends a queue pair with an error.
struct Pause<'a> {
    node: &'a Node,
    memory: Arc<AtomicBool>,
}

impl<'a> Pause<'a> {
    fn begin(node: &'a Node) -> Self {
        assert!(node.hca.pause());
        let memory = node.memory.revocation();
        memory.store(true, Ordering::SeqCst);
        Self { node, memory }
    }
}

impl Drop for Pause<'_> {
    fn drop(&mut self) {
        self.memory.store(false, Ordering::SeqCst);
        assert!(self.node.hca.resume());
    }
}

/// Asserts that a requester of this node has waited for no peer, and counted no retry.
fn assert_patient(node: &Node) {
    for name in ["unanswered", "retries", "rnr_retries", "request_errors"] {
        assert_eq!(node.counter(name), 0, "{name}");
    }
}

/// Sets the smallest budgets of retries.
fn no_retries(attrs: &mut QpAttrs) {
    (attrs.retry_cnt, attrs.rnr_retry, attrs.timeout) = (0, 0, 1);
}

#[test]
fn the_peer_of_a_paused_device_waits_without_a_timer() {
    let operations: [fn(&Buffer) -> SendOp; 4] = [
        |_| SEND,
        |theirs| write(theirs.remote(0)),
        |theirs| SendOp::Read { remote: theirs.remote(0) },
        |theirs| SendOp::FetchAdd { remote: theirs.remote(0), add: 1 },
    ];
    // With a connection that was used before, and with one that has not met its peer.
    for (operation, used) in operations.into_iter().flat_map(|operation| [(operation, false), (operation, true)]) {
        let pair = Pair::with(World::new(), no_retries, |_| {});
        let (mine, theirs) = (pair.a.buffer(8), pair.b.buffer(8));
        if used {
            pair.left.submit(0, write(theirs.remote(0)), &[]);
            assert_eq!(pair.left.scq.poll_statuses(), [(0, WcStatus::Success)]);
        }
        pair.right.recv(9, &[theirs.all()]);
        let pause = Pause::begin(&pair.b);
        pair.left.submit(1, operation(&theirs), &[mine.all()]);
        pair.world.run();
        assert_eq!(pair.world.next_deadline(), None);
        assert_eq!(pair.left.qp.inspect()["requester"]["wait"]["for"], "resume");
        pair.world.clock.advance(HOUR);
        // A doorbell does not end the wait.
        pair.left.submit(2, write(theirs.remote(0)), &[]);
        pair.world.run();
        assert_eq!(pair.world.next_deadline(), None);
        assert!(pair.left.scq.poll().is_empty() && pair.right.rcq.poll().is_empty());
        drop(pause);
        pair.world.run();
        assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
        assert_patient(&pair.a);
    }
}

/// The time of a pause counts for no wait, whether the wait ends in the pause or after it.
#[test]
fn a_wait_for_a_receive_begins_anew_after_a_pause() {
    for (before, paused) in [(MS / 2, 10 * MS), (MS / 4, MS / 4)] {
        // A code of 12 is 640 microseconds.
        let pair = Pair::with(World::new(), |a| a.rnr_retry = 1, |a| a.min_rnr_timer = 12);
        pair.left.send(1, &[]);
        pair.world.clock.advance(before);
        let pause = Pause::begin(&pair.b);
        pair.world.clock.advance(paused);
        pair.world.run();
        drop(pause);
        pair.world.clock.advance(640 * MS / 1000);
        pair.world.run();
        assert!(pair.left.scq.poll().is_empty());
        assert_eq!(pair.a.counter("rnr_retries"), 0);
        pair.right.recv(1, &[]);
        pair.world.run();
        assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Success)]);
    }
    // Without a pause that would have been the end.
    let pair = Pair::with(World::new(), |a| a.rnr_retry = 1, |a| a.min_rnr_timer = 12);
    pair.left.send(1, &[]);
    pair.settle();
    assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::RnrRetryExceeded)]);
}

#[test]
fn a_wait_for_a_response_begins_anew_after_a_pause_of_either_end() {
    for end in [0, 1] {
        let pair = Pair::with(World::new(), |a| a.retry_cnt = 0, |_| {});
        pair.right.recv(1, &[]);
        assert!(pair.b.hca.set_link(false).unwrap());
        pair.left.send(1, &[]);
        let pause = Pause::begin([&pair.a, &pair.b][end]);
        pair.world.clock.advance(30_000 * MS);
        pair.world.run();
        assert!(pair.b.hca.set_link(true).unwrap());
        drop(pause);
        pair.world.run();
        assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Success)], "end {end}");
        assert_eq!(pair.a.counter("retries"), 0);
    }
}

#[test]
fn a_transfer_stops_in_the_middle() {
    const LENGTH: u64 = 8 << 20;
    for (end, gets) in [(0, false), (1, false), (0, true), (1, true)] {
        let pair = Pair::with(World::new(), no_retries, |_| {});
        let (mine, theirs) = (pair.a.buffer(LENGTH), pair.b.buffer(LENGTH));
        let (from, to) = if gets { (&theirs, &mine) } else { (&mine, &theirs) };
        from.write(0, &pattern(1, LENGTH));
        let op = if gets { SendOp::Read { remote: theirs.remote(0) } } else { write(theirs.remote(0)) };
        pair.left.submit(1, op, &[mine.all()]);
        // The first part went with the doorbell.
        assert_ne!(to.read(0, 64), [0; 64]);
        let pause = Pause::begin([&pair.a, &pair.b][end]);
        pair.world.run();
        pair.world.clock.advance(HOUR);
        pair.world.run();
        drop(pause);
        assert_eq!(to.read(LENGTH - 64, 64), [0; 64], "end {end}");
        pair.world.run();
        assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Success)]);
        assert!(to.read(0, LENGTH) == pattern(1, LENGTH));
        assert_patient(&pair.a);
    }
}

/// Doorbells of a paused device do nothing, and are made up for.
#[test]
fn doorbells_wait_for_the_end_of_a_pause() {
    let pair = Pair::new();
    let pause = Pause::begin(&pair.a);
    pair.left.send(1, &[]);
    pair.left.recv(8, &[]);
    pair.right.send(2, &[]);
    pair.right.recv(9, &[]);
    pair.settle();
    assert_eq!((pair.left.sends.posted.lock().len(), pair.left.receives.posted.lock().len()), (1, 1));
    drop(pause);
    pair.settle();
    for (end, sent, received) in [(&pair.left, 1, 8), (&pair.right, 2, 9)] {
        assert_eq!(end.scq.poll_statuses(), [(sent, WcStatus::Success)]);
        assert_eq!(end.rcq.poll_statuses(), [(received, WcStatus::Success)]);
    }
    assert_patient(&pair.b);
}

/// A receive that is posted in a pause ends the wait that began before it.
#[test]
fn receives_that_were_posted_in_a_pause_are_found() {
    for shared in [false, true] {
        let world = World::new();
        let (a, b) = (world.node(1), world.node(2));
        let (srq, ring) = b.srq(0);
        let (left, right) = (a.qp(QpType::Rc), b.qp_with(QpType::Rc, shared.then_some(&srq), |_| {}));
        left.connect(&right, |a| a.rnr_retry = 1);
        // The longest wait.
        right.connect(&left, |a| a.min_rnr_timer = 0);
        left.send(1, &[]);
        assert_eq!(a.counter("rnr_waits"), 1);
        let pause = Pause::begin(&b);
        if shared {
            post_shared(&srq, &ring, 5..6);
        } else {
            // Without a doorbell, as on a page that is memory.
            right.receives.posted.lock().push_back(RecvWr { wr_id: 5, ..RecvWr::default() });
        }
        world.run();
        assert!(left.scq.poll().is_empty());
        drop(pause);
        world.run();
        assert_eq!(left.scq.poll_statuses(), [(1, WcStatus::Success)]);
        assert_eq!(right.rcq.poll_statuses(), [(5, WcStatus::Success)]);
    }
}

#[test]
fn both_ends_pause() {
    for first in [0, 1] {
        let pair = Pair::with(World::new(), no_retries, no_retries);
        let nodes = [&pair.a, &pair.b];
        pair.right.recv(1, &[]);
        let outer = Pause::begin(nodes[first]);
        pair.left.send(1, &[]);
        pair.world.run();
        let inner = Pause::begin(nodes[1 - first]);
        pair.settle();
        drop(outer);
        pair.settle();
        pair.world.clock.advance(HOUR);
        pair.settle();
        assert!(pair.left.scq.poll().is_empty());
        drop(inner);
        pair.settle();
        assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Success)], "{first} first");
        assert_eq!(pair.right.rcq.poll_statuses(), [(1, WcStatus::Success)]);
        assert_patient(&pair.a);
    }
}

#[test]
fn a_loop_through_a_paused_device() {
    let world = World::new();
    let node = world.node(1);
    let (left, right) = (node.qp(QpType::Rc), node.qp(QpType::Rc));
    left.connect(&right, no_retries);
    right.connect(&left, |_| {});
    right.recv(1, &[]);
    let pause = Pause::begin(&node);
    left.send(1, &[]);
    world.clock.advance(HOUR);
    world.settle();
    assert!(left.scq.poll().is_empty());
    drop(pause);
    world.run();
    assert_eq!(left.scq.poll_statuses(), [(1, WcStatus::Success)]);
    assert_eq!(right.rcq.poll_statuses(), [(1, WcStatus::Success)]);
}

/// A pause that ends soon loses no datagram. One that takes long does not keep a sender from its other peers.
#[test]
fn datagrams_wait_for_a_second() {
    let world = World::new();
    let nodes = [1, 2, 3].map(|number| world.node(number));
    let ends = nodes.each_ref().map(|node| node.qp(QpType::Ud));
    ends.iter().for_each(|end| end.start_datagrams(QKEY));
    let mine = nodes[0].buffer(64);
    let inboxes = nodes.each_ref().map(|node| node.buffer(128));
    for (end, inbox) in ends.iter().zip(&inboxes).skip(1) {
        (0..4).for_each(|id| end.recv(id, &[inbox.all()]));
    }
    let send = |id, to: usize| {
        let (qpn, dgid) = (ends[to].qp.qpn(), gid(ends[to].node));
        let to = UdDestination { qpn, qkey: QKEY, dgid, hop_limit: 64, ..UdDestination::default() };
        ends[0].submit(id, SendOp::Send { data: SendData::None, to: Some(to) }, &[mine.all()]);
    };
    let pause = Pause::begin(&nodes[1]);
    send(1, 1);
    send(2, 2);
    world.clock.advance(999 * MS);
    world.run();
    assert!(ends[0].scq.poll().is_empty(), "datagrams stay in order");
    drop(pause);
    world.run();
    assert_eq!(ends[0].scq.poll_statuses(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    assert_eq!([1, 2].map(|to: usize| ends[to].rcq.poll().len()), [1, 1]);
    let pause = Pause::begin(&nodes[1]);
    send(3, 1);
    send(4, 2);
    assert_eq!(world.settle(), 1000 * MS);
    assert_eq!(ends[0].scq.poll_statuses(), [(3, WcStatus::Success), (4, WcStatus::Success)]);
    send(5, 1);
    assert_eq!(ends[0].scq.poll_statuses(), [(5, WcStatus::Success)]);
    assert_eq!([1, 2].map(|to: usize| ends[to].rcq.poll().len()), [0, 1]);
    assert_eq!(nodes[0].counter("ud_dropped_paused"), 2);
    drop(pause);
    send(6, 1);
    assert_eq!(ends[1].rcq.poll().len(), 1);
}

#[test]
fn pauses_do_not_nest() {
    let pair = Pair::new();
    assert!(!pair.a.hca.resume() && !pair.a.hca.is_paused());
    assert!(pair.a.hca.pause() && pair.a.hca.is_paused());
    assert!(!pair.a.hca.pause() && pair.a.hca.is_paused());
    assert!(pair.a.hca.resume() && !pair.a.hca.is_paused());
    assert!(!pair.a.hca.resume());
}

#[test]
fn commands_in_a_pause() {
    let pair = Pair::new();
    pair.left.recv(1, &[]);
    let pause = Pause::begin(&pair.a);
    let attrs = QpAttrs { state: QpState::Error, ..QpAttrs::default() };
    assert!(matches!(pair.left.qp.modify(&attrs, QpAttrMask::STATE), Err(VerbsError::NotAllowed(_))));
    assert_eq!(pair.left.state(), QpState::Rts);
    // The link goes down and up.
    assert!(pair.a.hca.set_link(false).unwrap() && pair.a.hca.set_link(true).unwrap());
    pair.world.run();
    drop(pause);
    assert!(pair.left.rcq.poll().is_empty());
    pair.right.send(2, &[]);
    pair.settle();
    assert_eq!(pair.left.rcq.poll_statuses(), [(1, WcStatus::Success)]);
}

/// A queue pair ends in the pause: its peer waits until the end of the pause, and gets no answer then.
#[test]
fn a_queue_pair_is_destroyed_in_a_pause() {
    let pair = Pair::with(World::new(), |_| {}, |a| a.retry_cnt = 1);
    pair.left.send(1, &[]);
    let pause = Pause::begin(&pair.a);
    pair.right.send(2, &[]);
    pair.left.qp.destroy();
    pair.settle();
    assert_eq!(pair.b.counter("unanswered"), 0);
    drop(pause);
    pair.settle();
    assert!(pair.left.scq.poll().is_empty());
    assert_eq!(pair.right.scq.poll_statuses(), [(2, WcStatus::RetryExceeded)]);
    assert_eq!(pair.b.counter("retries"), 1);
}

/// The waiting requester ends in the pause.
#[test]
fn a_request_that_waits_is_flushed() {
    let pair = Pair::new();
    let _pause = Pause::begin(&pair.b);
    pair.left.send(1, &[]);
    pair.left.to(QpState::Error);
    assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Flushed)]);
}

#[test]
fn a_device_ends_in_a_pause() {
    let Pair { world, a, b, left, right } = Pair::with(World::new(), |a| a.retry_cnt = 1, |_| {});
    assert!(b.hca.pause());
    left.send(1, &[]);
    world.settle();
    assert_eq!(a.counter("unanswered"), 0);
    drop((right, b));
    world.settle();
    assert_eq!(left.scq.poll_statuses(), [(1, WcStatus::RetryExceeded)]);
}

/// The peer is beyond a cable. Its packets are lost in the pause, and it repeats them.
#[test]
fn a_peer_on_the_wire_repeats_its_packets() {
    on_the_wire(Faults::default(), 1, || {
        let pair = Pair::with(World::new(), |_| {}, no_retries);
        let (mine, theirs) = (pair.a.buffer(4096), pair.b.buffer(4096));
        mine.write(0, &pattern(1, 4096));
        pair.right.recv(1, &[]);
        pair.right.recv(2, &[]);
        pair.left.send(0, &[]);
        assert_eq!(pair.left.scq.poll_statuses(), [(0, WcStatus::Success)]);
        let pause = Pause::begin(&pair.b);
        pair.left.submit(1, write(theirs.remote(0)), &[mine.all()]);
        pair.left.send(2, &[]);
        pair.right.submit(7, SendOp::Read { remote: mine.remote(0) }, &[theirs.all()]);
        assert!(pair.left.scq.poll().is_empty());
        assert!(pair.b.counter("wire_dropped_paused") > 0);
        drop(pause);
        pair.settle();
        assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
        assert_eq!(pair.right.scq.poll_statuses(), [(7, WcStatus::Success)]);
        assert_eq!(pair.right.rcq.poll_statuses(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
        assert!(theirs.read(0, 4096) == pattern(1, 4096));
    });
}

/// The device is paused after its requests have left. The responses are lost, and its timers have passed long since,
/// but it spends no retry.
#[test]
fn a_paused_requester_on_the_wire_spends_no_retry() {
    let operations: [fn(&Buffer) -> SendOp; 3] = [
        |theirs| write(theirs.remote(0)),
        |theirs| SendOp::Read { remote: theirs.remote(0) },
        |theirs| SendOp::FetchAdd { remote: theirs.remote(0), add: 1 },
    ];
    for (operation, bytes) in operations.into_iter().zip([20_000, 20_000, 8]) {
        on_the_wire(Faults::default(), 1, || {
            let mut pair = Pair::with(World::new(), no_retries, |_| {});
            let (mine, theirs) = (pair.a.buffer(bytes), pair.b.buffer(bytes));
            pair.left.submit(0, write(theirs.remote(0)), &[]);
            assert_eq!(pair.left.scq.poll_statuses(), [(0, WcStatus::Success)]);
            // Without the backends running, the packets leave and wait.
            pair.left.drive = None;
            pair.left.submit(1, operation(&theirs), &[mine.all()]);
            let pause = Pause::begin(&pair.a);
            pair.world.run();
            assert!(pair.a.counter("wire_dropped_paused") > 0);
            pair.world.clock.advance(HOUR);
            pair.world.run();
            drop(pause);
            pair.settle();
            assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Success)]);
            assert_eq!(pair.a.counter("wire_timeouts"), 0);
            if bytes == 8 {
                assert_eq!(theirs.read(0, 8), [1, 0, 0, 0, 0, 0, 0, 0], "executed once");
            }
        });
    }
}

/// The peer is a device of the process that is reached by a cable, because local delivery is off. Its packets are lost
/// in the pause, but it spends no retry, whether its timers fire in the pause or after it.
#[test]
fn a_peer_in_the_process_behind_a_cable() {
    for (paused, before) in [(HOUR, true), (MS, true), (HOUR, false)] {
        let world = World::with(|config| config.local = false);
        let (one, other) = memory::pair(1000).unwrap();
        let _ports = [plug(&world.rxe, 1, one, PortRules::default()), plug(&world.rxe, 2, other, PortRules::default())];
        let pair = Pair::with(world, no_retries, |_| {});
        let (mine, theirs) = (pair.a.buffer(8), pair.b.buffer(8));
        pair.right.recv(1, &[]);
        pair.left.send(0, &[]);
        pair.settle();
        assert_eq!(pair.left.scq.poll_statuses(), [(0, WcStatus::Success)]);
        let request = || pair.left.submit(1, write(theirs.remote(0)), &[mine.all()]);
        if before {
            // The packet is in the cable when the pause begins.
            request();
        }
        let pause = Pause::begin(&pair.b);
        if !before {
            request();
        }
        pair.world.run();
        pair.world.clock.advance(paused);
        pair.world.run();
        drop(pause);
        pair.settle();
        assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Success)]);
        assert_eq!(pair.a.counter("wire_timeouts"), 0);
    }
}

/// A connection between each two of three devices, in both directions, under threads: whatever is paused and when, all
/// messages arrive once and in order, and nothing of a paused device moves.
#[test]
fn pauses_under_traffic() {
    const COUNT: u64 = 10_000;
    const CYCLES: u64 = 200;
    let world = World::with(|config| {
        config.workers = 2;
        config.clock = Arc::new(MonotonicClock::default());
        (config.inline_bytes, config.inline_requests) = (4096, 4);
        (config.worker_bytes, config.worker_requests) = (16 << 10, 16);
    });
    let nodes = [1, 2, 3].map(|number| world.node(number));
    let mut ends = Vec::new();
    for (one, other) in [(0, 1), (1, 2), (2, 0)] {
        let pair = [nodes[one].qp(QpType::Rc), nodes[other].qp(QpType::Rc)];
        // The timeout is 8 microseconds: retries would be over soon.
        let set = |a: &mut QpAttrs| (a.retry_cnt, a.timeout, a.rnr_retry, a.min_rnr_timer) = (0, 1, 7, 1);
        pair[0].connect(&pair[1], set);
        pair[1].connect(&pair[0], set);
        ends.push([(one, pair)]);
    }
    let ends: Vec<_> =
        ends.iter().flatten().flat_map(|(one, [left, right])| [(*one, left), ((one + 1) % 3, right)]).collect();
    let buffers: Vec<_> = ends.iter().map(|&(node, _)| nodes[node].buffer(8192)).collect();
    let totals = |paused: usize| {
        let own = ends.iter().filter(|&&(node, _)| node == paused);
        own.map(|(_, end)| (end.scq.total(), end.rcq.total(), end.receives.posted.lock().len())).collect::<Vec<_>>()
    };
    std::thread::scope(|scope| {
        let guests: Vec<_> = ends
            .iter()
            .zip(&buffers)
            .map(|(&(_, end), buffer)| {
                scope.spawn(move || {
                    for id in 0..COUNT {
                        end.recv(id, &[buffer.sge(4096, 1024)]);
                        end.send(id, &[buffer.sge(0, 1 + id % 1024)]);
                        if id % 64 == 0 {
                            std::thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        let mut cycles = 0;
        while cycles < CYCLES || guests.iter().any(|guest| !guest.is_finished()) {
            let node = usize::try_from(cycles % 3).unwrap();
            let pause = Pause::begin(&nodes[node]);
            let other = (cycles % 5 == 0).then(|| Pause::begin(&nodes[(node + 1) % 3]));
            let completions =
                |totals: Vec<(u64, u64, usize)>| totals.iter().map(|&(s, r, _)| (s, r)).collect::<Vec<_>>();
            let before = completions(totals(node));
            (0..50).for_each(|_| std::thread::yield_now());
            assert_eq!(completions(totals(node)), before, "a paused device has completed a request");
            drop((pause, other));
            cycles += 1;
        }
    });
    let expected: Vec<_> = (0..COUNT).map(|id| (id, WcStatus::Success)).collect();
    for (_, end) in &ends {
        let count = usize::try_from(COUNT).unwrap();
        assert!(end.scq.statuses(count) == expected && end.rcq.statuses(count) == expected);
    }
}

/// The same over a cable, where the packets of a pause are lost.
#[test]
fn pauses_under_traffic_on_the_wire() {
    const COUNT: u64 = 2_000;
    const CYCLES: usize = 30;
    on_the_wire(Faults::default(), 2, || {
        let world = World::with(|config| {
            config.workers = 2;
            config.clock = Arc::new(MonotonicClock::default());
        });
        // The longest wait for an ACK, so that no retries are used up on a busy machine.
        let pair = Pair::with(world, |a| a.timeout = 18, |a| a.timeout = 18);
        let buffers = [pair.a.buffer(8192), pair.b.buffer(8192)];
        let ends = [&pair.left, &pair.right];
        std::thread::scope(|scope| {
            let guests = [0, 1].map(|end| {
                let (end, buffer) = (ends[end], &buffers[end]);
                scope.spawn(move || {
                    for id in 0..COUNT {
                        end.recv(id, &[buffer.sge(4096, 2048)]);
                        end.post(id, SEND, &[buffer.sge(0, 1 + id % 2048)]);
                        end.qp.notify_send();
                        if id % 16 == 0 {
                            std::thread::yield_now();
                        }
                    }
                })
            });
            let mut cycles = 0;
            while cycles < CYCLES || guests.iter().any(|guest| !guest.is_finished()) {
                let pause = Pause::begin([&pair.a, &pair.b][cycles % 2]);
                (0..20).for_each(|_| std::thread::yield_now());
                drop(pause);
                (0..200).for_each(|_| std::thread::yield_now());
                cycles += 1;
            }
        });
        let expected: Vec<_> = (0..COUNT).map(|id| (id, WcStatus::Success)).collect();
        for end in ends {
            let count = usize::try_from(COUNT).unwrap();
            assert!(end.scq.statuses(count) == expected && end.rcq.statuses(count) == expected);
        }
    });
}
