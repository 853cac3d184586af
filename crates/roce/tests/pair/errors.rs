//! Errors, and the way in which both ends learn of them.

use std::time::Duration;

use pvrdma_roce::wire::{Extension, NakCode, Opcode, Packet, Syndrome, build};
use pvrdma_verbs::QpEvent;
use pvrdma_verbs_types::{
    Access, Invalidate, Mtu, QpAttrs, RemoteAddress, SendData, SendFlags, SendOp, SendWr, Sge,
    WcStatus::{
        self, BadResponse, Flushed, LocalAccess, LocalLength, LocalProtection, LocalQpOperation, RemoteAccess,
        RemoteInvalidRequest, RemoteOperation, RetryExceeded, RnrRetryExceeded, Success,
    },
};

use super::host::KEY;
use super::net::{Pair, Setup};

const LOCAL: u64 = 0x1000;
const REMOTE: RemoteAddress = RemoteAddress { addr: 0x5000, rkey: KEY };

fn work(op: SendOp, length: u32) -> SendWr {
    let sges = vec![Sge { addr: LOCAL, length, lkey: KEY }];
    SendWr { wr_id: 0, op, flags: SendFlags::SIGNALED, sges }
}

fn send(length: u32) -> SendWr {
    work(SendOp::Send { data: SendData::None, to: None }, length)
}

fn write(remote: RemoteAddress, length: u32) -> SendWr {
    work(SendOp::Write { remote, immediate: None }, length)
}

fn read(remote: RemoteAddress, length: u32) -> SendWr {
    work(SendOp::Read { remote }, length)
}

fn add(remote: RemoteAddress) -> SendWr {
    work(SendOp::FetchAdd { remote, add: 1 }, 8)
}

/// Posts the requests at end 0, runs until nothing happens any more, and returns their statuses.
fn run(pair: &mut Pair, works: impl IntoIterator<Item = SendWr>) -> Vec<WcStatus> {
    for (wr_id, work) in works.into_iter().enumerate() {
        pair.ends[0].post(SendWr { wr_id: wr_id as u64, ..work });
    }
    pair.run();
    let sent = &pair.ends[0].host.sent;
    assert!(sent.iter().enumerate().all(|(i, ended)| ended.wr_id == i as u64), "{sent:?}");
    sent.iter().map(|ended| ended.status).collect()
}

fn received(pair: &Pair) -> Vec<WcStatus> {
    pair.ends[1].host.received.iter().map(|(ended, _)| ended.status).collect()
}

/// The NAKs that end 1 sent.
fn naks(pair: &Pair) -> Vec<NakCode> {
    let sent = pair.frames[1].iter().map(|frame| Packet::parse(frame).unwrap());
    sent.filter_map(|packet| match packet.header.extension.aeth()?.syndrome {
        Syndrome::Nak(code) => Some(code),
        _ => None,
    })
    .collect()
}

fn pair() -> Pair {
    let mut pair = Pair::new(&Setup::default(), 7);
    pair.keep_frames = true;
    pair
}

fn with(change: impl FnOnce(&mut QpAttrs)) -> Pair {
    let mut setup = Setup::default();
    change(&mut setup.attrs);
    let mut pair = Pair::new(&setup, 7);
    pair.keep_frames = true;
    pair
}

#[test]
fn wrong_keys_end_both_ends() {
    let bad = RemoteAddress { rkey: 0x9999, ..REMOTE };
    for failing in [write(bad, 3000), write(bad, 1), read(bad, 3000), add(bad)] {
        let mut pair = pair();
        pair.ends[1].host.post_receive(0, 0x9000, 100);
        let statuses = run(&mut pair, [write(REMOTE, 10), failing, send(5), read(REMOTE, 5)]);
        assert_eq!(statuses, [Success, RemoteAccess, Flushed, Flushed]);
        assert_eq!(received(&pair), [Flushed]);
        assert_eq!(pair.ends[1].host.events, [QpEvent::CommunicationEstablished, QpEvent::AccessError]);
        assert_eq!(naks(&pair), [NakCode::RemoteAccess]);
        // Requests that are posted later are flushed at once.
        pair.ends[0].post(SendWr { wr_id: 4, ..send(1) });
        assert_eq!(pair.ends[0].host.sent.last().map(|ended| ended.status), Some(Flushed));
    }
}

#[test]
fn empty_writes_and_reads_look_at_no_key() {
    let nowhere = RemoteAddress { addr: u64::MAX, rkey: 0xdead };
    assert_eq!(run(&mut pair(), [write(nowhere, 0), read(nowhere, 0)]), [Success, Success]);
}

#[test]
fn what_is_not_enabled_is_an_invalid_request() {
    for (missing, failing) in [
        (Access::REMOTE_WRITE, write(REMOTE, 100)),
        (Access::REMOTE_READ, read(REMOTE, 100)),
        (Access::REMOTE_ATOMIC, add(REMOTE)),
    ] {
        let mut pair = pair();
        pair.ends[1].host.qp_access -= missing;
        assert_eq!(run(&mut pair, [failing]), [RemoteInvalidRequest]);
        assert_eq!(naks(&pair), [NakCode::InvalidRequest]);
        assert_eq!(pair.ends[1].host.events.last(), Some(&QpEvent::RequestError));
    }
    let mut none = with(|attrs| attrs.max_dest_rd_atomic = 0);
    assert_eq!(run(&mut none, [read(REMOTE, 100)]), [RemoteInvalidRequest]);
    let misaligned = RemoteAddress { addr: 0x5004, ..REMOTE };
    assert_eq!(run(&mut pair(), [add(misaligned)]), [RemoteInvalidRequest]);
}

#[test]
fn a_message_longer_than_the_receive() {
    let mut pair = pair();
    pair.ends[1].host.post_receive(0, 0x9000, 1500);
    pair.ends[1].host.post_receive(1, 0xa000, 1500);
    assert_eq!(run(&mut pair, [send(3000), send(1)]), [RemoteInvalidRequest, Flushed]);
    assert_eq!(received(&pair), [LocalLength, Flushed]);
    assert_eq!(naks(&pair), [NakCode::InvalidRequest]);
}

#[test]
fn a_receive_that_cannot_be_written() {
    let mut pair = pair();
    pair.ends[1].host.post_receive(0, 0x9000, 1500);
    pair.ends[1].host.memory_end = 0x9100;
    assert_eq!(run(&mut pair, [send(1000)]), [RemoteOperation]);
    assert_eq!(received(&pair), [LocalProtection]);
}

#[test]
fn a_key_that_cannot_be_invalidated() {
    let mut pair = pair();
    pair.ends[1].host.post_receive(0, 0x9000, 1500);
    let op = SendOp::Send { data: SendData::Invalidate(KEY), to: None };
    assert_eq!(run(&mut pair, [work(op, 10)]), [RemoteOperation]);
    assert_eq!(received(&pair), [RemoteInvalidRequest]);
}

#[test]
fn local_errors_wait_for_their_turn_and_send_nothing() {
    let foreign = |mut work: SendWr| {
        work.sges[0].lkey = 0x55;
        work
    };
    let huge = SendWr { sges: vec![Sge { addr: 0, length: u32::MAX, lkey: KEY }; 2], ..write(REMOTE, 0) };
    let cases = [
        (foreign(write(REMOTE, 100)), LocalProtection),
        (huge, LocalLength),
        (work(SendOp::Malformed, 0), LocalQpOperation),
        (work(SendOp::Unsupported { opcode: 99 }, 0), LocalQpOperation),
    ];
    for (failing, status) in cases {
        let mut pair = pair();
        let statuses = run(&mut pair, [write(REMOTE, 5000), read(REMOTE, 3000), failing, write(REMOTE, 1)]);
        assert_eq!(statuses, [Success, Success, status, Flushed]);
        assert_eq!(pair.frames[0].len(), 6);
        assert!(!pair.ends[1].host.failed);
    }
}

/// The peer has executed a READ or an atomic before its result meets the local key.
#[test]
fn the_peers_checks_come_before_the_key_of_a_result() {
    let foreign = |mut work: SendWr| {
        work.sges[0].lkey = 0x55;
        work
    };
    let bad = RemoteAddress { rkey: 0x9999, ..REMOTE };
    let unaligned = RemoteAddress { addr: 0x5004, ..REMOTE };
    for (failing, status) in [
        (foreign(read(REMOTE, 3000)), LocalProtection),
        (foreign(add(REMOTE)), LocalProtection),
        (foreign(read(bad, 3000)), RemoteAccess),
        (foreign(add(bad)), RemoteAccess),
        (foreign(add(unaligned)), RemoteInvalidRequest),
    ] {
        let mut pair = pair();
        assert_eq!(run(&mut pair, [write(REMOTE, 5000), failing, write(REMOTE, 1)]), [Success, status, Flushed]);
        assert_eq!(pair.ends[1].host.failed, status != LocalProtection);
    }
}

/// IBA C9-222.1.
#[test]
fn a_write_with_immediate_to_a_bad_key_ends_the_receive_that_it_has_taken() {
    let bad = RemoteAddress { rkey: 0x9999, ..REMOTE };
    for (length, taken) in [(10, true), (1024, true), (1025, false)] {
        let mut pair = pair();
        pair.ends[1].host.post_receive(0, 0x9000, 100);
        pair.ends[1].host.post_receive(1, 0x9000, 100);
        let failing = work(SendOp::Write { remote: bad, immediate: Some([1; 4]) }, length);
        assert_eq!(run(&mut pair, [failing]), [RemoteAccess]);
        assert_eq!(received(&pair), [if taken { LocalAccess } else { Flushed }, Flushed], "{length}");
        // The responder reports the error in a completion or as an event.
        assert_eq!(pair.ends[1].host.events.contains(&QpEvent::AccessError), !taken, "{length}");
        assert_eq!(naks(&pair), [NakCode::RemoteAccess]);
    }
}

#[test]
fn a_read_that_cannot_be_placed() {
    let mut pair = pair();
    let mut failing = read(REMOTE, 3000);
    failing.sges[0].addr = 0x8000;
    for (wr_id, work) in [failing, write(REMOTE, 1)].into_iter().enumerate() {
        pair.ends[0].post(SendWr { wr_id: wr_id as u64, ..work });
    }
    while pair.frames[0].is_empty() {
        pair.step();
    }
    // The region is taken away while the answer is on its way.
    pair.ends[0].host.memory_end = 0x8100;
    pair.run();
    let statuses: Vec<WcStatus> = pair.ends[0].host.sent.iter().map(|ended| ended.status).collect();
    assert_eq!(statuses, [LocalProtection, Flushed]);
}

#[test]
fn silence_ends_after_the_retries() {
    let mut pair = with(|attrs| attrs.retry_cnt = 3);
    pair.ends[1].deaf = true;
    let start = pair.now;
    assert_eq!(run(&mut pair, [send(64), read(REMOTE, 1)]), [RetryExceeded, Flushed]);
    // The first request was sent four times, after 1 + 2 + 4 + 4 times the timeout of 67.1 ms.
    let sent = pair.frames[0].iter().filter(|frame| Packet::parse(frame).unwrap().header.bth.opcode == Opcode(4));
    assert_eq!(sent.count(), 4);
    let took = pair.now - start;
    assert!((Duration::from_millis(738)..Duration::from_millis(739)).contains(&took), "{took:?}");
}

#[test]
fn attributes_change_under_way() {
    let mut pair = pair();
    pair.ends[1].deaf = true;
    pair.ends[0].post(send(64));
    while pair.frames[0].len() < 2 {
        pair.step();
    }
    let attrs = QpAttrs { retry_cnt: 1, timeout: 8, ..Setup::default().attrs };
    let path = pair.ends[0].path;
    pair.ends[0].requester.set_attrs(&attrs, path);
    pair.run();
    // Three frames: the first attempt, the one after the timeout that the test saw, and the one retry that is left.
    assert_eq!(pair.frames[0].len(), 3);
    assert_eq!(pair.ends[0].host.sent[0].status, RetryExceeded);
}

#[test]
fn without_a_timeout_silence_lasts() {
    let mut pair = with(|attrs| attrs.timeout = 0);
    pair.ends[1].deaf = true;
    assert!(run(&mut pair, [send(64)]).is_empty());
    assert_eq!(pair.frames[0].len(), 1);
}

#[test]
fn no_receive_ends_after_the_rnr_retries() {
    let mut pair = with(|attrs| {
        attrs.rnr_retry = 3;
        attrs.min_rnr_timer = 16;
    });
    let start = pair.now;
    assert_eq!(run(&mut pair, [write(REMOTE, 5), send(100), send(10)]), [Success, RnrRetryExceeded, Flushed]);
    let sends = pair.frames[0].iter().filter(|frame| Packet::parse(frame).unwrap().payload.len() == 100);
    assert_eq!(sends.count(), 4);
    assert!(pair.now - start >= Duration::from_micros(3 * 2560));
    assert!(!pair.ends[1].host.failed);
}

#[test]
fn a_receive_is_looked_for_before_the_key() {
    let mut pair = with(|attrs| attrs.rnr_retry = 0);
    let bad = RemoteAddress { rkey: 0x9999, ..REMOTE };
    let failing = work(SendOp::Write { remote: bad, immediate: Some([1; 4]) }, 10);
    assert_eq!(run(&mut pair, [failing]), [RnrRetryExceeded]);
}

#[test]
fn long_messages_in_small_packets() {
    let mut pair = with(|attrs| attrs.path_mtu = Mtu::M256);
    let data: Vec<u8> = (0..300_000_u32).map(|i| i.to_le_bytes()[(i % 3) as usize]).collect();
    pair.ends[0].host.memory.write(LOCAL, &data);
    let there = RemoteAddress { addr: 0x100_0000, rkey: KEY };
    let mut back = read(there, 300_000);
    back.sges[0].addr = 0x200_0000;
    assert_eq!(run(&mut pair, [write(there, 300_000), back]), [Success, Success]);
    assert!(pair.ends[1].host.memory.get(there.addr, data.len()) == data);
    assert!(pair.ends[0].host.memory.get(0x200_0000, data.len()) == data);
    assert_eq!(pair.ends[0].requester.stats().retransmitted, 0);
}

#[test]
fn local_invalidation_waits_for_what_came_before() {
    let mut pair = pair();
    // The key of the region that the first write reads from. Only the byte that the consumer chooses differs.
    let invalidate = SendOp::LocalInvalidate(Invalidate { key: KEY + 1 });
    for (wr_id, work) in [write(REMOTE, 5000), work(invalidate, 0), write(REMOTE, 1)].into_iter().enumerate() {
        pair.ends[0].post(SendWr { wr_id: wr_id as u64, ..work });
    }
    while pair.ends[0].host.sent.is_empty() {
        assert!(pair.ends[0].host.invalidated.is_empty());
        assert!(pair.step());
    }
    pair.run();
    assert_eq!(pair.ends[0].host.invalidated, [KEY + 1]);
    assert!(pair.ends[0].host.sent.iter().map(|ended| ended.wr_id).eq(0..3));
}

#[test]
fn draining_finishes_what_was_started() {
    let mut pair = pair();
    pair.ends[0].post(write(REMOTE, 50_000));
    while pair.frames[0].is_empty() {
        pair.step();
    }
    pair.ends[0].requester.set_draining(true);
    pair.ends[0].post(SendWr { wr_id: 1, ..write(REMOTE, 1) });
    assert!(!pair.ends[0].requester.is_idle());
    pair.run();
    assert_eq!(pair.ends[0].host.sent.len(), 1);
    assert!(pair.ends[0].requester.is_idle());
    pair.ends[0].requester.set_draining(false);
    pair.run();
    assert_eq!(pair.ends[0].host.sent.len(), 2);
}

/// A responder reports a missing packet once, so a second copy of a NAK was duplicated by the network.
#[test]
fn a_doubled_nak_counts_once() {
    let mut pair = with(|attrs| attrs.retry_cnt = 1);
    let now = pair.now;
    let [ours, peer] = &mut pair.ends;
    ours.post(write(REMOTE, 3000));
    let sent = ours.transmit(now);
    peer.receive(now, &sent[1]);
    peer.receive(now, &sent[2]);
    let naks = peer.transmit(now);
    assert_eq!((sent.len(), naks.len()), (3, 1));
    for again in [3, 0, 0] {
        ours.receive(now, &naks[0]);
        assert_eq!(ours.transmit(now).len(), again);
    }
    assert!(!ours.host.failed);
    for frame in &sent {
        peer.receive(now, frame);
    }
    for frame in peer.transmit(now) {
        ours.receive(now, &frame);
    }
    assert_eq!(ours.host.sent[0].status, Success);
}

/// rxe follows an RNR NAK with a sequence NAK of the same PSN when the next packet arrives. The requester keeps
/// waiting.
#[test]
fn an_rnr_wait_is_not_cut_short() {
    let mut pair = pair();
    let now = pair.now;
    let [ours, peer] = &mut pair.ends;
    ours.post(send(2500));
    for frame in ours.transmit(now) {
        peer.receive(now, &frame);
    }
    let naks = peer.transmit(now);
    assert_eq!(naks.len(), 1);
    let mut echo = Packet::parse(&naks[0]).unwrap().header;
    let Extension::Aeth(aeth) = &mut echo.extension else { unreachable!() };
    assert_eq!(aeth.syndrome, Syndrome::RnrNak { timer: 12 });
    aeth.syndrome = Syndrome::Nak(NakCode::SequenceError);
    let echo = build(&echo, &[]).unwrap();
    ours.receive(now, &naks[0]);
    ours.receive(now, &echo);
    assert!(ours.transmit(now).is_empty());
    let deadline = ours.requester.poll_timeout().unwrap();
    assert_eq!(deadline - now, Duration::from_micros(640));
    ours.requester.handle_timeout(deadline, &mut ours.host);
    assert_eq!(ours.transmit(deadline).len(), 3);
}

/// Responses to packets that were not sent, or to requests that are done, are ignored. A response of the wrong kind
/// ends the QP.
#[test]
fn answers_that_fit_nothing() {
    let mut pair = pair();
    let now = pair.now;
    let [ours, peer] = &mut pair.ends;
    ours.post(read(REMOTE, 2000));
    ours.post(SendWr { wr_id: 1, ..write(REMOTE, 10) });
    for frame in ours.transmit(now) {
        peer.receive(now, &frame);
    }
    // The write waits until the answers to the read have left.
    let mut answers = peer.transmit(now);
    peer.receive(now, &[]);
    answers.extend(peer.transmit(now));
    assert_eq!(answers.len(), 3);
    // The response to the write arrives first, so that of the READ is late or lost. The READ is requested again after a
    // short time, and until then no request is done.
    ours.receive(now, &answers[2]);
    assert!(ours.host.sent.is_empty() && ours.transmit(now).is_empty());
    let now = ours.requester.poll_timeout().unwrap();
    ours.requester.handle_timeout(now, &mut ours.host);
    let again = ours.transmit(now);
    assert_eq!(again.len(), 1, "the write is known to have arrived");
    for frame in &answers {
        ours.receive(now, frame);
        ours.receive(now, frame);
    }
    assert_eq!(ours.host.sent.len(), 2);
    assert_eq!(ours.requester.stats().stale, 4);

    // An answer to a READ where a write is outstanding.
    ours.post(SendWr { wr_id: 2, ..write(REMOTE, 10) });
    let sent = ours.transmit(now);
    let mut header = Packet::parse(&answers[0]).unwrap().header;
    header.bth.psn = Packet::parse(&sent[0]).unwrap().header.bth.psn;
    ours.receive(now, &build(&header, &[0; 1024]).unwrap());
    assert_eq!(ours.host.sent[2].status, BadResponse);
}

/// If the NAK is lost, the peer hears nothing more, as the architecture says.
#[test]
fn a_lost_refusal_is_silence() {
    let mut pair = with(|attrs| {
        attrs.retry_cnt = 2;
        attrs.timeout = 8;
    });
    pair.ends[0].post(write(RemoteAddress { rkey: 1, ..REMOTE }, 10));
    pair.ends[0].deaf = true;
    while !pair.ends[1].host.failed || pair.ends[1].responder.has_responses() {
        assert!(pair.step());
    }
    for _ in 0..20 {
        pair.step();
    }
    pair.ends[0].deaf = false;
    pair.run();
    assert_eq!(pair.ends[0].host.sent[0].status, RetryExceeded);
    assert_eq!(naks(&pair).len(), 1);
}

/// A READ with late or lost responses is in front of a request that the responder refuses. The READ must not be flushed
/// before the error is reported.
#[test]
fn a_flush_is_never_the_first_error() {
    let bad = RemoteAddress { rkey: 0x9999, ..REMOTE };
    let run = |timeout: u8, responses: &[usize]| {
        let mut pair = with(|attrs| attrs.timeout = timeout);
        let mut now = pair.now;
        let [ours, peer] = &mut pair.ends;
        for (wr_id, work) in [read(REMOTE, 2000), write(bad, 10), send(1)].into_iter().enumerate() {
            ours.post(SendWr { wr_id: wr_id as u64, ..work });
        }
        ours.transmit(now).iter().for_each(|frame| peer.receive(now, frame));
        let mut sent = peer.transmit(now);
        peer.handle(now);
        sent.extend(peer.transmit(now));
        assert_eq!(sent.len(), 3, "two responses and a NAK");
        ours.receive(now, &sent[2]);
        assert!(ours.host.sent.is_empty(), "the READ may still have its responses");
        assert!(ours.transmit(now).is_empty(), "and nothing new leaves");
        responses.iter().for_each(|&index| ours.receive(now, &sent[index]));
        while let Some(deadline) = ours.requester.poll_timeout() {
            now = deadline;
            ours.requester.handle_timeout(now, &mut ours.host);
            // The peer has ended.
            ours.transmit(now);
        }
        let statuses: Vec<_> = ours.host.sent.iter().map(|ended| ended.status).collect();
        (statuses, now - pair.now)
    };
    let none = Duration::ZERO;
    for timeout in [14, 0] {
        for order in [[0, 1], [1, 0]] {
            assert_eq!(run(timeout, &order), (vec![Success, RemoteAccess, Flushed], none));
        }
        for some in [&[][..], &[0], &[1]] {
            let (statuses, took) = run(timeout, some);
            assert_eq!(statuses, [RetryExceeded, Flushed, Flushed]);
            assert!(took < Duration::from_secs(2), "{took:?} with timeout {timeout}");
        }
    }
}

/// The READ is in front of a request that found no receive. The responder is alive, so the READ is repeated.
#[test]
fn a_read_completes_before_the_request_that_found_no_receive() {
    let mut pair = with(|attrs| (attrs.timeout, attrs.rnr_retry) = (0, 0));
    let mut now = pair.now;
    let [ours, peer] = &mut pair.ends;
    for (wr_id, work) in [read(REMOTE, 2000), send(10), write(REMOTE, 1)].into_iter().enumerate() {
        ours.post(SendWr { wr_id: wr_id as u64, ..work });
    }
    ours.transmit(now).iter().for_each(|frame| peer.receive(now, frame));
    let mut sent = peer.transmit(now);
    peer.handle(now);
    sent.extend(peer.transmit(now));
    // The responses are lost.
    ours.receive(now, sent.last().unwrap());
    while let Some(deadline) = ours.requester.poll_timeout() {
        now = deadline;
        ours.requester.handle_timeout(now, &mut ours.host);
        ours.transmit(now).iter().for_each(|frame| peer.receive(now, frame));
        peer.transmit(now).iter().for_each(|frame| ours.receive(now, frame));
    }
    let statuses: Vec<_> = ours.host.sent.iter().map(|ended| ended.status).collect();
    assert_eq!(statuses, [Success, RnrRetryExceeded, Flushed]);
}
