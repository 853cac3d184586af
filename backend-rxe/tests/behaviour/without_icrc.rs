//! Packets without an ICRC between two devices of this engine, whose administrators decide about them.

use std::sync::Arc;

use pvrdma_link::{Frames, memory};
use pvrdma_roce::wire::{ACCEPT, ACCEPT_WITHOUT_ICRC, Bth, Header, OFFER, Packet, REQUEST_WITHOUT_ICRC, build};
use pvrdma_rxe::{PortConfig, PortRules};
use pvrdma_verbs_types::{QpType, SendOp, UdDestination, WcStatus};

use crate::tap::{Tap, tapped};
use crate::ud;
use crate::world::*;

const SENT: &str = "wire_sent_without_icrc";
const RECEIVED: &str = "wire_received_without_icrc";
const DAMAGED: &str = "wire_dropped_damaged";

/// Two nodes on a cable with taps, and a connection.
struct Rig {
    pair: Pair,
    taps: [Arc<Tap>; 2],
}

impl Rig {
    fn new(omit: [bool; 2]) -> Self {
        let (world, taps) = tapped(omit.map(|omit| PortRules::default().with_negotiate(true).with_omit_icrc(omit)));
        Self { pair: Pair::with(world, |_| {}, |_| {}), taps }
    }

    /// Executes two writes and a READ from node 1. Returns the frames that both ends sent.
    fn exchange(&self) -> [Vec<Vec<u8>>; 2] {
        let Pair { a, b, left, .. } = &self.pair;
        let (mine, theirs) = (a.buffer(10_000), b.buffer(10_000));
        let data = pattern(3, 10_000);
        mine.write(0, &data);
        let read = SendOp::Read { remote: theirs.remote(0) };
        for (wr_id, op) in [write(theirs.remote(0)), write(theirs.remote(0)), read].into_iter().enumerate() {
            left.submit(wr_id as u64, op, &[mine.all()]);
            self.pair.settle();
            assert_eq!(left.scq.one().status, WcStatus::Success);
        }
        assert!(mine.read(0, 10_000) == data && theirs.read(0, 10_000) == data);
        self.taps.each_ref().map(|tap| std::mem::take(&mut *tap.sent.lock()).iter().map(<[u8]>::to_vec).collect())
    }

    /// Counters of both nodes.
    fn counters(&self, name: &str) -> [u64; 2] {
        [self.pair.a.counter(name), self.pair.b.counter(name)]
    }

    /// A frame arrives at node 2, as if node 1 had sent it.
    fn inject(&self, frame: &[u8]) {
        let mut frames = Frames::default();
        frames.push(frame);
        assert_eq!(self.taps[0].inject(&frames), 1);
        self.pair.settle();
    }
}

fn omit(frames: &[Vec<u8>]) -> usize {
    frames.iter().filter(|frame| Packet::parse(frame).unwrap().omits_icrc()).count()
}

fn bits(frames: &[Vec<u8>]) -> Vec<u8> {
    frames.iter().map(|frame| Packet::parse(frame).unwrap().header.bth.reserved7).collect()
}

/// The frame as its sender would build it without the agreement.
fn plain(frame: &[u8]) -> Vec<u8> {
    with_bits(frame, 0)
}

/// The frame with these bits and a valid ICRC.
fn with_bits(frame: &[u8], reserved7: u8) -> Vec<u8> {
    let packet = Packet::parse(frame).unwrap();
    let bth = Bth { reserved7, ..packet.header.bth };
    build(&Header { bth, ..packet.header }, packet.payload).unwrap()
}

fn without_icrc(mut frame: Vec<u8>) -> Vec<u8> {
    frame.last_chunk_mut::<4>().unwrap().fill(0);
    frame
}

#[test]
fn both_ends_count_packets_without_an_icrc() {
    let rig = Rig::new([true, true]);
    let first = rig.exchange();
    let second = rig.exchange();
    // By the end of the first exchange the ends have agreed.
    assert!(bits(&first[0]).starts_with(&[OFFER]) && bits(&first[1]).starts_with(&[ACCEPT]));
    for (frames, bits_of) in second.iter().zip([REQUEST_WITHOUT_ICRC, ACCEPT_WITHOUT_ICRC]) {
        assert!(!frames.is_empty() && omit(frames) == frames.len());
        assert!(bits(frames).iter().all(|&bits| bits == bits_of));
    }
    let sent = [0, 1].map(|node| (omit(&first[node]) + omit(&second[node])) as u64);
    assert_eq!(rig.counters(SENT), sent);
    assert_eq!(rig.counters(RECEIVED), [sent[1], sent[0]]);
    assert_eq!(rig.counters(DAMAGED), [0, 0]);
}

#[test]
fn towards_every_other_peer_each_byte_is_as_before() {
    let reference = Rig::new([false, false]);
    let expected = [reference.exchange(), reference.exchange()];
    for omits in [[true, false], [false, true], [false, false]] {
        let rig = Rig::new(omits);
        for expected in &expected {
            let frames = rig.exchange();
            assert_eq!(omit(&frames.concat()), 0);
            if !omits[0] {
                assert_eq!(&frames, expected);
            }
            let all_plain = |frames: &Vec<Vec<u8>>| frames.iter().map(|frame| plain(frame)).collect::<Vec<_>>();
            assert_eq!(frames.each_ref().map(all_plain), expected.each_ref().map(all_plain));
        }
        assert_eq!((rig.counters(SENT), rig.counters(RECEIVED)), ([0, 0], [0, 0]));
    }
}

/// A peer on a network whose administrator has not permitted it, and a peer that did not agree on anything.
#[test]
fn a_peer_alone_cannot_leave_the_icrc_out() {
    for negotiate in [true, false] {
        let (world, taps) = tapped([PortRules::default().with_negotiate(negotiate), PortRules::default()]);
        let rig = Rig { pair: Pair::with(world, |_| {}, |_| {}), taps };
        let theirs = rig.pair.b.buffer(4096);
        let mine = rig.pair.a.buffer(4096);
        mine.write(0, &[1; 4096]);
        rig.pair.left.submit(1, write(theirs.remote(0)), &[mine.sge(0, 8)]);
        rig.pair.settle();
        assert_eq!(rig.pair.left.scq.one().status, WcStatus::Success);
        let template = rig.taps[0].sent.lock().iter().next().unwrap().to_vec();
        // The request that node 2 executes next.
        let packet = Packet::parse(&template).unwrap();
        let mut header = packet.header;
        header.bth.psn = header.bth.psn.plus(1);
        let forged = build(&header, &[9; 8]).unwrap();
        for reserved7 in 0..0x80 {
            rig.inject(&without_icrc(with_bits(&forged, reserved7)));
        }
        assert_eq!((rig.counters(DAMAGED), rig.counters(RECEIVED)), ([0, 0x80], [0, 0]));
        assert_eq!(theirs.read(0, 8), [1; 8]);
        // With an ICRC it is a request like others, which gets no other response.
        rig.taps[1].sent.lock().clear();
        rig.inject(&with_bits(&forged, REQUEST_WITHOUT_ICRC));
        assert_eq!(theirs.read(0, 8), [9; 8]);
        let responses: Vec<_> = rig.taps[1].sent.lock().iter().map(<[u8]>::to_vec).collect();
        assert!(!responses.is_empty() && omit(&responses) == 0 && bits(&responses).iter().all(|&bits| bits == 0));
        assert_eq!(rig.counters(SENT), [0, 0]);
    }
}

/// A guest cannot send such packets from its network function, which must not send RoCE at all.
#[test]
fn a_network_function_sends_none() {
    let world = World::new();
    let (uplink, network) = memory::pair(100).unwrap();
    let (nic, function) = memory::pair(100).unwrap();
    let rules = PortRules::default().with_negotiate(true).with_omit_icrc(true);
    let config = PortConfig::new(Arc::new(uplink), 4500).with_nic(Some(Arc::new(nic))).with_rules(rules);
    let _station = plug_in(&world.rxe, 1, config);
    let node = world.node(1);
    let end = node.qp(QpType::Rc);
    connect_to_test(&end);
    let mut own = without_icrc(with_bits(&request(), REQUEST_WITHOUT_ICRC));
    own[..6].copy_from_slice(&mac(2).0);
    own[6..12].copy_from_slice(&mac(1).0);
    give(&function, &own);
    world.rxe.run_ready();
    assert_eq!((taken(&network).len(), node.counter("passed_dropped_roce")), (0, 1));
}

/// Datagrams have no peer that could agree.
#[test]
fn datagrams_have_an_icrc() {
    let rules = PortRules::default().with_negotiate(true).with_omit_icrc(true);
    let (world, taps) = tapped([rules.clone(), rules]);
    let (a, b) = (world.node(1), world.node(2));
    let (left, right) = (a.qp(QpType::Ud), b.qp(QpType::Ud));
    left.start_datagrams(ud::QKEY);
    right.start_datagrams(ud::QKEY);
    let (mine, theirs) = (a.buffer(4096), b.buffer(4096));
    right.recv(1, &[theirs.all()]);
    left.submit(1, ud::send(UdDestination { dmac: mac(2), ..ud::to(&right) }), &[mine.sge(0, 100)]);
    world.settle();
    assert_eq!(right.rcq.one().status, WcStatus::Success);
    let frame = taps[0].sent.lock().iter().next().unwrap().to_vec();
    assert_eq!(Packet::parse(&frame).unwrap().verify(), Ok(()));
    right.recv(2, &[theirs.all()]);
    for reserved7 in [0, REQUEST_WITHOUT_ICRC, ACCEPT_WITHOUT_ICRC] {
        let mut frames = Frames::default();
        frames.push(&without_icrc(with_bits(&frame, reserved7)));
        taps[0].inject(&frames);
    }
    world.settle();
    assert_eq!((right.rcq.poll().len(), b.counter(DAMAGED)), (0, 3));
}
