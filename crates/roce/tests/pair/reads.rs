//! READs with late, lost or reordered responses: which parts are requested again.

use std::time::Duration;

use pvrdma_roce::wire::{Extension, Opcode, Packet};
use pvrdma_verbs_types::{Psn, RemoteAddress, SendFlags, SendOp, SendWr, Sge, WcStatus::Success};

use super::host::KEY;
use super::net::{Faults, Pair, Random, Setup};

const LANDING: u64 = 0x100_0000;
const TARGET: u64 = 0x200_0000;
/// Packets of one READ, as many as a request has.
const PACKETS: u32 = 64;
const LENGTH: u32 = PACKETS * 1024;

fn read(wr_id: u64) -> SendWr {
    let at = wr_id * u64::from(LENGTH);
    let sges = vec![Sge { addr: LANDING + at, length: LENGTH, lkey: KEY }];
    let op = SendOp::Read { remote: RemoteAddress { addr: TARGET + at, rkey: KEY } };
    SendWr { wr_id, op, flags: SendFlags::SIGNALED, sges }
}

fn write(wr_id: u64) -> SendWr {
    let op = SendOp::Write { remote: RemoteAddress { addr: 0x5000, rkey: KEY }, immediate: None };
    SendWr { wr_id, op, flags: SendFlags::SIGNALED, sges: Vec::new() }
}

/// A pair with data to read.
fn pair(reads: u64) -> Pair {
    let mut pair = Pair::new(&Setup::default(), 1);
    let mut random = Random(7);
    let data: Vec<u8> = (0..reads * u64::from(LENGTH)).map(|_| random.next().to_le_bytes()[0]).collect();
    pair.ends[1].host.memory.write(TARGET, &data);
    pair.ends[1].keeps = true;
    pair
}

/// Same, with a known round-trip time of 30 µs.
fn calibrated(reads: u64) -> Pair {
    let mut pair = pair(reads);
    for wr_id in 100..110 {
        pair.ends[0].post(write(wr_id));
        step(&mut pair, Duration::from_micros(30), |_| true);
    }
    assert_eq!(pair.ends[0].host.sent.len(), 10);
    pair.ends[0].host.sent.clear();
    pair
}

/// Returns the first PSN that a READ request asks for, and the number of packets.
fn asked(frame: &[u8]) -> Option<(Psn, u32)> {
    let packet = Packet::parse(frame).unwrap();
    match packet.header.extension {
        Extension::Reth(reth) if packet.header.bth.opcode == Opcode::READ_REQUEST => {
            Some((packet.header.bth.psn, reth.length.div_ceil(1024)))
        }
        _ => None,
    }
}

/// Delivers the packets of end 0, and after `delay` those responses whose numbers `arrives` accepts. Returns the
/// packets sent.
fn step(pair: &mut Pair, delay: Duration, arrives: impl Fn(usize) -> bool) -> Vec<Vec<u8>> {
    let now = pair.now;
    let [ours, peer] = &mut pair.ends;
    let sent = ours.transmit(now);
    sent.iter().for_each(|frame| peer.receive(now, frame));
    let responses = peer.transmit(now);
    pair.now += delay;
    for (_, frame) in responses.iter().enumerate().filter(|(index, _)| arrives(*index)) {
        pair.ends[0].receive(pair.now, frame);
    }
    sent
}

fn assert_done(pair: &Pair, reads: u64) {
    let [ours, peer] = &pair.ends;
    assert_eq!(ours.host.sent.iter().filter(|ended| ended.wr_id < 100).count() as u64, reads);
    assert!(ours.host.sent.iter().all(|ended| ended.status == Success), "{:?}", ours.host.sent);
    let length = usize::try_from(reads * u64::from(LENGTH)).unwrap();
    assert!(ours.host.memory.get(LANDING, length) == peer.host.memory.get(TARGET, length), "wrong data");
}

/// Lets time pass until `until` without any arrival. Returns the response packets that were requested again.
fn silence(pair: &mut Pair, until: Duration) -> u32 {
    let mut again = 0;
    while let Some(deadline) = pair.ends[0].requester.poll_timeout()
        && deadline < until
    {
        pair.now = pair.now.max(deadline);
        let end = &mut pair.ends[0];
        end.requester.handle_timeout(pair.now, &mut end.host);
        again += end.transmit(pair.now).iter().filter_map(|frame| asked(frame)).map(|(_, count)| count).sum::<u32>();
    }
    pair.now = until;
    again
}

/// A responder with a long queue: round trips were 30 us, and then a READ takes 2 ms.
#[test]
fn a_late_response_costs_one_packet_and_the_timer_learns() {
    let mut pair = calibrated(80);
    let mut again = Vec::new();
    for round in 0..20 {
        let now = pair.now;
        let [ours, peer] = &mut pair.ends;
        (0..4).for_each(|index| ours.post(read(round * 4 + index)));
        let requests = ours.transmit(now);
        assert_eq!(requests.len(), 4);
        requests.iter().for_each(|frame| peer.receive(now, frame));
        let responses = peer.transmit(now);
        again.push(silence(&mut pair, now + Duration::from_millis(2)));
        for frame in &responses {
            let now = pair.now;
            pair.ends[0].receive(now, frame);
            assert!(pair.ends[0].transmit(now).is_empty(), "nothing is missing");
        }
    }
    assert_done(&pair, 80);
    assert!(again.iter().sum::<u32>() <= 1, "{again:?}");
}

/// Same as the test above, with a responder that was fast at first.
#[test]
fn a_responder_that_becomes_slow_is_asked_for_one_packet_more() {
    let mut pair = calibrated(40);
    for wr_id in 0..20 {
        pair.ends[0].post(read(wr_id));
        step(&mut pair, Duration::from_micros(60), |_| true);
    }
    let mut again = Vec::new();
    for wr_id in 20..40 {
        let now = pair.now;
        let [ours, peer] = &mut pair.ends;
        ours.post(read(wr_id));
        ours.transmit(now).iter().for_each(|frame| peer.receive(now, frame));
        let responses = peer.transmit(now);
        again.push(silence(&mut pair, now + Duration::from_millis(2)));
        responses.iter().for_each(|frame| pair.ends[0].receive(now + Duration::from_millis(2), frame));
    }
    assert_done(&pair, 40);
    assert!(again.iter().sum::<u32>() <= 2 && again.iter().all(|&count| count <= 1), "{again:?}");
}

/// Responses that overtake others by up to 16 places: nothing is requested again, and no retry is used.
#[test]
fn overtaking_costs_nothing() {
    let mut pair = calibrated(40);
    let mut random = Random(3);
    for round in 0..10 {
        (0..4).for_each(|index| pair.ends[0].post(read(round * 4 + index)));
        let now = pair.now;
        let [ours, peer] = &mut pair.ends;
        ours.transmit(now).iter().for_each(|frame| peer.receive(now, frame));
        let mut responses: Vec<_> = peer.transmit(now).into_iter().enumerate().collect();
        assert_eq!(responses.len(), 256);
        for (index, (place, _)) in responses.iter_mut().enumerate() {
            *place = if random.chance(100) { index + usize::try_from(random.below(17)).unwrap() } else { index };
        }
        responses.sort_by_key(|(place, _)| *place);
        for (_, frame) in &responses {
            pair.now += Duration::from_nanos(1260);
            let now = pair.now;
            let end = &mut pair.ends[0];
            end.requester.handle_timeout(now, &mut end.host);
            end.receive(now, frame);
            assert!(end.transmit(now).is_empty());
        }
    }
    assert_done(&pair, 40);
    let state = pair.ends[0].requester.inspect(pair.now);
    assert_eq!((state.stats.retransmitted, state.retries_left, state.window), (0, 7, 256));
}

/// Only the lost responses are requested again, without using a retry and without closing the window.
#[test]
fn a_lost_response_is_asked_for_alone() {
    for (lost, count) in [(0..1, 1), (7..8, 1), (62..63, 1), (10..14, 4)] {
        let mut pair = calibrated(2);
        (0..2).for_each(|wr_id| pair.ends[0].post(read(wr_id)));
        let sent = step(&mut pair, Duration::from_micros(30), |index| !lost.contains(&index));
        let state = pair.ends[0].requester.inspect(pair.now);
        assert_eq!((state.retries_left, state.window), (7, 256));
        let again = step(&mut pair, Duration::from_micros(30), |_| true);
        let first = asked(&sent[0]).unwrap().0.plus(u32::try_from(lost.start).unwrap());
        assert_eq!(again.iter().map(|frame| asked(frame)).collect::<Vec<_>>(), [Some((first, count))], "{lost:?}");
        assert_done(&pair, 2);
    }
}

/// Adapters acknowledge a duplicate with the newest PSN that they have executed. Within a READ, such an ACK says
/// nothing about the READ's responses, which are still on their way.
#[test]
fn an_ack_within_a_read_loses_no_response() {
    let mut pair = calibrated(1);
    let now = pair.now;
    let [ours, peer] = &mut pair.ends;
    ours.post(read(0));
    let request = ours.transmit(now).remove(0);
    peer.receive(now, &request);
    let responses = peer.transmit(now);
    let mut header = Packet::parse(&responses[0]).unwrap().header;
    header.bth.opcode = Opcode::ACKNOWLEDGE;
    header.bth.psn = header.bth.psn.plus(PACKETS - 1);
    let ack = pvrdma_roce::wire::build(&header, &[]).unwrap();
    ours.receive(now, &ack);
    assert!(ours.transmit(now).is_empty());
    let later = now + Duration::from_micros(400);
    ours.requester.handle_timeout(later, &mut ours.host);
    assert!(ours.transmit(later).is_empty(), "nothing is lost");
    responses.iter().for_each(|frame| ours.receive(later, frame));
    assert_eq!(ours.requester.inspect(later).retries_left, 7);
    assert_done(&pair, 1);
}

/// A few responses behind the missing one do not show that it is lost. If nothing more arrives for a while, that does.
#[test]
fn a_lost_response_near_the_end_is_asked_for_soon() {
    let mut pair = calibrated(1);
    pair.ends[0].post(read(0));
    step(&mut pair, Duration::from_micros(30), |index| index != 60);
    assert!(pair.ends[0].transmit(pair.now).is_empty());
    let deadline = pair.ends[0].requester.poll_timeout().unwrap();
    assert!(deadline - pair.now <= Duration::from_micros(200), "{:?}", deadline - pair.now);
    pair.now = deadline;
    let end = &mut pair.ends[0];
    end.requester.handle_timeout(deadline, &mut end.host);
    let again = step(&mut pair, Duration::from_micros(30), |_| true);
    assert_eq!(asked(&again[0]).map(|(_, count)| count), Some(1));
    assert_done(&pair, 1);
}

/// As long as responses arrive, they show which ones are late, so no timer has to wake a thread.
#[test]
fn a_gap_needs_no_timer_while_more_is_to_come() {
    let mut pair = calibrated(1);
    let began = pair.now;
    let [ours, peer] = &mut pair.ends;
    ours.post(read(0));
    ours.transmit(began).iter().for_each(|frame| peer.receive(began, frame));
    let responses = peer.transmit(began);
    assert_eq!(responses.len(), 64);
    responses[..20]
        .iter()
        .enumerate()
        .filter(|&(index, _)| index != 5)
        .for_each(|(_, frame)| ours.receive(began, frame));
    assert!(ours.transmit(began).is_empty());
    let wait = ours.requester.poll_timeout().unwrap() - began;
    assert!(wait >= Duration::from_micros(500), "{wait:?}");
    let late = began + Duration::from_micros(150);
    ours.receive(late, &responses[20]);
    let again = ours.transmit(late);
    assert_eq!(again.iter().map(|frame| asked(frame).map(|(_, count)| count)).collect::<Vec<_>>(), [Some(1)]);
}

/// When a request stays silent, it was lost, or all its responses were, or the responses to the repeated request. It is
/// requested again in each case.
#[test]
fn a_silent_request_is_asked_again_whatever_was_lost() {
    for fate in 0..16_u32 {
        let mut pair = calibrated(2);
        (0..2).for_each(|wr_id| pair.ends[0].post(read(wr_id)));
        let mut round = 0;
        while pair.ends[0].host.sent.len() < 2 {
            let now = pair.now;
            let [ours, peer] = &mut pair.ends;
            let lost = |bit: u32| round < 2 && fate >> bit & 1 == 1;
            let (request, response) = (!lost(2 * round), !lost(2 * round + 1));
            let sent = ours.transmit(now);
            for frame in sent.iter().filter(|_| request) {
                peer.receive(now, frame);
            }
            for frame in peer.transmit(now).iter().filter(|_| response) {
                ours.receive(now, frame);
            }
            if sent.is_empty()
                && let Some(deadline) = ours.requester.poll_timeout()
            {
                pair.now = pair.now.max(deadline);
                ours.requester.handle_timeout(pair.now, &mut ours.host);
                continue;
            }
            round += 1;
            assert!(round < 40, "fate {fate}: {}", pair.report());
        }
        assert_done(&pair, 2);
        assert!(pair.ends[0].requester.stats().timeouts == 0, "fate {fate} {}", pair.report());
    }
}

/// rxe answers a repeated READ only if it begins no earlier than the part that it repeated last. So within one request,
/// a later repetition never begins before an earlier one.
#[test]
fn what_is_asked_again_never_begins_earlier() {
    let mut asked_again = 0;
    for seed in 0..200 {
        let mut pair = pair(8);
        pair.random = Random(seed);
        pair.keep_frames = true;
        pair.faults = Faults { loss: 60, reorder: 60, ..Faults::default() };
        (0..8).for_each(|wr_id| pair.ends[0].post(read(wr_id)));
        pair.run();
        assert_done(&pair, 8);
        let first = Setup::default().attrs.sq_psn;
        // The range that each request asks for, and where its last repetition began.
        let mut requests: Vec<(std::ops::Range<u32>, u32)> = Vec::new();
        for (psn, count) in pair.frames[0].iter().filter_map(|frame| asked(frame)) {
            let at = u32::try_from(psn.since(first)).unwrap();
            assert!(at % PACKETS + count <= PACKETS);
            if requests.last().is_none_or(|(last, _)| at >= last.end) {
                requests.push((at..at + count, at));
                continue;
            }
            let (request, begin) = requests.iter_mut().find(|(request, _)| request.contains(&at)).unwrap();
            assert!(at >= *begin, "seed {seed}: {at} after {begin}");
            assert!(at + count <= request.end, "seed {seed}: {count} from {at}, {request:?}");
            asked_again += u32::from(at > *begin);
            *begin = at;
        }
    }
    assert!(asked_again > 1000, "{asked_again}");
}

/// A peer that requests a part again before the rest has left gets both.
#[test]
fn what_is_repeated_does_not_replace_what_is_owed() {
    let mut pair = calibrated(1);
    let now = pair.now;
    let [ours, peer] = &mut pair.ends;
    ours.post(read(0));
    let request = ours.transmit(now).remove(0);
    peer.receive(now, &request);
    let mut out = [0; pvrdma_roce::wire::MAX_FRAME];
    let mut responses = Vec::new();
    let mut owed = |peer: &mut super::net::End, count: usize| {
        for _ in 0..count {
            let Some(length) = peer.responder.poll_transmit(&mut peer.host, &mut out) else { break };
            responses.push(Packet::parse(&out[..length]).unwrap().header.bth.psn);
        }
    };
    owed(peer, 40);
    let header = Packet::parse(&request).unwrap().header;
    let Extension::Reth(reth) = header.extension else { panic!() };
    for (skip, count) in [(5_u32, 1), (6, 2), (50, 3)] {
        let mut part = header;
        part.bth.psn = header.bth.psn.plus(skip);
        let address = reth.address + u64::from(skip) * 1024;
        part.extension = Extension::Reth(pvrdma_roce::wire::Reth { address, length: count * 1024, ..reth });
        peer.receive(now, &pvrdma_roce::wire::build(&part, &[]).unwrap());
    }
    owed(peer, 100);
    let numbers: Vec<_> = responses.iter().map(|psn| psn.since(header.bth.psn)).collect();
    assert_eq!(numbers, (0..40).chain(5..8).chain(40..64).collect::<Vec<_>>());
}
