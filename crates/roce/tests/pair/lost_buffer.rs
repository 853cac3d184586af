//! A responder that loses the packets that it kept behind a gap, like one that is restored without them.

use std::time::Duration;

use pvrdma_roce::wire::{Aeth, Bth, Extension, Header, NakCode, Opcode, Packet, SackMap, Syndrome, build};
use pvrdma_verbs_types::{
    Psn, QpAttrs, RemoteAddress, SendFlags, SendOp, SendWr, Sge,
    WcStatus::{RetryExceeded, Success},
};

use super::host::KEY;
use super::net::{Faults, Pair, Setup};

const LOCAL: u64 = 0x100_0000;
const REMOTE: u64 = 0x500_0000;

fn write(wr_id: u64, packets: u32) -> SendWr {
    let remote = RemoteAddress { addr: REMOTE, rkey: KEY };
    let sges = vec![Sge { addr: LOCAL, length: packets * 1024, lkey: KEY }];
    SendWr { wr_id, op: SendOp::Write { remote, immediate: None }, flags: SendFlags::SIGNALED, sges }
}

fn read(wr_id: u64, packets: u32) -> SendWr {
    let remote = RemoteAddress { addr: LOCAL, rkey: KEY };
    let sges = vec![Sge { addr: REMOTE, length: packets * 1024, lkey: KEY }];
    SendWr { wr_id, op: SendOp::Read { remote }, flags: SendFlags::SIGNALED, sges }
}

/// A pair whose ends have agreed on selective acknowledgements. End 1 keeps packets behind a gap; end 0 has `retry_cnt`
/// retries.
fn agreed(retry_cnt: u8, seed: u64) -> Pair {
    let base = Setup::default();
    let tuning = base.tuning.with_negotiate(true);
    let mut pair = Pair::new(&Setup { tuning, attrs: QpAttrs { retry_cnt, ..base.attrs }, ..base }, seed);
    pair.ends[1].keeps = true;
    pair.ends[0].post(write(0, 1));
    pair.run();
    assert!(pair.ends[0].requester.inspect(pair.now).sack);
    pair
}

/// A header of a response of end 1.
fn template(pair: &mut Pair) -> Header {
    pair.ends[0].post(write(1, 1));
    let sent = pair.ends[0].transmit(pair.now);
    sent.iter().for_each(|frame| pair.ends[1].receive(pair.now, frame));
    let responses = pair.ends[1].transmit(pair.now);
    responses.iter().for_each(|frame| pair.ends[0].receive(pair.now, frame));
    Packet::parse(&responses[0]).unwrap().header
}

/// A sequence NAK for `psn` of a peer that has the packets at these distances behind it.
fn nak(template: &Header, psn: Psn, distances: impl IntoIterator<Item = u32>) -> Vec<u8> {
    let mut payload = [0; SackMap::MAX_LEN];
    let mut last = 0;
    for distance in distances {
        payload[(distance as usize - 1) / 8] |= 1 << ((distance - 1) % 8);
        last = (distance as usize).div_ceil(32) * 4;
    }
    let bth = Bth { reserved7: 0x53, ..Bth::new(Opcode::ACKNOWLEDGE, template.bth.destination, psn) };
    let extension = Extension::Aeth(Aeth { syndrome: Syndrome::Nak(NakCode::SequenceError), msn: 0 });
    build(&Header { bth, extension, ..*template }, &payload[..last]).unwrap()
}

/// The responder may lose its buffer at any moment: everything arrives within a few round trips, and the requester,
/// which has no retry left, needs none.
#[test]
fn a_buffer_that_is_lost_at_any_moment_costs_no_timeout_and_no_retry() {
    let mut lost = 0;
    for seed in 0..10 {
        for moment in 1..30 {
            let mut pair = agreed(0, seed);
            let data: Vec<u8> = (0..150 * 1024_u32).map(|i| i.to_le_bytes()[(i % 3) as usize]).collect();
            pair.ends[0].host.memory.write(LOCAL, &data);
            pair.faults = Faults { loss: 60, ..Faults::default() };
            [write(1, 150), read(2, 20), write(3, 30)].into_iter().for_each(|work| pair.ends[0].post(work));
            for _ in 0..moment {
                pair.step();
            }
            // From here on the network loses nothing, because a lost packet would cost extra time.
            pair.faults = Faults::default();
            lost += pair.ends[1].kept();
            pair.ends[1].lose_kept();
            let (began, before) = (pair.now, pair.ends[0].requester.stats());
            while pair.ends[0].host.sent.len() < 4 {
                assert!(pair.step(), "seed {seed}, moment {moment}: {}", pair.report());
            }
            let stats = pair.ends[0].requester.stats();
            let took = pair.now - began;
            assert!(
                stats.timeouts == before.timeouts && took < Duration::from_millis(4),
                "seed {seed}, moment {moment}: {took:?} {}",
                pair.report()
            );
            assert!(pair.ends[0].host.sent.iter().all(|ended| ended.status == Success), "{}", pair.report());
            assert!(pair.ends[1].host.memory.get(REMOTE, data.len()) == data, "seed {seed}, moment {moment}");
        }
    }
    assert!(lost > 500, "{lost} packets were lost with the buffer");
}

/// The missing packet arrives before the NAK has left. The NAK then names the next missing packet.
#[test]
fn a_loss_is_told_even_if_the_missing_packet_arrives_first() {
    let mut pair = agreed(0, 1);
    let now = pair.now;
    pair.ends[0].post(write(1, 20));
    let [ours, peer] = &mut pair.ends;
    let sent = ours.transmit(now);
    sent.iter().skip(1).for_each(|frame| peer.receive(now, frame));
    peer.transmit(now).iter().for_each(|frame| ours.receive(now, frame));
    assert_eq!(ours.requester.inspect(now).sacked, 19);
    let again = ours.transmit(now);
    assert_eq!(again.len(), 1);
    peer.lose_kept();
    peer.receive(now, &again[0]);
    peer.transmit(now).iter().for_each(|frame| ours.receive(now, frame));
    assert_eq!(ours.requester.inspect(now).sacked, 0);
    pair.run();
    assert_eq!((pair.ends[0].host.sent.len(), pair.ends[0].requester.stats().timeouts), (2, 0));
}

/// The NAK that reports the loss of the buffer may be lost itself. A later NAK then names a packet that the responder
/// had reported as received, which shows the loss.
#[test]
fn a_packet_that_was_kept_and_is_missing_tells_of_the_loss() {
    let mut pair = agreed(0, 1);
    let header = template(&mut pair);
    let now = pair.now;
    pair.ends[0].post(write(2, 20));
    let ours = &mut pair.ends[0];
    let first = Packet::parse(&ours.transmit(now)[0]).unwrap().header.bth.psn;
    ours.receive(now, &nak(&header, first, 1..19));
    assert_eq!((ours.requester.inspect(now).sacked, ours.transmit(now).len()), (18, 1));
    ours.receive(now, &nak(&header, first.plus(1), [1]));
    assert_eq!(ours.requester.inspect(now).sacked, 0);
    let again: Vec<Psn> = ours.transmit(now).iter().map(|frame| Packet::parse(frame).unwrap().header.bth.psn).collect();
    assert_eq!(again[..3], [1, 2, 3].map(|behind| first.plus(behind)));
}

/// The network duplicates the NAK: the requester goes back once.
#[test]
fn a_copy_of_the_nak_has_no_effect() {
    let mut pair = agreed(0, 1);
    let header = template(&mut pair);
    let now = pair.now;
    pair.ends[0].post(write(2, 20));
    let ours = &mut pair.ends[0];
    let first = Packet::parse(&ours.transmit(now)[0]).unwrap().header.bth.psn;
    let nothing = nak(&header, first, []);
    ours.receive(now, &nothing);
    let before = ours.requester.stats();
    assert!(!ours.transmit(now).is_empty());
    (0..3).for_each(|_| ours.receive(now, &nothing));
    assert!(ours.transmit(now).is_empty());
    assert_eq!(ours.requester.stats().sequence_naks, before.sequence_naks);
    assert!(!ours.host.failed);
}

/// The requester gives up, after its retries, on a peer that keeps losing its buffer without progress.
#[test]
fn a_peer_that_loses_its_buffer_without_end_is_given_up() {
    let mut pair = agreed(3, 1);
    let header = template(&mut pair);
    let now = pair.now;
    pair.ends[0].post(write(2, 20));
    let ours = &mut pair.ends[0];
    let first = Packet::parse(&ours.transmit(now)[0]).unwrap().header.bth.psn;
    let mut rounds = 0;
    while !ours.host.failed {
        rounds += 1;
        assert!(rounds < 20, "no end in sight");
        ours.receive(now, &nak(&header, first, 1..19));
        ours.receive(now, &nak(&header, first, []));
        ours.transmit(now);
    }
    // The first round costs no retry.
    assert_eq!((rounds, ours.host.sent.last().unwrap().status), (1 + 3 + 1, RetryExceeded));
}
