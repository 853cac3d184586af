//! The startup over sockets: negotiation of both ends, and refusals.

use pvrdma_iwarp::wire::{Enhanced, FrameKind, Opcode, RawHeader, SegmentHeader, StartupFrame, fpdu};
use pvrdma_iwarp::{
    Connection, Event, Limits, MAX_PROGRAM_DATA, Negotiated, Role, Rtr, StartupError, Stream, StreamInspect,
};
use pvrdma_verbs_types::WcStatus;

use super::endpoint::{Endpoint, Socket, ends, establish, established, run, run_one};
use super::peer::{Peer, request};
use super::{LIMITS, START, sockets, tuning};
use crate::host::{Ended, Host};
use crate::pair::{read, send, sge, write};

/// The private data of a request that has arrived.
fn asked(end: &Endpoint) -> &[u8] {
    let [Event::Requested(incoming)] = &end.events[..] else { unreachable!("{:?}", end.events) };
    incoming.private_data()
}

#[test]
fn private_data_of_every_length_that_programs_use() {
    for length in [0, 1, 56, 57, 148, 196, 252, MAX_PROGRAM_DATA] {
        let data: Vec<u8> = (0..=255).cycle().take(length).collect();
        let connection = Connection::initiate(START, LIMITS, tuning(), &data).unwrap();
        let mut ends = ends(connection, tuning(), 0, 5);
        run(&mut ends, |[_, b]| !b.events.is_empty());
        assert_eq!(asked(&ends[1]), data);
        ends[1].connection.accept(LIMITS, &data).unwrap();
        run(&mut ends, |[a, _]| !a.events.is_empty());
        let [Event::Established { private_data, .. }] = &ends[0].events[..] else { unreachable!() };
        assert_eq!(*private_data, data);
    }
    let long = [0; MAX_PROGRAM_DATA + 1];
    let error = Connection::initiate(START, LIMITS, tuning(), &long).err();
    assert_eq!(error, Some(StartupError::PrivateData));
}

#[test]
fn private_data_that_is_too_long_can_be_replaced() {
    let long = [0; MAX_PROGRAM_DATA + 1];
    let mut ends = ends(Connection::initiate(START, LIMITS, tuning(), b"").unwrap(), tuning(), 0, 5);
    run(&mut ends, |[_, b]| !b.events.is_empty());
    assert_eq!(ends[1].connection.accept(LIMITS, &long).err(), Some(StartupError::PrivateData));
    assert_eq!(ends[1].connection.reject(&long).err(), Some(StartupError::PrivateData));
    ends[1].events.clear();
    ends[1].connection.accept(LIMITS, b"").unwrap();
    run(&mut ends, |[a, _]| !a.events.is_empty());
    // A decision is made once.
    assert_eq!(ends[1].connection.accept(LIMITS, b"").err(), Some(StartupError::Closed));
    assert_eq!(ends[1].connection.reject(b"").err(), Some(StartupError::Closed));
}

#[test]
fn both_ends_have_the_same_properties() {
    for crc in [[true, true], [true, false], [false, true], [false, false]] {
        let limits = Limits { ird: 5, ord: 7, crc: crc[0] };
        let mut ends = ends(Connection::initiate(START, limits, tuning(), b"").unwrap(), tuning(), 64, 5);
        let agreed = establish(&mut ends, Limits { ird: 3, ord: 9, crc: crc[1] });
        let (crc, rtr) = (crc.contains(&true), Some(Rtr::Read));
        assert_eq!(agreed[0], Negotiated { role: Role::Initiator, crc, ird: 5, ord: 3, rtr });
        assert_eq!(agreed[1], Negotiated { role: Role::Responder, crc, ird: 3, ord: 5, rtr });
    }
}

/// Programs whose server speaks first need the ready-to-receive message.
#[test]
fn a_responder_that_sends_first_waits_for_the_first_message() {
    let mut ends = established(tuning(), 64, 5);
    ends[0].host.post_receive(1, vec![sge(0, 8)]);
    ends[1].post(send(1, vec![sge(0, 8)]));
    run(&mut ends, |[a, _]| a.host.received.len() == 1);

    // A peer that sends none, as `siw` does: the responder sends nothing until the first message is there.
    let (mut peer, mut end) = Peer::requester(LIMITS, 64);
    end.post(send(1, vec![sge(0, 8)]));
    while end.step() {}
    let inspect = |end: &Endpoint| -> StreamInspect { end.stream().inspect() };
    assert_eq!((inspect(&end).open, inspect(&end).stats.fpdus_sent), (false, 0));
    peer.send(&crate::ends::fpdu(crate::ends::tagged(Opcode::Write, crate::host::KEY, 0), &[9; 8]));
    run_one(&mut end, |end| end.host.sent.len() == 1);
    assert_eq!(end.host.memory[..8], [9; 8]);
}

/// The RTR of a peer that offers both kinds, or only a READ, whatever the number of its READs.
#[test]
fn a_peer_chooses_the_kind_of_its_first_message() {
    for (rtr_write, rtr_read) in [(true, false), (false, true), (true, true)] {
        let (mut peer, mut end) = Peer::connecting(64);
        let enhanced = Enhanced { peer_to_peer: true, rtr_write, rtr_read, ird: 4, ord: 4, rtr_send: false };
        peer.send(&request(|frame| frame.enhanced = Some(enhanced)).to_bytes());
        run_one(&mut end, |end| !end.events.is_empty());
        end.connection.accept(Limits { ird: 0, ..LIMITS }, b"").unwrap();
        let reply = peer.frame(&mut end, FrameKind::Reply).enhanced.unwrap();
        assert_eq!((reply.rtr_write, reply.rtr_read), (rtr_write, !rtr_write));
        end.post(write(1, 0, vec![sge(0, 8)]));
        let rtr = if rtr_write {
            crate::ends::fpdu(crate::ends::tagged(Opcode::Write, 1, 0), &[])
        } else {
            let body = pvrdma_iwarp::wire::ReadRequest { sink_stag: 1, source_stag: 1, ..Default::default() };
            crate::ends::fpdu(crate::ends::untagged(Opcode::ReadRequest, 1, 0), &body.to_bytes())
        };
        peer.send_slowly(&rtr, &mut end);
        run_one(&mut end, |end| end.host.sent.len() == 1);
        assert_eq!(end.end(), None);
        end.flush();
        let sent = peer.rest(&mut end).unwrap();
        let first = fpdu::Fpdu::parse(&sent, true).unwrap().unwrap();
        let header = SegmentHeader::parse(&RawHeader::split(first.segment).unwrap().0).unwrap();
        assert_eq!(header.opcode == Opcode::ReadResponse, !rtr_write, "the READ is answered, and first");
    }
}

#[test]
fn a_rejection_closes_the_connection_in_order() {
    let mut ends = ends(Connection::initiate(START, LIMITS, tuning(), b"").unwrap(), tuning(), 0, 5);
    run(&mut ends, |[_, b]| !b.events.is_empty());
    ends[1].connection.reject(b"busy").unwrap();
    run(&mut ends, |ends| ends.iter().all(|end| end.socket == Socket::Closed));
    assert_eq!(ends[0].events, [Event::Rejected { private_data: b"busy".to_vec() }]);
    assert!(ends[0].connection.stream().is_none() && ends[1].connection.stream().is_none());
}

/// Some peers close or reset the connection when they see a revision that they do not know.
#[test]
fn a_peer_that_knows_revision_1_only_gets_a_second_request() {
    let (peer, mut end) = Peer::accepting(64);
    drop(peer);
    run_one(&mut end, |end| end.socket == Socket::Closed);
    assert_eq!(end.events, [Event::Failed(StartupError::Closed)]);
    let connection = end.connection.fallback(START).unwrap();
    let mut ends = ends(connection, tuning(), 64, 5);
    let agreed = establish(&mut ends, LIMITS);
    assert_eq!(agreed.map(|agreed| agreed.rtr), [None; 2]);
    ends[1].host.memory.fill(7);
    ends[0].post(read(1, 0, vec![sge(0, 64)]));
    run(&mut ends, |[a, _]| !a.host.sent.is_empty());
    assert_eq!(ends[0].host.sent, [Ended { wr_id: 1, status: WcStatus::Success, byte_len: 64 }]);
    assert_eq!(ends[0].host.memory, [7; 64]);

    // A peer that closes also this one has no further chance.
    let (connected, accepted) = sockets();
    let mut initiator = Connection::initiate(START, LIMITS, tuning(), b"").unwrap();
    initiator.reset(&mut Host::new(0));
    let mut end = Endpoint::new(connected, initiator.fallback(START).unwrap(), 0, 5);
    drop(accepted);
    run_one(&mut end, |end| end.socket == Socket::Closed);
    assert!(end.connection.fallback(START).is_none());
}

#[test]
fn a_peer_that_has_begun_to_reply_gets_no_second_request() {
    let (mut peer, mut end) = Peer::accepting(64);
    peer.frame(&mut end, FrameKind::Request);
    peer.send(b"MPA ID");
    peer.shut_down();
    run_one(&mut end, |end| end.socket == Socket::Closed);
    assert_eq!(end.events, [Event::Failed(StartupError::Closed)]);
    assert!(end.connection.fallback(START).is_none());
}

#[test]
fn a_decision_comes_too_late_when_the_peer_has_closed() {
    let (mut peer, mut end) = Peer::connecting(0);
    peer.send(&request(|_| {}).to_bytes());
    run_one(&mut end, |end| !end.events.is_empty());
    peer.shut_down();
    run_one(&mut end, |end| end.socket == Socket::Closed);
    assert_eq!(end.events[1..], [Event::Failed(StartupError::Closed)]);
    assert_eq!(end.connection.accept(LIMITS, b"").err(), Some(StartupError::Closed));
}

#[test]
fn the_owner_can_give_up_in_every_phase() {
    let phases: [fn() -> (Peer, Endpoint); 3] = [
        || Peer::connecting(0),
        || Peer::accepting(0),
        || {
            let (mut peer, mut end) = Peer::connecting(0);
            peer.send(&request(|_| {}).to_bytes());
            run_one(&mut end, |end| !end.events.is_empty());
            (peer, end)
        },
    ];
    for phase in phases {
        let (mut peer, mut end) = phase();
        end.flush();
        assert!(peer.rest(&mut end).is_none_or(|bytes| bytes.is_empty()));
        assert!(end.connection.stream().is_none_or(Stream::is_empty));
    }
}

/// The reply leaves before the connection is closed.
#[test]
fn the_owner_can_give_up_right_after_the_reply() {
    let (mut peer, mut end) = Peer::connecting(0);
    peer.send(&request(|_| {}).to_bytes());
    run_one(&mut end, |end| !end.events.is_empty());
    end.connection.accept(LIMITS, b"welcome").unwrap();
    end.flush();
    assert_eq!(end.connection.close(), None);
    let sent = peer.rest(&mut end).unwrap();
    let (reply, length) = StartupFrame::parse(FrameKind::Reply, &sent).unwrap().unwrap();
    assert_eq!((&reply.private_data[..], length), (&b"welcome"[..], sent.len()));
}
