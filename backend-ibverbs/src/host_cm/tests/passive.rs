//! Connections that peers begin.

use pvrdma_ib_cm::{MessageKind, Rej, RejectReason};
use pvrdma_verbs::Peers;
use rustix::io::Errno;

use super::*;

const OURS: u32 = 0x9009;

/// The guest's answer to a REQ.
fn accept(req: &Req, qpn: u32) -> Message {
    Message::Rep(Rep {
        local_id: OURS,
        remote_id: req.local_id,
        qpn: Qpn::new(qpn),
        responder_resources: 100,
        initiator_depth: 2,
        private_data: [6; 196],
        ..Rep::default()
    })
}

#[test]
fn from_request_to_end() {
    let mut bench = Bench::new();
    let listener = bench.listener();
    let (id, req) = bench.asked(listener);
    assert_eq!((req.service_id, req.qpn.get()), (PORT_SPACE_TCP + u64::from(PORT), PEER_QPN));
    let addresses = IpAddresses::from_bytes(req.private_data.first_chunk().unwrap()).unwrap();
    assert_eq!((addresses.source, addresses.source_port, addresses.destination), (ip(gid(9)), 40000, ip(gid(1))));
    assert_eq!(req.private_data[36..], [9; 56]);
    let end = init(&bench);
    to_rtr(&end, PEER_QPN).unwrap();
    to_rts(&end).unwrap();
    bench.send(accept(&req, qpn(&end)));
    let calls = bench.calls();
    let [CmCall::Accept(data)] = &calls[..] else { panic!("{calls:?}") };
    assert_eq!((data.qpn, data.private_data.clone()), (qpn(&end), vec![6; 196]));
    assert_eq!((data.responder_resources, data.initiator_depth), (16, 2));
    assert_eq!(bench.received(), []);
    bench.event(id, sys::ESTABLISHED, 0, ConnectionData::default());
    assert!(matches!(bench.one(), Message::Rtu(rtu) if rtu.remote_id == OURS));
    assert_eq!(bench.counter("cm_connections"), 1);

    bench.event(id, sys::DISCONNECTED, 0, ConnectionData::default());
    assert_eq!(bench.calls(), [CmCall::Disconnect, CmCall::Destroy]);
    let Message::Dreq(message) = bench.one() else { panic!("no DREQ") };
    bench.send(drep(&message));
    bench.tick();
    assert_eq!(bench.manager().connections.len(), 0);
}

#[test]
fn a_guest_may_end_it_as_well() {
    let mut bench = Bench::new();
    let listener = bench.listener();
    let (id, req) = bench.asked(listener);
    let end = init(&bench);
    to_rtr(&end, PEER_QPN).unwrap();
    bench.send(accept(&req, qpn(&end)));
    bench.event(id, sys::ESTABLISHED, 0, ConnectionData::default());
    bench.received();
    bench.calls();
    let (local_id, remote_id, remote_qpn) = (OURS, req.local_id, Qpn::new(PEER_QPN));
    bench.send(Message::Dreq(Dreq { local_id, remote_id, remote_qpn, private_data: [0; 220] }));
    assert!(matches!(bench.one(), Message::Drep(_)));
    assert_eq!(bench.calls(), [CmCall::Disconnect]);
    bench.event(id, sys::DISCONNECTED, 0, ConnectionData::default());
    assert_eq!(bench.calls(), [CmCall::Destroy]);
}

#[test]
fn a_guest_that_rejects_rejects_to_the_peer() {
    let mut bench = Bench::new();
    let listener = bench.listener();
    let (_, req) = bench.asked(listener);
    bench.send(Message::Rej(Rej {
        local_id: 0,
        remote_id: req.local_id,
        rejected: MessageKind::Req,
        reason: RejectReason::INVALID_SERVICE_ID,
        info_len: 0,
        info: [0; 72],
        private_data: [4; 148],
    }));
    assert_eq!(bench.calls(), [CmCall::Reject(vec![4; 148]), CmCall::Destroy]);
}

#[test]
fn a_guest_that_does_not_answer_is_given_up() {
    let mut bench = Bench::new();
    let listener = bench.listener();
    bench.asked(listener);
    while bench.backend.host.cm_ids() == 2 {
        bench.tick();
    }
    assert_eq!(bench.calls(), [CmCall::Destroy]);
    assert_eq!(bench.received().len(), usize::from(pvrdma_ib_cm::MAX_REPEATS) + 1);
}

#[test]
fn a_peer_that_gives_up_is_reported_to_the_guest() {
    for kind in [sys::UNREACHABLE, sys::REJECTED, sys::CONNECT_ERROR] {
        let mut bench = Bench::new();
        let listener = bench.listener();
        let (id, _) = bench.asked(listener);
        bench.event(id, kind, 4, ConnectionData::default());
        assert!(matches!(bench.one(), Message::Rej(rej) if rej.reason == RejectReason::TIMEOUT));
        assert_eq!(bench.calls(), [CmCall::Destroy]);
    }
}

/// Only what the device listens for, from peers that it may have, with private data that a REQ can carry.
#[test]
fn requests_that_the_guest_may_not_see_are_rejected() {
    let peers = Peers(vec!["10.0.0.8".parse().unwrap()]);
    for (rules, data, counter) in [
        (rules().with_peers(peers), wish(), "peers_refused"),
        (rules(), ConnectionData { private_data: vec![1; 57], ..wish() }, "cm_refused"),
    ] {
        let mut bench = Bench::on(TRANSPORT_IB, LINK_LAYER_ETHERNET, rules);
        let listener = bench.listener();
        bench.backend.host.cm_request(listener, "10.0.0.9:40000".parse().unwrap(), data);
        bench.run();
        assert_eq!((bench.received(), bench.counter(counter)), (vec![], 1));
        assert_eq!(bench.calls(), [CmCall::Reject(Vec::new()), CmCall::Destroy]);
    }
}

#[test]
fn the_host_listens_on_the_guests_own_addresses_while_it_has_them() {
    let mut bench = Bench::new();
    assert_eq!(bench.calls(), [CmCall::Listen(SocketAddr::new(ip(gid(1)), PORT))]);
    // The host does not have this one.
    bench.node.hca.bind_gid(1, gid(2), GidType::RoceV2).unwrap();
    bench.run();
    assert_eq!(bench.calls(), []);
    bench.node.hca.unbind_gid(0);
    bench.run();
    assert_eq!(bench.calls(), [CmCall::Destroy]);
    bench.backend.host.refuse_cm("listen", Errno::ADDRINUSE);
    bench.node.hca.bind_gid(0, gid(1), GidType::RoceV2).unwrap();
    bench.run();
    assert_eq!(bench.calls().last(), Some(&CmCall::Destroy));
    assert_eq!(bench.backend.host.cm_ids(), 0);
}
