//! What is sent again and what is not: to a responder that keeps what comes behind a gap and tells of every packet that is
//! missing, and after a timeout that was too early.

use std::time::Duration;

use pvrdma_roce::wire::{Extension, Packet, Syndrome};
use pvrdma_verbs::WcStatus::Success;
use pvrdma_verbs::{Psn, RemoteAddress, SendFlags, SendOp, SendWr, Sge};

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

/// Sends what end 0 has, without the packets of these indices. Gives what was sent and what is answered.
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

#[test]
fn all_that_is_missing_comes_in_one_round_trip() {
    let mut pair = pair();
    pair.ends[0].post(write(0, 20));
    let (sent, answers) = cross(&mut pair, &[3, 7, 15]);
    let all = psns(&sent);
    // One NAK, and ACKs that are old for everybody else.
    assert_eq!(answers.iter().map(|frame| is_nak(frame)).collect::<Vec<_>>(), [true, false, false]);
    assert_eq!(psn(&answers[0]), all[3]);
    // The hints overtake the NAK, and everything comes twice.
    for _ in 0..2 {
        answer(&mut pair, &answers[1..]);
        answer(&mut pair, &answers[..1]);
    }
    let (repairs, answers) = cross(&mut pair, &[]);
    assert_eq!(psns(&repairs), [all[3], all[7], all[15]]);
    answer(&mut pair, &answers);
    assert_eq!(pair.ends[0].host.sent[0].status, Success);
    assert_eq!(pair.ends[0].requester.stats().retransmitted, 3);
    pair.run();
    assert_eq!(pair.ends[0].requester.stats().retransmitted, 3);
}

/// The peer names a packet again when it gets there. If that was sent again already, it is on its way.
#[test]
fn a_repair_under_way_is_not_repeated_and_a_lost_one_is() {
    let mut pair = pair();
    // How long a round trip takes.
    pair.ends[0].post(write(0, 1));
    pair.run();
    pair.ends[0].post(write(1, 20));
    let (_, answers) = cross(&mut pair, &[3, 7]);
    answer(&mut pair, &answers[1..]);
    answer(&mut pair, &answers[..1]);
    // The second repair is lost, too; its NAK comes with the first.
    let (repairs, answers) = cross(&mut pair, &[1]);
    assert_eq!(repairs.len(), 2);
    answer(&mut pair, &answers);
    assert!(pair.ends[0].transmit(pair.now).is_empty());
    pair.run();
    assert_eq!(pair.ends[0].host.sent[1].status, Success);
    assert_eq!(pair.ends[0].requester.stats().retransmitted, 3);
}

/// Old answers that mean nothing stay without effect.
#[test]
fn hints_about_what_is_not_under_way_are_stale() {
    let mut pair = pair();
    pair.ends[0].post(write(0, 20));
    let (_, answers) = cross(&mut pair, &[3, 7]);
    pair.ends[0].post(work(1, SendOp::Read { remote: REMOTE }, 10));
    pair.run();
    assert_eq!(pair.ends[0].host.sent.len(), 2);
    let (stale, resent) = (pair.ends[0].requester.stats().stale, pair.ends[0].requester.stats().retransmitted);
    answer(&mut pair, &answers);
    assert!(pair.ends[0].transmit(pair.now).is_empty());
    let after = pair.ends[0].requester.stats();
    assert_eq!((after.stale - stale, after.retransmitted), (answers.len() as u64, resent));
}

/// A responder without memory drops what it kept before. It names one packet after the other.
#[test]
fn a_peer_that_stops_to_keep_gets_everything_again() {
    let mut pair = pair();
    pair.ends[0].post(write(0, 20));
    let (_, answers) = cross(&mut pair, &[3, 7]);
    answer(&mut pair, &answers[1..]);
    answer(&mut pair, &answers[..1]);
    let (_, answers) = cross(&mut pair, &[]);
    answer(&mut pair, &answers);
    assert_eq!(pair.ends[0].host.sent.len(), 1);
    pair.ends[1].keeps = false;
    pair.ends[0].post(write(1, 200));
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
        // A later packet that is still on its way.
        let [ours, peer] = &mut pair.ends;
        peer.receive(pair.now, &sent[190]);
        for frame in peer.transmit(pair.now) {
            ours.receive(pair.now, &frame);
        }
    }
    pair.run();
    assert_eq!(pair.ends[0].host.sent[1].status, Success);
}

/// Once answers to the first attempt come, nothing more is sent a second time.
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
