//! Messages that no correct peer sends, over sockets: each ends its connection with the Terminate that names the
//! reason, and then in order, however the bytes are cut.

use pvrdma_iwarp::wire::{Cause, Opcode, Placement, RawHeader, ReadRequest, SegmentHeader, fpdu as framing};
use pvrdma_iwarp::{End, Event, Limits};
use pvrdma_verbs_types::WcStatus;

use super::LIMITS;
use super::endpoint::{Endpoint, Socket, run_one};
use super::peer::Peer;
use crate::ends::{fpdu, tagged, terminate, untagged};
use crate::host::KEY;
use crate::pair::{read, sge, write};

const MEMORY: usize = 256;
const READ: ReadRequest = ReadRequest { sink_stag: 5, sink_offset: 0, length: 8, source_stag: KEY, source_offset: 0 };

/// A peer, and a responder with a receive of 64 bytes that executes one READ at a time.
fn responder() -> (Peer, Endpoint) {
    let (peer, mut end) = Peer::requester(Limits { ird: 1, ..LIMITS }, MEMORY);
    end.host.post_receive(1, vec![sge(0, 64)]);
    (peer, end)
}

/// A peer, and an initiator that has sent two READs of 64 bytes, with the sinks 1 and 2.
fn reader() -> (Peer, Endpoint) {
    let (peer, mut end) = Peer::acceptor(MEMORY);
    end.post(read(1, 0, vec![sge(0, 64)]));
    end.post(read(2, 0, vec![sge(64, 64)]));
    run_one(&mut end, |end| {
        let inspect = end.stream().inspect();
        inspect.reads == 2 && inspect.not_taken == 0
    });
    (peer, end)
}

/// Sends bytes at once, and then in pieces to another end. Each time the answer is a Terminate with this cause.
fn refused(ends: fn() -> (Peer, Endpoint), bytes: &[u8], cause: Cause) {
    for slowly in [false, true] {
        let (mut peer, mut end) = ends();
        let before = end.host.memory.clone();
        if slowly {
            peer.send_slowly(bytes, &mut end)
        } else {
            peer.send(bytes)
        }
        let answer = last_terminate(&peer.rest(&mut end).expect("a Terminate, and a close in order"));
        assert_eq!(answer, cause);
        assert_eq!(end.events, [Event::Ended(End::Refused(cause))]);
        assert!(end.host.failed && end.host.memory == before && end.connection.kept() == 0);
    }
}

/// The cause of the Terminate that is the last of these FPDUs.
fn last_terminate(bytes: &[u8]) -> Cause {
    let mut rest = bytes;
    loop {
        let whole = framing::Fpdu::parse(rest, true).unwrap().unwrap();
        let (raw, body) = RawHeader::split(whole.segment).unwrap();
        let header = SegmentHeader::parse(&raw).unwrap();
        rest = &rest[whole.len..];
        if header.opcode == Opcode::Terminate {
            assert!(rest.is_empty() && header == untagged(Opcode::Terminate, 1, 0));
            return pvrdma_iwarp::wire::Terminate::parse(body).cause;
        }
    }
}

/// An FPDU with a byte replaced, and a CRC that fits.
fn edited(header: SegmentHeader, at: usize, value: u8) -> Vec<u8> {
    let mut bytes = fpdu(header, &[7; 32]);
    bytes[at] = value;
    let segment = bytes.len() - framing::LENGTH_LEN - framing::CRC_LEN;
    let segment = segment.min(usize::from(u16::from_be_bytes([bytes[0], bytes[1]])));
    framing::seal(&mut bytes, segment, true).unwrap();
    bytes
}

fn part(header: SegmentHeader, length: usize) -> Vec<u8> {
    fpdu(SegmentHeader { last: false, ..header }, &vec![7; length])
}

fn read_request(request: ReadRequest, msn: u32) -> Vec<u8> {
    fpdu(untagged(Opcode::ReadRequest, msn, 0), &request.to_bytes())
}

const WRITE: SegmentHeader = tagged(Opcode::Write, KEY, 0);

fn send(msn: u32, offset: u32) -> SegmentHeader {
    untagged(Opcode::Send, msn, offset)
}

#[test]
fn lengths_of_segments() {
    for length in 0..14_u16 {
        refused(responder, &length.to_be_bytes(), Cause::FPDU_START);
        // With the bytes behind it, which cannot be understood.
        let more = [&length.to_be_bytes()[..], &[0; 100_000]].concat();
        refused(responder, &more, Cause::FPDU_START);
    }
    for length in 14..18 {
        let mut bytes = vec![0x41; framing::fpdu_len(length)];
        framing::seal(&mut bytes, length, true).unwrap();
        refused(responder, &bytes, Cause::FPDU_START);
    }
}

#[test]
fn a_longest_fpdu_that_never_completes_is_all_that_is_kept() {
    let (mut peer, mut end) = responder();
    let mut bytes = vec![0xff; framing::MAX_FPDU - 1];
    bytes[2] = 0xc1;
    peer.send(&bytes);
    run_one(&mut end, |end| end.connection.kept() == framing::MAX_FPDU - 1);
    assert_eq!(end.end(), None);
    peer.send(&[0xff]);
    assert_eq!(peer.terminate(&mut end).cause, Cause::CRC);
}

#[test]
fn crc() {
    for header in [WRITE, send(1, 0)] {
        for at in [2, 20, 40] {
            let mut bytes = fpdu(header, &[7; 32]);
            bytes[at] ^= 0x10;
            refused(responder, &bytes, Cause::CRC);
        }
    }
}

#[test]
fn versions_opcodes_and_queues() {
    for version in [0, 2, 3] {
        refused(responder, &edited(WRITE, 2, 0xc0 | version), Cause::TAGGED_VERSION);
        refused(responder, &edited(send(1, 0), 2, 0x40 | version), Cause::UNTAGGED_VERSION);
        refused(responder, &edited(WRITE, 3, version << 6), Cause::RDMAP_VERSION);
    }
    // Among them the immediate data and atomics of RFC 7306.
    for opcode in [1, 3, 7, 8, 9, 10, 11, 15] {
        refused(responder, &edited(WRITE, 3, 0x40 | opcode), Cause::UNEXPECTED_OPCODE);
    }
    for opcode in [0, 2, 8, 9, 10, 11, 15] {
        refused(responder, &edited(send(1, 0), 3, 0x40 | opcode), Cause::UNEXPECTED_OPCODE);
    }
    for queue in [1, 2, 3, u32::MAX] {
        let placement = Placement::Untagged { stag: 0, queue, msn: 1, offset: 0 };
        refused(responder, &fpdu(SegmentHeader { placement, ..send(1, 0) }, &[7; 8]), Cause::QUEUE);
    }
}

#[test]
fn message_numbers_and_offsets() {
    for msn in [0, 2, u32::MAX] {
        refused(responder, &fpdu(send(msn, 0), &[7; 8]), Cause::MSN_RANGE);
        refused(responder, &read_request(READ, msn), Cause::MSN_RANGE);
    }
    refused(responder, &fpdu(send(1, 1), &[7; 8]), Cause::MESSAGE_OFFSET);
    refused(responder, &fpdu(untagged(Opcode::ReadRequest, 1, 1), &READ.to_bytes()), Cause::MESSAGE_OFFSET);
}

#[test]
fn messages_without_end_and_messages_that_mix() {
    // The receive has 64 bytes, which the peer may write; only the memory behind them must not change.
    let (mut peer, mut end) = responder();
    let bytes = [part(send(1, 0), 32), part(send(1, 32), 32), part(send(1, 64), 32)].concat();
    peer.send_slowly(&bytes, &mut end);
    assert_eq!(peer.terminate(&mut end).cause, Cause::TOO_LONG);
    assert_eq!(end.host.received[0].0.status, WcStatus::LocalLength);
    assert_eq!(end.host.memory[64..], [0; MEMORY - 64]);

    let mixed = [
        ([part(send(1, 0), 0), read_request(READ, 1)].concat(), Cause::UNEXPECTED_OPCODE),
        ([part(send(1, 0), 0), fpdu(untagged(Opcode::SendSolicited, 1, 0), &[7])].concat(), Cause::UNEXPECTED_OPCODE),
        ([part(WRITE, 0), fpdu(tagged(Opcode::Write, KEY + 1, 0), &[7; 8])].concat(), Cause::TAGGED_STAG),
        ([part(WRITE, 0), fpdu(tagged(Opcode::Write, KEY, 1), &[7; 8])].concat(), Cause::TAGGED_BOUNDS),
        ([part(WRITE, 0), fpdu(tagged(Opcode::ReadResponse, 1, 0), &[7; 8])].concat(), Cause::UNEXPECTED_OPCODE),
    ];
    for (bytes, cause) in mixed {
        refused(responder, &bytes, cause);
    }
}

#[test]
fn a_write_without_end_keeps_only_its_position() {
    let (mut peer, mut end) = Peer::requester(LIMITS, 1 << 20);
    for at in (0..1 << 20).step_by(1 << 14) {
        peer.send_slowly(&part(tagged(Opcode::Write, KEY, at), 1 << 14), &mut end);
    }
    run_one(&mut end, |end| end.host.memory.iter().all(|&byte| byte == 7));
    assert_eq!((end.end(), end.connection.kept()), (None, 0));
    peer.send(&part(tagged(Opcode::Write, KEY, 1 << 20), 1));
    assert_eq!(peer.terminate(&mut end).cause, Cause::TAGGED_STAG);
}

#[test]
fn read_requests() {
    let cases = [
        // 4 GiB, of a memory of 256 bytes.
        (ReadRequest { length: u32::MAX, ..READ }, Cause::READ_STAG),
        (ReadRequest { source_stag: KEY + 1, ..READ }, Cause::READ_STAG),
        (ReadRequest { source_stag: 0, ..READ }, Cause::READ_STAG),
        (ReadRequest { source_offset: 249, ..READ }, Cause::READ_STAG),
        (ReadRequest { source_offset: u64::MAX - 6, ..READ }, Cause::READ_WRAP),
        (ReadRequest { sink_offset: u64::MAX - 6, ..READ }, Cause::READ_WRAP),
    ];
    for (request, cause) in cases {
        refused(responder, &read_request(request, 1), cause);
    }
    let header = untagged(Opcode::ReadRequest, 1, 0);
    refused(responder, &fpdu(header, &READ.to_bytes()[..27]), Cause::OPERATION);
    refused(responder, &fpdu(header, &[READ.to_bytes().as_slice(), &[0]].concat()), Cause::TOO_LONG);
    refused(responder, &part(header, 28), Cause::TOO_LONG);
}

/// Requests that arrive together are bounded by the IRD; those that arrive one by one are answered.
#[test]
fn a_thousand_read_requests() {
    let same_memory = ReadRequest { sink_stag: KEY, sink_offset: 0, ..READ };
    for request in [READ, ReadRequest { length: 0, ..READ }, same_memory] {
        let flood: Vec<u8> = (1..=1000).flat_map(|msn| read_request(request, msn)).collect();
        let (mut peer, mut end) = responder();
        end.connection.handle_bytes(end.now, &flood, &mut end.host);
        assert_eq!(end.end(), Some(End::Refused(Cause::STREAM)));
        assert_eq!(peer.terminate(&mut end).cause, Cause::STREAM);

        let (mut peer, mut end) = responder();
        for msn in 1..=1000 {
            peer.send(&read_request(request, msn));
            run_one(&mut end, |end| {
                let inspect = end.stream().inspect();
                assert_eq!(inspect.end, None);
                inspect.stats.fpdus_sent == u64::from(msn) && inspect.not_taken == 0
            });
        }
    }
}

#[test]
fn responses_that_fit_no_read() {
    let response = |stag, offset, last, length: usize| {
        fpdu(SegmentHeader { last, ..tagged(Opcode::ReadResponse, stag, offset) }, &vec![7; length])
    };
    let cases = [
        // Without any READ under this STag; for a later READ; too long; too short; without the end; at a wrong offset.
        (response(9, 0, true, 64), Cause::TAGGED_STAG),
        (response(2, 0, true, 64), Cause::TAGGED_STAG),
        (response(1, 0, true, 65), Cause::TAGGED_BOUNDS),
        (response(1, 0, true, 63), Cause::TAGGED_BOUNDS),
        (response(1, 0, false, 64), Cause::TAGGED_BOUNDS),
        (response(1, 1, true, 63), Cause::TAGGED_BOUNDS),
        (response(1, u64::MAX, false, 8), Cause::TAGGED_BOUNDS),
        // A WRITE to the sink of a READ.
        (fpdu(tagged(Opcode::Write, 1, 0), &[7; 8]), Cause::TAGGED_STAG),
    ];
    for (bytes, cause) in cases {
        refused(reader, &bytes, cause);
    }
    // For a READ that was answered.
    let (mut peer, mut end) = reader();
    peer.send_slowly(&[response(1, 0, true, 64), response(1, 0, true, 64)].concat(), &mut end);
    assert_eq!(last_terminate(&peer.rest(&mut end).unwrap()), Cause::TAGGED_STAG);
    assert_eq!(end.host.statuses(), [(1, WcStatus::Success), (2, WcStatus::BadResponse)]);
    // Without any READ.
    refused(responder, &response(1, 0, true, 8), Cause::TAGGED_STAG);
}

#[test]
fn writes_to_forbidden_memory() {
    let cases = [
        (0, 0, Cause::TAGGED_STAG),
        (KEY + 1, 0, Cause::TAGGED_STAG),
        (KEY, 249, Cause::TAGGED_STAG),
        (KEY, u64::MAX - 7, Cause::TAGGED_STAG),
        (KEY, u64::MAX - 6, Cause::TAGGED_WRAP),
        (KEY, u64::MAX, Cause::TAGGED_WRAP),
    ];
    for (stag, offset, cause) in cases {
        refused(responder, &fpdu(tagged(Opcode::Write, stag, offset), &[7; 8]), cause);
    }
}

/// The first Terminate counts, whatever is wrong with it, and none is answered.
#[test]
fn a_thousand_terminates_with_cut_headers() {
    let whole = terminate(Cause::TAGGED_BOUNDS, Some(WRITE));
    let body = &whole[framing::LENGTH_LEN + 18..whole.len() - framing::CRC_LEN];
    for cut in [0, 1, 3, 4, 5, 6, 7, body.len() - 1] {
        let (mut peer, mut end) = reader();
        let mut bytes = fpdu(untagged(Opcode::Terminate, 1, 0), &body[..cut]);
        bytes.extend((0..1000).flat_map(|_| terminate(Cause::NO_BUFFER, None)));
        peer.send(&bytes);
        let sent = peer.rest(&mut end).unwrap();
        assert_eq!(sent.len(), 2 * framing::fpdu_len(18 + ReadRequest::LEN), "only the two READ requests were sent");
        let status = if cut < 4 { WcStatus::RemoteOperation } else { WcStatus::RemoteAccess };
        assert_eq!(end.host.statuses(), [(1, status), (2, WcStatus::Flushed)]);
    }
    // With an STag, message number or queue that Terminates do not have.
    for (msn, stag) in [(2, 0), (u32::MAX, 7)] {
        let (mut peer, mut end) = reader();
        let placement = Placement::Untagged { stag, queue: 2, msn, offset: 3 };
        peer.send(&fpdu(SegmentHeader { placement, ..untagged(Opcode::Terminate, 1, 0) }, body));
        peer.rest(&mut end).unwrap();
        assert!(matches!(end.end(), Some(End::Terminated { cause: Cause::TAGGED_BOUNDS, .. })));
    }
}

/// The Terminate is sent between two segments of a message, and the rest of the message never.
#[test]
fn a_refusal_in_the_middle_of_a_message_of_this_end() {
    let (mut peer, mut end) = responder();
    end.host.memory = vec![1; 8 << 20];
    end.set_buffers(65_536);
    peer.send(&fpdu(tagged(Opcode::Write, KEY, 0), &[1; 8]));
    run_one(&mut end, |end| end.stream().inspect().open);
    end.post(write(1, 0, vec![sge(0, 8 << 20)]));
    // Until the socket is full.
    while end.step() {}
    assert!(end.host.sent.is_empty());
    peer.send(&fpdu(tagged(Opcode::Write, 0, 0), &[1; 8]));
    run_one(&mut end, |end| end.end().is_some());
    let sent = std::thread::scope(|scope| {
        // The socket has room only when the peer reads.
        let peer = scope.spawn(move || peer.all());
        run_one(&mut end, |end| end.socket == Socket::Closed);
        peer.join().unwrap()
    });
    assert_eq!(last_terminate(&sent), Cause::TAGGED_STAG);
    assert_eq!(end.host.statuses(), [(1, WcStatus::Flushed)]);
}
