//! A link that is down: the device sends and receives nothing, on any route.

use std::sync::Arc;

use pvrdma_link::{Frames, Link, fault::Faults, memory};
use pvrdma_rxe::PortConfig;
use pvrdma_verbs::{Hca, QueuePair, VerbsError};
use pvrdma_verbs_types::{
    Mtu, PortState, QpAttrMask, QpAttrs, QpState, QpType, SendData, SendOp, UdDestination, WcStatus,
};

use crate::world::*;

const QKEY: u32 = 0x1234;

#[test]
fn connections_wait_for_a_link_and_give_up() {
    for end in [0, 1] {
        let pair = Pair::new();
        let node = [&pair.a, &pair.b][end];
        pair.right.recv(1, &[]);
        pair.right.recv(2, &[]);
        assert!(node.hca.set_link(false).unwrap());
        assert_eq!((node.hca.set_link(false).unwrap(), node.hca.port().state), (false, PortState::Down));
        pair.left.send(1, &[]);
        pair.world.rxe.run_ready();
        assert!(pair.left.scq.poll().is_empty() && pair.right.rcq.poll().is_empty(), "end {end}");
        // In time.
        assert_eq!((node.hca.set_link(true).unwrap(), node.hca.port().state), (true, PortState::Active));
        pair.settle();
        assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Success)], "end {end}");
        assert_eq!(pair.right.rcq.poll_statuses(), [(1, WcStatus::Success)]);
        assert!(pair.a.counter("dropped_link_down") > 0);
        // Too late.
        assert!(node.hca.set_link(false).unwrap());
        pair.left.send(2, &[]);
        pair.settle();
        assert_eq!(pair.left.scq.poll_statuses(), [(2, WcStatus::RetryExceeded)], "end {end}");
        assert!(pair.right.rcq.poll().is_empty());
    }
}

/// This includes data in transfer, and traffic of the device with itself.
#[test]
fn a_link_goes_down_under_a_transfer() {
    let pair = Pair::new();
    let (mine, theirs) = (pair.a.buffer(8 << 20), pair.b.buffer(8 << 20));
    mine.write(0, &pattern(1, 8 << 20));
    pair.left.submit(1, write(theirs.remote(0)), &[mine.all()]);
    // The first part went with the doorbell.
    assert_ne!(theirs.read(0, 64), [0; 64]);
    assert!(pair.a.hca.set_link(false).unwrap());
    pair.world.rxe.run_ready();
    assert_eq!(theirs.read((8 << 20) - 64, 64), [0; 64]);
    assert!(pair.a.hca.set_link(true).unwrap());
    pair.settle();
    assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Success)]);
    assert!(theirs.read(0, 8 << 20) == mine.read(0, 8 << 20));
}

#[test]
fn datagrams_get_lost() {
    for end in [0, 1] {
        let world = World::new();
        let (a, b) = (world.node(1), world.node(2));
        let (left, right) = (a.qp(QpType::Ud), b.qp(QpType::Ud));
        left.start_datagrams(QKEY);
        right.start_datagrams(QKEY);
        let (mine, theirs) = (a.buffer(64), b.buffer(128));
        right.recv(5, &[theirs.all()]);
        let to = UdDestination {
            qpn: right.qp.qpn(),
            qkey: QKEY,
            dgid: gid(right.node),
            hop_limit: 64,
            ..UdDestination::default()
        };
        let send = |id| left.submit(id, SendOp::Send { data: SendData::None, to: Some(to) }, &[mine.all()]);
        let node = [&a, &b][end];
        node.hca.set_link(false).unwrap();
        send(1);
        assert_eq!(left.scq.one().status, WcStatus::Success, "a datagram has left, whether anybody took it or not");
        assert!(right.rcq.poll().is_empty(), "end {end}");
        assert_eq!(a.counter("dropped_link_down"), 1);
        node.hca.set_link(true).unwrap();
        send(2);
        assert_eq!((left.scq.one().status, right.rcq.one().wr_id), (WcStatus::Success, 5), "end {end}");
    }
}

/// RxeStation and network function: RoCE and other frames are dropped in both directions, including frames that were
/// waiting.
#[test]
fn a_port_that_is_down() {
    let world = World::new();
    let (uplink, network) = memory::pair(3).unwrap();
    let (nic, function) = memory::pair(1000).unwrap();
    let config = PortConfig::new(Arc::new(uplink), 4500).with_nic(Some(Arc::new(nic)));
    let _station = plug_in(&world.rxe, 1, config);
    let node = world.node(1);
    let end = node.qp(QpType::Rc);
    connect_to_test(&end);
    end.recv(1, &[]);
    let give = |link: &memory::MemoryLink, frame: &[u8]| {
        let mut frames = Frames::default();
        frames.push(frame);
        assert_eq!(link.send(&frames, 0), 1);
        world.rxe.run_ready();
    };
    let own = [&[0xff; 6], &mac(1).0[..], &[0x88, 0xb5], b"who has"].concat();
    let theirs = [&[0xff; 6], &mac(2).0[..], &[0x88, 0xb5], b"who has"].concat();
    // More than the uplink holds.
    (0..5).for_each(|_| give(&function, &own));
    node.hca.set_link(false).unwrap();
    assert_eq!((taken(&network).len(), node.counter("frames_dropped_link_down")), (3, 2));
    for (number, (link, frame)) in
        [(&network, request()), (&network, theirs.clone()), (&function, own.clone())].into_iter().enumerate()
    {
        give(link, &frame);
        assert_eq!(node.counter("frames_dropped_link_down"), 3 + number as u64);
    }
    assert!(taken(&network).is_empty() && taken(&function).is_empty() && end.rcq.poll().is_empty());
    node.hca.set_link(true).unwrap();
    give(&network, &request());
    assert_eq!((end.rcq.one().status, taken(&network).len()), (WcStatus::Success, 1));
    give(&function, &own);
    give(&network, &theirs);
    assert_eq!((taken(&network), taken(&function)), (vec![own], vec![theirs]));
    // Its own requests as well.
    node.hca.set_link(false).unwrap();
    let before = node.counter("frames_dropped_link_down");
    end.send(1, &[]);
    world.rxe.run_ready();
    assert!(taken(&network).is_empty() && node.counter("frames_dropped_link_down") > before);
}

/// When the MTU of the uplink changes, new connections must fit it. Packets of existing connections pass if they fit.
#[test]
fn path_mtus_follow_the_mtu_of_the_uplink() {
    on_the_wire(Faults::default(), 1, || {
        let pair = Pair::with(World::new(), |a| a.path_mtu = Mtu::M4096, |a| a.path_mtu = Mtu::M4096);
        let (mine, theirs) = (pair.a.buffer(4096), pair.b.buffer(4096));
        let path_mtu = || pair.a.hca.port().active_mtu;
        assert_eq!(path_mtu(), Mtu::M4096);
        assert!(
            !pair.a.hca.set_uplink_mtu(Some(9000)) && path_mtu() == Mtu::M4096,
            "it is no more than it was made for"
        );
        assert!(pair.a.hca.set_uplink_mtu(Some(1500)) && !pair.a.hca.set_uplink_mtu(Some(1400)));
        assert_eq!(path_mtu(), Mtu::M1024);
        let try_path_mtu = |path_mtu| {
            let end = pair.a.qp(QpType::Rc);
            let attrs = QpAttrs { state: QpState::Rtr, path_mtu, ..QpAttrs::default() };
            end.qp.modify(&attrs, QpAttrMask::STATE | QpAttrMask::PATH_MTU)
        };
        for too_long in [Mtu::M2048, Mtu::M4096] {
            assert!(matches!(try_path_mtu(too_long), Err(VerbsError::Invalid("a path MTU above that of the port"))));
        }
        assert!(matches!(try_path_mtu(Mtu::M1024), Err(VerbsError::Transition(_))), "no further event");
        // Packets that fit pass. Longer ones are dropped here, and counted.
        pair.left.submit(1, write(theirs.remote(0)), &[mine.sge(0, 1000)]);
        pair.settle();
        assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Success)]);
        assert_eq!(pair.a.counter("wire_dropped_too_long"), 0);
        pair.left.submit(2, write(theirs.remote(0)), &[mine.all()]);
        pair.world.run();
        assert!(pair.left.scq.poll().is_empty() && pair.a.counter("wire_dropped_too_long") > 0);
        // In time.
        assert!(pair.a.hca.set_uplink_mtu(None) && path_mtu() == Mtu::M4096);
        pair.settle();
        assert_eq!(pair.left.scq.poll_statuses(), [(2, WcStatus::Success)]);
        // Too late.
        pair.a.hca.set_uplink_mtu(Some(1500));
        pair.left.submit(3, write(theirs.remote(0)), &[mine.all()]);
        pair.settle();
        assert_eq!(pair.left.scq.poll_statuses(), [(3, WcStatus::RetryExceeded)]);
    });
}
