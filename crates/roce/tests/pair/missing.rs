//! Retransmission to a responder that keeps packets behind a gap, and after a timeout that was too early.

use std::time::Duration;

use pvrdma_roce::wire::{Extension, Packet, Syndrome, build};
use pvrdma_verbs_types::{Psn, RemoteAddress, SendFlags, SendOp, SendWr, Sge, WcStatus::Success};

use super::host::KEY;
use super::net::{Pair, Setup};

const REMOTE: RemoteAddress = RemoteAddress { addr: 0x5000, rkey: KEY };

fn work(wr_id: u64, op: SendOp, length: u32) -> SendWr {
    let sges = vec![Sge { addr: 0x1000, length, lkey: KEY }];
    SendWr { wr_id, op, flags: SendFlags::SIGNALED, sges }
}

fn write(wr_id: u64, packets: u32) -> SendWr {
    work(wr_id, SendOp::Write { remote: REMOTE, immediate: None }, packets * 1024)
}

fn psn(frame: &[u8]) -> Psn {
    Packet::parse(frame).unwrap().header.bth.psn
}

fn psns(frames: &[Vec<u8>]) -> Vec<Psn> {
    frames.iter().map(|frame| psn(frame)).collect()
}

fn is_nak(frame: &[u8]) -> bool {
    matches!(Packet::parse(frame).unwrap().header.extension, Extension::Aeth(aeth) if matches!(aeth.syndrome, Syndrome::Nak(_)))
}

/// A pair whose end 1 keeps packets.
fn pair() -> Pair {
    let mut pair = Pair::new(&Setup::default(), 1);
    pair.ends[1].keeps = true;
    pair
}

/// Delivers what end 0 sends, except for the packets with these indices. Returns the packets and the responses.
fn cross(pair: &mut Pair, lost: &[usize]) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let now = pair.now;
    let [ours, peer] = &mut pair.ends;
    let sent = ours.transmit(now);
    for (_, frame) in sent.iter().enumerate().filter(|(index, _)| !lost.contains(index)) {
        peer.receive(now, frame);
    }
    (sent, peer.transmit(now))
}

fn answer(pair: &mut Pair, answers: &[Vec<u8>]) {
    for frame in answers {
        pair.ends[0].receive(pair.now, frame);
    }
}

/// Overtaking packets say nothing about how the peer treats a loss. No ACK may be older than an earlier one, because
/// not every adapter ignores such an ACK: in the middle of a READ's responses, rxe takes it for an error.
#[test]
fn no_acknowledgement_is_older_than_an_earlier_one() {
    let mut pair = pair();
    let now = pair.now;
    pair.ends[0].post(write(0, 40));
    let [ours, peer] = &mut pair.ends;
    let mut sent = ours.transmit(now);
    sent.swap(3, 4);
    let mut newest = psn(&sent[0]);
    for (_, frame) in sent.iter().enumerate().filter(|(index, _)| ![10, 14, 20, 21, 22].contains(index)) {
        peer.receive(now, frame);
        for response in peer.transmit(now) {
            let psn = psn(&response);
            assert!(!psn.precedes(newest), "{psn:?} after {newest:?}");
            newest = psn;
        }
    }
    assert_eq!(newest, psn(&sent[10]), "the first that is missing is named");
}

/// A pair whose end 0 has seen that end 1 keeps packets behind a gap, and which has measured the round-trip time.
fn learned() -> Pair {
    let mut pair = pair();
    pair.ends[0].post(write(0, 1));
    pair.run();
    pair.ends[0].post(write(1, 20));
    let (_, answers) = cross(&mut pair, &[3]);
    answer(&mut pair, &answers);
    pair.run();
    // The window opens again.
    pair.ends[0].post(write(2, 250));
    pair.run();
    let learned = pair.ends[0].requester.inspect(pair.now);
    assert_eq!((pair.ends[0].host.sent.len(), learned.peer_reorders, learned.window), (3, true, 256));
    pair
}

/// The responder names one missing packet after the other, and each is sent again alone.
#[test]
fn each_missing_packet_costs_itself_and_a_round_trip() {
    let mut pair = learned();
    let before = pair.ends[0].requester.stats().retransmitted;
    pair.ends[0].post(write(3, 20));
    let (sent, mut answers) = cross(&mut pair, &[3, 7, 15]);
    for missing in [3, 7, 15] {
        assert!(is_nak(answers.last().unwrap()));
        // The answer arrives twice.
        answer(&mut pair, &answers);
        answer(&mut pair, &answers);
        let (repairs, next) = cross(&mut pair, &[]);
        assert_eq!(psns(&repairs), [psn(&sent[missing])]);
        answers = next;
    }
    answer(&mut pair, &answers);
    assert_eq!(pair.ends[0].host.sent[3].status, Success);
    pair.run();
    assert_eq!(pair.ends[0].requester.stats().retransmitted, before + 3);
}

#[test]
fn a_repair_that_is_lost_is_repeated() {
    let mut pair = learned();
    let before = pair.ends[0].requester.stats().retransmitted;
    pair.ends[0].post(write(3, 20));
    let (_, answers) = cross(&mut pair, &[3]);
    answer(&mut pair, &answers);
    let (repairs, nothing) = cross(&mut pair, &[0]);
    assert_eq!((repairs.len(), nothing.len()), (1, 0));
    // The network duplicated the NAK, which then changes nothing.
    answer(&mut pair, &answers);
    assert!(pair.ends[0].transmit(pair.now).is_empty());
    pair.run();
    assert_eq!(pair.ends[0].host.sent[3].status, Success);
    assert_eq!(pair.ends[0].requester.stats().retransmitted, before + 2);
}

/// Old answers have no effect, whatever their age.
#[test]
fn old_answers_stay_without_effect() {
    let mut pair = learned();
    pair.ends[0].post(write(3, 20));
    let (sent, answers) = cross(&mut pair, &[3, 7]);
    pair.ends[0].post(work(4, SendOp::Read { remote: REMOTE }, 10));
    let mut ancient = Packet::parse(&answers[0]).unwrap().header;
    ancient.bth.psn = psn(&sent[3]).plus((1_u32 << 22).wrapping_neg());
    let Extension::Aeth(aeth) = &mut ancient.extension else { panic!() };
    aeth.syndrome = Syndrome::ACK;
    let ancient = build(&ancient, &[]).unwrap();
    for round in 1..3 {
        let before = pair.ends[0].requester.stats();
        pair.ends[0].transmit(pair.now);
        answer(&mut pair, std::slice::from_ref(&ancient));
        assert!(pair.ends[0].transmit(pair.now).is_empty());
        let after = pair.ends[0].requester.stats();
        assert_eq!((after.stale - before.stale, after.retransmitted), (1, before.retransmitted), "{round}");
        pair.run();
        assert_eq!(pair.ends[0].host.sent.len(), 5);
    }
    let before = pair.ends[0].requester.stats();
    answer(&mut pair, &answers);
    assert!(pair.ends[0].transmit(pair.now).is_empty());
    let after = pair.ends[0].requester.stats();
    assert_eq!((after.stale - before.stale, after.retransmitted), (answers.len() as u64, before.retransmitted));
}

/// A responder without memory drops the packets that it kept. It then names one missing packet after the other.
#[test]
fn a_peer_that_stops_to_keep_gets_everything_again() {
    let mut pair = learned();
    pair.ends[1].keeps = false;
    pair.ends[0].post(write(3, 200));
    let (sent, answers) = cross(&mut pair, &[3]);
    answer(&mut pair, &answers);
    for alone in 0..3 {
        let (again, answers) = cross(&mut pair, &[]);
        if again.len() > 1 {
            assert!(alone > 0);
            break;
        }
        assert_eq!(psns(&again), [psn(&sent[3 + alone])]);
        answer(&mut pair, &answers);
        // A later packet arrives, which was still on its way.
        let [ours, peer] = &mut pair.ends;
        peer.receive(pair.now, &sent[190]);
        for frame in peer.transmit(pair.now) {
            ours.receive(pair.now, &frame);
        }
    }
    pair.run();
    assert_eq!(pair.ends[0].host.sent[3].status, Success);
}

/// A packet that was overtaken but arrives in the same batch does not count as missing.
#[test]
fn a_packet_that_is_late_in_its_batch_is_not_requested_again() {
    let mut pair = pair();
    let now = pair.now;
    let [ours, peer] = &mut pair.ends;
    ours.post(write(0, 40));
    let mut sent = ours.transmit(now);
    sent.swap(3, 6);
    sent.iter().for_each(|frame| peer.receive(now, frame));
    let answers = peer.transmit(now);
    assert!(!answers.is_empty() && !answers.iter().any(|frame| is_nak(frame)));
    answers.iter().for_each(|frame| ours.receive(now, frame));
    assert_eq!((ours.host.sent.len(), ours.requester.stats().retransmitted), (1, 0));
}

/// A requester that repeats packets without asking for an acknowledgement gets one.
#[test]
fn a_duplicate_is_acknowledged_even_if_it_does_not_ask() {
    let mut pair = pair();
    let now = pair.now;
    let [ours, peer] = &mut pair.ends;
    ours.post(write(0, 20));
    let sent = ours.transmit(now);
    sent.iter().for_each(|frame| peer.receive(now, frame));
    assert_eq!(peer.transmit(now).len(), 1);
    let silent: Vec<_> = sent.iter().filter(|frame| !Packet::parse(frame).unwrap().header.bth.ack_request).collect();
    silent.iter().for_each(|frame| peer.receive(now, frame));
    let answers = peer.transmit(now);
    assert_eq!(psns(&answers), [psn(&sent[19])], "one for all of them");
}

/// Once acknowledgements of the first attempt arrive, no further packet is repeated.
#[test]
fn late_answers_end_the_repetition() {
    let mut pair = pair();
    let now = pair.now;
    let [ours, peer] = &mut pair.ends;
    ours.post(write(0, 200));
    let (sent, mut answers) = (ours.transmit(now), Vec::new());
    for frames in sent.chunks(40) {
        frames.iter().for_each(|frame| peer.receive(now, frame));
        answers.extend(peer.transmit(now));
    }
    assert_eq!((sent.len(), answers.len()), (200, 5));
    let later = now + Duration::from_secs(1);
    ours.requester.handle_timeout(later, &mut ours.host);
    let again = ours.transmit(later).len();
    assert!(again > 0 && again < 40, "{again}");
    for answer in &answers {
        ours.receive(later, answer);
        assert!(ours.transmit(later).is_empty());
    }
    assert_eq!(ours.host.sent[0].status, Success);
    assert_eq!(ours.requester.stats().retransmitted, again as u64);
}
