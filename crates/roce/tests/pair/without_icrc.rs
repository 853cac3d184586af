//! Packets without an ICRC: both administrators permit them, and both ends agree. In all other cases every byte stays
//! as it is.

use std::time::Duration;

use pvrdma_roce::{
    IcrcRule::{self, Always, UnlessAgreed},
    Path,
    wire::{
        ACCEPT, ACCEPT_WITHOUT_ICRC, Aeth, Bth, Extension, Header, MAX_FRAME, OFFER, Opcode, Packet,
        REQUEST_WITHOUT_ICRC, Syndrome, build,
    },
};
use pvrdma_verbs_types::{GidType, RemoteAddress, SendData, SendFlags, SendOp, SendWr, Sge, WcStatus};

use super::host::KEY;
use super::mixed;
use super::net::{End, Faults, Pair, Random, Setup};

const LOCAL: u64 = 0x100_0000;
const REMOTE: u64 = 0x500_0000;
/// Number of packets of a request.
const PACKETS: u32 = 4;
const LENGTH: u32 = PACKETS * 1024;

fn setup(icrc: IcrcRule) -> Setup {
    let base = Setup::default();
    Setup { tuning: base.tuning.with_negotiate(true), icrc, ..base }
}

/// A pair with these rules. The end of number 0 has data to write.
fn pair(rules: [IcrcRule; 2]) -> Pair {
    let [one, other] = rules.map(setup);
    let mut pair = Pair::between([&one, &other], 7);
    pair.keep_frames = true;
    pair.ends.iter_mut().for_each(|end| end.keeps = true);
    pair.ends[0].host.memory.write(LOCAL, &data());
    pair
}

fn data() -> Vec<u8> {
    (0..LENGTH).map(|i| i.to_le_bytes()[(i % 2) as usize]).collect()
}

/// The path of an end with another rule.
fn path(rule: IcrcRule, end: usize) -> Path {
    let setup = setup(rule);
    if end == 0 { End::new(&setup, 1, 2).path } else { End::new(&setup, 2, 1).path }
}

fn post(pair: &mut Pair, wr_id: u64, op: SendOp, addr: u64) {
    let sges = vec![Sge { addr, length: LENGTH, lkey: KEY }];
    pair.ends[0].post(SendWr { wr_id, op, flags: SendFlags::SIGNALED, sges });
}

/// Executes a WRITE, and a READ of what was written.
fn exchange(pair: &mut Pair) {
    let (wr_id, remote) = (pair.ends[0].host.sent.len() as u64, RemoteAddress { addr: REMOTE, rkey: KEY });
    post(pair, wr_id, SendOp::Write { remote, immediate: None }, LOCAL);
    pair.run();
    post(pair, wr_id + 1, SendOp::Read { remote }, LOCAL + 0x1_0000);
    pair.run();
    let host = &pair.ends[0].host;
    assert_eq!(host.sent.len() as u64, wr_id + 2, "{}", pair.report());
    assert!(host.sent.iter().all(|ended| ended.status == WcStatus::Success));
    assert!(host.memory.get(LOCAL + 0x1_0000, data().len()) == data());
}

fn sent(pair: &mut Pair) -> [Vec<Vec<u8>>; 2] {
    std::mem::take(&mut pair.frames)
}

fn bits(frames: &[Vec<u8>]) -> Vec<u8> {
    frames.iter().map(|frame| Packet::parse(frame).unwrap().header.bth.reserved7).collect()
}

fn omit(frame: &[u8]) -> bool {
    Packet::parse(frame).unwrap().omits_icrc()
}

fn is_sound(frame: &[u8]) -> bool {
    Packet::parse(frame).unwrap().verify().is_ok()
}

fn without_icrc(mut frame: Vec<u8>) -> Vec<u8> {
    frame.last_chunk_mut::<4>().unwrap().fill(0);
    frame
}

/// Numbers of packets sent without an ICRC: by the requester and the responder of an end.
fn counts(end: &End) -> [u64; 2] {
    [end.requester.stats().without_icrc, end.responder.stats().without_icrc]
}

fn inspected(end: &End) -> [bool; 2] {
    [end.requester.inspect(Duration::ZERO).omits_icrc, end.responder.inspect().omits_icrc]
}

#[test]
fn two_ends_agree() {
    let mut pair = pair([UnlessAgreed; 2]);
    exchange(&mut pair);
    let [requests, responses] = sent(&mut pair);
    // The first packets are sent before the first response, and the next ones before a response to a request that
    // permits it.
    let offers = bits(&requests).iter().take_while(|&&bits| bits == OFFER).count();
    assert!(offers > 0 && bits(&requests)[offers..].iter().all(|&bits| bits == REQUEST_WITHOUT_ICRC));
    assert!(bits(&responses).iter().all(|&bits| bits == ACCEPT || bits == ACCEPT_WITHOUT_ICRC));
    assert_eq!(bits(&responses).last(), Some(&ACCEPT_WITHOUT_ICRC));
    exchange(&mut pair);
    let [requests, responses] = sent(&mut pair);
    for frame in requests.iter().chain(&responses) {
        assert!(omit(frame) && !is_sound(frame), "{}", Packet::parse(frame).unwrap());
        assert_eq!(frame.last_chunk::<4>(), Some(&[0; 4]));
    }
    // Both ends count what they send and receive.
    let [one, other] = &pair.ends;
    assert_eq!((one.damaged, other.damaged), (0, 0));
    assert_eq!((counts(one)[0], counts(one)[1]), (other.without_icrc, 0));
    assert_eq!((counts(other)[0], counts(other)[1]), (0, one.without_icrc));
    assert!(other.without_icrc > PACKETS.into() && one.without_icrc > PACKETS.into());
    assert_eq!((inspected(one), inspected(other)), ([true, false], [false, true]));
    assert_eq!(one.requester.stats().retransmitted, 0);
}

/// All bytes are those of ends without the agreement.
#[test]
fn one_permission_is_not_enough() {
    for rules in [[Always, UnlessAgreed], [UnlessAgreed, Always]] {
        let mut pair = pair(rules);
        exchange(&mut pair);
        exchange(&mut pair);
        let frames = sent(&mut pair);
        assert!(frames.iter().flatten().all(|frame| is_sound(frame) && !omit(frame)));
        assert!(bits(&frames[1]).iter().all(|&bits| bits == ACCEPT));
        let permits = bits(&frames[0]).contains(&REQUEST_WITHOUT_ICRC);
        assert_eq!(permits, rules[0] == UnlessAgreed);
        assert!(pair.ends.iter().all(|end| counts(end) == [0; 2] && end.without_icrc == 0));
        assert!(pair.ends.iter().all(|end| inspected(end) == [false; 2]));
    }
    // Neither do ends that permit it without the negotiation.
    let base = Setup { icrc: UnlessAgreed, ..Setup::default() };
    let mut plain = Pair::new(&base, 7);
    plain.keep_frames = true;
    plain.ends[0].host.memory.write(LOCAL, &data());
    exchange(&mut plain);
    exchange(&mut plain);
    let frames = sent(&mut plain);
    assert!(frames.iter().flatten().all(|frame| is_sound(frame)));
    assert!(bits(&frames.concat()).iter().all(|&bits| bits == 0));
}

/// The frames of an end with the rule are the same as before, whatever bits a peer sets.
#[test]
fn a_peer_cannot_switch_the_check_off() {
    let now = Duration::from_secs(1);
    for kind in [GidType::RoceV1, GidType::RoceV2] {
        let strict = Setup { kind, ..setup(Always) };
        let (mut end, mut peer) = (End::new(&strict, 1, 2), End::new(&strict, 2, 1));
        let remote = RemoteAddress { addr: REMOTE, rkey: KEY };
        let write = SendOp::Write { remote, immediate: None };
        for (to_peer, sender) in [(false, &mut peer), (true, &mut end)] {
            let sges = vec![Sge { addr: LOCAL, length: 8, lkey: KEY }];
            sender.host.memory.write(LOCAL, &[u8::from(to_peer) + 1; 8]);
            sender.post(SendWr { wr_id: 0, op: write.clone(), flags: SendFlags::SIGNALED, sges });
        }
        // A request and a response with the bits of the agreement and no ICRC.
        let request = Packet::parse(&peer.transmit(now)[0]).map(|packet| packet.header).unwrap();
        let [data, other] = [[7; 8], [8; 8]];
        let bth = Bth { reserved7: REQUEST_WITHOUT_ICRC, ..request.bth };
        let forged = without_icrc(build(&Header { bth, ..request }, &data).unwrap());
        assert!(omit(&forged));
        end.receive(now, &forged);
        assert_eq!((end.damaged, end.without_icrc, end.host.memory.get(REMOTE, 8)), (1, 0, vec![0; 8]));
        let written = end.transmit(now);
        let bth = Bth::new(Opcode::ACKNOWLEDGE, request.bth.destination, strict.attrs.sq_psn);
        let bth = Bth { reserved7: ACCEPT_WITHOUT_ICRC, ..bth };
        let extension = Extension::Aeth(Aeth { syndrome: Syndrome::ACK, msn: 1 });
        let ack = build(&Header { bth, extension, ..request }, &[]).unwrap();
        end.receive(now, &without_icrc(ack.clone()));
        assert_eq!((end.damaged, end.host.sent.len()), (2, 0));
        // With an ICRC both are packets like others, and the bits change nothing.
        let bth = Bth { reserved7: REQUEST_WITHOUT_ICRC, ..request.bth };
        end.receive(now, &build(&Header { bth, ..request }, &other).unwrap());
        end.receive(now, &ack);
        assert_eq!((end.damaged, end.host.memory.get(REMOTE, 8), end.host.sent.len()), (2, other.to_vec(), 1));
        let sges = vec![Sge { addr: LOCAL, length: 8, lkey: KEY }];
        end.post(SendWr { wr_id: 1, op: write.clone(), flags: SendFlags::SIGNALED, sges });
        let sent = end.transmit(now);
        assert!(sent.len() == 2 && written.iter().chain(&sent).all(|frame| is_sound(frame)));
        assert_eq!((counts(&end), inspected(&end)), ([0; 2], [false; 2]));
    }
}

/// With the rule, zeros without the bits of the agreement are damage. So is any other wrong ICRC.
#[test]
fn only_the_agreed_form_is_accepted() {
    let now = Duration::from_secs(1);
    let trusting = setup(UnlessAgreed);
    let (mut end, mut peer) = (End::new(&trusting, 1, 2), End::new(&trusting, 2, 1));
    peer.post(SendWr { op: SendOp::Send { data: SendData::None, to: None }, ..SendWr::default() });
    let header = Packet::parse(&peer.transmit(now)[0]).map(|packet| packet.header).unwrap();
    let with = |reserved7| {
        let bth = Bth { reserved7, ..header.bth };
        build(&Header { bth, ..header }, &[]).unwrap()
    };
    let mut damaged = 0;
    for reserved7 in (0..0x80).filter(|&bits| bits != REQUEST_WITHOUT_ICRC) {
        end.receive(now, &without_icrc(with(reserved7)));
        damaged += 1;
        assert_eq!(end.damaged, damaged, "{reserved7:#x}");
    }
    let mut wrong = with(REQUEST_WITHOUT_ICRC);
    *wrong.last_mut().unwrap() ^= 1;
    end.receive(now, &wrong);
    assert_eq!((end.damaged, end.responder.stats().executed), (damaged + 1, 0));
    // A UDP checksum is verified in any case.
    let mut summed = without_icrc(with(REQUEST_WITHOUT_ICRC));
    let udp = 14 + 20;
    summed[udp + 6..udp + 8].copy_from_slice(&[1, 2]);
    end.receive(now, &summed);
    assert_eq!(end.damaged, damaged + 2);
    // Notifications have an ICRC: the agreement is one of connections.
    let bth = Bth { reserved7: REQUEST_WITHOUT_ICRC, ..Bth::new(Opcode::CNP, header.bth.destination, header.bth.psn) };
    let cnp = without_icrc(build(&Header { bth, extension: Extension::None, ..header }, &[0; 16]).unwrap());
    let cnp = Packet::parse(&cnp).unwrap();
    assert!(!cnp.omits_icrc() && pvrdma_roce::admit_notification(&cnp).is_err());
}

/// An administrator withdraws the permission of one end: the other one follows with the next packet.
#[test]
fn a_peer_that_stops() {
    for stops in 0..2 {
        let mut pair = pair([UnlessAgreed; 2]);
        exchange(&mut pair);
        exchange(&mut pair);
        assert_eq!([inspected(&pair.ends[0])[0], inspected(&pair.ends[1])[1]], [true; 2]);
        let before = pair.ends.each_ref().map(counts);
        let retransmitted = pair.ends[0].requester.stats().retransmitted;
        sent(&mut pair);
        pair.ends[stops].set_path(path(Always, stops));
        exchange(&mut pair);
        exchange(&mut pair);
        let frames = sent(&mut pair);
        let after = pair.ends.each_ref().map(counts);
        assert_eq!(after[stops], before[stops]);
        assert!(frames[stops].iter().all(|frame| is_sound(frame)));
        assert_eq!(pair.ends.each_ref().map(inspected), [[false; 2]; 2]);
        if stops == 0 {
            assert_eq!(after[1], before[1], "requests without the permission come first");
        } else {
            // The first packets are lost, and the retransmission has an ICRC.
            assert!(pair.ends[0].requester.stats().retransmitted > retransmitted);
            let first = frames[0].iter().position(|frame| is_sound(frame)).unwrap();
            assert!(first > 0 && frames[0][first..].iter().all(|frame| is_sound(frame)));
        }
    }
}

/// A device moves to a host with another rule. Nothing about the agreement is saved, and no retry is left.
#[test]
fn a_moved_peer() {
    for (moved, rule) in [(0, Always), (1, Always), (0, UnlessAgreed), (1, UnlessAgreed)] {
        for steps in 0..40 {
            let mut pair = pair([UnlessAgreed; 2]);
            exchange(&mut pair);
            exchange(&mut pair);
            let remote = RemoteAddress { addr: REMOTE + 0x1_0000, rkey: KEY };
            post(&mut pair, 4, SendOp::Write { remote, immediate: None }, LOCAL);
            post(&mut pair, 5, SendOp::Read { remote }, LOCAL + 0x2_0000);
            for _ in 0..steps {
                pair.step();
            }
            let now = pair.now;
            let end = &mut pair.ends[moved];
            end.path = path(rule, moved);
            end.replace(now);
            assert_eq!(inspected(end), [false; 2]);
            pair.run();
            let at = format!("end {moved} {rule:?} after {steps} steps: {}", pair.report());
            assert_eq!(pair.ends[0].host.sent.len(), 6, "{at}");
            assert!(pair.ends[0].host.sent.iter().all(|ended| ended.status == WcStatus::Success), "{at}");
            assert!(pair.ends[0].host.memory.get(LOCAL + 0x2_0000, data().len()) == data(), "{at}");
            exchange(&mut pair);
            exchange(&mut pair);
            let omits = [inspected(&pair.ends[0])[0], inspected(&pair.ends[1])[1]];
            assert_eq!(omits, [rule == UnlessAgreed; 2], "{at}");
        }
    }
}

/// Packets behind a gap were kept, the packet in front of them was lost, and then its sender moved. The kept packets
/// are executed last, and are from before the move.
#[test]
fn kept_packets_of_a_moved_peer() {
    let mut pair = pair([UnlessAgreed; 2]);
    exchange(&mut pair);
    exchange(&mut pair);
    let remote = RemoteAddress { addr: REMOTE + 0x1_0000, rkey: KEY };
    post(&mut pair, 4, SendOp::Write { remote, immediate: None }, LOCAL);
    let now = pair.now;
    let [end, peer] = &mut pair.ends;
    let frames = end.transmit(now);
    assert!(frames.iter().all(|frame| omit(frame)));
    frames[1..].iter().for_each(|frame| peer.receive(now, frame));
    assert_eq!(peer.kept(), frames.len() - 1);
    end.path = path(Always, 0);
    end.replace(now);
    let again = end.transmit(now);
    peer.receive(now, &again[0]);
    assert_eq!(peer.kept(), 0);
    let responses = peer.transmit(now);
    assert!(!responses.is_empty() && responses.iter().all(|frame| is_sound(frame)), "its new host would drop others");
    responses.iter().for_each(|frame| end.receive(now, frame));
    assert_eq!(end.host.sent.len(), 5);
}

/// A lost packet is retransmitted with an ICRC, which protects it: a damaged retransmission is dropped and counted.
#[test]
fn a_retransmission_has_an_icrc() {
    let mut pair = pair([UnlessAgreed; 2]);
    exchange(&mut pair);
    exchange(&mut pair);
    let remote = RemoteAddress { addr: REMOTE + 0x1_0000, rkey: KEY };
    post(&mut pair, 4, SendOp::Write { remote, immediate: None }, LOCAL);
    let mut now = pair.now;
    let before = pair.ends[0].requester.stats();
    let lost = pair.ends[0].transmit(now);
    assert!(lost.len() == PACKETS as usize && lost.iter().all(|frame| omit(frame)));
    let [end, peer] = &mut pair.ends;
    let mut out = [0; MAX_FRAME];
    let mut retransmitted = 0;
    let mut damage = true;
    while end.host.sent.len() < 5 {
        while let Some(length) = end.requester.poll_transmit(now, &mut end.host, &mut out) {
            let frame = &mut out[..length];
            let packet = Packet::parse(frame).unwrap();
            assert_eq!((packet.verify(), packet.header.bth.reserved7), (Ok(()), REQUEST_WITHOUT_ICRC));
            retransmitted += 1;
            // The last byte of the payload.
            frame[length - 5] ^= u8::from(damage);
            peer.receive(now, frame);
        }
        damage = peer.damaged == 0;
        peer.transmit(now).iter().for_each(|frame| end.receive(now, frame));
        if let Some(timeout) = end.requester.poll_timeout() {
            now = now.max(timeout);
            end.requester.handle_timeout(now, &mut end.host);
        }
    }
    let after = end.requester.stats();
    assert_eq!(after.retransmitted - before.retransmitted, retransmitted);
    assert_eq!((after.without_icrc - before.without_icrc, retransmitted > 4), (4, true));
    assert!(peer.damaged > 0 && peer.host.memory.get(REMOTE + 0x1_0000, data().len()) == data());
    // New packets leave without one again.
    exchange(&mut pair);
    assert!(inspected(&pair.ends[0])[0]);
}

/// Answers of a paused device always have an ICRC.
#[test]
fn answers_in_a_pause_have_an_icrc() {
    let mut pair = pair([UnlessAgreed; 2]);
    exchange(&mut pair);
    exchange(&mut pair);
    let remote = RemoteAddress { addr: REMOTE, rkey: KEY };
    post(&mut pair, 4, SendOp::Write { remote, immediate: None }, LOCAL);
    let now = pair.now;
    let [end, peer] = &mut pair.ends;
    let frames = end.transmit(now);
    let packet = Packet::parse(&frames[0]).unwrap();
    let mut out = [0; MAX_FRAME];
    let length = peer.responder.hold_off(&packet, 1, &mut out).unwrap();
    assert!(omit(&frames[0]) && is_sound(&out[..length]));
    let length = peer.responder.prompt(&mut out).unwrap();
    assert!(is_sound(&out[..length]));
}

/// Bidirectional traffic of all operations over a network that loses, repeats and reorders packets. One end is saved
/// and restored at times.
#[test]
fn seeds_of_a_bad_network() {
    let mut totals = [0_u64; 2];
    for seed in 0..300 {
        let mut random = Random(seed ^ 0x1c2c);
        let mut upto = |limit: u64| if random.chance(600) { random.below(limit + 1) } else { 0 };
        // Nothing detects damage in a packet without an ICRC, so the link must.
        let faults = Faults { loss: upto(100), duplicate: upto(100), reorder: upto(100), corrupt: 0 };
        let rules = [UnlessAgreed, if seed % 4 == 0 { Always } else { UnlessAgreed }];
        let mut moves = Random(seed);
        let pair = mixed::scenario_of(seed, rules, Some(faults), seed % 2 == 0, |pair| {
            if seed % 3 == 0 && moves.chance(20) {
                let (now, end) = (pair.now, usize::from(moves.chance(500)));
                pair.ends[end].replace(now);
            }
        });
        let sent: u64 = pair.ends.iter().flat_map(counts).sum();
        let damaged: u64 = pair.ends.iter().map(|end| end.damaged).sum();
        assert_eq!(damaged, 0, "seed {seed}");
        if rules[1] == Always {
            assert_eq!(sent, 0, "seed {seed}");
        }
        totals[0] += sent;
        totals[1] += pair.ends.iter().map(|end| end.requester.stats().retransmitted).sum::<u64>();
    }
    assert!(totals[0] > 10_000 && totals[1] > 1000, "{totals:?}");
}
