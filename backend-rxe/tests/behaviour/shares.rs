//! Fairness between devices, processes and peers: CPU time and bandwidth, on virtual time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_link::{Clock, Frames, Link, LinkInspect, ManualClock, Readiness, fault::Faults, memory};
use pvrdma_rxe::{PortRules, Rxe, RxeConfig, ShareConfig};
use pvrdma_verbs::QueuePair;
use pvrdma_verbs_types::{QpType, SendOp, WcStatus};

use crate::world::*;

const MS: Duration = Duration::from_millis(1);

/// Creates queue pairs whose peer never posts a receive. They use the shortest RNR timer and unlimited retries.
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

/// Advances the clock, and runs all work that becomes due.
fn pass(world: &World, time: Duration) {
    let end = world.clock.now() + time;
    world.run();
    while world.next_deadline().is_some_and(|next| next <= end) {
        world.step();
    }
    world.clock.advance(end - world.clock.now());
}

#[test]
fn rnr_timers_of_an_idle_guest_fire_rarely() {
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
fn rnr_timers_on_the_wire_fire_rarely() {
    const QPS: u64 = 400;
    on_the_wire(Faults::default(), 1, || {
        let world = World::new();
        let (a, _b, ends) = deaf_to_receives(&world, 400, true);
        pass(&world, 1000 * MS);
        let first = a.counter("wire_rnr_naks");
        pass(&world, 1000 * MS);
        let fired = a.counter("wire_rnr_naks") - first;
        assert!(fired > 0 && fired < 10 * QPS, "{fired} in a second");
        // A message is delivered within this time, and the next one starts its wait anew.
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

/// A connection to a peer that does not exist, with a window full of packets in flight and no ACK timer.
fn deaf(node: &Node, buffer: &Buffer) -> End {
    let end = node.qp(QpType::Rc);
    end.connect(&end, |a| {
        (a.av.dgid, a.av.dmac, a.timeout) = (gid(2), mac(2), 0);
        a.dest_qpn = pvrdma_verbs_types::Qpn::new(0x7777);
    });
    end.post(1, write(buffer.remote(0)), &[buffer.all()]);
    end.post(2, write(buffer.remote(0)), &[buffer.all()]);
    end.qp.notify_send();
    end
}

#[test]
fn qps_without_a_timeout_and_an_answer_stop_no_other() {
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

/// Any number of such connections of one process leave another process of the guest its share of the turns.
#[test]
fn a_process_cannot_reserve_the_window_of_a_host() {
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
        // Only those 200 connections compete for turns, and none of them gets an answer.
        pass(&world, 10 * MS);
        assert_eq!(left.scq.poll_statuses(), [(1, WcStatus::Success)]);
    });
}

/// Queue pairs that owe much READ data do not keep the port from reading its socket.
#[test]
fn reception_continues_beside_readers() {
    const READERS: u64 = 50;
    let (world, taps) = crate::tap::tapped([PortRules::default(), PortRules::default()]);
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
    // The test only measures the frames of the port's thread, not those that doorbells have sent.
    for tap in &taps {
        tap.forget();
    }
    world.run();
    for (left, _) in &readers {
        assert_eq!(left.scq.poll_statuses(), [(1, WcStatus::Success)]);
    }
    assert_eq!(writer.scq.poll_statuses(), [(1, WcStatus::Success)]);
    // Both sides: the responder, and the requester that continues after responses.
    for tap in &taps {
        let most = tap.most_between_reads.load(SeqCst);
        assert!(most < 512 << 10, "{most} bytes were sent between two reads");
    }
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Creates a backend whose workers and doorbells move little at a time, so that shares are exact.
fn fine() -> World {
    World::with(|config| {
        config.inline_bytes = 64 * KIB;
        config.worker_bytes = 64 * KIB;
    })
}

/// A device with connections to itself and much queued work.
struct Busy {
    node: Node,
    ends: Vec<End>,
    _buffer: Buffer,
}

impl Busy {
    /// Creates a device with this many connections, each with this many writes of this length.
    fn new(world: &World, number: u8, connections: usize, writes: u64, length: u64) -> Self {
        let node = world.node(number);
        let buffer = node.buffer(length);
        let ends: Vec<_> = (0..connections).map(|_| node.qp(QpType::Rc)).collect();
        for end in &ends {
            end.connect(end, |_| {});
            for wr_id in 0..writes {
                end.post(wr_id, write(buffer.remote(0)), &[buffer.all()]);
            }
        }
        Self { node, ends, _buffer: buffer }
    }

    fn ring(&self) {
        for end in &self.ends {
            end.qp.notify_send();
        }
    }

    fn moved(&self) -> u64 {
        self.node.counter("rc_write_bytes")
    }

    /// Returns the reason why the first connection does not send.
    fn gate(&self) -> serde_json::Value {
        self.ends[0].qp.inspect()["requester"]["gate"].clone()
    }
}

/// Runs ready tasks until the devices have moved this many bytes together. Returns the first device's part in percent.
fn part_of_first(world: &World, devices: [&Busy; 2], total: u64) -> f64 {
    let before = devices.map(Busy::moved);
    let moved = |index: usize| devices[index].moved() - before[index];
    while moved(0) + moved(1) < total {
        assert!(world.run_one(), "nothing is left to do");
    }
    #[expect(clippy::cast_precision_loss, reason = "megabytes")]
    let part = moved(0) as f64 * 100.0 / (moved(0) + moved(1)) as f64;
    part
}

fn close(what: f64, to: f64, within: f64) -> bool {
    (what - to).abs() <= within
}

#[test]
fn a_device_beside_500_busy_qps_has_half() {
    let world = fine();
    let many = Busy::new(&world, 1, 500, 8, 64 * KIB);
    let one = Busy::new(&world, 3, 1, 512, 64 * KIB);
    many.ring();
    one.ring();
    let part = part_of_first(&world, [&one, &many], 32 * MIB);
    assert!(close(part, 50.0, 2.5), "{part} %");
}

#[test]
fn weights_share_the_workers() {
    let world = fine();
    for (number, weight) in [(1, 10), (3, 30)] {
        world.station(number).set_share(ShareConfig::default().with_weight(weight));
    }
    let light = Busy::new(&world, 1, 20, 100, 64 * KIB);
    let heavy = Busy::new(&world, 3, 2, 1000, 64 * KIB);
    light.ring();
    heavy.ring();
    let part = part_of_first(&world, [&light, &heavy], 64 * MIB);
    assert!(close(part, 25.0, 5.0), "{part} %");
}

/// Work on the thread that rings a device's doorbells counts against the device's share while another device is busy.
#[test]
fn doorbells_are_no_way_around_a_share() {
    let world = fine();
    let busy = Busy::new(&world, 3, 2, 1000, 64 * KIB);
    let other = Busy::new(&world, 1, 1, 0, 64 * KIB);
    // Without competition, a doorbell moves as much as it may.
    let ring = |device: &Busy| {
        let before = device.moved();
        device.ends[0].post(1, write(device._buffer.remote(0)), &[device._buffer.all()]);
        device.ends[0].qp.notify_send();
        device.moved() - before
    };
    for _ in 0..100 {
        assert_eq!(ring(&other), 64 * KIB);
    }
    busy.ring();
    // Beside a busy device it soon exceeds its share, and workers do the remaining work in order.
    let at_once = (0..100).filter(|_| ring(&other) > 0).count();
    assert!((1..=3).contains(&at_once), "{at_once}");
    let part = part_of_first(&world, [&other, &busy], 8 * MIB);
    assert!(close(part, 50.0, 5.0), "{part} %");
}

/// Lets time pass. Returns the rate at which `moved` grew, in bytes per second.
fn rate(world: &World, time: Duration, moved: impl Fn() -> u64) -> f64 {
    let before = moved();
    pass(world, time);
    #[expect(clippy::cast_precision_loss, reason = "megabytes")]
    let bytes = (moved() - before) as f64;
    bytes / time.as_secs_f64()
}

#[test]
fn a_device_keeps_to_its_rate() {
    let world = World::new();
    let config = ShareConfig::default().with_max_rate(Some(100_000_000)).with_burst(Some(100_000));
    let station = world.station(1);
    station.set_share(config);
    let device = Busy::new(&world, 1, 20, 2000, 4 * KIB);
    device.ring();
    assert!(device.moved() <= 108 * KIB, "a burst: {}", device.moved());
    assert_eq!(device.gate(), "device_rate");
    let rate = rate(&world, 1000 * MS, || device.moved());
    assert!(close(rate, 100e6, 5e6), "{rate}");
    assert!(station.share_usage().throttled > 100);
    // No other device is slowed down by that.
    let other = Busy::new(&world, 3, 1, 100, 64 * KIB);
    other.ring();
    world.run();
    assert_eq!(other.moved(), 100 * 64 * KIB);
}

/// Over the wire, whole frames count, and so does data that peers read.
#[test]
fn a_device_keeps_to_its_rate_on_the_wire() {
    for read in [false, true] {
        on_the_wire(Faults::default(), 1, || {
            let config = ShareConfig::default().with_max_rate(Some(100_000_000));
            let world = World::with_shares(|_| {}, &[(if read { 2 } else { 1 }, config)]);
            let (a, b) = (world.node(1), world.node(2));
            let (mine, theirs) = (a.buffer(MIB), b.buffer(MIB));
            let ends: Vec<_> = (0..10).map(|_| (a.qp(QpType::Rc), b.qp(QpType::Rc))).collect();
            for (left, right) in &ends {
                left.connect(right, |_| {});
                right.connect(left, |_| {});
                for wr_id in 0..20 {
                    let remote = theirs.remote(0);
                    let op = if read { SendOp::Read { remote } } else { write(remote) };
                    left.post(wr_id, op, &[mine.all()]);
                }
                left.qp.notify_send();
            }
            let sender = if read { &b } else { &a };
            pass(&world, 100 * MS);
            let rate = rate(&world, 1000 * MS, || sender.counter("wire_sent_bytes"));
            assert!(close(rate, 100e6, 5e6), "{read}: {rate}");
        });
    }
}

#[test]
fn a_queue_pair_keeps_to_its_rate() {
    let world = World::new();
    let config = ShareConfig::default().with_qp_max_rate(Some(10_000_000));
    world.station(1).set_share(config);
    let device = Busy::new(&world, 1, 3, 5000, 4 * KIB);
    device.ring();
    pass(&world, 100 * MS);
    assert_eq!(device.gate(), "qp_rate");
    let rate = rate(&world, 1000 * MS, || device.moved());
    assert!(close(rate, 30e6, 1.5e6), "{rate}");
}

/// Rates may be set, changed and removed during traffic. Each takes effect at once, also for work that waits because of
/// the former rate.
#[test]
fn rates_change_while_a_device_moves_bytes() {
    let world = World::new();
    let station = world.station(1);
    let slow = ShareConfig::default().with_max_rate(Some(100_000)).with_burst(Some(100_000));
    station.set_share(slow);
    assert_eq!(station.share(), slow);
    let device = Busy::new(&world, 1, 20, 5000, 4 * KIB);
    device.ring();
    assert!(device.moved() <= 108 * KIB, "a burst: {}", device.moved());
    let fast = slow.with_max_rate(Some(100_000_000)).with_burst(Some(100_000));
    station.set_share(fast);
    let moves = rate(&world, 200 * MS, || device.moved());
    assert!(close(moves, 100e6, 5e6), "{moves}");
    // The rate of queue pairs also applies to existing ones.
    station.set_share(fast.with_max_rate(None).with_burst(None).with_qp_max_rate(Some(1_000_000)));
    pass(&world, 100 * MS);
    let moves = rate(&world, 1000 * MS, || device.moved());
    assert!(close(moves, 20e6, 1e6), "{moves}");
    station.set_share(ShareConfig::default());
    pass(&world, 100 * MS);
    world.run();
    assert_eq!(device.moved(), 20 * 5000 * 4 * KIB);
}

/// A changed weight applies from the device's next turn on.
#[test]
fn weights_change() {
    let world = fine();
    let [left, right] = [1, 3].map(|number| Busy::new(&world, number, 4, 1000, 64 * KIB));
    left.ring();
    right.ring();
    world.station(1).set_share(ShareConfig::default().with_weight(300));
    let start = [left.moved(), right.moved()];
    let moved = || [left.moved() - start[0], right.moved() - start[1]];
    while moved().iter().sum::<u64>() < 100 * MIB {
        assert!(world.run_one());
    }
    let [mine, others] = moved();
    assert!((MIB..4 * MIB).contains(&(mine.abs_diff(3 * others) + 2 * MIB)), "{mine} {others}");
}

/// A device of low weight has a minimum rate of 300 MB/s of a worker's 1 GB/s.
#[test]
fn a_promised_rate_comes_first() {
    let world = fine();
    let small = ShareConfig::default().with_weight(1).with_min_rate(Some(300_000_000));
    world.station(1).set_share(small);
    let promised = Busy::new(&world, 1, 4, 1000, 64 * KIB);
    let other = Busy::new(&world, 3, 4, 1000, 64 * KIB);
    promised.ring();
    other.ring();
    let start = [promised.moved(), other.moved()];
    let total = || promised.moved() + other.moved() - start[0] - start[1];
    while total() < 100 * MIB {
        let before = total();
        assert!(world.run_one());
        world.clock.advance(Duration::from_nanos(total() - before));
    }
    #[expect(clippy::cast_precision_loss, reason = "megabytes")]
    let part = (promised.moved() - start[0]) as f64 * 100.0 / total() as f64;
    assert!(close(part, 30.0, 5.0), "{part} %");
}

/// One of several ends of an uplink, which accepts a given number of bytes until the test adds more.
#[derive(Debug)]
struct SlowEnd {
    inner: memory::MemoryLink,
    room: Arc<AtomicUsize>,
}

impl Link for SlowEnd {
    fn receive(&self, frames: &mut Frames, most: usize) {
        self.inner.receive(frames, most);
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        let mut fitting = Frames::default();
        for frame in frames.iter_from(from) {
            let room = self.room.load(SeqCst);
            if room < frame.len() {
                break;
            }
            self.room.store(room - frame.len(), SeqCst);
            fitting.push(frame);
        }
        assert_eq!(self.inner.send(&fitting, 0), fitting.len());
        fitting.len()
    }

    fn line(&self) -> Option<usize> {
        Some(Arc::as_ptr(&self.room).addr())
    }

    fn readiness(&self) -> Readiness {
        self.inner.readiness()
    }

    fn lost(&self) -> u64 {
        0
    }

    fn inspect(&self) -> LinkInspect {
        self.inner.inspect()
    }
}

/// Devices 1 and 3 on one slow uplink, with peers 2 and 4 on another host.
fn on_one_uplink(shares: [ShareConfig; 2]) -> (World, Arc<AtomicUsize>) {
    let clock = Arc::new(ManualClock::default());
    let config = RxeConfig::default().with_workers(0).with_clock(Arc::clone(&clock) as _);
    let near = Rxe::new(config.clone()).unwrap();
    let far = Rxe::new(config).unwrap();
    let room = Arc::new(AtomicUsize::new(0));
    let mut stations = Vec::new();
    for (share, number) in shares.into_iter().zip([1, 3]) {
        let (inner, theirs) = memory::pair(100_000).unwrap();
        let station = plug(&near, number, SlowEnd { inner, room: Arc::clone(&room) }, PortRules::default());
        station.set_share(share);
        stations.extend([station, plug(&far, number + 1, theirs, PortRules::default())]);
    }
    (World { rxe: near, clock, far: Some(far), stations: Mutex::new(stations) }, room)
}

/// Returns the part of the uplink that device 1 gets beside device 3, in percent. `connections` of each device; with
/// `read` their peers read from them.
fn part_of_uplink(shares: [ShareConfig; 2], connections: [usize; 2], read: bool) -> f64 {
    let (world, room) = on_one_uplink(shares);
    let devices: Vec<_> = [(1, connections[0]), (3, connections[1])]
        .into_iter()
        .map(|(number, count)| {
            let (node, peer) = (world.node(number), world.node(number + 1));
            let (mine, theirs) = (node.buffer(MIB), peer.buffer(MIB));
            let ends: Vec<_> = (0..count).map(|_| (node.qp(QpType::Rc), peer.qp(QpType::Rc))).collect();
            for (left, right) in &ends {
                left.connect(right, |_| {});
                right.connect(left, |_| {});
                let (from, op, sge) = if read {
                    (right, SendOp::Read { remote: mine.remote(0) }, theirs.all())
                } else {
                    (left, write(theirs.remote(0)), mine.all())
                };
                for wr_id in 0..200 {
                    from.post(wr_id, op.clone(), &[sge]);
                }
                from.qp.notify_send();
            }
            (node, peer, ends, mine, theirs)
        })
        .collect();
    let sent = || [0, 1].map(|index: usize| devices[index].0.counter("wire_sent_bytes"));
    let pass = |bytes: u64| {
        let start = sent().iter().sum::<u64>();
        while sent().iter().sum::<u64>() - start < bytes {
            // A gigabyte a second.
            room.fetch_add(128 << 10, SeqCst);
            world.clock.advance(Duration::from_micros(128));
            world.run();
        }
    };
    pass(8 * MIB);
    let before = sent();
    pass(64 * MIB);
    let after = sent();
    #[expect(clippy::cast_precision_loss, reason = "megabytes")]
    let [first, second] = [0, 1].map(|index| (after[index] - before[index]) as f64);
    first * 100.0 / (first + second)
}

#[test]
fn weights_share_the_uplink() {
    let weight = |weight| ShareConfig::default().with_weight(weight);
    for read in [false, true] {
        let part = part_of_uplink([weight(100), weight(300)], [8, 2], read);
        assert!(close(part, 25.0, 5.0), "{read}: {part} %");
        let part = part_of_uplink([weight(100), weight(100)], [1, 50], read);
        assert!(close(part, 50.0, 5.0), "{read}: {part} %");
    }
}
