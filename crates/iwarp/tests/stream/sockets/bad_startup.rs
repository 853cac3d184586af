//! Frames of the startup that no correct peer sends. The connection is closed without a stream.

use std::time::Duration;

use pvrdma_iwarp::wire::{Cause, Enhanced, FrameError, FrameKind, StartupFrame};
use pvrdma_iwarp::{Event, Limits, MAX_PROGRAM_DATA, REPLY_TIMEOUT, REQUEST_TIMEOUT, StartupError};

use super::endpoint::{Endpoint, Socket, run_one};
use super::peer::{Peer, request, terminate};
use super::{LIMITS, START};

/// Bytes with one byte replaced.
fn with(mut bytes: Vec<u8>, at: usize, value: u8) -> Vec<u8> {
    bytes[at] = value;
    bytes
}

/// Checks that the startup fails for this reason, and that no more than one frame was kept.
fn fails(end: &Endpoint, error: StartupError) {
    assert_eq!(end.events.last(), Some(&Event::Failed(error)));
    assert!(end.connection.stream().is_none() && end.connection.kept() == 0);
}

fn frame(revision: u8) -> Vec<u8> {
    let enhanced = (revision == 2).then_some(Enhanced { ird: 16, ord: 16, ..Enhanced::default() });
    request(|frame| (frame.revision, frame.enhanced) = (revision, enhanced)).to_bytes()
}

#[test]
fn frames_that_are_none_reset_the_connection() {
    let cases = |kind: FrameKind| {
        let frame = StartupFrame { kind, ..request(|_| {}) }.to_bytes();
        let mut cases = vec![
            (vec![0; 1000], FrameError::Key),
            (b"GET / HTTP/1.1\r\n\r\n".to_vec(), FrameError::Key),
            (with(frame.clone(), 15, b'E'), FrameError::Key),
            (with(frame.clone(), 17, 0), FrameError::Revision(0)),
            (with(frame.clone(), 17, 3), FrameError::Revision(3)),
            (with(frame.clone(), 17, 255), FrameError::Revision(255)),
            (with(frame.clone(), 18, 255), FrameError::PrivateData(0xff04)),
            (with(with(frame.clone(), 18, 2), 19, 1), FrameError::PrivateData(513)),
            (with(frame, 19, 3), FrameError::PrivateData(3)),
        ];
        // The other direction's frame.
        let other = if kind == FrameKind::Request { FrameKind::Reply } else { FrameKind::Request };
        cases.push((StartupFrame { kind: other, ..request(|_| {}) }.to_bytes(), FrameError::Key));
        cases
    };
    for (bytes, error) in cases(FrameKind::Request) {
        for slowly in [false, true] {
            let (mut peer, mut end) = Peer::connecting(0);
            if slowly {
                peer.send_slowly(&bytes, &mut end)
            } else {
                peer.send(&bytes)
            }
            assert_eq!(peer.rest(&mut end), None);
            fails(&end, error.into());
        }
    }
    for (bytes, error) in cases(FrameKind::Reply) {
        let (mut peer, mut end) = Peer::accepting(0);
        peer.frame(&mut end, FrameKind::Request);
        peer.send(&bytes);
        assert_eq!(peer.rest(&mut end), None);
        fails(&end, error.into());
    }
}

#[test]
fn bytes_behind_a_frame_reset_the_connection() {
    for extra in [1, 100_000] {
        // In the same segment, and when the request already waits for the decision.
        for revision in [1, 2] {
            let (mut peer, mut end) = Peer::connecting(0);
            peer.send(&[frame(revision), vec![0; extra]].concat());
            assert_eq!(peer.rest(&mut end), None);
            fails(&end, StartupError::ExtraBytes);
        }
        // Behind the longest frame.
        let (mut peer, mut end) = Peer::connecting(0);
        let longest = request(|frame| frame.private_data = vec![1; MAX_PROGRAM_DATA]).to_bytes();
        let bytes = [longest, vec![0; extra]].concat();
        end.connection.handle_bytes(START, &bytes, &mut end.host);
        assert_eq!(peer.rest(&mut end), None);
        fails(&end, StartupError::ExtraBytes);
        let (mut peer, mut end) = Peer::connecting(0);
        peer.send(&frame(2));
        run_one(&mut end, |end| !end.events.is_empty());
        peer.send(&vec![0; extra]);
        assert_eq!(peer.rest(&mut end), None);
        fails(&end, StartupError::ExtraBytes);
        assert_eq!(end.connection.accept(LIMITS, b"").err(), Some(StartupError::Closed));

        let (mut peer, mut end) = Peer::accepting(0);
        peer.frame(&mut end, FrameKind::Request);
        let reply = StartupFrame { kind: FrameKind::Reply, ..request(|_| {}) };
        peer.send(&[reply.to_bytes(), vec![0; extra]].concat());
        assert_eq!(peer.rest(&mut end), None);
        fails(&end, StartupError::ExtraBytes);
    }
}

#[test]
fn a_request_byte_by_byte_has_five_seconds() {
    let (mut peer, mut end) = Peer::connecting(0);
    let bytes = request(|frame| frame.private_data = vec![1; 508]).to_bytes();
    for byte in &bytes[..bytes.len() - 1] {
        peer.send(&[*byte]);
        run_one(&mut end, |end| end.connection.kept() > 0);
        end.now += REQUEST_TIMEOUT / 600;
        end.connection.handle_timeout(end.now, &mut end.host);
        assert_eq!((end.socket, &end.events[..]), (Socket::Open, &[][..]));
    }
    end.now = START + REQUEST_TIMEOUT - Duration::from_nanos(1);
    end.connection.handle_timeout(end.now, &mut end.host);
    assert!(end.connection.poll_event().is_none());
    assert_eq!(end.connection.poll_timeout(), Some(START + REQUEST_TIMEOUT));
    end.time_out();
    assert_eq!(peer.rest(&mut end), None);
    fails(&end, StartupError::Timeout);
}

#[test]
fn a_peer_that_never_replies_has_ten_seconds() {
    let (mut peer, mut end) = Peer::accepting(0);
    peer.frame(&mut end, FrameKind::Request);
    assert_eq!(end.connection.poll_timeout(), Some(START + REPLY_TIMEOUT));
    end.time_out();
    assert_eq!(peer.rest(&mut end), None);
    fails(&end, StartupError::Timeout);
}

#[test]
fn markers_and_first_messages_that_are_unknown_are_rejected() {
    let (mut peer, mut end) = Peer::connecting(0);
    peer.send(&request(|frame| frame.markers = true).to_bytes());
    let reply = peer.rest(&mut end).unwrap();
    assert!(StartupFrame::parse(FrameKind::Reply, &reply).unwrap().unwrap().0.rejected);
    fails(&end, StartupError::Markers);

    let (mut peer, mut end) = Peer::connecting(0);
    let enhanced = Enhanced { peer_to_peer: true, rtr_send: true, ird: 1, ord: 1, ..Enhanced::default() };
    peer.send(&request(|frame| frame.enhanced = Some(enhanced)).to_bytes());
    run_one(&mut end, |end| !end.events.is_empty());
    assert_eq!(end.connection.accept(LIMITS, b"").err(), Some(StartupError::NoRtr));
    let reply = peer.rest(&mut end).unwrap();
    assert!(StartupFrame::parse(FrameKind::Reply, &reply).unwrap().unwrap().0.rejected);
}

/// Replies that do not fit the request are answered by the Terminate of RFC 6581.
#[test]
fn replies_that_do_not_fit_the_request() {
    type Edit = fn(&mut StartupFrame);

    let cases: [(Edit, StartupError, Cause); 5] = [
        (|frame| frame.markers = true, StartupError::Markers, Cause::STARTUP),
        (|frame| frame.enhanced = None, StartupError::Reply, Cause::STARTUP),
        (|frame| edit(frame, |data| data.ord = 17), StartupError::ReadResources, Cause::READ_RESOURCES),
        (
            |frame| edit(frame, |data| (data.peer_to_peer, data.rtr_write) = (true, true)),
            StartupError::NoRtr,
            Cause::NO_RTR,
        ),
        (
            |frame| edit(frame, |data| (data.peer_to_peer, data.rtr_read, data.ird) = (true, true, 0)),
            StartupError::ReadResources,
            Cause::READ_RESOURCES,
        ),
    ];
    for (edit, error, cause) in cases {
        let (mut peer, mut end) = Peer::accepting(0);
        peer.frame(&mut end, FrameKind::Request);
        let mut reply = StartupFrame { kind: FrameKind::Reply, ..request(|_| {}) };
        edit(&mut reply);
        peer.send(&reply.to_bytes());
        assert_eq!(terminate(&peer.rest(&mut end).unwrap()).cause, cause);
        fails(&end, error);
    }
}

fn edit(frame: &mut StartupFrame, edit: impl FnOnce(&mut Enhanced)) {
    edit(frame.enhanced.as_mut().unwrap());
}

/// The largest and smallest numbers of READs that a peer can name.
#[test]
fn numbers_of_reads_at_the_ends_of_their_range() {
    for (ird, ord) in [(0, 0), (0x3fff, 0x3fff), (0x3ffe, 0x3ffe), (0, 0x3fff), (0x3fff, 0)] {
        let (mut peer, mut end) = Peer::connecting(0);
        peer.send(&request(|frame| frame.enhanced = Some(Enhanced { ird, ord, ..Enhanced::default() })).to_bytes());
        run_one(&mut end, |end| !end.events.is_empty());
        let agreed = end.connection.accept(Limits { ird: 8, ord: u16::MAX, crc: true }, b"").unwrap();
        assert_eq!((agreed.ird, agreed.ord), (8, if ird == 0x3fff { 0x3ffe } else { ird }));
        let reply = peer.frame(&mut end, FrameKind::Reply).enhanced.unwrap();
        assert_eq!(reply.ird, if ord == 0x3fff { 0x3fff } else { 8 });
    }
}
