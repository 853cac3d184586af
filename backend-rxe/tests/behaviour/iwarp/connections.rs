//! From the request to the established connection, and rejections.

use std::io::{Read, Write};
use std::net::TcpListener;

use pvrdma_ib_cm::{IpAddresses, Mad, PORT_SPACE_TCP, Rej, RejectReason};
use pvrdma_iwarp::wire::{FrameKind, StartupFrame};
use pvrdma_iwarp::{Initiator, Limits};
use pvrdma_verbs::VerbsError;
use pvrdma_verbs_types::{QpAttrMask as M, QpState, WcStatus};

use super::*;
use crate::world::{SEND, pattern};

fn rejection(net: &Net, guest: usize) -> Rej {
    match net.next(guest) {
        Message::Rej(rej) => rej,
        message => unreachable!("no REJ: {message:?}"),
    }
}

fn ask(net: &Net, change: impl FnOnce(&mut Req)) -> End {
    let left = net.qp(0);
    let mut request = net.guests[0].request(gid(2), PORT, left.qp.qpn());
    change(&mut request);
    net.guests[0].send(gid(2), Message::Req(Box::new(request)));
    left
}

#[test]
fn private_data_and_reads_reach_the_other_end() {
    let net = Net::new();
    let Ends { left, right, rep, req } = net.connect_with(
        |req| (req.responder_resources, req.initiator_depth) = (4, 200),
        |rep| (rep.responder_resources, rep.initiator_depth) = (8, 3),
    );
    assert_eq!((req.private_data[IpAddresses::LEN..].to_vec(), rep.private_data), (vec![7; 56], [6; 196]));
    let addresses = IpAddresses::from_bytes(req.private_data.first_chunk().unwrap()).unwrap();
    assert_eq!((addresses.source, addresses.destination), (gid(1).into(), gid(2).into()));
    assert_eq!(req.service_id, PORT_SPACE_TCP + u64::from(PORT));
    // Number of READs that the peer executes, and that it may request: at most 128.
    assert_eq!((req.responder_resources, req.initiator_depth), (4, 128));
    assert_eq!((rep.responder_resources, rep.initiator_depth), (8, 4));
    assert!(rep.qpn.get() > 1 && req.qpn.get() > 1);
    assert_eq!([left.state(), right.state()], [QpState::Rts; 2]);
    assert_eq!([net.counter(0, "iwarp_connections"), net.counter(1, "iwarp_connections")], [1, 1]);
    let path = |end: &End| end.qp.inspect()["requester"]["route"]["path"].clone();
    assert_eq!([path(&left), path(&right)], ["stream", "stream"]);
}

#[test]
fn several_connections_between_the_same_guests() {
    let net = Net::new();
    let ends: Vec<_> = (0..5).map(|_| net.connect()).collect();
    let (mine, theirs) = (net.guests[0].node.buffer(64), net.guests[1].node.buffer(64));
    for (number, Ends { left, right, .. }) in (0..).zip(&ends) {
        mine.write(0, &pattern(number, 64));
        right.recv(number, &[theirs.all()]);
        left.send(number, &[mine.all()]);
        net.wait(&right.rcq, 1);
        net.wait(&left.scq, 1);
        assert_eq!(theirs.read(0, 64), pattern(number, 64));
    }
}

#[test]
fn a_port_without_a_program_is_an_invalid_service() {
    let net = Net::new();
    let _left = ask(&net, |req| req.service_id = PORT_SPACE_TCP + 9);
    assert_eq!(rejection(&net, 0).reason, RejectReason::INVALID_SERVICE_ID);
    assert_eq!(net.counter(0, "iwarp_refused"), 1);
}

/// Requests that are not those of `rdma_cm`, and a QP that the guest does not have or uses already.
#[test]
fn invalid_requests_are_rejected() {
    let net = Net::new();
    let Ends { left, right: _right, .. } = net.connect();
    let used = left.qp.qpn();
    let changes: [&dyn Fn(&mut Req); 5] = [
        &|req| req.service_id = 0x0111_0000 + u64::from(PORT),
        &|req| req.transport = 1,
        &|req| req.private_data[35] ^= 1,
        &|req| req.qpn = Qpn::new(0x77_7777),
        &|req| req.qpn = used,
    ];
    for (number, change) in changes.iter().enumerate() {
        let _end = ask(&net, change);
        let expected = if number < 3 { RejectReason::INVALID_SERVICE_ID } else { RejectReason(1) };
        assert_eq!(rejection(&net, 0).reason, expected, "{number}");
    }
    assert_eq!(net.counter(0, "iwarp_refused"), 5);
}

#[test]
fn a_program_that_rejects_passes_private_data() {
    let net = Net::new();
    let _left = ask(&net, |_| {});
    let req = net.next_req(1);
    net.guests[1].send(gid(1), CmGuest::reject(&req, 5));
    let rej = rejection(&net, 0);
    assert_eq!((rej.reason, rej.private_data), (RejectReason::CONSUMER, [5; 148]));
}

/// A REQ has room for 56 bytes behind the addresses.
#[test]
fn private_data_that_a_guest_cannot_get_is_refused() {
    for (length, arrives) in [(56, true), (57, false)] {
        let net = Net::new();
        let mut peer = TcpStream::connect((net.sockets.host(2), PORT)).unwrap();
        let limits = Limits { ird: 1, ord: 1, crc: true };
        let private_data = vec![9; length];
        let initiator = Initiator::new(Duration::ZERO, limits, &private_data).unwrap();
        peer.write_all(&initiator.request()).unwrap();
        if arrives {
            let req = net.next_req(1);
            assert_eq!(req.private_data[IpAddresses::LEN..], private_data);
        } else {
            let reply = read_to_end(&net, &peer).unwrap();
            let answer = initiator.handle_bytes(&reply).unwrap();
            assert!(matches!(answer, Some(pvrdma_iwarp::Answer::Rejected { .. })));
            assert!(!net.guests[1].has_message());
        }
    }
}

#[test]
fn a_guest_that_does_not_answer_ends_the_connection() {
    let net = Net::new();
    let _left = ask(&net, |_| {});
    net.next_req(1);
    // The first guest is asked for patience; the second one gets the REQ again.
    net.pass(Duration::from_millis(4500));
    assert!(matches!(net.next(0), Message::Mra(_)));
    assert!(matches!(net.next(1), Message::Req(_)));
    // A reply takes at most ten seconds.
    net.pass(Duration::from_secs(6));
    net.until("the rejection", || {
        std::iter::from_fn(|| net.guests[0].has_message().then(|| net.guests[0].take_message()))
            .any(|message| matches!(message, Message::Rej(_)))
    });
    assert_eq!(net.counter(0, "iwarp_failed"), 1);
}

/// Without a connection, a QP has no peer.
#[test]
fn a_queue_pair_that_no_connection_belongs_to_gets_no_answers() {
    let net = Net::new();
    let left = net.qp(0);
    to_rts(&left, 2, Qpn::new(0x1234));
    left.post(1, SEND, &[]);
    left.qp.notify_send();
    net.run();
    while left.scq.total() == 0 {
        let deadline = net.engines[0].next_deadline().unwrap();
        net.pass(deadline.saturating_sub(net.clock.now()));
    }
    assert_eq!(left.scq.one().status, WcStatus::RetryExceeded);
}

#[test]
fn addresses_that_the_guest_loses_are_not_listened_on() {
    let net = Net::new();
    net.guests[1].node.hca.unbind_gid(0);
    net.run();
    let _left = ask(&net, |_| {});
    assert_eq!(rejection(&net, 0).reason, RejectReason::INVALID_SERVICE_ID);
}

#[test]
fn devices_of_one_engine() {
    let net = Net::on_one_engine();
    let Ends { left, right, .. } = net.connect();
    right.recv(1, &[]);
    left.send(1, &[]);
    net.wait(&right.rcq, 1);
    assert_eq!((left.scq.one().status, right.rcq.one().status), (WcStatus::Success, WcStatus::Success));
}

/// Service ID resolution, and datagrams that are not of the connection manager.
#[test]
fn other_datagrams_to_the_peers_are_lost() {
    let net = Net::new();
    let mut sidr = Mad { transaction: 1, message: net.guests[0].rtu(&Rep::default()) }.to_bytes();
    sidr[17] = 0x17;
    net.guests[0].send_bytes(gid(2), &sidr);
    net.guests[0].send_bytes(gid(2), &sidr[..100]);
    net.run();
    assert_eq!(net.counter(0, "iwarp_datagrams_dropped"), 2);
    assert!(!net.guests[0].has_message());
}

/// A host that accepts connections to a port of its own.
fn host(net: &Net) -> (TcpListener, u16) {
    let listener = TcpListener::bind((net.sockets.host(3), 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

/// Lets the first guest connect to a port of the host, and returns the host's socket with the request.
fn asked(net: &Net, listener: &TcpListener) -> (TcpStream, StartupFrame) {
    listener.set_nonblocking(true).unwrap();
    let mut socket = None;
    let socket = std::cell::RefCell::new(&mut socket);
    net.until("a connection", || {
        **socket.borrow_mut() = listener.accept().ok();
        socket.borrow().is_some()
    });
    let socket = socket.borrow_mut().take().unwrap().0;
    socket.set_nonblocking(true).unwrap();
    let bytes = std::cell::RefCell::new(Vec::new());
    net.until("a request", || {
        let mut more = [0; 600];
        if let Ok(read) = (&socket).read(&mut more) {
            bytes.borrow_mut().extend_from_slice(&more[..read]);
        }
        StartupFrame::parse(FrameKind::Request, &bytes.borrow()).unwrap().is_some()
    });
    let (frame, _) = StartupFrame::parse(FrameKind::Request, &bytes.borrow()).unwrap().unwrap();
    (socket, frame)
}

fn ask_host(net: &Net, port: u16) -> End {
    let left = net.qp(0);
    let request = net.guests[0].request(gid(3), port, left.qp.qpn());
    net.guests[0].send(gid(3), Message::Req(Box::new(request)));
    left
}

/// Some adapters close the connection when they get a request of revision 2.
#[test]
fn a_peer_that_knows_only_the_first_revision() {
    let net = Net::new();
    let (listener, port) = host(&net);
    let _left = ask_host(&net, port);
    let (socket, request) = asked(&net, &listener);
    assert_eq!((request.revision, request.crc), (2, true));
    drop(socket);
    let (mut socket, request) = asked(&net, &listener);
    assert_eq!((request.revision, request.private_data.clone()), (1, vec![7; 56]));
    let reply = StartupFrame { kind: FrameKind::Reply, private_data: vec![8; 100], ..request };
    socket.write_all(&reply.to_bytes()).unwrap();
    let rep = net.next_rep(0);
    assert_eq!((rep.private_data[..100].to_vec(), rep.private_data[100]), (vec![8; 100], 0));
}

#[test]
fn a_peer_that_closes_every_connection() {
    let net = Net::new();
    let (listener, port) = host(&net);
    let _left = ask_host(&net, port);
    drop(asked(&net, &listener));
    drop(asked(&net, &listener));
    assert_eq!(rejection(&net, 0).reason, RejectReason::TIMEOUT);
    assert_eq!(net.counter(0, "iwarp_failed"), 1);
}

/// A REP has room for 196 bytes, and a REJ for 148.
#[test]
fn answers_that_are_longer_than_a_guest_can_get() {
    for (length, rejected) in [(197, false), (300, true)] {
        let net = Net::new();
        let (listener, port) = host(&net);
        let _left = ask_host(&net, port);
        let (mut socket, request) = asked(&net, &listener);
        let reply = StartupFrame { kind: FrameKind::Reply, rejected, private_data: vec![8; length], ..request };
        socket.write_all(&reply.to_bytes()).unwrap();
        let rej = rejection(&net, 0);
        assert_eq!((rej.reason, rej.private_data[147]), (RejectReason::CONSUMER, if rejected { 8 } else { 0 }));
        drop(read_to_end(&net, &socket));
    }
}

/// The guest has room for connections, but not for their buffers.
#[test]
fn memory_is_limited() {
    let net = Net::new();
    let left = ask(&net, |_| {});
    let req = net.next_req(1);
    let right = net.qp(1);
    net.accept(&right, &req, |_| {});
    let rep = net.next_rep(0);
    let budget = &net.guests[0].node.budget;
    budget.set_limit(budget.used());
    let attrs = QpAttrs { state: QpState::Init, access: crate::world::ALL, port_num: 1, ..QpAttrs::default() };
    left.qp.modify(&attrs, M::STATE | M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS).unwrap();
    let mut attrs = QpAttrs { state: QpState::Rtr, dest_qpn: rep.qpn, ..End::toward(&left) };
    attrs.av.dgid = gid(2);
    let mask = M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
    assert!(matches!(left.qp.modify(&attrs, mask | M::STATE), Err(VerbsError::Exhausted(_) | VerbsError::Budget(_))));
    let _other = ask(&net, |_| {});
    net.run();
    assert_eq!(net.counter(0, "iwarp_overflow"), 1);
}
