//! Ends of connections, as seen by the requests, the queue pair and the peer.

use std::time::Duration;

use pvrdma_iwarp::{
    Close, End as StreamEnd, Finished, Role,
    wire::{Cause, Opcode, Placement, RefusedSegment, SegmentHeader, Terminate, fpdu},
};
use pvrdma_verbs_types::{NakReason, WcStatus};

use crate::host::KEY;
use crate::pair::{End, Pair, negotiated, read, send, sge, write};

/// An FPDU.
pub(crate) fn fpdu(header: SegmentHeader, payload: &[u8]) -> Vec<u8> {
    let raw = header.to_raw();
    let mut out = vec![0; fpdu::LENGTH_LEN];
    out.extend(raw.bytes());
    out.extend(payload);
    let segment = out.len() - fpdu::LENGTH_LEN;
    out.resize(fpdu::fpdu_len(segment), 0);
    fpdu::seal(&mut out, segment, true).unwrap();
    out
}

pub(crate) fn untagged(opcode: Opcode, msn: u32, offset: u32) -> SegmentHeader {
    let placement = Placement::Untagged { stag: 0, queue: opcode.queue().unwrap(), msn, offset };
    SegmentHeader { last: true, opcode, placement }
}

pub(crate) const fn tagged(opcode: Opcode, stag: u32, offset: u64) -> SegmentHeader {
    SegmentHeader { last: true, opcode, placement: Placement::Tagged { stag, offset } }
}

pub(crate) fn terminate(cause: Cause, segment: Option<SegmentHeader>) -> Vec<u8> {
    let segment = segment.map(|header| RefusedSegment { length: 100, header: header.to_raw() });
    fpdu(untagged(Opcode::Terminate, 1, 0), &Terminate { cause, segment, read: None }.to_bytes())
}

/// An initiator with a WRITE, a READ and a SEND that have been built. TCP has accepted none of their bytes.
fn busy() -> End {
    let [mut a, _] = Pair::new(8192).0;
    a.post(write(1, 0x100, vec![sge(0, 64)]));
    a.post(read(2, 0x200, vec![sge(64, 64)]));
    a.post(send(3, vec![sge(0, 64)]));
    a.transmit_all();
    a
}

#[test]
fn a_terminate_ends_the_first_request_with_its_reason() {
    let cause = |layer, error_type, code| Cause { layer, error_type, code };
    let cases = [
        (Cause::READ_STAG, WcStatus::RemoteAccess),
        (Cause::TAGGED_BOUNDS, WcStatus::RemoteAccess),
        (Cause::NO_BUFFER, WcStatus::RnrRetryExceeded),
        (Cause::TOO_LONG, WcStatus::RemoteInvalidRequest),
        (Cause::MSN_RANGE, WcStatus::RemoteInvalidRequest),
        (Cause::UNEXPECTED_OPCODE, WcStatus::RemoteInvalidRequest),
        (Cause::STREAM, WcStatus::RemoteOperation),
        (Cause::CATASTROPHIC, WcStatus::RemoteOperation),
        (Cause::DDP_CATASTROPHIC, WcStatus::RemoteOperation),
        (Cause::CRC, WcStatus::RemoteOperation),
        (cause(15, 15, 255), WcStatus::RemoteOperation),
    ];
    for (cause, status) in cases {
        let mut a = busy();
        a.deliver(&terminate(cause, None));
        assert_eq!(a.host.statuses(), [(1, status), (2, WcStatus::Flushed), (3, WcStatus::Flushed)]);
        assert_eq!(a.stream.end(), Some(StreamEnd::Terminated { cause, unreported: false }));
        // It is not answered.
        assert!(a.host.failed && a.transmit_all() == 0);
    }
}

#[test]
fn a_terminate_ends_the_request_that_it_names() {
    let mut a = busy();
    a.deliver(&terminate(Cause::TAGGED_BOUNDS, Some(tagged(Opcode::Write, KEY, 0x13f))));
    assert_eq!(a.host.statuses()[0], (1, WcStatus::RemoteAccess));

    // The READ is found by its sink. The message number is wrong, as in common implementations.
    let mut a = busy();
    let request = a.outbox[fpdu::fpdu_len(14 + 64) + 20..][..28].try_into().unwrap();
    let body = Terminate {
        cause: Cause::READ_STAG,
        segment: Some(RefusedSegment { length: 46, header: untagged(Opcode::ReadRequest, 999, 0).to_raw() }),
        read: Some(pvrdma_iwarp::wire::ReadRequest::from_bytes(request)),
    };
    a.deliver(&fpdu(untagged(Opcode::Terminate, 1, 0), &body.to_bytes()));
    let (flushed, denied) = (WcStatus::Flushed, WcStatus::RemoteAccess);
    assert_eq!(a.host.statuses(), [(1, flushed), (2, denied), (3, flushed)]);

    // A WRITE that is not open.
    let mut a = busy();
    a.deliver(&terminate(Cause::TAGGED_BOUNDS, Some(tagged(Opcode::Write, KEY, 0x140))));
    assert_eq!(a.host.statuses()[0], (1, WcStatus::RemoteAccess));
}

#[test]
fn a_terminate_without_open_requests_is_for_an_event() {
    let [mut a, _] = Pair::new(64).0;
    a.deliver(&terminate(Cause::TOO_LONG, None));
    assert_eq!(a.stream.end(), Some(StreamEnd::Terminated { cause: Cause::TOO_LONG, unreported: true }));
    assert!(a.host.failed);
    // Requests that are posted later are flushed.
    a.post(send(1, vec![]));
    assert_eq!(a.host.statuses(), [(1, WcStatus::Flushed)]);
    assert!(!a.stream.has_room());
}

#[test]
fn cut_and_repeated_terminates_count_once() {
    let whole = Terminate { cause: Cause::TOO_LONG, segment: None, read: None }.to_bytes();
    for cut in 0..=whole.len() {
        let mut a = busy();
        let mut bytes = fpdu(untagged(Opcode::Terminate, 1, 0), &whole[..cut]);
        for _ in 0..1000 {
            bytes.extend(terminate(Cause::READ_STAG, None));
        }
        a.deliver(&bytes);
        let status = if cut < 4 { WcStatus::RemoteOperation } else { WcStatus::RemoteInvalidRequest };
        assert_eq!(a.host.statuses(), [(1, status), (2, WcStatus::Flushed), (3, WcStatus::Flushed)]);
        assert!(a.inbox.is_empty());
    }
}

#[test]
fn a_reset_is_a_transport_error() {
    let mut a = busy();
    a.finished(Finished::Reset);
    assert_eq!(a.host.statuses()[..2], [(1, WcStatus::RetryExceeded), (2, WcStatus::Flushed)]);
    assert_eq!(a.stream.end(), Some(StreamEnd::Lost));
    assert!(a.host.failed);
}

#[test]
fn a_close_between_messages_leaves_requests_to_the_owner() {
    let mut a = busy();
    a.finished(Finished::Closed(0));
    assert_eq!((a.host.statuses(), a.stream.end(), a.host.failed), (vec![], Some(StreamEnd::PeerClosed), false));
    a.post(send(4, vec![]));
    assert_eq!(a.transmit_all(), 0);
    a.stream.flush(&mut a.host);
    let flushed = WcStatus::Flushed;
    assert_eq!(a.host.statuses(), [(1, flushed), (2, flushed), (3, flushed), (4, flushed)]);
}

#[test]
fn a_close_within_a_message_is_a_loss() {
    // Within an FPDU.
    let mut a = busy();
    a.deliver(&[0]);
    a.finished(Finished::Closed(a.inbox.len()));
    assert_eq!(a.host.statuses()[0], (1, WcStatus::RetryExceeded));
    // Between the segments of a SEND, of a WRITE and of a READ response.
    for opcode in [Opcode::Send, Opcode::Write, Opcode::ReadResponse] {
        let mut a = busy();
        a.host.post_receive(1, vec![sge(0, 64)]);
        let header = match opcode {
            Opcode::Send => untagged(opcode, 1, 0),
            Opcode::Write => tagged(opcode, KEY, 0),
            // Sinks are counted from 1 with the default seed.
            _ => tagged(opcode, 1, 0),
        };
        a.deliver(&fpdu(SegmentHeader { last: false, ..header }, &[1; 8]));
        assert_eq!(a.stream.end(), None);
        a.finished(Finished::Closed(0));
        assert_eq!(a.stream.end(), Some(StreamEnd::Lost));
    }
}

#[test]
fn a_receive_that_is_never_posted_ends_both_sides() {
    let mut pair = Pair::open(64);
    let [a, b] = &mut pair.0;
    a.post(send(1, vec![sge(0, 8)]));
    a.post(read(2, 0, vec![sge(0, 8)]));
    b.post(read(3, 0, vec![sge(0, 8)]));
    b.deliver(&a.sent());
    b.stream.handle_timeout(b.now + Duration::from_nanos(4_999_999_999), &mut b.host);
    assert_eq!(b.stream.end(), None);
    b.stream.handle_timeout(b.now + Duration::from_secs(5), &mut b.host);
    assert_eq!(b.stream.end(), Some(StreamEnd::Refused(Cause::NO_BUFFER)));
    assert_eq!(
        (b.host.statuses(), &b.host.refused[..]),
        (vec![(3, WcStatus::Flushed)], &[NakReason::InvalidRequest][..])
    );
    a.deliver(&b.sent());
    // The SEND completed when TCP accepted it, so the next request reports the error.
    assert_eq!(a.host.statuses(), [(1, WcStatus::Success), (2, WcStatus::RnrRetryExceeded)]);
    assert_eq!(b.stream.poll_timeout(), None);
}

#[test]
fn the_owner_closes_in_order_only_between_messages() {
    let mut pair = Pair::open(8192);
    let [a, b] = &mut pair.0;
    assert_eq!(a.stream.close(), Close::Finish);
    a.post(read(1, 0, vec![sge(0, 4000)]));
    b.deliver(&a.sent());
    assert_eq!((a.stream.close(), b.stream.close()), (Close::Finish, Close::Reset));
    b.transmit_all();
    assert_eq!(b.stream.close(), Close::Reset);
    b.take(usize::MAX);
    assert_eq!(b.stream.close(), Close::Finish);
    a.stream.flush(&mut a.host);
    assert_eq!((a.host.statuses(), a.stream.end()), (vec![(1, WcStatus::Flushed)], Some(StreamEnd::Flushed)));
    assert_eq!(a.transmit_all(), 0);
}

#[test]
fn memory_of_a_read_that_disappears_ends_the_reader() {
    let mut pair = Pair::new(8192);
    let [a, b] = &mut pair.0;
    a.post(read(1, 0, vec![sge(0, 4000)]));
    b.deliver(&a.sent());
    assert!(b.transmit());
    b.host.gone = true;
    pair.settle();
    let [a, b] = &pair.0;
    assert_eq!(b.stream.end(), Some(StreamEnd::Refused(Cause::READ_STAG)));
    assert_eq!(b.host.refused, [NakReason::RemoteAccess]);
    assert_eq!(a.host.statuses(), [(1, WcStatus::RemoteAccess)]);
}

#[test]
fn the_sink_of_a_read_that_disappears_ends_that_read() {
    let mut pair = Pair::new(8192);
    let [a, _] = &mut pair.0;
    a.post(write(1, 0, vec![sge(0, 8)]));
    a.post(read(2, 0, vec![sge(0, 100)]));
    let bytes = a.sent();
    a.host.gone = true;
    pair.0[1].deliver(&bytes);
    pair.settle();
    let [a, b] = &pair.0;
    assert_eq!(a.host.statuses(), [(1, WcStatus::Success), (2, WcStatus::LocalProtection)]);
    assert_eq!(b.stream.end(), Some(StreamEnd::Terminated { cause: Cause::CATASTROPHIC, unreported: true }));
}

#[test]
fn after_the_end_all_bytes_are_discarded() {
    let mut a = End::new(negotiated(Role::Responder), pvrdma_iwarp::Tuning::default(), 64);
    a.finished(Finished::Reset);
    a.deliver(&vec![0; 100_000]);
    assert!(a.inbox.is_empty());
}

#[test]
fn bytes_behind_the_response_that_lets_a_failed_request_report_are_discarded() {
    let mut pair = Pair::new(64);
    let [a, b] = &mut pair.0;
    a.post(read(1, 0, vec![sge(0, 8)]));
    a.post(pvrdma_verbs_types::SendWr { wr_id: 2, ..Default::default() });
    b.deliver(&a.sent());
    let mut bytes = b.sent();
    bytes.push(0);
    a.deliver(&bytes);
    assert_eq!(a.host.statuses(), [(1, WcStatus::Success), (2, WcStatus::LocalQpOperation)]);
    assert!(a.inbox.is_empty());
}

#[test]
fn a_terminate_does_not_affect_earlier_requests() {
    let mut pair = Pair::new(64);
    let [a, b] = &mut pair.0;
    a.post(read(1, 0, vec![sge(0, 8)]));
    a.post(write(2, 0, vec![sge(0, 8)]));
    a.post(read(3, 0, vec![sge(0, 8)]));
    b.deliver(&a.sent());
    assert!(b.transmit());
    let bytes = [b.take(usize::MAX), terminate(Cause::READ_STAG, None)].concat();
    a.deliver(&bytes);
    let (ok, denied) = (WcStatus::Success, WcStatus::RemoteAccess);
    assert_eq!(a.host.statuses(), [(1, ok), (2, ok), (3, denied)]);
}
