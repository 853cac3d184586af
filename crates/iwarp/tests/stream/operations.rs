//! Each operation, with the rules about when it may be sent and when it completes.

use std::time::Duration;

use pvrdma_iwarp::wire::{Opcode, Placement, RawHeader, ReadRequest, SegmentHeader, fpdu};
use pvrdma_iwarp::{Close, Negotiated, Role, Rtr, Tuning};
use pvrdma_verbs_types::{Invalidate, RemoteAddress, SendData, SendFlags, SendOp, SendWr, WcStatus};

use crate::host::KEY;
use crate::pair::{End, Pair, negotiated, read, remote, request, send, sge, write};

const OK: WcStatus = WcStatus::Success;

/// Headers of the FPDUs in a run of bytes, with the payloads.
fn segments(mut bytes: &[u8], crc: bool) -> Vec<(SegmentHeader, Vec<u8>)> {
    let mut found = Vec::new();
    while let Some(fpdu) = fpdu::Fpdu::parse(bytes, crc).unwrap() {
        let (raw, payload) = RawHeader::split(fpdu.segment).unwrap();
        found.push((SegmentHeader::parse(&raw).unwrap(), payload.to_vec()));
        bytes = &bytes[fpdu.len..];
    }
    assert!(bytes.is_empty());
    found
}

fn opcodes(bytes: &[u8]) -> Vec<Opcode> {
    segments(bytes, true).iter().map(|(header, _)| header.opcode).collect()
}

#[test]
fn a_send_arrives_with_its_flags() {
    let mut pair = Pair::new(4096);
    let kinds = [
        (SendData::None, SendFlags::empty(), Opcode::Send),
        (SendData::None, SendFlags::SOLICITED, Opcode::SendSolicited),
        (SendData::Invalidate(7), SendFlags::empty(), Opcode::SendInvalidate),
        (SendData::Invalidate(8), SendFlags::SOLICITED, Opcode::SendSolicitedInvalidate),
    ];
    for (number, (data, flags, opcode)) in (0..).zip(kinds) {
        let [a, b] = &mut pair.0;
        a.host.memory[..5].copy_from_slice(b"hello");
        b.host.post_receive(number, vec![sge(100, 2), sge(200, 10)]);
        let op = SendOp::Send { data, to: None };
        a.post(SendWr { wr_id: number, op, flags, sges: vec![sge(0, 5)] });
        let bytes = a.sent();
        assert_eq!(opcodes(&bytes), [opcode]);
        b.deliver(&bytes);
        let (ended, received) = b.host.received.pop().unwrap();
        let received = received.unwrap();
        assert_eq!((ended.wr_id, ended.status, received.length), (number, OK, 5));
        assert_eq!(received.solicited, flags.contains(SendFlags::SOLICITED));
        assert_eq!(received.invalidated, if let SendData::Invalidate(key) = data { Some(key) } else { None });
        assert_eq!([&b.host.memory[100..102], &b.host.memory[200..203]].concat(), b"hello");
    }
    assert_eq!(pair.0[1].host.invalidated, [7, 8]);
    assert_eq!(pair.0[0].host.statuses(), [(0, OK), (1, OK), (2, OK), (3, OK)]);
}

#[test]
fn segments_follow_the_mss_and_messages_their_numbers() {
    for mss in [0, 136, 137, 1448, 8948, 70_000] {
        let tuning = Tuning::default().with_mss(mss);
        let mut pair = Pair::with(negotiated(Role::Initiator), tuning, 100_000);
        let [a, _] = &mut pair.0;
        a.post(send(1, vec![sge(0, 90_000)]));
        a.post(write(2, 5, vec![sge(0, 90_000)]));
        a.post(send(3, vec![]));
        let segments = segments(&a.sent(), true);
        let (mut at, mut to, mut msn) = (0, 5_u64, 1);
        for (header, payload) in &segments {
            assert!(fpdu::fpdu_len(header.to_raw().bytes().len() + payload.len()) <= mss.max(136));
            match header.placement {
                Placement::Untagged { stag, queue, msn: number, offset } => {
                    assert_eq!((stag, queue, number, offset), (0, 0, msn, at));
                    at += u32::try_from(payload.len()).unwrap();
                    if header.last {
                        (at, msn) = (0, msn + 1);
                    }
                }
                Placement::Tagged { stag, offset } => {
                    assert_eq!((stag, offset), (KEY, to));
                    to += payload.len() as u64;
                    assert_eq!(header.last, to == 90_005);
                }
            }
        }
        assert_eq!((msn, to), (3, 90_005));
    }
}

#[test]
fn a_request_completes_when_tcp_has_taken_its_last_byte() {
    let mut pair = Pair::new(8192);
    let [a, _] = &mut pair.0;
    a.post(send(1, vec![sge(0, 3000)]));
    a.post(write(2, 0, vec![sge(0, 10)]));
    let sizes: Vec<usize> = std::iter::from_fn(|| a.transmit().then_some(a.outbox.len())).collect();
    assert_eq!(sizes.len(), 4);
    a.take(sizes[2] - 1);
    assert_eq!(a.host.statuses(), []);
    a.take(1);
    assert_eq!(a.host.statuses(), [(1, OK)]);
    a.take(usize::MAX);
    assert_eq!(a.host.statuses(), [(1, OK), (2, OK)]);
    assert_eq!(a.stream.close(), Close::Finish);
}

#[test]
fn a_read_is_scattered_to_all_its_sges() {
    let mut pair = Pair::new(65_536);
    let [a, b] = &mut pair.0;
    for (at, byte) in b.host.memory.iter_mut().enumerate() {
        *byte = u8::try_from(at % 251).unwrap();
    }
    let sges: Vec<_> = (0..16).map(|n| sge(n * 1000, 100 + n)).collect();
    let length: usize = sges.iter().map(|sge| sge.length as usize).sum();
    a.post(read(1, 12_345, sges.clone()));
    pair.settle();
    let [a, b] = &pair.0;
    let gathered: Vec<u8> =
        (0..16).flat_map(|n: usize| a.host.memory[n * 1000..n * 1000 + 100 + n].iter().copied()).collect();
    assert_eq!(gathered, b.host.memory[12_345..12_345 + length]);
    assert_eq!((a.host.sent[0].status, a.host.sent[0].byte_len as usize), (OK, length));
    // Nothing between the elements was touched.
    assert_eq!(a.host.memory.iter().filter(|&&byte| byte != 0).count(), gathered.iter().filter(|&&b| b != 0).count());
}

#[test]
fn reads_beyond_the_ord_wait_and_128_may_be_outstanding() {
    let properties = Negotiated { ird: 128, ord: 128, ..negotiated(Role::Initiator) };
    let tuning = Tuning::default().with_requests(200);
    let mut pair = Pair::with(properties, tuning, 1 << 20);
    let [a, b] = &mut pair.0;
    for (at, byte) in b.host.memory.iter_mut().enumerate() {
        *byte = u8::try_from((at / 4096 + at) % 253).unwrap();
    }
    for number in 0..150 {
        a.post(read(number as u64, number * 4096, vec![sge(number * 4096, 1), sge(number * 4096 + 1, 4095)]));
    }
    let requests = a.sent();
    assert_eq!(opcodes(&requests), [Opcode::ReadRequest; 128]);
    b.deliver(&requests);
    assert_eq!(b.stream.inspect().responses, 128);
    pair.settle();
    let [a, b] = &pair.0;
    assert_eq!(a.host.statuses(), (0..150).map(|number| (number, OK)).collect::<Vec<_>>());
    assert_eq!(a.host.memory[..150 * 4096], b.host.memory[..150 * 4096]);
}

#[test]
fn a_read_names_no_memory_of_its_own_as_the_sink() {
    let mut pair = Pair::with(negotiated(Role::Initiator), Tuning::default().with_seed(u32::MAX), 64);
    let [a, _] = &mut pair.0;
    a.post(read(1, 0, vec![sge(0, 8)]));
    a.post(read(2, 0, vec![sge(8, 8)]));
    a.post(request(3, SendOp::Read { remote: RemoteAddress { addr: 0, rkey: 0 } }, vec![]));
    let sinks: Vec<_> = segments(&a.sent(), true)
        .iter()
        .map(|(_, body)| ReadRequest::from_bytes(body.first_chunk().unwrap()))
        .map(|read| (read.sink_stag, read.sink_offset, read.source_stag))
        .collect();
    // STag 0 is left out, also for memory that is only read.
    assert_eq!(sinks, [(u32::MAX, 0, KEY), (1, 0, KEY), (2, 0, 1)]);
}

#[test]
fn messages_without_data_work_and_never_name_stag_0() {
    let mut pair = Pair::new(64);
    let [a, b] = &mut pair.0;
    b.host.post_receive(9, vec![]);
    let nowhere = RemoteAddress { addr: 0, rkey: 0 };
    a.post(request(1, SendOp::Write { remote: nowhere, immediate: None }, vec![]));
    a.post(request(2, SendOp::Read { remote: nowhere }, vec![]));
    a.post(send(3, vec![]));
    a.transmit();
    assert_eq!(segments(&a.outbox, true)[0].0.placement, Placement::Tagged { stag: 1, offset: 0 });
    pair.settle();
    let [a, b] = &pair.0;
    assert_eq!(a.host.statuses(), [(1, OK), (2, OK), (3, OK)]);
    assert_eq!((b.host.received.len(), a.stream.end(), b.stream.end()), (1, None, None));
}

#[test]
fn a_request_that_would_name_stag_0_fails_at_its_turn() {
    let nowhere = RemoteAddress { addr: 0, rkey: 0 };
    let requests = [
        (SendOp::Write { remote: nowhere, immediate: None }, WcStatus::RemoteAccess),
        (SendOp::Read { remote: nowhere }, WcStatus::RemoteAccess),
        (SendOp::Send { data: SendData::Invalidate(0), to: None }, WcStatus::RemoteOperation),
    ];
    for (op, status) in requests {
        let mut pair = Pair::new(64);
        let [a, b] = &mut pair.0;
        b.host.post_receive(9, vec![]);
        a.post(send(1, vec![]));
        a.post(request(2, op, vec![sge(0, 8)]));
        a.post(send(3, vec![]));
        pair.settle();
        let [a, b] = &pair.0;
        assert_eq!(a.host.statuses(), [(1, OK), (2, status), (3, WcStatus::Flushed)]);
        assert!(a.host.failed && b.host.failed && b.host.received.len() == 1);
    }
}

#[test]
fn operations_that_iwarp_lacks_fail_and_count() {
    let remote = remote(0);
    let operations = [
        SendOp::Send { data: SendData::Immediate([1; 4]), to: None },
        SendOp::Write { remote, immediate: Some([1; 4]) },
        SendOp::CompareSwap { remote, compare: 0, swap: 1 },
        SendOp::FetchAdd { remote, add: 1 },
    ];
    for op in operations {
        let mut pair = Pair::new(64);
        pair.0[0].post(request(1, op, vec![sge(0, 8)]));
        pair.settle();
        let [a, b] = &pair.0;
        assert_eq!(a.host.statuses(), [(1, WcStatus::LocalQpOperation)]);
        assert_eq!(a.stream.stats().unsupported, 1);
        assert_eq!(b.host.memory, [0; 64]);
    }
}

#[test]
fn a_failed_request_reports_after_those_before_it() {
    let mut pair = Pair::new(64);
    let [a, _] = &mut pair.0;
    a.post(read(1, 0, vec![sge(0, 8)]));
    a.post(request(2, SendOp::Malformed, vec![]));
    a.post(write(3, 0, vec![]));
    a.transmit_all();
    assert_eq!((a.host.statuses(), a.stream.end()), (vec![], None));
    pair.settle();
    let statuses = [(1, OK), (2, WcStatus::LocalQpOperation), (3, WcStatus::Flushed)];
    assert_eq!(pair.0[0].host.statuses(), statuses);
}

#[test]
fn memory_that_is_lost_within_a_message_leaves_only_a_reset() {
    let mut pair = Pair::new(8192);
    let [a, _] = &mut pair.0;
    a.post(send(1, vec![sge(0, 4000)]));
    assert!(a.transmit());
    a.host.gone = true;
    assert!(!a.transmit());
    assert_eq!(a.host.statuses(), [(1, WcStatus::LocalProtection)]);
    a.take(usize::MAX);
    assert_eq!(a.stream.close(), Close::Reset);
}

#[test]
fn a_fence_and_an_invalidation_wait_for_reads() {
    let mut pair = Pair::new(64);
    let [a, _] = &mut pair.0;
    a.post(read(1, 0, vec![sge(0, 8)]));
    a.post(SendWr { flags: SendFlags::FENCE, ..write(2, 0, vec![sge(0, 8)]) });
    a.post(request(3, SendOp::LocalInvalidate(Invalidate { key: KEY | 0xff }), vec![]));
    a.post(read(4, 0, vec![sge(8, 8)]));
    a.post(request(5, SendOp::LocalInvalidate(Invalidate { key: KEY }), vec![]));
    a.post(request(6, SendOp::LocalInvalidate(Invalidate { key: 1 << 8 }), vec![]));
    assert_eq!(opcodes(&a.sent()), [Opcode::ReadRequest]);
    assert_eq!(a.host.invalidated, []);
    let mut pair = Pair::new(64);
    let [a, _] = &mut pair.0;
    a.post(read(1, 0, vec![sge(0, 8)]));
    a.post(request(2, SendOp::LocalInvalidate(Invalidate { key: KEY | 0xff }), vec![]));
    a.transmit_all();
    assert_eq!(a.host.invalidated, []);
    pair.settle();
    assert_eq!(pair.0[0].host.invalidated, [KEY | 0xff]);
    assert_eq!(pair.0[0].host.statuses(), [(1, OK), (2, OK)]);
}

#[test]
fn a_responder_sends_nothing_before_the_first_fpdu() {
    let mut pair = Pair::new(64);
    let [a, b] = &mut pair.0;
    a.host.post_receive(1, vec![sge(0, 8)]);
    b.post(request(1, SendOp::LocalInvalidate(Invalidate { key: 5 }), vec![]));
    b.post(send(2, vec![sge(0, 8)]));
    assert_eq!(b.transmit_all(), 0);
    // Local requests are not held up.
    assert_eq!(b.host.invalidated, [5]);
    a.post(write(1, 0, vec![]));
    pair.settle();
    assert_eq!(pair.0[0].host.received.len(), 1);
}

#[test]
fn the_ready_to_receive_message_is_first_and_takes_no_resource() {
    for ird in [0, 1] {
        let properties = Negotiated { ird, ord: ird, rtr: Some(Rtr::Read), ..negotiated(Role::Initiator) };
        let mut pair = Pair::with(properties, Tuning::default(), 64);
        let [a, b] = &mut pair.0;
        b.host.qp_access = pvrdma_verbs_types::Access::empty();
        a.host.post_receive(1, vec![sge(0, 8)]);
        b.host.post_receive(1, vec![sge(0, 8)]);
        b.post(send(1, vec![sge(0, 8)]));
        a.post(send(1, vec![sge(0, 8)]));
        assert!(a.transmit());
        assert_eq!(opcodes(&a.outbox), [Opcode::ReadRequest]);
        pair.settle();
        let [a, b] = &pair.0;
        assert_eq!((a.stream.end(), b.stream.end()), (None, None));
        assert_eq!((a.host.received.len(), b.host.received.len(), b.host.arrived), (1, 1, 2));
        assert_eq!(a.stream.inspect().reads, 0);
    }
}

#[test]
fn a_write_as_the_ready_to_receive_message_needs_no_right() {
    let properties = Negotiated { rtr: Some(Rtr::Write), ..negotiated(Role::Responder) };
    let mut b = End::new(properties, Tuning::default(), 64);
    b.host.qp_access = pvrdma_verbs_types::Access::empty();
    let mut a = End::new(negotiated(Role::Initiator), Tuning::default(), 64);
    a.post(write(1, 0, vec![]));
    b.deliver(&a.sent());
    assert_eq!((b.stream.end(), b.host.arrived), (None, 1));
    // It is one message, not a right.
    a.post(write(2, 0, vec![]));
    b.deliver(&a.sent());
    assert!(b.stream.end().is_some());
}

#[test]
fn responses_and_requests_take_turns() {
    let mut pair = Pair::open(65_536);
    let [a, b] = &mut pair.0;
    for number in 0..4 {
        a.post(read(number, 0, vec![sge(0, 10)]));
        b.post(write(number, 0, vec![sge(0, 10)]));
    }
    b.deliver(&a.sent());
    // The last message was the response to the ready-to-receive message.
    let (response, write) = (Opcode::ReadResponse, Opcode::Write);
    assert_eq!(opcodes(&b.sent()), [write, response, write, response, write, response, write, response]);
}

#[test]
fn sqd_finishes_what_was_started() {
    let mut pair = Pair::new(8192);
    let [a, b] = &mut pair.0;
    b.host.post_receive(1, vec![sge(0, 4000)]);
    a.post(send(1, vec![sge(0, 4000)]));
    a.post(write(2, 0, vec![sge(0, 8)]));
    a.transmit();
    a.stream.set_draining(true);
    pair.settle();
    assert_eq!(pair.0[0].host.statuses(), [(1, OK)]);
    assert!(pair.0[0].stream.is_idle() && !pair.0[0].stream.is_empty());
    pair.0[0].stream.set_draining(false);
    pair.settle();
    assert_eq!(pair.0[0].host.statuses(), [(1, OK), (2, OK)]);
}

#[test]
fn a_receive_that_is_posted_late_is_used() {
    let mut pair = Pair::new(8192);
    let [a, b] = &mut pair.0;
    a.host.memory[..3000].fill(7);
    a.post(send(1, vec![sge(0, 3000)]));
    a.post(write(2, 5000, vec![sge(0, 1)]));
    b.deliver(&a.sent());
    assert!(b.stream.waits_for_receive() && !b.inbox.is_empty());
    assert_eq!(b.stream.poll_timeout(), Some(b.now + Duration::from_secs(5)));
    // Neither repeated bytes nor time before the deadline changes anything, and nothing behind the SEND is placed.
    b.now += Duration::from_secs(2);
    b.deliver(&[]);
    b.stream.handle_timeout(b.now, &mut b.host);
    assert_eq!(b.stream.poll_timeout(), Some(b.now + Duration::from_secs(3)));
    assert_eq!((b.host.memory[5000], b.stream.stats().waited_for_receive, b.stream.end()), (0, 1, None));
    b.host.post_receive(1, vec![sge(0, 3000)]);
    b.deliver(&[]);
    assert_eq!((b.inbox.len(), b.stream.poll_timeout(), b.host.received.len()), (0, None, 1));
    assert_eq!((&b.host.memory[..3000], b.host.memory[5000]), (&[7; 3000][..], 7));
}

#[test]
fn without_crc_the_field_is_0() {
    let properties = Negotiated { crc: false, ..negotiated(Role::Initiator) };
    let mut pair = Pair::with(properties, Tuning::default(), 64);
    let [a, b] = &mut pair.0;
    a.host.memory.fill(9);
    a.post(write(1, 8, vec![sge(0, 8)]));
    let bytes = a.sent();
    assert_eq!(bytes[bytes.len() - 4..], [0; 4]);
    b.deliver(&bytes);
    assert_eq!(b.host.memory[8..16], [9; 8]);
}
