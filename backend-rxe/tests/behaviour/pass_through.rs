//! The daemon's place between a network function and its network: RoCE for the device is taken out, everything else
//! passes.

use std::slice;
use std::sync::Arc;

use pvrdma_verbs::{QpType, WcStatus};

use crate::world::*;
use pvrdma_ether_link::memory::{self, MemoryLink};
use pvrdma_ether_link::{Frames, Link};
use pvrdma_rxe::{PortConfig, PortRules, Uplink};

/// A device whose uplink and whose network function are both in the hands of the test.
struct Between {
    world: World,
    network: MemoryLink,
    function: MemoryLink,
    _uplink: Uplink,
}

impl Between {
    /// `room`: frames that the link to the network function holds.
    fn new(room: usize) -> Self {
        let world = World::new();
        let (uplink, network) = memory::pair(10_000).unwrap();
        let (nic, function) = memory::pair(room).unwrap();
        let config =
            PortConfig { uplink: Arc::new(uplink), nic: Some(Arc::new(nic)), mtu: 4500, rules: PortRules::default() };
        let uplink = world.rxe.plug(mac(1), config).unwrap();
        Self { world, network, function, _uplink: uplink }
    }

    fn give(&self, link: &MemoryLink, list: &[Vec<u8>]) {
        let mut frames = Frames::default();
        list.iter().for_each(|frame| frames.push(frame));
        assert_eq!(link.send(&frames, 0), list.len());
        self.world.rxe.run_ready();
    }
}

/// A frame with this destination, type and content.
fn frame(to: [u8; 6], kind: u16, content: &[u8]) -> Vec<u8> {
    [&to[..], &mac(2).0, &kind.to_be_bytes(), content].concat()
}

#[test]
fn roce_is_for_the_device_and_the_rest_passes_both_ways() {
    let between = Between::new(1000);
    let roce = request();
    // Nobody serves the device yet: its frames may be for software in the guest.
    between.give(&between.network, slice::from_ref(&roce));
    assert_eq!(taken(&between.function), slice::from_ref(&roce));

    let node = between.world.node(1);
    let end = node.qp(QpType::Rc);
    connect_to_test(&end);
    end.recv(1, &[]);
    let mut others = roce.clone();
    others[..6].copy_from_slice(&mac(3).0);
    let passing = [
        frame([0xff; 6], 0x0806, b"who has"),
        others,
        frame(mac(1).0, 0x0800, &[0x45; 40]),
        frame(mac(1).0, 0x86dd, &[0x60; 60]),
        vec![1, 2, 3],
    ];
    let (first, second) = passing.split_at(2);
    between.give(&between.network, &[first, &[roce], second].concat());
    assert_eq!(taken(&between.function), passing, "as they were and in their order");
    assert_eq!((end.rcq.one().status, end.rcq.poll().len()), (WcStatus::Success, 0));
    let answers = taken(&between.network);
    assert!(answers.len() == 1 && answers[0][..6] == mac(2).0, "the device acknowledges, {answers:?}");

    let mut own = passing.to_vec();
    own.pop();
    own.iter_mut().for_each(|frame| frame[6..12].copy_from_slice(&mac(1).0));
    between.give(&between.function, &own);
    // Only queue pairs send RoCE.
    own.remove(1);
    assert_eq!(taken(&between.network), own);
    assert_eq!(node.counter("passed_dropped_roce"), 1);
    assert!(taken(&between.function).is_empty(), "nothing comes back");
    let counts = ["passed_in", "passed_out", "passed_dropped", "wire_frames_received", "wire_frames_sent"];
    assert_eq!(counts.map(|name| node.counter(name)), [6, 3, 0, 1, 1]);

    // The driver goes, and with it the device.
    drop((end, node));
    between.give(&between.network, &[request()]);
    assert_eq!(taken(&between.function).len(), 1);
}

#[test]
fn a_function_that_does_not_take_its_frames_holds_nobody_up() {
    let between = Between::new(1);
    let node = between.world.node(1);
    let end = node.qp(QpType::Rc);
    connect_to_test(&end);
    end.recv(1, &[]);
    let numbered: Vec<_> = (0..1000_u32)
        .map(|number| frame(mac(1).0, 0x0800, &[&number.to_be_bytes()[..], &[0; 9000]].concat()))
        .collect();
    between.give(&between.network, &numbered);
    between.give(&between.network, &[request()]);
    assert_eq!(end.rcq.one().status, WcStatus::Success, "RDMA goes on");
    let dropped = usize::try_from(node.counter("passed_dropped")).unwrap();
    assert!((400..600).contains(&dropped), "{dropped} of 1000 frames of 9 KB, of which 4 MiB wait");
    // What waits comes in its order as soon as there is room.
    let mut got = Vec::new();
    loop {
        let more = taken(&between.function);
        if more.is_empty() {
            break;
        }
        got.extend(more);
        between.world.rxe.run_ready();
    }
    assert!(got == numbered[..1000 - dropped]);
}
