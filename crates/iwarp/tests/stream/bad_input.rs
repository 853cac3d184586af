//! Bytes that no correct peer sends. Each input is answered by a Terminate with its code, and changes no memory.

use pvrdma_iwarp::{
    End as StreamEnd, Negotiated, Role, Tuning,
    wire::{Cause, Opcode, Placement, RawHeader, ReadRequest, SegmentHeader, Terminate, fpdu as framing},
};
use pvrdma_verbs_types::{Access, NakReason, WcStatus};

use crate::ends::{fpdu, tagged, untagged};
use crate::host::{Ended, KEY};
use crate::pair::{End, negotiated, read, sge};

/// A responder with 256 bytes of memory, a receive for 64 bytes, and one READ resource.
fn responder() -> End {
    let properties = Negotiated { ird: 1, ..negotiated(Role::Responder) };
    let mut end = End::new(properties, Tuning::default(), 256);
    end.host.post_receive(1, vec![sge(0, 64)]);
    end
}

/// The Terminate that an end sends, and nothing else.
fn answer(end: &mut End) -> Terminate {
    let bytes = end.sent();
    let whole = framing::Fpdu::parse(&bytes, true).unwrap().unwrap();
    assert_eq!(whole.len, bytes.len(), "nothing follows a Terminate");
    let (raw, body) = RawHeader::split(whole.segment).unwrap();
    assert_eq!(SegmentHeader::parse(&raw).unwrap(), untagged(Opcode::Terminate, 1, 0));
    Terminate::parse(body)
}

/// Checks that an end refuses `bytes` with this cause, and that its memory stays unchanged.
fn refuses(mut end: End, bytes: &[u8], cause: Cause) -> End {
    let before = end.host.memory.clone();
    end.deliver(bytes);
    assert_eq!(end.stream.end(), Some(StreamEnd::Refused(cause)));
    assert_eq!(answer(&mut end).cause, cause);
    assert!(end.host.failed && end.host.memory == before && end.inbox.is_empty());
    // Nothing is processed any more.
    end.deliver(&fpdu(tagged(Opcode::Write, KEY, 0), &[9; 8]));
    assert_eq!(end.host.memory, before);
    end
}

fn read_request(request: ReadRequest, msn: u32) -> Vec<u8> {
    fpdu(untagged(Opcode::ReadRequest, msn, 0), &request.to_bytes())
}

const READ: ReadRequest = ReadRequest { sink_stag: 5, sink_offset: 0, length: 8, source_stag: KEY, source_offset: 0 };

#[test]
fn lengths_that_no_segment_has() {
    for length in 0..14_u16 {
        refuses(responder(), &length.to_be_bytes(), Cause::FPDU_START);
    }
    // An untagged header is longer.
    for length in 14..18 {
        let mut bytes = vec![0x41; framing::fpdu_len(length)];
        framing::seal(&mut bytes, length, true).unwrap();
        refuses(responder(), &bytes, Cause::FPDU_START);
    }
}

#[test]
fn a_wrong_crc_is_found_before_anything_is_placed() {
    for header in [tagged(Opcode::Write, KEY, 0), untagged(Opcode::Send, 1, 0)] {
        let mut bytes = fpdu(header, &[7; 32]);
        let at = bytes.len() - 8;
        bytes[at] ^= 1;
        let mut end = responder();
        // This end's own request ends as if the connection had been reset.
        end.post(read(1, 0, vec![sge(0, 8)]));
        let end = refuses(end, &bytes, Cause::CRC);
        assert_eq!(end.host.statuses(), [(1, WcStatus::RetryExceeded)]);
    }
}

#[test]
fn versions_opcodes_and_queues() {
    let edited = |header: SegmentHeader, at: usize, value: u8| {
        let mut bytes = fpdu(header, &[7; 32]);
        bytes[at] = value;
        let segment = usize::from(u16::from_be_bytes([bytes[0], bytes[1]]));
        framing::seal(&mut bytes, segment, true).unwrap();
        bytes
    };
    let (write, send) = (tagged(Opcode::Write, KEY, 0), untagged(Opcode::Send, 1, 0));
    for version in [0, 2, 3] {
        refuses(responder(), &edited(write, 2, 0xc0 | version), Cause::TAGGED_VERSION);
        refuses(responder(), &edited(send, 2, 0x40 | version), Cause::UNTAGGED_VERSION);
    }
    for version in [0, 2, 3] {
        refuses(responder(), &edited(write, 3, version << 6), Cause::RDMAP_VERSION);
    }
    // Unknown opcodes, and those of the other kind of segment.
    for opcode in [1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 15] {
        refuses(responder(), &edited(write, 3, 0x40 | opcode), Cause::UNEXPECTED_OPCODE);
    }
    for opcode in [0, 2, 8, 9, 10, 11, 15] {
        refuses(responder(), &edited(send, 3, 0x40 | opcode), Cause::UNEXPECTED_OPCODE);
    }
    for queue in [1, 2, 3, u32::MAX] {
        let placement = Placement::Untagged { stag: 0, queue, msn: 1, offset: 0 };
        refuses(responder(), &fpdu(SegmentHeader { placement, ..send }, &[7; 8]), Cause::QUEUE);
    }
    let placement = Placement::Untagged { stag: 0, queue: 0, msn: 1, offset: 0 };
    let header = SegmentHeader { placement, ..untagged(Opcode::ReadRequest, 1, 0) };
    refuses(responder(), &fpdu(header, &READ.to_bytes()), Cause::QUEUE);
}

#[test]
fn message_numbers_and_offsets() {
    for msn in [0, 2, u32::MAX] {
        refuses(responder(), &fpdu(untagged(Opcode::Send, msn, 0), &[7; 8]), Cause::MSN_RANGE);
        refuses(responder(), &read_request(READ, msn), Cause::MSN_RANGE);
    }
    refuses(responder(), &fpdu(untagged(Opcode::Send, 1, 1), &[7; 8]), Cause::MESSAGE_OFFSET);
    let header = untagged(Opcode::ReadRequest, 1, 1);
    refuses(responder(), &fpdu(header, &READ.to_bytes()), Cause::MESSAGE_OFFSET);
    // In the middle of a message.
    let first = fpdu(SegmentHeader { last: false, ..untagged(Opcode::Send, 1, 0) }, &[7; 8]);
    for (msn, offset, cause) in [(1, 7, Cause::MESSAGE_OFFSET), (1, 0, Cause::MESSAGE_OFFSET), (2, 8, Cause::MSN_RANGE)]
    {
        let mut end = responder();
        end.deliver(&first);
        refuses(end, &fpdu(untagged(Opcode::Send, msn, offset), &[7; 8]), cause);
    }
}

#[test]
fn messages_of_one_kind_do_not_interleave() {
    let mut end = responder();
    end.deliver(&fpdu(SegmentHeader { last: false, ..untagged(Opcode::Send, 1, 0) }, &[7; 8]));
    refuses(end, &read_request(READ, 1), Cause::UNEXPECTED_OPCODE);
    let mut end = responder();
    end.deliver(&fpdu(SegmentHeader { last: false, ..untagged(Opcode::Send, 1, 0) }, &[7; 8]));
    refuses(end, &fpdu(untagged(Opcode::SendSolicited, 1, 8), &[7; 8]), Cause::UNEXPECTED_OPCODE);

    let mut end = responder();
    end.deliver(&fpdu(SegmentHeader { last: false, ..tagged(Opcode::Write, KEY, 0) }, &[7; 8]));
    refuses(end, &fpdu(tagged(Opcode::Write, KEY + 1, 8), &[7; 8]), Cause::TAGGED_STAG);
    let mut end = responder();
    end.deliver(&fpdu(SegmentHeader { last: false, ..tagged(Opcode::Write, KEY, 0) }, &[7; 8]));
    refuses(end, &fpdu(tagged(Opcode::Write, KEY, 9), &[7; 8]), Cause::TAGGED_BOUNDS);
    let mut end = responder();
    end.deliver(&fpdu(SegmentHeader { last: false, ..tagged(Opcode::Write, KEY, 0) }, &[7; 8]));
    refuses(end, &fpdu(tagged(Opcode::ReadResponse, 1, 8), &[7; 8]), Cause::UNEXPECTED_OPCODE);
}

#[test]
fn a_tagged_and_an_untagged_message_may_interleave() {
    let mut end = responder();
    let part = |header, last| fpdu(SegmentHeader { last, ..header }, &[7; 8]);
    end.deliver(&part(untagged(Opcode::Send, 1, 0), false));
    end.deliver(&part(tagged(Opcode::Write, KEY, 100), false));
    end.deliver(&part(untagged(Opcode::Send, 1, 8), true));
    end.deliver(&part(tagged(Opcode::Write, KEY, 108), true));
    assert_eq!((end.stream.end(), end.host.received.len()), (None, 1));
    assert_eq!((&end.host.memory[..16], &end.host.memory[100..116]), (&[7; 16][..], &[7; 16][..]));
}

#[test]
fn a_send_without_end_outgrows_its_receive() {
    let mut end = responder();
    let part = |at| fpdu(SegmentHeader { last: false, ..untagged(Opcode::Send, 1, at) }, &[7; 32]);
    end.deliver(&[part(0), part(32)].concat());
    let end = refuses(end, &part(64), Cause::TOO_LONG);
    let ended = Ended { wr_id: 1, status: WcStatus::LocalLength, byte_len: 0 };
    assert_eq!(end.host.received, [(ended, None)]);
    assert_eq!(end.host.refused, [], "the receive has already reported the error");
}

/// Only its position is kept, so it may be as long as a message can be.
#[test]
fn a_write_without_end_costs_no_memory() {
    let mut end = responder();
    for at in (0..256).step_by(32) {
        end.deliver(&fpdu(SegmentHeader { last: false, ..tagged(Opcode::Write, KEY, at) }, &[7; 32]));
    }
    assert_eq!((end.stream.end(), end.inbox.capacity() < 100_000), (None, true));
    refuses(end, &fpdu(tagged(Opcode::Write, KEY, 256), &[7; 32]), Cause::TAGGED_STAG);
}

#[test]
fn writes_to_forbidden_memory() {
    let cases = [
        (KEY + 1, 0, Cause::TAGGED_STAG),
        (0, 0, Cause::TAGGED_STAG),
        (KEY, 249, Cause::TAGGED_STAG),
        (KEY, u64::MAX - 6, Cause::TAGGED_WRAP),
        (KEY, u64::MAX, Cause::TAGGED_WRAP),
        // The last byte of the address space does not wrap.
        (KEY, u64::MAX - 7, Cause::TAGGED_STAG),
    ];
    for (stag, offset, cause) in cases {
        let end = refuses(responder(), &fpdu(tagged(Opcode::Write, stag, offset), &[7; 8]), cause);
        assert_eq!(end.host.refused, [NakReason::RemoteAccess]);
    }
    let mut end = responder();
    end.host.qp_access = Access::empty();
    let end = refuses(end, &fpdu(tagged(Opcode::Write, KEY, 0), &[7; 8]), Cause::ACCESS_RIGHTS);
    assert_eq!(end.host.refused, [NakReason::InvalidRequest]);
}

#[test]
fn a_terminate_names_the_refused_segment() {
    let mut end = responder();
    let header = tagged(Opcode::Write, KEY + 1, 3);
    end.deliver(&fpdu(header, &[7; 8]));
    let segment = answer(&mut end).segment.unwrap();
    assert_eq!((segment.length, segment.header), (22, header.to_raw()));

    let mut end = responder();
    let request = ReadRequest { source_stag: 0, ..READ };
    end.deliver(&read_request(request, 1));
    let terminate = answer(&mut end);
    assert_eq!((terminate.segment.unwrap().length, terminate.read), (46, Some(request)));
}

#[test]
fn read_requests_for_forbidden_memory() {
    let cases = [
        (ReadRequest { source_stag: KEY + 1, ..READ }, Cause::READ_STAG),
        (ReadRequest { source_stag: 0, ..READ }, Cause::READ_STAG),
        (ReadRequest { source_offset: 249, ..READ }, Cause::READ_STAG),
        (ReadRequest { length: u32::MAX, ..READ }, Cause::READ_STAG),
        (ReadRequest { source_offset: u64::MAX - 6, ..READ }, Cause::READ_WRAP),
        (ReadRequest { sink_offset: u64::MAX - 6, ..READ }, Cause::READ_WRAP),
    ];
    for (request, cause) in cases {
        let end = refuses(responder(), &read_request(request, 1), cause);
        assert_eq!(end.host.refused, [NakReason::RemoteAccess]);
    }
    let mut end = responder();
    end.host.qp_access = Access::empty();
    refuses(end, &read_request(READ, 1), Cause::ACCESS_RIGHTS);
}

#[test]
fn read_requests_of_a_wrong_shape() {
    let header = untagged(Opcode::ReadRequest, 1, 0);
    for length in [0, 27] {
        refuses(responder(), &fpdu(header, &READ.to_bytes()[..length]), Cause::OPERATION);
    }
    let long = [&READ.to_bytes()[..], &[0]].concat();
    refuses(responder(), &fpdu(header, &long), Cause::TOO_LONG);
    refuses(responder(), &fpdu(SegmentHeader { last: false, ..header }, &READ.to_bytes()), Cause::TOO_LONG);
}

#[test]
fn a_thousand_read_requests_are_bounded_by_the_ird() {
    let flood: Vec<u8> = (1..=1000).flat_map(|msn| read_request(READ, msn)).collect();
    let mut end = responder();
    end.deliver(&flood);
    assert_eq!(end.stream.end(), Some(StreamEnd::Refused(Cause::STREAM)));
    assert_eq!((answer(&mut end).cause, &end.host.refused[..]), (Cause::STREAM, &[NakReason::InvalidRequest][..]));

    // This also holds if they read nothing, and if the peer reads from its sink.
    for request in [ReadRequest { length: 0, ..READ }, ReadRequest { sink_stag: KEY, ..READ }] {
        let mut end = responder();
        end.deliver(&read_request(request, 1));
        assert_eq!(end.stream.end(), None);
        end.deliver(&read_request(request, 2));
        assert_eq!(end.stream.end(), Some(StreamEnd::Refused(Cause::STREAM)));
    }
}

/// A reader whose READ of 64 bytes has the sink 1.
fn reader() -> End {
    let mut end = End::new(negotiated(Role::Initiator), Tuning::default(), 256);
    end.post(read(1, 0, vec![sge(0, 64)]));
    end.post(read(2, 0, vec![sge(64, 64)]));
    end.sent();
    end
}

#[test]
fn responses_that_fit_no_read() {
    let response = |stag, offset, last, length: usize| {
        fpdu(SegmentHeader { last, ..tagged(Opcode::ReadResponse, stag, offset) }, &vec![7; length])
    };
    let cases = [
        // The requester did not ask for it.
        (response(9, 0, true, 64), Cause::TAGGED_STAG),
        // For a later READ.
        (response(2, 0, true, 64), Cause::TAGGED_STAG),
        // Too long; too short; the end is missing; at a wrong offset.
        (response(1, 0, true, 65), Cause::TAGGED_BOUNDS),
        (response(1, 0, true, 63), Cause::TAGGED_BOUNDS),
        (response(1, 0, false, 64), Cause::TAGGED_BOUNDS),
        (response(1, 1, true, 63), Cause::TAGGED_BOUNDS),
        (response(1, u64::MAX, false, 8), Cause::TAGGED_BOUNDS),
    ];
    for (bytes, cause) in cases {
        let end = refuses(reader(), &bytes, cause);
        assert_eq!(end.host.statuses(), [(1, WcStatus::BadResponse), (2, WcStatus::Flushed)]);
    }
    // For a READ that is answered.
    let mut end = reader();
    end.deliver(&response(1, 0, true, 64));
    let end = refuses(end, &response(1, 0, true, 64), Cause::TAGGED_STAG);
    assert_eq!(end.host.statuses(), [(1, WcStatus::Success), (2, WcStatus::BadResponse)]);
    // Without any READ there is only an event.
    let end = refuses(responder(), &response(1, 0, true, 8), Cause::TAGGED_STAG);
    assert_eq!(end.host.refused, [NakReason::RemoteAccess]);
}

#[test]
fn the_sink_of_a_read_is_no_memory_for_writes() {
    refuses(reader(), &fpdu(tagged(Opcode::Write, 1, 0), &[7; 8]), Cause::TAGGED_STAG);
}

#[test]
fn a_key_that_cannot_be_invalidated() {
    let mut end = responder();
    end.host.may_invalidate = false;
    let placement = Placement::Untagged { stag: 7, queue: 0, msn: 1, offset: 0 };
    let header = SegmentHeader { placement, ..untagged(Opcode::SendInvalidate, 1, 0) };
    let end = refuses(end, &fpdu(header, &[]), Cause::NOT_INVALIDATED);
    assert_eq!(end.host.received[0].0.status, WcStatus::LocalProtection);
}

#[test]
fn memory_of_a_receive_that_disappears() {
    let mut end = responder();
    end.host.gone = true;
    let end = refuses(end, &fpdu(untagged(Opcode::Send, 1, 0), &[7; 8]), Cause::DDP_CATASTROPHIC);
    assert_eq!(end.host.received[0].0.status, WcStatus::LocalProtection);
}
