//! Captures show the frames on a cable, and for local deliveries the same frames.

use std::time::Duration;

use pvrdma_link::fault::Faults;
use pvrdma_roce::wire::{Extension, Opcode, Packet, Syndrome};
use pvrdma_rxe::capture::{Batch, Capture, CaptureConfig, CaptureCounts, Direction, Interface};
use pvrdma_verbs::QueuePair;
use pvrdma_verbs_types::{QpType, Qpn, SendData, SendOp, UdDestination, WcStatus};

use crate::world::*;

const ROOMY: CaptureConfig = CaptureConfig::new(10_000, 64 << 20);
const QKEY: u32 = 0x4321;

/// A captured frame with its direction.
type Seen = (Direction, Vec<u8>);

fn taken(capture: &Capture, interface: Interface) -> Vec<Seen> {
    let mut batch = Batch::default();
    capture.take(&mut batch);
    assert!(batch.iter().map(|(seen, _)| seen.time).is_sorted());
    batch
        .iter()
        .map(|(seen, frame)| {
            assert_eq!((seen.interface, seen.length), (interface, frame.len()));
            (seen.direction, frame.to_vec())
        })
        .collect()
}

fn lines(seen: &[Seen]) -> String {
    let line = |(direction, frame): &Seen| format!("{direction:?} {}\n", Packet::parse(frame).unwrap());
    seen.iter().map(line).collect()
}

fn is_over_wire(pair: &World) -> bool {
    pair.far.is_some()
}

/// Runs every operation, and some that are refused. Returns the captures of nodes 1 and 2.
fn operations() -> [Vec<Seen>; 2] {
    let pair = Pair::with(World::new(), |a| a.av.traffic_class = 0x68, |_| {});
    let over_wire = is_over_wire(&pair.world);
    let captures = [1, 2].map(|number| pair.world.station(number).capture(ROOMY).unwrap());
    let (mine, theirs) = (pair.a.buffer(20_000), pair.b.buffer(20_000));
    mine.write(0, &pattern(1, 20_000));
    theirs.write(0, &pattern(2, 20_000));
    let window = pair.b.buffer(8);
    let run = |op: SendOp, len: u64, status: WcStatus| {
        pair.left.submit(1, op.clone(), &[mine.sge(3, len / 2), mine.sge(10_000, len - len / 2)]);
        pair.settle();
        assert_eq!(pair.left.scq.poll_statuses(), [(1, status)], "{op:?} {len}");
    };
    let send = |data| SendOp::Send { data, to: None };
    for len in [0, 1, 1024, 1025, 5000] {
        for data in [SendData::None, SendData::Immediate([1, 2, 3, 4])] {
            pair.right.recv(1, &[theirs.sge(0, 6000)]);
            run(send(data), len, WcStatus::Success);
        }
        run(write(theirs.remote(100)), len, WcStatus::Success);
        pair.right.recv(1, &[]);
        run(SendOp::Write { remote: theirs.remote(7), immediate: Some([5, 6, 7, 8]) }, len, WcStatus::Success);
        run(SendOp::Read { remote: theirs.remote(99) }, len, WcStatus::Success);
    }
    run(SendOp::FetchAdd { remote: window.remote(0), add: 0x0102_0304_0506_0708 }, 8, WcStatus::Success);
    run(SendOp::CompareSwap { remote: window.remote(0), compare: 1, swap: 2 }, 8, WcStatus::Success);
    // A message without a receive, which is retried later.
    pair.left.submit(1, SEND, &[mine.sge(0, 10)]);
    if over_wire {
        // Over the wire, the responder keeps the message for 400 µs before it answers.
        pair.world.clock.advance(Duration::from_micros(401));
        pair.world.run();
    }
    pair.right.recv(1, &[theirs.sge(0, 10)]);
    pair.settle();
    assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Success)]);
    pair.right.recv(1, &[]);
    run(SendOp::FetchAdd { remote: theirs.remote(1), add: 1 }, 8, WcStatus::RemoteInvalidRequest);
    assert_eq!(pair.b.events.poll().len(), 1);
    // Another connection, which uses wrong keys.
    let (left, right) = (pair.a.qp(QpType::Rc), pair.b.qp(QpType::Rc));
    left.connect(&right, |_| {});
    right.connect(&left, |_| {});
    let wrong = pvrdma_verbs_types::RemoteAddress { rkey: 0x55, ..theirs.remote(0) };
    left.submit(1, SendOp::Read { remote: wrong }, &[mine.sge(0, 3000)]);
    pair.settle();
    assert_eq!(left.scq.one().status, WcStatus::RemoteAccess);
    let interface = if over_wire { Interface::Uplink } else { Interface::Local };
    captures.map(|capture| taken(&capture, interface))
}

#[test]
fn local_deliveries_look_as_the_wire_does() {
    let local = operations();
    let mut wire = None;
    on_the_wire(Faults::default(), 1, || wire = Some(operations()));
    let wire = wire.unwrap();
    for (local, wire) in local.iter().zip(&wire) {
        assert_eq!(lines(local), lines(wire));
        assert!(local == wire);
        assert!(local.iter().all(|(_, frame)| Packet::parse(frame).unwrap().verify().is_ok()));
    }
    // Both ends capture the same frames in opposite directions.
    let [one, other] = local;
    assert!(one.iter().zip(&other).all(|(one, other)| one.1 == other.1 && one.0 != other.0));
    assert!(one.len() > 80, "{}", one.len());
}

/// Sends datagrams of ordinary and general services QPs, with and without a receive.
fn datagrams() -> Vec<Seen> {
    let world = World::new();
    let (a, b) = (world.node(1), world.node(2));
    let capture = world.station(1).capture(ROOMY).unwrap();
    for (kind, qkey) in [(QpType::Ud, QKEY), (QpType::Gsi, 0x8001_0000)] {
        let (left, right) = (a.qp(kind), b.qp(kind));
        left.start_datagrams(qkey);
        right.start_datagrams(qkey);
        let (mine, theirs) = (a.buffer(4096), b.buffer(8192));
        mine.write(0, &pattern(3, 4096));
        right.recv(1, &[theirs.all()]);
        let destination = |qpn, dgid| UdDestination {
            qpn,
            qkey,
            dgid,
            dmac: mac(2),
            hop_limit: 64,
            traffic_class: 0x20,
            ..UdDestination::default()
        };
        let to = |qpn, dgid, data| SendOp::Send { data, to: Some(destination(qpn, dgid)) };
        left.submit(1, to(right.qp.qpn(), gid(2), SendData::None), &[mine.sge(0, 1000), mine.sge(1000, 24)]);
        left.submit(2, to(right.qp.qpn(), gid(2), SendData::Immediate([4, 3, 2, 1])), &[mine.sge(0, 77)]);
        left.submit(3, to(Qpn::new(0x999), gid(2), SendData::None), &[]);
        left.submit(4, to(right.qp.qpn(), gid(9), SendData::None), &[mine.sge(5, 5)]);
        assert_eq!(left.scq.poll_statuses().len(), 4);
    }
    taken(&capture, if is_over_wire(&world) { Interface::Uplink } else { Interface::Local })
}

#[test]
fn datagrams_look_as_the_wire_does() {
    let local = datagrams();
    let mut wire = None;
    on_the_wire(Faults::default(), 1, || wire = Some(datagrams()));
    assert_eq!(lines(&local), lines(&wire.clone().unwrap()));
    assert!(Some(&local) == wire.as_ref());
    assert_eq!(local.len(), 8);
}

#[test]
fn a_long_message_is_seen_as_it_moves() {
    // Budgets interrupt the message at other places than packet boundaries.
    let world = World::with(|config| (config.inline_bytes, config.worker_bytes) = (1500, 2500));
    let pair = Pair::with(world, |_| {}, |_| {});
    let capture = pair.world.station(1).capture(ROOMY).unwrap();
    let (mine, theirs) = (pair.a.buffer(30_000), pair.b.buffer(30_000));
    mine.write(0, &pattern(1, 30_000));
    theirs.write(0, &pattern(2, 30_000));
    for (op, data) in [(write(theirs.remote(0)), 1), (SendOp::Read { remote: theirs.remote(0) }, 1)] {
        pair.left.submit(1, op.clone(), &[mine.all()]);
        pair.settle();
        assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Success)]);
        let seen = taken(&capture, Interface::Local);
        let packets: Vec<_> = seen.iter().map(|(_, frame)| Packet::parse(frame).unwrap()).collect();
        let payload: Vec<u8> = packets.iter().flat_map(|packet| packet.payload.to_vec()).collect();
        assert!(payload == pattern(data, 30_000), "{op:?}");
        assert_eq!(packets.len(), 30 + 1, "30 with data, and a request or an acknowledgement");
    }
}

#[test]
fn a_capture_that_starts_late_sees_whole_packets_only() {
    let world = World::with(|config| (config.inline_bytes, config.worker_bytes) = (1500, 1500));
    let pair = Pair::with(world, |_| {}, |_| {});
    let (mine, theirs) = (pair.a.buffer(10_000), pair.b.buffer(10_000));
    pair.left.post(1, write(theirs.remote(0)), &[mine.all()]);
    pair.left.qp.notify_send();
    assert!(pair.left.scq.poll().is_empty());
    let capture = pair.world.station(2).capture(ROOMY).unwrap();
    pair.settle();
    let seen = taken(&capture, Interface::Local);
    let opcodes: Vec<_> = seen.iter().map(|(_, frame)| Packet::parse(frame).unwrap().header.bth.opcode.0).collect();
    assert_eq!(opcodes, [7, 7, 7, 7, 7, 7, 7, 7, 8, 0x11]);
    // PSNs continue behind the packets that were not captured.
    pair.left.submit(1, write(theirs.remote(0)), &[]);
    let seen = taken(&capture, Interface::Local);
    assert_eq!(Packet::parse(&seen[0].1).unwrap().header.bth.psn.get(), 5 + 10);
}

#[test]
fn silence_is_seen_as_one_repeated_packet() {
    let pair = Pair::with(World::new(), |a| a.retry_cnt = 2, |_| {});
    let capture = pair.world.station(1).capture(ROOMY).unwrap();
    pair.right.qp.destroy();
    pair.left.submit(1, SEND, &[]);
    pair.settle();
    assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::RetryExceeded)]);
    let seen = taken(&capture, Interface::Local);
    assert_eq!(seen.len(), 3);
    for (direction, frame) in &seen {
        let bth = Packet::parse(frame).unwrap().header.bth;
        assert_eq!((*direction, bth.opcode, bth.psn.get()), (Direction::Outbound, Opcode(4), 5));
    }
}

#[test]
fn a_device_that_talks_to_itself_is_seen_once() {
    let world = World::new();
    let node = world.node(1);
    let (left, right) = (node.qp(QpType::Rc), node.qp(QpType::Rc));
    left.connect(&right, |_| {});
    right.connect(&left, |_| {});
    let capture = world.station(1).capture(ROOMY).unwrap();
    left.submit(1, write(Default::default()), &[]);
    let seen = taken(&capture, Interface::Local);
    assert!(seen.iter().all(|(direction, _)| *direction == Direction::Outbound));
    let extension = |index: usize| Packet::parse(&seen[index].1).unwrap().header.extension;
    assert!(matches!(extension(0), Extension::Reth(_)));
    assert!(matches!(extension(1), Extension::Aeth(aeth) if aeth.syndrome == Syndrome::ACK && aeth.msn == 1));
    assert_eq!(seen.len(), 2);
}

#[test]
fn captures_come_and_go() {
    let pair = Pair::new();
    let station = pair.world.station(1);
    let write = || pair.left.submit(1, write(Default::default()), &[]);
    write();
    let small = CaptureConfig::new(60, 400);
    let captures: Vec<_> = (0..4).map(|_| station.capture(small).unwrap()).collect();
    assert!(station.capture(small).is_err());
    // A device can be captured even before it exists.
    let absent = pair.world.station(7).capture(ROOMY).unwrap();
    for _ in 0..10 {
        write();
    }
    let (seen, dropped) = captures[0].counts(Interface::Local);
    assert!(seen == 20 && dropped > 10, "{dropped}");
    let counts = CaptureCounts { active: 4, captured: 80 - 4 * dropped, dropped: 4 * dropped };
    assert_eq!(station.capture_counts(), counts);
    assert_eq!(pair.world.station(2).capture_counts(), CaptureCounts::default());
    let mut batch = Batch::default();
    captures[0].take(&mut batch);
    assert!(batch.iter().all(|(seen, frame)| frame.len() == 60 && seen.length > 60));
    let node = pair.world.node(7);
    let (left, right) = (node.qp(QpType::Rc), node.qp(QpType::Rc));
    left.connect(&right, |_| {});
    right.connect(&left, |_| {});
    left.submit(1, SEND, &[]);
    assert_eq!(absent.counts(Interface::Local), (2, 0));
    drop((captures, absent));
    write();
    assert_eq!(station.capture_counts(), CaptureCounts { active: 0, ..counts });
}

on_slow_memory! {
    local_deliveries_look_as_the_wire_does
    datagrams_look_as_the_wire_does
    a_long_message_is_seen_as_it_moves
    silence_is_seen_as_one_repeated_packet
    a_device_that_talks_to_itself_is_seen_once
}
