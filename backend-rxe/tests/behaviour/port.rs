//! The port of a device: the frames that it accepts and sends, and its behaviour on a full link.

use std::sync::Arc;

use pvrdma_link::switch::{Switch, UnknownUnicast};
use pvrdma_link::{Frames, Link, memory};
use pvrdma_rxe::{PortConfig, ShareConfig};
use pvrdma_verbs::{Hca, QueuePair, VerbsError};
use pvrdma_verbs_types::{
    GidType, Mtu, QpAttrMask, QpAttrs, QpState, QpType, SendData, SendOp, UdDestination, WcStatus,
};

use crate::world::*;

#[test]
fn the_guard() {
    let good = request();
    let (world, node, cable, _station) = exposed(100_000);
    let neighbour = world.node(3);
    let end = node.qp(QpType::Rc);
    connect_to_test(&end);
    end.recv(1, &[]);
    let give = |change: &dyn Fn(&mut Vec<u8>)| {
        let (mut frame, mut frames) = (good.clone(), Frames::default());
        change(&mut frame);
        frames.push(&frame);
        assert_eq!(cable.send(&frames, 0), 1);
        world.rxe.run_ready();
    };
    type Change = fn(&mut Vec<u8>);
    let cases: [(&str, Change); 6] = [
        ("wire_dropped_malformed", |frame| frame.truncate(50)),
        ("wire_dropped_damaged", |frame| *frame.last_mut().unwrap() ^= 1),
        ("wire_dropped_no_qp", |frame| frame[49] ^= 1),
        // To an address that the device does not have, with a correct header checksum.
        ("wire_dropped_address", |frame| (frame[31], frame[33]) = (frame[31] + 1, frame[33] - 1)),
        ("passed_dropped", |frame| frame[5] ^= 2),
        ("passed_dropped", |frame| frame[12] = 0x88),
    ];
    for (counter, change) in cases {
        let before = node.counter(counter);
        give(&change);
        assert_eq!(node.counter(counter), before + 1, "{counter}");
    }
    assert!(end.rcq.poll().is_empty());
    // A frame from the wire whose source is the address of a local device.
    neighbour.hca.bind_gid(1, gid(2), GidType::RoceV2).unwrap();
    let before = node.counter("wire_dropped_address");
    give(&|_| {});
    assert_eq!(node.counter("wire_dropped_address"), before + 1);
    neighbour.hca.unbind_gid(1);
    // The real one.
    give(&|_| {});
    assert_eq!(end.rcq.one().status, WcStatus::Success);
}

#[test]
fn a_full_link_holds_senders_up_and_loses_nothing() {
    let (world, node, cable, _station) = exposed(3);
    let end = node.qp(QpType::Rc);
    let memory = node.buffer(1 << 20);
    connect_to_test(&end);
    end.submit(1, write(memory.remote(0)), &[memory.all()]);
    world.rxe.run_ready();
    let mut got = Frames::default();
    // A window of packets leaves in order and without a gap, even if the cable is read slowly.
    for _ in 0..300 {
        cable.receive(&mut got, 1);
        world.rxe.run_ready();
    }
    let psn = |frame: &[u8]| u32::from_be_bytes([0, frame[51], frame[52], frame[53]]);
    assert!(got.iter().map(psn).eq(5..5 + 256), "{}", got.len());
    assert_eq!(node.counter("wire_dropped_no_room"), 0);
}

#[test]
fn the_port_reports_the_path_mtu_of_the_network() {
    for (mtu, path) in
        [(1500, Mtu::M1024), (9000, Mtu::M4096), (4200, Mtu::M4096), (2300, Mtu::M2048), (576, Mtu::M256)]
    {
        let world = World::new();
        let (ours, _theirs) = memory::pair(1).unwrap();
        let config = PortConfig::new(Arc::new(ours), mtu);
        let _station = plug_in(&world.rxe, 1, config.clone());
        assert!(world.rxe.station(mac(1)).plug(config).is_err());
        assert_eq!(world.node(1).hca.port().active_mtu, path);
        assert_eq!(world.node(3).hca.port().active_mtu, Mtu::M4096);
    }
}

/// A world whose node 1 has a network with an MTU of 1500 bytes.
fn narrow() -> (World, pvrdma_rxe::RxeStation, memory::MemoryLink) {
    let world = World::new();
    let (ours, theirs) = memory::pair(100).unwrap();
    let config = PortConfig::new(Arc::new(ours), 1500);
    let station = plug_in(&world.rxe, 1, config);
    (world, station, theirs)
}

/// Packets of 4096 bytes would all be lost, so the path MTU is refused before the guest sends.
#[test]
fn a_path_mtu_above_that_of_the_port_is_refused() {
    use QpAttrMask as M;
    let (world, _station, _cable) = narrow();
    let (a, b) = (world.node(1), world.node(3));
    let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    for (end, peer, mtu, fits) in [(&left, &right, Mtu::M2048, false), (&right, &left, Mtu::M4096, true)] {
        let attrs = QpAttrs { path_mtu: mtu, state: QpState::Rtr, ..End::toward(peer) };
        end.change(QpState::Init, attrs, M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS);
        let mask = M::STATE | M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
        assert_eq!(end.qp.modify(&attrs, mask).is_ok(), fits, "{mtu:?}");
        assert_eq!(end.state(), if fits { QpState::Rtr } else { QpState::Init });
        let smaller = QpAttrs { path_mtu: Mtu::M1024, ..attrs };
        assert!(fits || end.qp.modify(&smaller, mask).is_ok());
        assert!(fits || matches!(end.qp.modify(&attrs, M::STATE | M::PATH_MTU), Err(VerbsError::Invalid(_))));
    }
}

/// The size limit of a datagram does not depend on the location of its receiver.
#[test]
fn datagrams_have_one_limit() {
    let (world, _station, _cable) = narrow();
    let (a, b) = (world.node(1), world.node(3));
    let (left, right) = (a.qp(QpType::Ud), b.qp(QpType::Ud));
    left.start_datagrams(0x1234);
    right.start_datagrams(0x1234);
    let (mine, theirs) = (a.buffer(4096), b.buffer(8192));
    for (length, status) in [(1024, WcStatus::Success), (1025, WcStatus::LocalLength)] {
        // To a device of this process, and to an address on the wire.
        for dgid in [gid(3), gid(9)] {
            right.recv(1, &[theirs.all()]);
            let qpn = right.qp.qpn();
            let to = UdDestination { qpn, qkey: 0x1234, dgid, hop_limit: 64, ..UdDestination::default() };
            left.submit(2, SendOp::Send { data: SendData::None, to: Some(to) }, &[mine.sge(0, length)]);
            world.settle();
            assert_eq!(left.scq.one().status, status, "{length} bytes to {dgid:?}");
            if left.state() == QpState::Sqe {
                left.change(QpState::Rts, QpAttrs::default(), QpAttrMask::empty());
            }
        }
    }
}

/// An adapter holds its port for longer than the station. The address is free at once nevertheless.
#[test]
fn a_station_that_ends_leaves_the_switch() {
    let world = World::new();
    let switch = Switch::without_thread(None, 1500, Arc::clone(&world.clock) as _).unwrap();
    let port = || switch.port(mac(1), UnknownUnicast::Drop);
    let station = world.rxe.station(mac(1));
    station.plug(PortConfig::new(port().unwrap(), 1500)).unwrap();
    let _node = Node::new(&world.rxe, 1);
    assert!(port().is_err());
    drop(station);
    assert!(port().is_ok());
}

#[test]
fn handles_of_one_address_are_one_station() {
    let world = World::new();
    let (ours, _theirs) = memory::pair(1).unwrap();
    let [one, other] = [(); 2].map(|()| world.rxe.station(mac(1)));
    one.plug(PortConfig::new(Arc::new(ours), 1500)).unwrap();
    one.set_share(ShareConfig::default().with_weight(7));
    drop(one);
    assert_eq!(other.share().weight, 7);
    assert!(!other.port_counters().is_empty());
    other.unplug();
    assert!(other.port_counters().is_empty());
}
