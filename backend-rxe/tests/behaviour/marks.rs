//! Headers of frames between two devices on a cable: encapsulations, kinds of addresses, VLAN tags and priorities.

use std::net::Ipv6Addr;

use pvrdma_packet::Vlan;
use pvrdma_roce::wire::{Opcode, Packet};
use pvrdma_rxe::{PortRules, VlanMode};
use pvrdma_verbs::{Hca, QueuePair};
use pvrdma_verbs_types::{Gid, GidType, NetworkType, QpType, SendData, SendOp, UdDestination, WcStatus};

use crate::tap::tapped_in;
use crate::world::*;

const QKEY: u32 = 0x1234;

/// Kind of the addresses of the two devices.
#[derive(Clone, Copy, Debug)]
struct Addresses {
    kind: GidType,
    gids: [&'static str; 2],
    network: NetworkType,
}

const ADDRESSES: [Addresses; 6] = {
    const V4: [&str; 2] = ["::ffff:10.0.0.1", "::ffff:10.0.0.2"];
    const GLOBAL: [&str; 2] = ["fd00:77::11", "fd00:77::12"];
    const LINK_LOCAL: [&str; 2] = ["fe80::ff:fe00:1", "fe80::ff:fe00:2"];
    const fn addresses(kind: GidType, gids: [&'static str; 2], network: NetworkType) -> Addresses {
        Addresses { kind, gids, network }
    }
    [
        addresses(GidType::RoceV1, V4, NetworkType::RoceV1),
        addresses(GidType::RoceV1, GLOBAL, NetworkType::RoceV1),
        addresses(GidType::RoceV1, LINK_LOCAL, NetworkType::RoceV1),
        addresses(GidType::RoceV2, V4, NetworkType::Ipv4),
        addresses(GidType::RoceV2, GLOBAL, NetworkType::Ipv6),
        addresses(GidType::RoceV2, LINK_LOCAL, NetworkType::Ipv6),
    ]
};

impl Addresses {
    fn gid(&self, number: u8) -> Gid {
        Gid(self.gids[usize::from(number) - 1].parse::<Ipv6Addr>().unwrap().octets())
    }

    fn bind(&self, node: &Node, vlan: Option<u16>) {
        node.hca.bind_gid_in_vlan(0, self.gid(node.number), self.kind, vlan).unwrap();
    }

    fn connect(&self, end: &End, peer: &End) {
        end.connect(peer, |a| {
            a.av.dgid = self.gid(peer.node);
            (a.av.traffic_class, a.av.service_level) = (0x6a, 3);
        });
    }
}

/// Sends requests of all kinds between two devices, and checks the `expected` tags and the traffic class of the address
/// vector in their frames.
fn exchange(addresses: Addresses, mode: VlanMode, rules: [PortRules; 2], vlan: Option<u16>, expected: Option<Vlan>) {
    let (world, taps) = tapped_in(mode, rules);
    let (a, b) = (world.node(1), world.node(2));
    addresses.bind(&a, vlan);
    addresses.bind(&b, vlan);
    let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    addresses.connect(&left, &right);
    addresses.connect(&right, &left);
    let (mine, theirs) = (a.buffer(20_000), b.buffer(20_000));
    let data = pattern(4, 10_001);
    mine.write(0, &data);
    right.recv(1, &[theirs.sge(0, 5000)]);
    left.submit(1, SEND, &[mine.sge(0, 4999)]);
    left.submit(2, write(theirs.remote(4999)), &[mine.sge(4999, 5002)]);
    left.submit(3, SendOp::Read { remote: theirs.remote(0) }, &[mine.sge(9_999, 10_001)]);
    left.submit(4, SendOp::FetchAdd { remote: theirs.remote(16_000), add: 5 }, &[mine.sge(0, 8)]);
    world.settle();
    let done: Vec<_> = (1..5).map(|wr_id| (wr_id, WcStatus::Success)).collect();
    assert_eq!(left.scq.poll_statuses(), done, "{addresses:?} {vlan:?}");
    assert_eq!(right.rcq.one().byte_len, 4999);
    assert!(mine.read(9_999, 10_001) == data && theirs.read(16_000, 8) == 5_u64.to_le_bytes());

    let (left, right) = (a.qp(QpType::Ud), b.qp(QpType::Ud));
    left.start_datagrams(QKEY);
    right.start_datagrams(QKEY);
    right.recv(1, &[theirs.sge(0, 2000)]);
    let to = UdDestination {
        qpn: right.qp.qpn(),
        qkey: QKEY,
        dgid: addresses.gid(2),
        dmac: mac(2),
        // The traffic class contains an ECN mark, which a datagram over IP must not send.
        traffic_class: 0x6b,
        service_level: 3,
        ..UdDestination::default()
    };
    left.submit(1, SendOp::Send { data: SendData::None, to: Some(to) }, &[mine.sge(9_999, 1000)]);
    let got = right.rcq.one();
    assert_eq!((got.status, got.byte_len, got.network), (WcStatus::Success, 1040, Some(addresses.network)));
    assert_eq!(got.service_level, expected.map_or(0, |vlan| vlan.pcp));
    assert!(theirs.read(40, 1000) == data[..1000]);
    // The peer's address is in the header at the place that the interface specifies.
    let header = theirs.read(0, 40);
    match addresses.network {
        NetworkType::Ipv4 => assert_eq!(header[32..36], addresses.gid(1).0[12..]),
        NetworkType::RoceV1 | NetworkType::Ipv6 => assert_eq!(header[8..24], addresses.gid(1).0),
    }

    for tap in taps {
        let sent = tap.sent.lock();
        assert!(sent.len() > 4, "{addresses:?}");
        for frame in sent.iter() {
            let packet = Packet::parse(frame).unwrap();
            packet.verify().unwrap();
            let header = packet.header;
            assert_eq!(header.ethernet.vlan, expected, "{addresses:?}");
            let class = match (header.bth.opcode, addresses.kind) {
                (Opcode::UD_SEND, GidType::RoceV1) => 0x6b,
                (Opcode::UD_SEND, GidType::RoceV2) => 0x68,
                _ => 0x6a,
            };
            assert_eq!((header.network.kind(), header.network.traffic_class()), (addresses.network, class));
        }
    }
}

#[test]
fn every_encapsulation_with_and_without_tags() {
    let tag = |vid| Some(Vlan { pcp: 3, dei: false, vid });
    for addresses in ADDRESSES {
        let rules = || [PortRules::default(), PortRules::default()];
        for mode in [VlanMode::Untagged, VlanMode::Trunk] {
            exchange(addresses, mode, rules(), None, None);
        }
        exchange(addresses, VlanMode::Trunk, rules(), Some(42), tag(42));
        // An access port adds its tag, whatever VLAN the guest has bound.
        exchange(addresses, VlanMode::Access(7), rules(), None, tag(7));
        exchange(addresses, VlanMode::Access(7), rules(), Some(42), tag(7));
        let priority = || rules().map(|rules| rules.with_priority_tags(true));
        for mode in [VlanMode::Untagged, VlanMode::Trunk] {
            exchange(addresses, mode, priority(), None, tag(0));
        }
        exchange(addresses, VlanMode::Trunk, priority(), Some(4094), tag(4094));
    }
}

/// Returns whether a write from node 1 in one VLAN reaches node 2 in another one, and the number of dropped frames.
fn reaches(vlans: [Option<u16>; 2], kinds: [GidType; 2]) -> (bool, u64) {
    let (world, _taps) = tapped_in(VlanMode::Trunk, [PortRules::default(), PortRules::default()]);
    let (a, b) = (world.node(1), world.node(2));
    for (node, (vlan, kind)) in [&a, &b].into_iter().zip(vlans.into_iter().zip(kinds)) {
        node.hca.bind_gid_in_vlan(0, gid(node.number), kind, vlan).unwrap();
    }
    let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    left.connect(&right, |a| a.retry_cnt = 1);
    right.connect(&left, |_| {});
    left.submit(1, write(Default::default()), &[]);
    world.settle();
    let status = left.scq.one().status;
    assert!(matches!(status, WcStatus::Success | WcStatus::RetryExceeded), "{status:?}");
    (status == WcStatus::Success, b.counter("wire_dropped_vlan"))
}

#[test]
fn vlans_are_kept_apart() {
    let v2 = [GidType::RoceV2; 2];
    assert_eq!(reaches([Some(42), Some(42)], v2), (true, 0));
    for vlans in [[None, Some(42)], [Some(42), None], [Some(42), Some(43)]] {
        assert_eq!(reaches(vlans, v2), (false, 2), "{vlans:?}");
    }
    // An address of another encapsulation is a different address; no tag is wrong here.
    assert_eq!(reaches([Some(42), Some(42)], [GidType::RoceV1, GidType::RoceV2]), (false, 0));
}

/// Local delivery separates VLANs as well: the same address may exist once in each VLAN.
#[test]
fn vlans_of_one_daemon() {
    let world = World::with(|config| config.vlan = VlanMode::Trunk);
    let (a, b, c) = (world.node(1), world.node(2), world.node(3));
    let bind = |node: &Node, vlan| node.hca.bind_gid_in_vlan(0, gid(node.number), GidType::RoceV2, vlan);
    c.hca.bind_gid_in_vlan(0, gid(2), GidType::RoceV2, None).unwrap();
    assert!(!crate::claims::has(&c, gid(2)), "another device without a VLAN holds the address");
    c.hca.bind_gid_in_vlan(0, gid(2), GidType::RoceV2, Some(7)).unwrap();
    for wrong in [0, 4095, u16::MAX] {
        assert!(bind(&a, Some(wrong)).is_err());
    }
    let datagrams = |vlan| {
        bind(&a, vlan).unwrap();
        let (sender, receivers) = (a.qp(QpType::Ud), [b.qp(QpType::Ud), c.qp(QpType::Ud)]);
        sender.start_datagrams(QKEY);
        let memory = a.buffer(8);
        let buffers = [b.buffer(100), c.buffer(100)];
        for (receiver, buffer) in receivers.iter().zip(&buffers) {
            receiver.start_datagrams(QKEY);
            receiver.recv(1, &[buffer.all()]);
            let qpn = receiver.qp.qpn();
            let to = UdDestination { qpn, qkey: QKEY, dgid: gid(2), ..UdDestination::default() };
            let op = SendOp::Send { data: SendData::None, to: Some(to) };
            sender.submit(1, op, &[memory.all()]);
        }
        receivers.map(|receiver| receiver.rcq.poll().len())
    };
    assert_eq!(datagrams(None), [1, 0]);
    assert_eq!(datagrams(Some(7)), [0, 1]);
    // A connection between different VLANs gets no answer.
    for (vlan, status) in [(Some(7), WcStatus::RetryExceeded), (None, WcStatus::Success)] {
        bind(&a, vlan).unwrap();
        let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
        left.connect(&right, |a| a.retry_cnt = 1);
        right.connect(&left, |_| {});
        left.submit(1, write(Default::default()), &[]);
        world.settle();
        assert_eq!(left.scq.one().status, status);
    }
}
