//! Guests that do not keep to the rules, and guests that end at any time.

use pvrdma_ib_cm::RejectReason;

use super::super::manager::MAXIMUM;
use super::*;

fn reason(bench: &Bench) -> RejectReason {
    let Message::Rej(rej) = bench.one() else { panic!("no REJ") };
    rej.reason
}

/// Neither an unused number, nor one of another device, nor one that is connected.
#[test]
fn a_guest_connects_its_own_free_queue_pairs_only() {
    const NO_QP: RejectReason = RejectReason(1);
    let mut bench = Bench::new();
    let other = Node::new(&bench.backend, 2);
    let (end, foreign) = (init(&bench), other.qp(QpType::Rc));
    let datagrams = bench.node.qp(QpType::Ud);
    bench.calls();
    for number in [0, 0xff_ffff, qpn(&foreign), qpn(&datagrams)] {
        bench.send(Message::Req(Box::new(request(number))));
        assert_eq!((reason(&bench), bench.calls()), (NO_QP, vec![]));
    }
    bench.begin(qpn(&end));
    bench.send(Message::Req(Box::new(Req { local_id: GUEST_ID + 1, ..request(qpn(&end)) })));
    assert_eq!((reason(&bench), bench.calls()), (NO_QP, vec![]));
    // Refused requests leave nothing behind.
    assert_eq!(bench.manager().connections.len(), 1);
}

#[test]
fn a_guest_accepts_with_its_own_queue_pair_that_it_has_moved() {
    for moved in [true, false] {
        let mut bench = Bench::new();
        let listener = bench.listener();
        let (_, req) = bench.asked(listener);
        let [end, other] = [init(&bench), init(&bench)];
        if moved {
            to_rtr(&other, PEER_QPN).unwrap();
        }
        let named = if moved { qpn(&end) } else { 0xff_ffff };
        let rep = Rep { local_id: 5, remote_id: req.local_id, qpn: Qpn::new(named), ..Rep::default() };
        bench.send(Message::Rep(rep));
        assert_eq!(bench.calls(), [CmCall::Reject(Vec::new()), CmCall::Destroy]);
        reason(&bench);
    }
}

#[test]
fn a_flood_of_requests_is_bounded() {
    let mut bench = Bench::new();
    let end = init(&bench);
    let paths = &bench.node.hca.objects().adapter.cm_paths;
    // As many as wait, without the thread.
    let datagram = || {
        let to = UdDestination { dgid: gid(9), qpn: Qpn::GSI, ..UdDestination::default() };
        let payload = vec![0; 256];
        Datagram { from: gid(1), to, kind: GidType::RoceV2, immediate: None, solicited: false, payload }
    };
    let taken = (0..1000).filter(|_| paths.submit(bench.bound(), datagram())).count();
    assert_eq!(taken, 64);
    bench.run();
    assert_eq!(bench.counter("cm_refused"), 64);
    // Requests of peers that the guest does not answer.
    let listener = bench.listener();
    for port in 1..=2 * u16::try_from(MAXIMUM.in_progress).unwrap() {
        bench.backend.host.cm_request(listener, SocketAddr::new(ip(gid(9)), port), wish());
        bench.run();
    }
    assert_eq!(
        (bench.manager().connections.len(), bench.backend.host.cm_ids()),
        (MAXIMUM.in_progress, MAXIMUM.in_progress + 1)
    );
    bench.send(Message::Req(Box::new(request(qpn(&end)))));
    assert_eq!(bench.manager().connections.len(), MAXIMUM.in_progress);
    assert_eq!(bench.counter("cm_overflow"), MAXIMUM.in_progress as u64 + 1);
}

#[test]
fn messages_that_do_not_fit_have_no_effect() {
    let mut bench = Bench::new();
    let end = init(&bench);
    let (_, rep) = bench.offered(qpn(&end));
    bench.calls();
    let rtu = |remote_id| Message::Rtu(Rtu { local_id: GUEST_ID, remote_id, private_data: [0; 224] });
    // Of no connection, from another end of the guest, and to another peer.
    bench.send(rtu(rep.local_id ^ 1));
    let other = Rtu { local_id: 1, remote_id: rep.local_id, private_data: [0; 224] };
    bench.send(Message::Rtu(other));
    bench.send_to(gid(8), &Mad { transaction: TRANSACTION, message: rtu(rep.local_id) });
    bench.send(dreq(&rep, PEER_QPN ^ 1));
    assert_eq!((bench.calls(), bench.received()), (vec![], vec![]));
    // A connection that is long gone is confirmed to be so.
    bench.send(dreq(&Rep { local_id: 77, ..Rep::default() }, 5));
    assert!(matches!(bench.one(), Message::Drep(drep) if drep.local_id == 77));
    // Other peers than the addresses say, and none that the host could reach.
    for change in [
        |req: &mut Req| req.private_data[35] ^= 1,
        |req: &mut Req| req.private_data[19] ^= 1,
        |req: &mut Req| req.service_id = 0x0111_0000 + 5,
        |req: &mut Req| req.transport = 2,
    ] {
        let mut req = request(qpn(&end));
        req.local_id = 0x7777;
        change(&mut req);
        bench.send(Message::Req(Box::new(req)));
        assert_eq!((reason(&bench), bench.calls()), (RejectReason::INVALID_SERVICE_ID, vec![]));
    }
}

#[test]
fn private_data_that_a_rep_cannot_carry_ends_the_connection() {
    let mut bench = Bench::new();
    let end = init(&bench);
    let id = bench.connecting(qpn(&end));
    bench.calls();
    bench.event(id, sys::CONNECT_RESPONSE, 0, ConnectionData { private_data: vec![1; 197], ..answer() });
    assert_eq!((reason(&bench), bench.calls()), (RejectReason::CONSUMER, vec![CmCall::Destroy]));
    assert_eq!(bench.counter("cm_refused"), 1);
}

/// A guest that is killed takes its connections along, in every state.
#[test]
fn nothing_of_a_guest_that_ends_stays_on_the_host() {
    for step in 0..6 {
        let mut bench = Bench::new();
        let before = bench.backend.host.objects();
        let end = init(&bench);
        let made = bench.backend.host.objects() - before;
        match step {
            0 => drop(bench.begin(qpn(&end))),
            1 => drop(bench.connecting(qpn(&end))),
            2 => drop(bench.offered(qpn(&end))),
            3 => drop(bench.connected(&end)),
            4 => {
                let (_, rep) = bench.connected(&end);
                bench.send(dreq(&rep, PEER_QPN));
            }
            _ => {
                let listener = bench.listener();
                bench.asked(listener);
            }
        }
        assert_eq!(bench.backend.host.cm_ids(), 2, "{step}");
        bench.manager = None;
        assert_eq!(bench.backend.host.cm_ids(), 0, "{step}");
        // The channel and the listener existed before.
        assert_eq!(bench.backend.host.objects(), before - 2 + made, "{step}");
    }
}
