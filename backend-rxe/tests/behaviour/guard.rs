//! Protection of the network from a device, and of a device from strangers on the network.

use std::sync::Arc;

use pvrdma_link::{Frames, Link, memory};
use pvrdma_roce::wire::{
    Aeth, Deth, Extension, Header, NakCode, Network, Opcode, Packet, Position, Reth, Syndrome, build,
};
use pvrdma_rxe::{ForgedTransmits, PortConfig, PortRules, VlanMode};
use pvrdma_verbs::{Hca, QueuePair};
use pvrdma_verbs_types::{GidType, QpState, QpType, Qpn, SendOp, WcStatus};

use crate::tap::tapped;
use crate::world::*;

/// Frames of some other protocol.
fn arp(source: u8, tag: &[u8]) -> Vec<u8> {
    [&[0xff; 6], &mac(source).0[..], tag, &[0x88, 0xb5], &[7; 46]].concat()
}

#[test]
fn the_network_function_keeps_to_its_address_and_vlan() {
    let (own, forged) = (arp(1, &[]), arp(9, &[]));
    let (tagged, elsewhere) = (arp(1, &[0x81, 0, 0, 42]), arp(9, &[0x81, 0, 0, 43]));
    let rules = PortRules::default();
    let cases = [
        (VlanMode::Trunk, rules.clone(), vec![&own, &tagged], (1, 0)),
        (VlanMode::Trunk, rules.clone().with_forged(ForgedTransmits::Mac), vec![&own, &forged, &tagged], (0, 0)),
        (VlanMode::Access(42), rules, vec![&tagged], (1, 1)),
    ];
    for (vlan, rules, passed, (forgeries, wrong_tags)) in cases {
        let world = World::with(|config| config.vlan = vlan);
        let ((uplink, network), (nic, guest)) = (memory::pair(9).unwrap(), memory::pair(9).unwrap());
        let config = PortConfig::new(Arc::new(uplink), 1500).with_nic(Some(Arc::new(nic))).with_rules(rules);
        let _station = plug_in(&world.rxe, 1, config);
        let node = world.node(1);
        for frame in [&own, &forged, &tagged] {
            give(&guest, frame);
        }
        world.rxe.run_ready();
        assert_eq!(taken(&network).iter().collect::<Vec<_>>(), passed);
        let counts = || (node.counter("passed_dropped_forged"), node.counter("passed_dropped_vlan"));
        assert_eq!(counts(), (forgeries, wrong_tags));
        // The other direction.
        for frame in [&own, &tagged, &elsewhere] {
            give(&network, frame);
        }
        world.rxe.run_ready();
        let all = [own.clone(), tagged.clone(), elsewhere.clone()];
        let seen = if vlan != VlanMode::Trunk { vec![own.clone()] } else { all.to_vec() };
        assert_eq!(taken(&guest), seen);
        assert_eq!(counts().1, if vlan != VlanMode::Trunk { wrong_tags + 2 } else { 0 });
        assert_eq!(node.counter("passed_dropped"), 0);
    }
}

/// Returns the header of a packet with its PSN, as the peer may send it.
fn template() -> Header {
    Packet::parse(&request()).unwrap().header
}

fn with(opcode: Opcode, psn: u32, extension: Extension) -> Header {
    let mut header = Header { extension, ..template() };
    (header.bth.opcode, header.bth.psn) = (opcode, header.bth.psn.plus(psn));
    header.bth.ack_request = true;
    header
}

/// Packets behind a READ wait for its responses. Those beyond a limit are dropped, and a NAK makes the peer retransmit
/// them.
#[test]
fn packets_beyond_the_limit_are_retransmitted() {
    let (world, node, cable, _station) = exposed(100_000);
    let end = node.qp(QpType::Rc);
    connect_to_test(&end);
    let memory = node.buffer(1 << 20);
    let data = pattern(1, 1 << 20);
    memory.write(0, &data);
    let remote = memory.remote(0);
    let reth = Reth { address: remote.addr, rkey: remote.rkey, length: 1 << 20 };
    give(&cable, &build(&with(Opcode::READ_REQUEST, 0, Extension::Reth(reth)), &[]).unwrap());
    let write = |number: u32| {
        let reth = Reth { address: remote.addr + u64::from(number) * 4, length: 4, ..reth };
        build(&with(Opcode::write(Position::Only), 1024 + number, Extension::Reth(reth)), &number.to_be_bytes())
            .unwrap()
    };
    for number in 0..400 {
        give(&cable, &write(number));
    }
    world.rxe.run_ready();
    let lost = node.counter("wire_dropped_deferred");
    assert!((100..300).contains(&lost), "{lost}");
    // The next one shows that there is a gap.
    give(&cable, &write(399));
    world.rxe.run_ready();
    let mut answers = Frames::default();
    cable.receive(&mut answers, usize::MAX);
    let first = template().bth.psn;
    let (mut read, mut naks) = (Vec::new(), Vec::new());
    for frame in answers.iter() {
        let packet = Packet::parse(frame).unwrap();
        match packet.header.extension {
            Extension::Aeth(Aeth { syndrome: Syndrome::Nak(code), .. }) => naks.push((code, packet.header.bth.psn)),
            _ => read.extend_from_slice(packet.payload),
        }
    }
    // The responses to the READ contain no data of the later writes.
    assert!(read == data);
    let [(NakCode::SequenceError, missing)] = naks[..] else { panic!("{naks:?}") };
    let from = u32::try_from(missing.since(first.plus(1024))).unwrap();
    assert!((128..300).contains(&from), "{from}");
    for number in from..400 {
        give(&cable, &write(number));
        world.rxe.run_ready();
    }
    let expected: Vec<u8> = (0..400_u32).flat_map(u32::to_be_bytes).collect();
    assert_eq!(memory.read(0, 1600), expected);
}

/// A packet that waited behind a READ ends the QP. Later packets that wait must not keep the port busy forever.
#[test]
fn packets_behind_a_bad_one_end_with_its_qp() {
    let (world, node, cable, _station) = exposed(100_000);
    let end = node.qp(QpType::Rc);
    connect_to_test(&end);
    let memory = node.buffer(1 << 20);
    let remote = memory.remote(0);
    let reth = Reth { address: remote.addr, rkey: remote.rkey, length: 1 << 20 };
    give(&cable, &build(&with(Opcode::READ_REQUEST, 0, Extension::Reth(reth)), &[]).unwrap());
    for (number, rkey) in [(0, !remote.rkey), (1, remote.rkey), (2, remote.rkey)] {
        let reth = Reth { rkey, length: 4, ..reth };
        let header = with(Opcode::write(Position::Only), 1024 + number, Extension::Reth(reth));
        give(&cable, &build(&header, &[1; 4]).unwrap());
    }
    world.rxe.run_ready();
    assert_eq!(end.qp.query().state, QpState::Error);
    let mut answers = Frames::default();
    cable.receive(&mut answers, usize::MAX);
    let last = Packet::parse(answers.iter().last().unwrap()).unwrap().header.extension;
    assert!(matches!(last, Extension::Aeth(Aeth { syndrome: Syndrome::Nak(NakCode::RemoteAccess), .. })), "{last:?}");
    assert_eq!(memory.read(0, 4), [0; 4]);
}

#[test]
fn packets_longer_than_the_path_mtu() {
    let (world, node, cable, _station) = exposed(100);
    let (end, datagrams) = (node.qp(QpType::Rc), node.qp(QpType::Ud));
    connect_to_test(&end);
    datagrams.start_datagrams(5);
    let memory = node.buffer(8192);
    datagrams.recv(1, &[memory.all()]);
    let deth = Extension::Deth(Deth { qkey: 5, source: Qpn::new(7) });
    let mut header = with(Opcode::UD_SEND, 0, deth);
    header.bth.destination = datagrams.qp.qpn();
    for (length, dropped) in [(4097, 1), (4096, 1)] {
        give(&cable, &build(&header, &vec![1; length]).unwrap());
        world.rxe.run_ready();
        assert_eq!(node.counter("wire_dropped_malformed"), dropped);
    }
    assert_eq!(datagrams.rcq.one().byte_len, 4136);
    // The connection's is 1,024 bytes.
    let remote = memory.remote(0);
    let reth = Reth { address: remote.addr, rkey: remote.rkey, length: 1025 };
    give(&cable, &build(&with(Opcode::write(Position::Only), 0, Extension::Reth(reth)), &[2; 1025]).unwrap());
    world.rxe.run_ready();
    let answer = taken(&cable).remove(0);
    let Extension::Aeth(aeth) = Packet::parse(&answer).unwrap().header.extension else { panic!() };
    assert_eq!(aeth.syndrome, Syndrome::Nak(NakCode::InvalidRequest));
    assert_eq!((end.state(), memory.read(40, 1)), (QpState::Error, vec![1]));
}

/// Invalid packets between those of a transfer are dropped and counted by kind, without any other effect.
#[test]
fn a_flood_of_garbage_disturbs_no_connection() {
    let (world, [tap, _]) = tapped([PortRules::default(), PortRules::default()]);
    let (a, b) = (world.node(1), world.node(2));
    let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    left.connect(&right, |_| {});
    right.connect(&left, |_| {});
    let (mine, theirs) = (a.buffer(1 << 20), b.buffer(1 << 20));
    let data = pattern(3, 1 << 20);
    mine.write(0, &data);
    left.submit(0, write(theirs.remote(0)), &[mine.sge(0, 1500)]);
    world.settle();
    let good: Vec<Vec<u8>> = tap.sent.lock().iter().map(<[u8]>::to_vec).collect();
    let header = Packet::parse(&good[0]).unwrap().header;
    let mut random = 1_u64;
    let mut next = move || {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(99);
        random >> 33
    };
    let mut garbage = |number: usize| -> Vec<u8> {
        let mut frame = good[number % good.len()].clone();
        let random = next();
        let mut foreign = header;
        match number % 5 {
            0 => {
                // Any bytes behind an EtherType that the device knows.
                let kind: [u8; 2] = [[0x89, 0x15], [0x08, 0x00], [0x86, 0xdd]][number / 5 % 3];
                frame = [&mac(2).0[..], &mac(7).0, &kind].concat();
                frame.extend((0..random % 300).map(|_| next().to_le_bytes()[0]));
                // The frame must be long enough to be told from other IP packets.
                match kind {
                    [8, 0] => frame.extend([0; 28]),
                    [0x86, 0xdd] => frame.extend([0; 48]),
                    _ => {}
                }
                if let ([8, 0], Some(ip)) = (kind, frame.get_mut(14..42)) {
                    (ip[0], ip[6], ip[7], ip[9]) = (0x45, 0, 0, 17);
                    ip[22..24].copy_from_slice(&4791_u16.to_be_bytes());
                }
                if let ([0x86, 0xdd], Some(ip)) = (kind, frame.get_mut(14..62)) {
                    ip[6] = 17;
                    ip[42..44].copy_from_slice(&4791_u16.to_be_bytes());
                }
            }
            1 => {
                let at = 54 + usize::try_from(random).unwrap() % (frame.len() - 54);
                frame[at] ^= 1 << (random % 8);
            }
            2 => {
                foreign.bth.destination = Qpn::new(0x5000 + u32::try_from(random % 100).unwrap());
                frame = build(&foreign, &[9; 8]).unwrap();
            }
            3 => {
                let Network::V2Ipv4(ip, _) = &mut foreign.network else { panic!("{header:?}") };
                ip.source[1] = 77;
                frame = build(&foreign, &[9; 8]).unwrap();
            }
            _ => frame[5] = 0x77,
        }
        frame
    };
    left.post(1, write(theirs.remote(0)), &[mine.all()]);
    left.post(2, SendOp::Read { remote: theirs.remote(0) }, &[mine.all()]);
    left.qp.notify_send();
    let mut count = 0;
    while left.scq.total() < 3 {
        for _ in 0..100 {
            let frame = garbage(count);
            count += 1;
            let mut frames = Frames::default();
            frames.push(&frame);
            assert_eq!(tap.inject(&frames), 1);
        }
        world.rxe.run_ready();
        world.far.as_ref().unwrap().run_ready();
    }
    assert!(count >= 500, "{count}");
    assert_eq!(left.scq.poll_statuses(), [(0, WcStatus::Success), (1, WcStatus::Success), (2, WcStatus::Success)]);
    assert!(theirs.read(0, 1 << 20) == data && mine.read(0, 1 << 20) == data);
    let each = count as u64 / 5;
    for name in ["malformed", "damaged", "no_qp", "address"] {
        assert_eq!(b.counter(&format!("wire_dropped_{name}")), each, "{name}");
    }
    assert_eq!(b.counter("passed_dropped"), each);
    for name in ["wire_out_of_sequence", "wire_duplicates", "wire_dropped_refused"] {
        assert_eq!(b.counter(name), 0, "{name}");
    }
    for name in ["wire_resent", "wire_timeouts", "wire_sequence_naks"] {
        assert_eq!(a.counter(name), 0, "{name}");
    }
}

/// A QP keeps the route on which it found its peer. When the peer's address moves, the new owner has no such
/// connection, and the connection ends as after a host's failure.
#[test]
fn an_address_that_moves_takes_its_connections_along() {
    for to_wire in [false, true] {
        let (world, [near, far]) = tapped([PortRules::default(), PortRules::default()]);
        let (a, b) = (world.node(1), world.node(2));
        // On the same engine as `a`, without a connection to the network.
        let neighbour = world.node(3);
        let peer = if to_wire {
            b.hca.unbind_gid(0);
            neighbour.hca.bind_gid(0, gid(2), GidType::RoceV2).unwrap();
            &neighbour
        } else {
            &b
        };
        let (left, right) = (a.qp(QpType::Rc), peer.qp(QpType::Rc));
        left.connect(&right, |a| (a.av.dgid, a.retry_cnt) = (gid(2), 2));
        right.connect(&left, |_| {});
        left.submit(1, write(Default::default()), &[]);
        assert_eq!(left.scq.poll_statuses(), [(1, WcStatus::Success)]);
        let on_the_wire = near.sent.lock().len();
        assert_eq!(on_the_wire > 0, !to_wire);
        // The address moves. Its new owner even has a QP with the same number that is connected to ours.
        let new = if to_wire { &b } else { &neighbour };
        peer.hca.unbind_gid(0);
        new.hca.bind_gid(0, gid(2), GidType::RoceV2).unwrap();
        let impostor = new.qp(QpType::Rc);
        assert_eq!(impostor.qp.qpn(), right.qp.qpn());
        impostor.connect(&left, |_| {});
        left.submit(2, write(Default::default()), &[]);
        world.settle();
        assert_eq!(left.scq.poll_statuses(), [(2, WcStatus::RetryExceeded)], "{to_wire}");
        assert_eq!(far.sent.lock().is_empty(), to_wire, "answers of the former peer only");
        // After RESET it finds the new one.
        left.to(QpState::Reset);
        impostor.to(QpState::Reset);
        left.connect(&impostor, |a| a.av.dgid = gid(2));
        impostor.connect(&left, |_| {});
        left.submit(3, write(Default::default()), &[]);
        world.settle();
        assert_eq!(left.scq.poll_statuses(), [(3, WcStatus::Success)], "{to_wire}");
    }
}
