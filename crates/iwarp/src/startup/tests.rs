//! Both ends against each other, and each against frames that the other would not send.

use super::*;

const LIMITS: Limits = Limits { ird: 16, ord: 8, crc: true };
const START: Duration = Duration::from_secs(100);

fn initiator(limits: Limits) -> Initiator {
    Initiator::new(START, limits, b"hello").unwrap()
}

fn incoming(request: &[u8]) -> Result<Incoming, StartupFailure> {
    Responder::new(START).handle_bytes(request).map(Option::unwrap)
}

/// Edits a frame.
fn edited(frame: &[u8], kind: FrameKind, edit: impl FnOnce(&mut StartupFrame)) -> Vec<u8> {
    let (mut frame, _) = StartupFrame::parse(kind, frame).unwrap().unwrap();
    edit(&mut frame);
    frame.to_bytes()
}

/// Edits the enhanced data of a frame.
fn enhanced(frame: &[u8], kind: FrameKind, edit: impl FnOnce(&mut Enhanced)) -> Vec<u8> {
    edited(frame, kind, |frame| edit(frame.enhanced.as_mut().unwrap()))
}

fn accepted(answer: Option<Answer>) -> Negotiated {
    match answer {
        Some(Answer::Accepted { negotiated, .. }) => negotiated,
        other => panic!("{other:?}"),
    }
}

/// The Terminate in the last words of a failure.
fn terminate(failure: &StartupFailure, crc: bool) -> Cause {
    let segment = fpdu::Fpdu::parse(&failure.last_words, crc).unwrap().unwrap().segment;
    let (raw, body) = crate::wire::RawHeader::split(segment).unwrap();
    let header = SegmentHeader::parse(&raw).unwrap();
    assert_eq!(header.opcode, Opcode::Terminate);
    assert_eq!(header.placement, Placement::Untagged { stag: 0, queue: 2, msn: 1, offset: 0 });
    Terminate::parse(body).cause
}

#[test]
fn both_ends_agree() {
    for (ours, theirs) in [(true, true), (true, false), (false, true), (false, false)] {
        let initiator = initiator(Limits { crc: ours, ..LIMITS });
        let request = incoming(&initiator.request()).unwrap();
        assert_eq!(
            (request.private_data(), request.peer_ird(), request.peer_ord()),
            (&b"hello"[..], Some(16), Some(8))
        );
        let (reply, at_responder) = request.accept(Limits { ird: 4, ord: 100, crc: theirs }, b"yes").unwrap();
        let Some(Answer::Accepted { negotiated, private_data }) = initiator.handle_bytes(&reply).unwrap() else {
            panic!("{reply:?}")
        };
        assert_eq!(private_data, b"yes");
        let (crc, rtr) = (ours || theirs, Some(Rtr::Read));
        assert_eq!(negotiated, Negotiated { role: Role::Initiator, crc, ird: 16, ord: 4, rtr });
        assert_eq!(at_responder, Negotiated { role: Role::Responder, crc, ird: 4, ord: 16, rtr });
    }
}

#[test]
fn revision_1_has_no_enhanced_data_in_either_direction() {
    let initiator = initiator(LIMITS).fallback(START).unwrap();
    assert_eq!(initiator.clone().fallback(START), None);
    let request = incoming(&initiator.request()).unwrap();
    assert_eq!((request.peer_ird(), request.private_data()), (None, &b"hello"[..]));
    let (reply, at_responder) = request.accept(LIMITS, b"").unwrap();
    assert_eq!(reply[17..20], [1, 0, 0]);
    assert_eq!((at_responder.rtr, at_responder.ord), (None, 8));
    let negotiated = accepted(initiator.handle_bytes(&reply).unwrap());
    assert_eq!((negotiated.rtr, negotiated.ord), (None, 8));
}

#[test]
fn a_peer_of_revision_1_may_answer_a_request_of_revision_2() {
    let initiator = initiator(LIMITS);
    let (reply, _) = incoming(&initiator.request()).unwrap().accept(LIMITS, b"").unwrap();
    let reply = edited(&reply, FrameKind::Reply, |reply| (reply.revision, reply.enhanced) = (1, None));
    assert_eq!(accepted(initiator.handle_bytes(&reply).unwrap()).rtr, None);
}

#[test]
fn a_rejection_carries_private_data() {
    let initiator = initiator(LIMITS);
    let reply = incoming(&initiator.request()).unwrap().reject(b"busy").unwrap();
    let rejected = Answer::Rejected { private_data: b"busy".to_vec() };
    assert_eq!(initiator.handle_bytes(&reply), Ok(Some(rejected)));
}

#[test]
fn the_responder_prefers_write_and_names_one_kind_that_was_offered() {
    let request = initiator(LIMITS).request();
    let choices = [(true, true, Some(Rtr::Write)), (true, false, Some(Rtr::Write)), (false, true, Some(Rtr::Read))];
    for (rtr_write, rtr_read, chosen) in choices {
        let request = enhanced(&request, FrameKind::Request, |data| {
            (data.rtr_write, data.rtr_read, data.rtr_send) = (rtr_write, rtr_read, true);
        });
        // The READ of an RTR needs a READ resource, however many the program has.
        let (reply, negotiated) = incoming(&request).unwrap().accept(Limits { ird: 0, ..LIMITS }, b"").unwrap();
        let (reply, _) = StartupFrame::parse(FrameKind::Reply, &reply).unwrap().unwrap();
        let data = reply.enhanced.unwrap();
        assert_eq!(negotiated.rtr, chosen);
        assert_eq!((data.rtr_write, data.rtr_read), (chosen == Some(Rtr::Write), chosen == Some(Rtr::Read)));
        assert!(data.peer_to_peer && !data.rtr_send);
        assert_eq!((data.ird, negotiated.ird), (u16::from(chosen == Some(Rtr::Read)), 0));
    }
}

#[test]
fn a_request_with_no_usable_rtr_is_rejected() {
    let request = enhanced(&initiator(LIMITS).request(), FrameKind::Request, |data| {
        (data.rtr_read, data.rtr_send) = (false, true);
    });
    let failure = incoming(&request).unwrap().accept(LIMITS, b"").unwrap_err();
    let (reply, _) = StartupFrame::parse(FrameKind::Reply, &failure.last_words).unwrap().unwrap();
    assert!(failure.error == StartupError::NoRtr && reply.rejected);
}

#[test]
fn a_client_without_rtr_gets_none() {
    // As `siw` asks.
    let request = enhanced(&initiator(LIMITS).request(), FrameKind::Request, |data| {
        (data.peer_to_peer, data.rtr_read) = (false, false);
    });
    let (reply, negotiated) = incoming(&request).unwrap().accept(LIMITS, b"").unwrap();
    let (reply, _) = StartupFrame::parse(FrameKind::Reply, &reply).unwrap().unwrap();
    assert!(negotiated.rtr.is_none() && reply.enhanced.is_some_and(|data| !data.peer_to_peer));
}

#[test]
fn numbers_of_reads_that_are_not_negotiated_stay_as_they_are() {
    let request = enhanced(&initiator(LIMITS).request(), FrameKind::Request, |data| {
        (data.ird, data.ord) = (NOT_NEGOTIATED, NOT_NEGOTIATED);
    });
    let (reply, negotiated) = incoming(&request).unwrap().accept(LIMITS, b"").unwrap();
    assert_eq!((negotiated.ird, negotiated.ord), (16, 8));
    let data = StartupFrame::parse(FrameKind::Reply, &reply).unwrap().unwrap().0.enhanced.unwrap();
    assert_eq!((data.ird, data.ord), (NOT_NEGOTIATED, NOT_NEGOTIATED));
    assert_eq!(accepted(initiator(LIMITS).handle_bytes(&reply).unwrap()).ord, 8);
}

#[test]
fn the_initiator_names_the_missing_parts_of_a_reply() {
    let initiator = initiator(LIMITS);
    let (reply, _) = incoming(&initiator.request()).unwrap().accept(LIMITS, b"").unwrap();
    let edit = |edit: fn(&mut StartupFrame)| edited(&reply, FrameKind::Reply, edit);
    let data = |edit: fn(&mut Enhanced)| enhanced(&reply, FrameKind::Reply, edit);
    let cases = [
        (data(|data| data.ord = 17), StartupError::ReadResources, Cause::READ_RESOURCES),
        (data(|data| data.ird = 0), StartupError::ReadResources, Cause::READ_RESOURCES),
        (data(|data| data.rtr_read = false), StartupError::NoRtr, Cause::NO_RTR),
        (edit(|reply| reply.markers = true), StartupError::Markers, Cause::STARTUP),
        (edit(|reply| reply.enhanced = None), StartupError::Reply, Cause::STARTUP),
    ];
    for (reply, error, cause) in cases {
        let failure = initiator.handle_bytes(&reply).unwrap_err();
        assert_eq!((failure.error, terminate(&failure, true)), (error, cause));
    }
    let older = initiator.fallback(START).unwrap();
    assert_eq!(older.handle_bytes(&reply).unwrap_err().error, StartupError::Reply);
}

#[test]
fn markers_are_answered_by_a_rejection() {
    let request = edited(&initiator(LIMITS).request(), FrameKind::Request, |request| request.markers = true);
    let failure = incoming(&request).unwrap_err();
    let (reply, _) = StartupFrame::parse(FrameKind::Reply, &failure.last_words).unwrap().unwrap();
    assert!(failure.error == StartupError::Markers && reply.rejected);
}

#[test]
fn bytes_behind_a_frame_end_the_startup() {
    let initiator = initiator(LIMITS);
    let mut request = initiator.request();
    let (mut reply, _) = incoming(&request).unwrap().accept(LIMITS, b"").unwrap();
    request.push(0);
    reply.push(0);
    assert_eq!(incoming(&request).unwrap_err(), StartupError::ExtraBytes.into());
    assert_eq!(initiator.handle_bytes(&reply).unwrap_err(), StartupError::ExtraBytes.into());
}

#[test]
fn a_frame_that_arrives_byte_by_byte_has_one_deadline() {
    let initiator = initiator(LIMITS);
    let request = initiator.request();
    let responder = Responder::new(START);
    for cut in 0..request.len() {
        assert_eq!(responder.handle_bytes(&request[..cut]), Ok(None));
    }
    assert_eq!(responder.poll_timeout(), START + REQUEST_TIMEOUT);
    assert_eq!(initiator.poll_timeout(), START + REPLY_TIMEOUT);
    let just_before = |deadline: Duration| deadline - Duration::from_nanos(1);
    assert_eq!(responder.handle_timeout(just_before(responder.poll_timeout())), Ok(()));
    assert_eq!(responder.handle_timeout(responder.poll_timeout()), Err(StartupError::Timeout.into()));
    assert_eq!(initiator.handle_timeout(just_before(initiator.poll_timeout())), Ok(()));
    assert_eq!(initiator.handle_timeout(initiator.poll_timeout()), Err(StartupError::Timeout.into()));
}

#[test]
fn invalid_frames_end_the_startup_without_last_words() {
    let initiator = initiator(LIMITS);
    let request = initiator.request();
    for (at, value) in [(0, b'X'), (17, 3), (18, 0xff)] {
        let mut request = request.clone();
        request[at] = value;
        let failure = incoming(&request).unwrap_err();
        assert!(matches!(failure.error, StartupError::Frame(_)) && failure.last_words.is_empty(), "{failure:?}");
    }
    assert!(initiator.handle_bytes(b"HTTP/1.1 400 Bad Request").is_err());
}

#[test]
fn private_data_fits_the_frame() {
    for length in [0, 56, 57, 196, 252, MAX_PROGRAM_DATA] {
        let data = vec![5; length];
        let initiator = Initiator::new(START, LIMITS, &data).unwrap();
        let request = incoming(&initiator.request()).unwrap();
        assert_eq!(request.private_data(), data);
        let (reply, _) = request.accept(LIMITS, &data).unwrap();
        let answer = initiator.handle_bytes(&reply).unwrap();
        assert!(matches!(answer, Some(Answer::Accepted { private_data, .. }) if private_data == data));
    }
    let data = [0; MAX_PROGRAM_DATA + 1];
    assert_eq!(Initiator::new(START, LIMITS, &data), Err(StartupError::PrivateData));
    let request = incoming(&initiator(LIMITS).request()).unwrap();
    assert_eq!(request.accept(LIMITS, &data).unwrap_err(), StartupError::PrivateData.into());
}
