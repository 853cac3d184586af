//! Datagrams and the general services QP.

use pvrdma_packet::MacAddr;
use pvrdma_roce::wire::{Network, Packet};
use pvrdma_verbs::testing::LogLines;
use pvrdma_verbs::{Hca, QueuePair, VerbsError};
use pvrdma_verbs_types::Gid;
use pvrdma_verbs_types::{
    Access, GidType, NetworkType, QpAttrMask, QpAttrs, QpState, QpType, Qpn, SendData, SendOp, Sge, UdDestination,
    WcFlags, WcStatus,
};

use crate::world::*;

pub(crate) const QKEY: u32 = 0x1234;
const GSI_QKEY: u32 = 0x8001_0000;

pub(crate) fn to(end: &End) -> UdDestination {
    UdDestination {
        qpn: end.qp.qpn(),
        qkey: QKEY,
        dgid: gid(end.node),
        hop_limit: 64,
        service_level: 3,
        ..UdDestination::default()
    }
}

pub(crate) const fn send(to: UdDestination) -> SendOp {
    SendOp::Send { data: SendData::None, to: Some(to) }
}

struct Datagrams {
    world: World,
    a: Node,
    b: Node,
    left: End,
    right: End,
    mine: Buffer,
    theirs: Buffer,
}

fn datagrams() -> Datagrams {
    let world = World::new();
    let (a, b) = (world.node(1), world.node(2));
    let (left, right) = (a.qp(QpType::Ud), b.qp(QpType::Ud));
    left.start_datagrams(QKEY);
    right.start_datagrams(QKEY);
    let (mine, theirs) = (a.buffer(8192), b.buffer(8192));
    mine.write(0, &pattern(1, 8192));
    Datagrams { world, a, b, left, right, mine, theirs }
}

#[test]
fn a_datagram_brings_its_header() {
    let d = datagrams();
    d.right.recv(5, &[d.theirs.all()]);
    d.left.submit(1, send(UdDestination { traffic_class: 0x6b, ..to(&d.right) }), &[d.mine.sge(0, 11)]);
    assert_eq!(d.right.rcq.one().service_level, 3);
    // The 20 bytes in front of an IPv4 header are zero.
    assert_eq!(d.theirs.read(0, 20), vec![0; 20]);
    assert_eq!(d.theirs.read(20, 2), [0x45, 0x68]);
    assert_eq!(d.a.counter("ud_delivered"), 1);
}

#[test]
fn datagrams_without_a_receiver_are_dropped_in_silence() {
    let d = datagrams();
    let rc = d.b.qp(QpType::Rc);
    let stopped = d.b.qp(QpType::Ud);
    d.left.submit(1, send(to(&d.right)), &[d.mine.sge(0, 8)]);
    d.right.recv(1, &[d.theirs.all()]);
    let good = to(&d.right);
    for (wr_id, destination) in [
        UdDestination { dgid: gid(99), ..good },
        UdDestination { qpn: Qpn::new(0x7777), ..good },
        UdDestination { qkey: QKEY + 1, ..good },
        UdDestination { qpn: rc.qp.qpn(), ..good },
        UdDestination { qpn: stopped.qp.qpn(), ..good },
        UdDestination { qpn: Qpn::new(0xff_ffff), ..good },
    ]
    .into_iter()
    .enumerate()
    {
        d.left.submit(wr_id as u64, send(destination), &[d.mine.sge(0, 8)]);
    }
    assert!(d.left.scq.poll().iter().all(|c| c.status == WcStatus::Success));
    assert!(d.right.rcq.poll().is_empty());
    assert_eq!(d.world.settle(), std::time::Duration::ZERO);
    let dropped: u64 = ["no_route", "no_qp", "qkey", "no_receive"]
        .iter()
        .map(|reason| d.a.counter(&format!("ud_dropped_{reason}")))
        .sum();
    assert_eq!(dropped, 7);
    // The receiver must have a GID of the same encapsulation.
    d.a.hca.bind_gid(3, gid(50), GidType::RoceV1).unwrap();
    d.left.submit(20, send(UdDestination { sgid_index: 3, ..good }), &[d.mine.sge(0, 8)]);
    assert!(d.right.rcq.poll().is_empty());
    d.b.hca.bind_gid(1, gid(2), GidType::RoceV1).unwrap();
    d.left.submit(21, send(UdDestination { sgid_index: 3, ..good }), &[d.mine.sge(0, 8)]);
    assert_eq!(d.right.rcq.one().network, Some(NetworkType::RoceV1));
    assert_eq!(d.theirs.read(6, 1), [0x1b]);
}

#[test]
fn a_receive_that_cannot_be_written_ends_its_qp() {
    let d = datagrams();
    // A datagram that is too long is the sender's fault; an invalid list of a receive is the receiver's.
    d.right.recv(1, &[d.theirs.sge(0, 47)]);
    d.left.submit(1, send(to(&d.right)), &[d.mine.sge(0, 8)]);
    d.left.submit(2, send(to(&d.right)), &[d.mine.sge(0, 7)]);
    assert_eq!(d.right.rcq.poll_statuses(), [(1, WcStatus::Success)]);
    assert_eq!((d.left.scq.poll().len(), d.a.counter("ud_too_long")), (2, 1));
    let readonly = d.b.buffer_at(0, 100, Access::empty());
    d.right.recv(3, &[readonly.all()]);
    d.left.submit(3, send(to(&d.right)), &[d.mine.sge(0, 8)]);
    d.world.settle();
    assert_eq!(d.right.rcq.poll_statuses(), [(3, WcStatus::LocalProtection)]);
    assert_eq!(d.right.state(), QpState::Error);
    assert_eq!(d.left.state(), QpState::Rts);
}

#[test]
fn local_errors_stop_the_send_queue_only() {
    type Make = fn(&Datagrams) -> (SendOp, Sge);
    let cases: [(&str, WcStatus, Make); 2] = [
        ("key", WcStatus::LocalProtection, |d| (send(to(&d.right)), Sge { lkey: 0, ..d.mine.sge(0, 1) })),
        ("invalidate", WcStatus::LocalQpOperation, |d| {
            (SendOp::Send { data: SendData::Invalidate(1), to: Some(to(&d.right)) }, d.mine.sge(0, 1))
        }),
    ];
    for (name, status, make) in cases {
        let d = datagrams();
        let (op, sge) = make(&d);
        d.left.recv(9, &[d.mine.sge(4096, 100)]);
        d.left.post(1, op, &[sge]);
        d.left.submit(2, send(to(&d.right)), &[]);
        assert_eq!(d.left.scq.poll_statuses(), [(1, status), (2, WcStatus::Flushed)], "{name}");
        assert_eq!(d.left.state(), QpState::Sqe);
        // The QP still receives, and sends again after its consumer has moved it from SQE to RTS.
        d.right.submit(3, send(to(&d.left)), &[]);
        assert_eq!(d.left.rcq.poll_statuses(), [(9, WcStatus::Success)], "{name}");
        let from_error = QpAttrs { cur_state: QpState::Sqe, ..QpAttrs::default() };
        d.left.change(QpState::Rts, from_error, QpAttrMask::CUR_STATE);
        d.right.recv(4, &[d.theirs.all()]);
        d.left.submit(4, send(to(&d.right)), &[d.mine.sge(0, 4096)]);
        assert_eq!(d.right.rcq.one().byte_len, 4136, "{name}");
    }
}

#[test]
fn general_services() {
    let world = World::new();
    let (a, b) = (world.node(1), world.node(2));
    let (left, right) = (a.qp(QpType::Gsi), b.qp(QpType::Gsi));
    assert_eq!(left.qp.qpn(), Qpn::GSI);
    left.start_datagrams(GSI_QKEY);
    right.start_datagrams(GSI_QKEY);
    let (mine, theirs) = (a.buffer(256), b.buffer(296));
    right.recv(1, &[theirs.all()]);
    left.submit(1, send(UdDestination { qkey: GSI_QKEY, ..to(&right) }), &[mine.sge(0, 24), mine.sge(24, 232)]);
    let got = right.rcq.one();
    assert_eq!((got.byte_len, got.src_qpn, got.flags), (296, Qpn::GSI, WcFlags::GRH));
    // Without bit 31, the Q_Key of the request is sent, which does not match.
    right.recv(2, &[theirs.all()]);
    left.submit(2, send(UdDestination { qkey: 0x10000, ..to(&right) }), &[mine.sge(0, 24)]);
    assert!(right.rcq.poll().is_empty());
    // An ordinary QP cannot send a privileged Q_Key: its own is sent instead.
    let user = a.qp(QpType::Ud);
    user.start_datagrams(QKEY);
    user.submit(3, send(UdDestination { qkey: GSI_QKEY, ..to(&right) }), &[mine.sge(0, 24)]);
    assert!(right.rcq.poll().is_empty());
    assert!(matches!(a.qp_on(QpType::Gsi, None, [None, None], |_| {}), Err(VerbsError::InUse(_))));
}

#[test]
fn datagrams_to_many_devices_and_to_oneself() {
    let world = World::new();
    let nodes: Vec<_> = (1..=4).map(|number| world.node(number)).collect();
    let ends: Vec<_> = nodes
        .iter()
        .map(|node| {
            let end = node.qp(QpType::Ud);
            end.start_datagrams(QKEY);
            end
        })
        .collect();
    let buffers: Vec<_> = nodes.iter().map(|node| node.buffer(4096)).collect();
    for round in 0..3_u64 {
        for (end, buffer) in ends.iter().zip(&buffers) {
            for from in 0..4 {
                end.recv(from, &[buffer.sge(0, 100)]);
            }
        }
        for (end, buffer) in ends.iter().zip(&buffers) {
            for peer in &ends {
                end.post(round, send(to(peer)), &[buffer.sge(200, 8)]);
            }
            end.qp.notify_send();
        }
        for (end, qpns) in ends.iter().map(|end| (end, ends.iter().map(|e| e.qp.qpn()).collect::<Vec<_>>())) {
            assert_eq!(end.scq.poll_statuses(), [(round, WcStatus::Success); 4]);
            assert_eq!(end.rcq.poll().iter().map(|c| c.src_qpn).collect::<Vec<_>>(), qpns);
        }
    }
}

/// A datagram to a multicast group is sent on the uplink for its members. Without an uplink, or from an address of
/// another family, it is dropped, which a counter and the log report.
#[test]
fn datagrams_to_groups() {
    let v4: Gid = std::net::IpAddr::from([239, 1, 2, 3]).into();
    let mut v6 = Gid([0; 16]);
    (v6.0[0], v6.0[1], v6.0[15]) = (0xff, 0x0e, 7);
    let own: Gid = "fe80::1".parse::<std::net::IpAddr>().unwrap().into();
    let group = |dgid, sgid_index, dmac| {
        let qpn = Qpn::new(0x00ff_ffff);
        send(UdDestination { qpn, qkey: QKEY, dgid, sgid_index, dmac, hop_limit: 1, ..UdDestination::default() })
    };
    let (macs, lines) = ([MacAddr([1, 0, 0x5e, 1, 2, 3]), MacAddr([0x33, 0x33, 0, 0, 0, 7])], LogLines::watch());
    let (world, node, cable, _station) = exposed(10);
    node.hca.bind_gid(1, own, GidType::RoceV2).unwrap();
    let end = node.qp(QpType::Ud);
    end.start_datagrams(QKEY);
    let memory = node.buffer(4096);
    for (dgid, index, mac) in [(v4, 0, macs[0]), (v6, 1, macs[1])] {
        end.submit(1, group(dgid, index, mac), &[memory.sge(0, 100)]);
        world.settle();
        assert_eq!(end.scq.one().status, WcStatus::Success);
        let frames = taken(&cable);
        let packet = Packet::parse(&frames[0]).unwrap();
        packet.verify().unwrap();
        let header = packet.header;
        assert_eq!((header.ethernet.destination, header.network.destination()), (mac, dgid));
        assert_eq!(
            (header.bth.destination.get(), header.network.source()),
            (0x00ff_ffff, [gid(1), own][index as usize])
        );
        assert_eq!(matches!(header.network, Network::V2Ipv4(..)), index == 0);
    }
    // Group and source of different families, and a device without an uplink.
    let beside = world.node(3);
    let alone = beside.qp(QpType::Ud);
    alone.start_datagrams(QKEY);
    let other = beside.buffer(4096);
    for (end, node, sge, dgid, text) in [
        (&end, &node, memory.sge(0, 9), v6, "a datagram to group ff0e::7 cannot come from ::ffff:10.0.0.1"),
        (&alone, &beside, other.sge(0, 9), v4, "a datagram to group ::ffff:239.1.2.3: members are beyond an uplink"),
    ] {
        end.submit(2, group(dgid, 0, macs[0]), &[sge]);
        world.settle();
        assert_eq!((end.scq.one().status, taken(&cable).len()), (WcStatus::Success, 0));
        assert_eq!((node.counter("ud_dropped_no_route"), lines.with(text).len()), (1, 1), "{text}");
    }
    // The guest's kernel binds every address of its interface, which may include a group's address (`autojoin`).
    for group in [v4, v6] {
        node.hca.bind_gid(2, group, GidType::RoceV2).unwrap();
    }
}
