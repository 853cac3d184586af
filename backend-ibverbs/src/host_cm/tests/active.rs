//! Connections that the guest begins.

use pvrdma_ib_cm::{MessageKind, Mra, Rej, RejectReason, Rtu};
use rustix::io::Errno;

use super::*;
use crate::fake::ATTRIBUTE_QPN;

#[test]
fn from_request_to_end() {
    let mut bench = Bench::new();
    let end = init(&bench);
    let id = bench.connecting(qpn(&end));
    let calls = bench.calls();
    let [CmCall::ResolveRoute, CmCall::Connect(data)] = &calls[..] else { panic!("{calls:?}") };
    assert_eq!((data.qpn, data.private_data.clone()), (qpn(&end), vec![7; 56]));
    // The device has 16.
    assert_eq!((data.responder_resources, data.initiator_depth, data.retry_count, data.rnr_retry), (3, 16, 6, 5));
    bench.event(id, sys::CONNECT_RESPONSE, 0, answer());
    let Message::Rep(rep) = bench.one() else { panic!("no REP") };
    assert_eq!((rep.qpn.get(), rep.remote_id, rep.private_data), (PEER_QPN, GUEST_ID, [8; 196]));
    // The host's view, turned round.
    assert_eq!((rep.initiator_depth, rep.responder_resources), (2, 1));

    // The QP gets the host's path, and keeps the guest's limits.
    to_rtr(&end, PEER_QPN).unwrap();
    to_rts(&end).unwrap();
    let changes = bench.backend.host.modifications(qpn(&end));
    let (rtr, mask) = changes[1];
    assert_eq!((rtr.qp_state, rtr.dest_qp_num, rtr.max_dest_rd_atomic), (2, ATTRIBUTE_QPN, 4));
    // The bits of the kernel's own are not passed on.
    assert_eq!((mask >> 21, mask & 0x80), (0, 0x80));
    assert_eq!((changes[2].0.qp_state, changes[2].0.timeout), (3, 18));

    assert_eq!(bench.calls(), []);
    bench.send(Message::Rtu(Rtu { local_id: GUEST_ID, remote_id: rep.local_id, private_data: [0; 224] }));
    assert_eq!((bench.calls(), bench.counter("cm_connections")), (vec![CmCall::Establish], 1));

    bench.send(dreq(&rep, PEER_QPN));
    assert!(matches!(bench.one(), Message::Drep(_)));
    assert_eq!(bench.calls(), [CmCall::Disconnect]);
    bench.event(id, sys::DISCONNECTED, 0, ConnectionData::default());
    assert_eq!(bench.calls(), [CmCall::Destroy]);
    // Late messages are answered for a while; then nothing is left.
    bench.send(dreq(&rep, PEER_QPN));
    assert!(matches!(bench.one(), Message::Drep(_)));
    bench.tick();
    assert_eq!(bench.manager().connections.len(), 0);
}

#[test]
fn a_peer_that_ends_the_connection_ends_it_for_the_guest() {
    let mut bench = Bench::new();
    let end = init(&bench);
    let (id, rep) = bench.connected(&end);
    bench.event(id, sys::DISCONNECTED, 0, ConnectionData::default());
    // The host confirms the end to the peer.
    assert_eq!(bench.calls(), [CmCall::Disconnect, CmCall::Destroy]);
    let Message::Dreq(message) = bench.one() else { panic!("no DREQ") };
    assert_eq!((message.local_id, message.remote_id, message.remote_qpn.get()), (rep.local_id, GUEST_ID, qpn(&end)));
    bench.send(drep(&message));
    bench.tick();
    assert_eq!(bench.manager().connections.len(), 0);
}

fn rejection(bench: &Bench) -> (RejectReason, u8) {
    let Message::Rej(rej) = bench.one() else { panic!("no REJ") };
    (rej.reason, rej.private_data[0])
}

#[test]
fn what_a_peer_says_no_with_reaches_the_guest() {
    let private = ConnectionData { private_data: vec![5; 148], ..ConnectionData::default() };
    for (kind, status, expected) in [
        (sys::REJECTED, 28, (RejectReason::CONSUMER, 5)),
        (sys::REJECTED, 8, (RejectReason::INVALID_SERVICE_ID, 5)),
        // An errno of iWARP.
        (sys::REJECTED, -111, (RejectReason::CONSUMER, 5)),
        (sys::UNREACHABLE, -110, (RejectReason::TIMEOUT, 0)),
        (sys::CONNECT_ERROR, -22, (RejectReason::TIMEOUT, 0)),
        (sys::DEVICE_REMOVAL, 0, (RejectReason::TIMEOUT, 0)),
    ] {
        let mut bench = Bench::new();
        let end = init(&bench);
        let id = bench.connecting(qpn(&end));
        bench.calls();
        bench.event(id, kind, status, private.clone());
        assert_eq!((rejection(&bench), bench.calls()), (expected, vec![CmCall::Destroy]), "{kind} {status}");
        // The QP may be used for another attempt.
        bench.now += pvrdma_ib_cm::TIME_WAIT;
        bench.run();
        bench.begin(qpn(&end));
    }
}

#[test]
fn a_peer_that_cannot_be_resolved_is_not_waited_for() {
    for (resolved, kind) in [(false, sys::ADDR_ERROR), (true, sys::ROUTE_ERROR)] {
        let mut bench = Bench::new();
        let end = init(&bench);
        let id = bench.begin(qpn(&end));
        if resolved {
            bench.event(id, sys::ADDR_RESOLVED, 0, ConnectionData::default());
        }
        bench.event(id, kind, -110, ConnectionData::default());
        assert_eq!((rejection(&bench).0, bench.backend.host.cm_ids()), (RejectReason::TIMEOUT, 1));
    }
}

#[test]
fn calls_that_the_host_refuses_reject_the_guest() {
    for (call, errno, expected) in [
        ("resolve_addr", Errno::NODEV, RejectReason::TIMEOUT),
        ("resolve_route", Errno::INVAL, RejectReason::TIMEOUT),
        ("connect", Errno::INVAL, RejectReason::TIMEOUT),
        // No program listens: a TCP reset of an iWARP peer.
        ("connect", Errno::CONNREFUSED, RejectReason::INVALID_SERVICE_ID),
    ] {
        let mut bench = Bench::new();
        let end = init(&bench);
        bench.backend.host.refuse_cm(call, errno);
        bench.send(Message::Req(Box::new(request(qpn(&end)))));
        // The listener has the first number.
        for kind in [sys::ADDR_RESOLVED, sys::ROUTE_RESOLVED] {
            if bench.backend.host.cm_ids() == 2 {
                bench.event(2, kind, 0, ConnectionData::default());
            }
        }
        assert_eq!((rejection(&bench).0, bench.backend.host.cm_ids()), (expected, 1), "{call}");
    }
}

#[test]
fn a_guest_that_rejects_the_answer_rejects_it_to_the_peer() {
    let mut bench = Bench::new();
    let end = init(&bench);
    let (_, rep) = bench.offered(qpn(&end));
    bench.calls();
    bench.send(Message::Rej(Rej {
        local_id: GUEST_ID,
        remote_id: rep.local_id,
        rejected: MessageKind::Rep,
        reason: RejectReason::CONSUMER,
        info_len: 0,
        info: [0; 72],
        private_data: [3; 148],
    }));
    assert_eq!(bench.calls(), [CmCall::Reject(vec![3; 148]), CmCall::Destroy]);
}

/// The guest hears of a slow host, and its repeated REQ begins no second connection.
#[test]
fn a_guest_that_waits_is_asked_for_patience() {
    let mut bench = Bench::new();
    let end = init(&bench);
    bench.begin(qpn(&end));
    bench.tick();
    let Message::Mra(Mra { answered, remote_id, .. }) = bench.one() else { panic!("no MRA") };
    assert_eq!((answered, remote_id), (MessageKind::Req, GUEST_ID));
    bench.send(Message::Req(Box::new(request(qpn(&end)))));
    assert_eq!((bench.calls(), bench.received().len(), bench.manager().connections.len()), (vec![], 1, 1));
}

#[test]
fn a_guest_that_does_not_confirm_loses_the_connection() {
    let mut bench = Bench::new();
    let end = init(&bench);
    bench.offered(qpn(&end));
    bench.calls();
    while bench.backend.host.cm_ids() == 2 {
        bench.tick();
    }
    let received = bench.received();
    let reps = received.iter().filter(|message| matches!(message, Message::Rep(_))).count();
    assert_eq!((reps, bench.calls()), (usize::from(pvrdma_ib_cm::MAX_REPEATS), vec![CmCall::Destroy]));
    assert!(matches!(received.last(), Some(Message::Rej(_))));
}

/// Whatever the state, the host keeps nothing of a QP that is gone, and the guest hears of it.
#[test]
fn a_queue_pair_that_ends_ends_its_connection() {
    for (step, reset) in (0..5).flat_map(|step| [(step, true), (step, false)]) {
        let mut bench = Bench::new();
        let end = init(&bench);
        match step {
            0 => drop(bench.begin(qpn(&end))),
            1 => drop(bench.connecting(qpn(&end))),
            2 => drop(bench.offered(qpn(&end))),
            3 => {
                let (_, rep) = bench.offered(qpn(&end));
                to_rtr(&end, rep.qpn.get()).unwrap();
            }
            _ => drop(bench.connected(&end)),
        }
        if reset {
            end.qp.modify(&QpAttrs::default(), M::STATE).unwrap();
        } else {
            drop(end);
        }
        bench.run();
        assert_eq!((bench.backend.host.cm_ids(), bench.calls().last().cloned()), (1, Some(CmCall::Destroy)), "{step}");
        let message = bench.one();
        assert_eq!(matches!(message, Message::Dreq(_)), step == 4, "{step}: {message:?}");
        assert!(matches!(message, Message::Dreq(_) | Message::Rej(_)));
    }
}
