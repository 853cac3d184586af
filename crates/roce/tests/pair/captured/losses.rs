//! Captured connections with losses behind the capture point, and with receives that were posted late or never.

use std::collections::HashSet;
use std::time::Duration;

use pvrdma_roce::{
    Requester, Tuning, admit_connected,
    wire::{Extension, Header, MAX_FRAME, Operation, Packet, Syndrome},
};
use pvrdma_verbs_types::{Mtu, QpAttrs, SendOp, WcStatus};

use super::requester::works;
use super::{RECEIVES, answers, comparable, connections, is_response, receiver_of};
use crate::host::Host;
use crate::pcap;

/// Captures with losses in both directions. They contain the lost packets and their retransmissions.
const LOSSES: [&str; 4] = ["loss_write", "loss_send", "loss_read", "loss_atomic"];

/// Returns the requests that were sent for the first time.
fn first_attempts<'p>(packets: &[&'p Packet<'p>], mtu: Mtu) -> Vec<&'p Packet<'p>> {
    let mut next = packets[0].header.bth.psn;
    let mut first = Vec::new();
    for packet in packets.iter().filter(|packet| !is_response(packet)) {
        let bth = packet.header.bth;
        if bth.psn.precedes(next) {
            continue;
        }
        let is_read = bth.opcode.info().is_some_and(|info| info.operation == Operation::ReadRequest);
        let length = packet.header.extension.reth().filter(|_| is_read).map_or(0, |reth| reth.length);
        next = bth.psn.plus(length.div_ceil(mtu.bytes()).max(1));
        first.push(*packet);
    }
    first
}

/// Returns the place and content of the data in a response. The packet's position in its response depends on the
/// attempt.
fn data((header, payload): &(Header, Vec<u8>)) -> Option<(u32, Vec<u8>)> {
    match header.extension {
        Extension::AtomicAckEth(_, ack) => Some((header.bth.psn.get(), ack.original.to_le_bytes().to_vec())),
        Extension::Aeth(_) if payload.is_empty() => None,
        _ => Some((header.bth.psn.get(), payload.clone())),
    }
}

/// Our responder gets all attempts of the captured requester: it executes each message once, and a repeated READ gets
/// the same data, which is also the data of rxe's response.
#[test]
fn our_responder_takes_every_attempt() {
    let mut compared = 0;
    for name in LOSSES {
        let frames = pcap::load(name);
        let packets: Vec<Packet<'_>> = frames.iter().map(|frame| Packet::parse(frame).unwrap()).collect();
        let (own, peer, both) = connections(&packets).remove(0);
        let (ours, theirs, host) = answers(&both, own, peer, Mtu::M256, 0, |_, _| {});
        assert!(!host.failed, "{name}");
        let ours: HashSet<_> = ours.iter().filter_map(data).collect();
        let theirs: HashSet<_> = theirs.iter().filter_map(data).collect();
        assert!(theirs.is_subset(&ours), "{name}");
        // Every attempt at one place gets the same data.
        assert_eq!(ours.iter().map(|(psn, _)| psn).collect::<HashSet<_>>().len(), ours.len(), "{name}");
        compared += theirs.len();
        let first = first_attempts(&both, Mtu::M256);
        let sends = first.iter().filter(|packet| {
            packet.header.bth.opcode.info().is_some_and(|i| i.operation == Operation::Send && i.position.ends())
        });
        assert_eq!(host.received.len(), sends.count(), "{name}");
        let mut place = RECEIVES;
        let mut at = 0;
        for packet in first {
            if let Extension::Reth(reth) = packet.header.extension {
                at = reth.address;
            }
            let info = packet.header.bth.opcode.info().unwrap();
            let length = packet.payload.len();
            match info.operation {
                Operation::Write => {
                    assert!(host.memory.get(at, length) == packet.payload, "{name}: {packet}");
                    at += length as u64;
                }
                Operation::Send => {
                    assert!(host.memory.get(place, length) == packet.payload, "{name}: {packet}");
                    place += length as u64;
                    if info.position.ends() {
                        place = (place + 1).next_multiple_of(0x10_0000);
                    }
                }
                _ => {}
            }
        }
    }
    assert!(compared > 250, "{compared}");
}

/// The captured responses, to any attempt, complete our requests: each once, in order, with the right data.
#[test]
fn our_requester_takes_every_answer() {
    for name in LOSSES {
        let frames = pcap::load(name);
        let packets: Vec<Packet<'_>> = frames.iter().map(|frame| Packet::parse(frame).unwrap()).collect();
        let (own, peer, both) = connections(&packets).remove(0);
        let answer = both.iter().find(|packet| is_response(packet)).unwrap();
        let (mut attrs, path) = receiver_of(answer, own, Mtu::M256, 0);
        attrs.sq_psn = both[0].header.bth.psn;
        let mut host = Host::new();
        let mut requester =
            Requester::new(&attrs, path, Tuning::default().with_window(4096).with_read_chunk(2048).with_requests(1000));
        let works = works(&first_attempts(&both, Mtu::M256), &mut host);
        let count = works.len();
        let expected: Vec<_> = works.iter().map(|work| (work.wr_id, WcStatus::Success)).collect();
        let places: Vec<_> = works
            .iter()
            .filter(|work| !matches!(work.op, SendOp::Send { .. } | SendOp::Write { .. }))
            .map(|work| work.sges[0])
            .collect();
        for work in works {
            requester.post(work, &mut host);
        }
        let mut out = [0; MAX_FRAME];
        let mut landed = std::collections::BTreeMap::new();
        for packet in &both {
            while requester.poll_transmit(Duration::ZERO, &mut host, &mut out).is_some() {}
            if is_response(packet) {
                assert!(admit_connected(packet, peer, &path).is_ok(), "{name}: {packet}");
                requester.handle_packet(Duration::ZERO, packet, &mut host);
                if let Some((psn, bytes)) = data(&(packet.header, packet.payload.to_vec())) {
                    landed.insert(pvrdma_verbs_types::Psn::new(psn).since(both[0].header.bth.psn), bytes);
                }
            }
        }
        let ended: Vec<_> = host.sent.iter().map(|ended| (ended.wr_id, ended.status)).collect();
        assert_eq!(ended, expected, "{name}");
        assert_eq!(count, host.sent.len());
        let answered = landed.into_values().flatten();
        let memory = places.iter().flat_map(|sge| host.memory.get(sge.addr, usize::try_from(sge.length).unwrap()));
        assert!(memory.eq(answered), "{name}: wrong data");
    }
}

/// The three captures without a receive: RNR timer code, number of retries, and whether a receive is posted in the end.
const NOT_READY: [(&str, u8, u8, bool); 3] =
    [("rnr_recover", 20, 7, true), ("rnr_exceeded", 16, 3, false), ("rnr_write_imm", 14, 7, true)];

const fn syndrome(packet: &Packet<'_>) -> Option<Syndrome> {
    match packet.header.extension.aeth() {
        Some(aeth) => Some(aeth.syndrome),
        None => None,
    }
}

/// After each RNR NAK, rxe sends a sequence NAK for the same packet; this responder does not. Everything else is equal.
#[test]
fn our_responder_is_not_ready_as_captured() {
    for (name, timer, _, recovers) in NOT_READY {
        let frames = pcap::load(name);
        let packets: Vec<Packet<'_>> = frames.iter().map(|frame| Packet::parse(frame).unwrap()).collect();
        let (own, peer, both) = connections(&packets).remove(0);
        let last = both.iter().rposition(|packet| matches!(syndrome(packet), Some(Syndrome::RnrNak { .. }))).unwrap();
        // As in the capture, the receives are posted after the last RNR NAK.
        let (before, after) = both.split_at(last + 1);
        let (mut attrs, path) = receiver_of(both[0], peer, Mtu::M1024, 0);
        attrs.min_rnr_timer = timer;
        let mut host = Host::new();
        (host.any_key, host.rnr_timer) = (true, timer);
        let mut responder = pvrdma_roce::Responder::new(&attrs, path);
        let mut out = [0; MAX_FRAME];
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for (part, receives) in [(before, 0), (after, if recovers { 8 } else { 0 })] {
            for receive in 0..receives {
                host.post_receive(receive, RECEIVES + receive * 0x10_0000, 0x10_0000);
            }
            for packet in part {
                if is_response(packet) {
                    if !matches!(syndrome(packet), Some(Syndrome::Nak(_))) {
                        theirs.push(comparable(&packet.header));
                    }
                    continue;
                }
                assert!(admit_connected(packet, own, &path).is_ok());
                responder.handle_packet(packet, &mut host);
                while let Some(length) = responder.poll_transmit(&mut host, &mut out) {
                    ours.push(comparable(&Packet::parse(&out[..length]).unwrap().header));
                }
            }
        }
        assert_eq!(ours, theirs, "{name}");
        assert!(!host.failed, "{name}");
        assert!(theirs.len() >= 4, "{name}");
    }
}

/// Splits a capture into rounds: packets that are sent until the responses of the round arrive.
fn rounds<'p>(packets: &[&'p Packet<'p>]) -> Vec<(Vec<&'p Packet<'p>>, Vec<&'p Packet<'p>>)> {
    let mut rounds: Vec<(Vec<&Packet<'_>>, Vec<&Packet<'_>>)> = Vec::new();
    for packet in packets {
        if is_response(packet) {
            rounds.last_mut().unwrap().1.push(packet);
            continue;
        }
        let psn = packet.header.bth.psn;
        let again = rounds.last().is_none_or(|(sent, _)| !sent.last().unwrap().header.bth.psn.precedes(psn));
        if again {
            rounds.push((Vec::new(), Vec::new()));
        }
        rounds.last_mut().unwrap().0.push(packet);
    }
    rounds
}

/// After each RNR NAK our requester waits and sends the same packets again, as often as rxe, with the same outcome.
#[test]
fn our_requester_waits_as_captured() {
    for (name, _, rnr_retry, recovers) in NOT_READY {
        let frames = pcap::load(name);
        let packets: Vec<Packet<'_>> = frames.iter().map(|frame| Packet::parse(frame).unwrap()).collect();
        let (own, _, both) = connections(&packets).remove(0);
        let rounds = rounds(&both);
        let answer = both.iter().find(|packet| is_response(packet)).unwrap();
        let (attrs, path) = receiver_of(answer, own, Mtu::M1024, 0);
        let attrs = QpAttrs { sq_psn: both[0].header.bth.psn, rnr_retry, timeout: 0, ..attrs };
        let (mut host, mut now) = (Host::new(), Duration::ZERO);
        let mut requester = Requester::new(&attrs, path, Tuning::default());
        for work in works(&rounds[0].0, &mut host) {
            requester.post(work, &mut host);
        }
        let mut out = [0; MAX_FRAME];
        for (round, (requests, answers)) in rounds.iter().enumerate() {
            for captured in requests {
                let length = requester.poll_transmit(now, &mut host, &mut out);
                let length = length.unwrap_or_else(|| panic!("{name} round {round}: nothing instead of {captured}"));
                let ours = Packet::parse(&out[..length]).unwrap();
                let mut header = comparable(&ours.header);
                if round > 0 {
                    // This bit is a free choice: we ask for an acknowledgement of the first packet that is sent again.
                    header.bth.ack_request &= captured.header.bth.ack_request;
                }
                assert_eq!(header, comparable(&captured.header), "{name} round {round}");
                assert!(ours.payload == captured.payload, "{name} round {round}");
            }
            for answer in answers {
                // Our requester sends nothing before the wait is over.
                assert_eq!(requester.poll_transmit(now, &mut host, &mut out), None, "{name} round {round}");
                requester.handle_packet(now, answer, &mut host);
            }
            if let Some(deadline) = requester.poll_timeout() {
                assert_eq!(requester.poll_transmit(now, &mut host, &mut out), None, "{name} round {round}");
                now = deadline;
                requester.handle_timeout(now, &mut host);
            }
        }
        let statuses: Vec<_> = host.sent.iter().map(|ended| ended.status).collect();
        if recovers {
            assert!(!statuses.is_empty() && statuses.iter().all(|&status| status == WcStatus::Success), "{statuses:?}");
        } else {
            assert_eq!(statuses, [WcStatus::RnrRetryExceeded, WcStatus::Flushed], "{name}");
        }
        assert_eq!(rounds.len(), if recovers { rounds.len() } else { 1 + usize::from(rnr_retry) }, "{name}");
    }
}
