//! Data that a device moves is counted by peer and route, at the device that requests it.

use pvrdma_link::fault::Faults;
use pvrdma_rxe::{FlowCount, Road};
use pvrdma_verbs::QueuePair;
use pvrdma_verbs_types::{QpType, SendData, SendOp, UdDestination};

use crate::world::*;

const QKEY: u32 = 0x1234;
/// Bytes of a buffer.
const SIZE: u64 = 64 << 10;

fn requests_count_with_the_peer_that_they_go_to(far: Road) {
    let world = World::new();
    let station = world.station(1);
    let (a, b, c) = (world.node(1), world.node(2), world.node(3));
    let mine = a.buffer(SIZE);
    assert_eq!(station.flows(), []);
    for (peer, length) in [(&b, 5000_u64), (&c, 300)] {
        let theirs = peer.buffer(SIZE);
        let (left, right) = (a.qp(QpType::Rc), peer.qp(QpType::Rc));
        left.connect(&right, |_| {});
        right.connect(&left, |_| {});
        let remote = theirs.remote(0);
        left.post(1, SendOp::Write { remote, immediate: None }, &[mine.sge(0, length)]);
        left.post(2, SendOp::Read { remote }, &[mine.sge(0, 70)]);
        right.recv(3, &[theirs.all()]);
        left.post(4, SEND, &[mine.sge(0, 7)]);
        left.qp.notify_send();
        // A failed request does not count as moved data.
        world.settle();
        left.post(5, SendOp::Read { remote: theirs.remote(SIZE + 1) }, &[mine.sge(0, 1)]);
        left.qp.notify_send();
        world.settle();
    }
    let (sender, receiver) = (a.qp(QpType::Ud), c.qp(QpType::Ud));
    sender.start_datagrams(QKEY);
    receiver.start_datagrams(QKEY);
    let qpn = receiver.qp.qpn();
    let to = UdDestination { qpn, qkey: QKEY, dgid: gid(3), dmac: mac(3), ..UdDestination::default() };
    sender.post(6, SendOp::Send { data: SendData::None, to: Some(to) }, &[mine.sge(0, 11)]);
    sender.qp.notify_send();
    world.settle();
    let count = |number, road, requests, bytes_out| FlowCount {
        peer: Some(gid(number)),
        road,
        requests,
        bytes_out,
        bytes_in: 70,
    };
    assert_eq!(station.flows(), [count(2, far, 3, 5007), count(3, Road::Local, 4, 318)]);
    // After the driver has ended, its counts remain.
    drop((sender, a));
    assert_eq!(station.flows().len(), 2);
    assert_eq!(world.station(3).flows(), []);
}

#[test]
fn flows_of_local_delivery() {
    requests_count_with_the_peer_that_they_go_to(Road::Local);
}

/// Node 2 is on the wire, node 3 in the same process.
#[test]
fn flows_on_the_wire() {
    on_the_wire(Faults::default(), 1, || requests_count_with_the_peer_that_they_go_to(Road::Wire));
}
