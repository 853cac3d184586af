//! A peer that sends whatever it likes, with right addresses and a right ICRC.

use std::time::Duration;

use pvrdma_roce::{
    Handled,
    wire::{
        Aeth, AtomicAckEth, AtomicEth, Bth, Extension, Feth, Header, Ieth, ImmDt, MAX_FRAME, Opcode, Packet, Reth,
        Shape, Syndrome, build,
    },
};
use pvrdma_verbs_types::{RemoteAddress, SendData, SendFlags, SendOp, SendWr, Sge};

use super::host::KEY;
use super::net::{End, Random, Setup};

/// Some packet, most often near what is expected.
fn packet(random: &mut Random, template: &Header, setup: &Setup) -> Vec<u8> {
    let near = setup.attrs.rq_psn.plus(u32::try_from(random.below(12)).unwrap()).plus(u32::MAX - 3);
    let psn = if random.chance(50) { near.plus(u32::try_from(random.below(1 << 24)).unwrap()) } else { near };
    let opcode = if random.chance(950) { random.below(0x18) } else { random.below(256) };
    let mut bth = Bth::new(Opcode(u8::try_from(opcode).unwrap()), template.bth.destination, psn);
    bth.ack_request = random.chance(500);
    let reth = Reth {
        address: if random.chance(900) { 0x5000 + random.below(64) } else { random.next() },
        rkey: if random.chance(900) { KEY } else { 1 },
        length: match random.below(4) {
            0 => u32::try_from(random.below(1 << 32)).unwrap(),
            1 => 1024,
            _ => u32::try_from(random.below(3000)).unwrap(),
        },
    };
    let atomic = AtomicEth { address: reth.address, rkey: reth.rkey, swap_or_add: 1, compare: 0 };
    let syndrome = u8::try_from(random.below(256)).unwrap();
    let aeth = Aeth { syndrome: Syndrome::from_byte(if random.chance(600) { 0x1f } else { syndrome }), msn: 0 };
    let extension = match bth.opcode.info().map_or(Shape::None, |info| info.shape) {
        Shape::None => Extension::None,
        Shape::ImmDt => Extension::ImmDt(ImmDt([1; 4])),
        Shape::Ieth => Extension::Ieth(Ieth { rkey: 7 }),
        Shape::Reth => Extension::Reth(reth),
        Shape::RethImmDt => Extension::RethImmDt(reth, ImmDt([2; 4])),
        Shape::Aeth => Extension::Aeth(aeth),
        Shape::AtomicAckEth => Extension::AtomicAckEth(aeth, AtomicAckEth { original: 5 }),
        Shape::AtomicEth => Extension::AtomicEth(atomic),
        Shape::Deth => Extension::Deth(Default::default()),
        Shape::DethImmDt => Extension::DethImmDt(Default::default(), ImmDt([3; 4])),
        Shape::FethReth => Extension::FethReth(Feth::default(), reth),
    };
    let length = match random.below(4) {
        0 | 1 => 1024,
        2 => 0,
        _ => usize::try_from(random.below(1200)).unwrap(),
    };
    build(&Header { bth, extension, ..*template }, &vec![0xa5; length]).unwrap()
}

/// The header of a packet that the peer would send.
fn template(peer: &mut End, now: Duration) -> Header {
    peer.post(SendWr {
        wr_id: 0,
        op: SendOp::Write { remote: RemoteAddress { addr: 0, rkey: KEY }, immediate: None },
        flags: SendFlags::empty(),
        sges: Vec::new(),
    });
    let frame = peer.transmit(now).remove(0);
    Packet::parse(&frame).unwrap().header
}

#[test]
fn arbitrary_packets() {
    let now = Duration::from_secs(1);
    let setup = Setup::default();
    let template = template(&mut End::new(&setup, 2, 1), now);
    let mut most = 0;
    for seed in 0..3000 {
        let mut random = Random(seed);
        let mut end = End::new(&setup, 1, 2);
        for i in 0..6 {
            end.host.post_receive(i, 0x9000 + i * 4096, 4096);
            let remote = RemoteAddress { addr: 0x5000, rkey: KEY };
            let op = match random.below(4) {
                0 => SendOp::Send { data: SendData::None, to: None },
                1 => SendOp::Write { remote, immediate: None },
                2 => SendOp::Read { remote },
                _ => SendOp::FetchAdd { remote, add: 1 },
            };
            let length = u32::try_from(random.below(3000)).unwrap();
            let sges = vec![Sge { addr: 0x10_0000, length, lkey: KEY }];
            end.post(SendWr { wr_id: i, op, flags: SendFlags::empty(), sges });
        }
        let mut out = [0; MAX_FRAME];
        let mut owed = 0;
        for _ in 0..60 {
            let frame = packet(&mut random, &template, &setup);
            let parsed = Packet::parse(&frame).unwrap();
            if parsed.header.bth.opcode.info().is_some_and(|info| info.operation.is_response()) {
                end.requester.handle_packet(now, &parsed, &mut end.host);
            } else if !end.host.failed {
                let handled = end.responder.handle_packet(&parsed, &mut end.host);
                owed = if handled == Handled::Done { owed + 1 } else { owed };
            }
            end.requester.poll_transmit(now, &mut end.host, &mut out);
            if random.chance(100) {
                // Responses are taken one at a time, and only a few of them, because those of a long READ would take
                // too long.
                for _ in 0..10 {
                    end.responder.poll_transmit(&mut end.host, &mut out);
                }
            }
            if random.chance(50) {
                end.requester.handle_timeout(now + Duration::from_secs(10), &mut end.host);
            }
            most = most.max(end.responder.pending_responses());
        }
        // Every request ends at most once, in order; the QP's end flushes the rest.
        if end.host.failed {
            end.requester.flush(&mut end.host);
            assert_eq!(end.host.sent.len(), 6, "seed {seed}");
        }
        assert!(end.host.sent.iter().enumerate().all(|(i, ended)| ended.wr_id == i as u64), "seed {seed}");
        assert!(end.host.received.iter().enumerate().all(|(i, (ended, _))| ended.wr_id == i as u64), "seed {seed}");
    }
    // Four resources: at most four responses, four repeated ones, and an ACK between any two of them.
    assert!(most <= 18, "{most}");
}

/// If a READ is requested many times, its responses are owed only once.
#[test]
fn a_flood_of_repeated_requests_is_bounded() {
    let now = Duration::from_secs(1);
    let setup = Setup::default();
    let mut peer = End::new(&setup, 2, 1);
    let mut end = End::new(&setup, 1, 2);
    let remote = RemoteAddress { addr: 0x5000, rkey: KEY };
    for i in 0..4 {
        let sges = vec![Sge { addr: 0x10_0000, length: if i % 2 == 0 { 5000 } else { 8 }, lkey: KEY }];
        let op = if i % 2 == 0 { SendOp::Read { remote } } else { SendOp::FetchAdd { remote, add: 1 } };
        peer.post(SendWr { wr_id: i, op, flags: SendFlags::empty(), sges });
    }
    let requests = peer.transmit(now);
    for _ in 0..100 {
        for frame in &requests {
            end.receive(now, frame);
            end.transmit(now);
        }
        for frame in &requests {
            end.receive(now, frame);
        }
        assert!(end.responder.pending_responses() <= 4);
    }
    assert_eq!(end.host.atomics, 2);
}

/// Duplicates and packets behind a gap in turns, while nothing can be sent: a NAK is owed, and an ACK on each side of
/// it.
#[test]
fn a_flood_of_duplicates_behind_a_gap_is_bounded() {
    let now = Duration::from_secs(1);
    let base = Setup::default();
    let setup = Setup { tuning: base.tuning.with_negotiate(true), ..base };
    let (mut peer, mut end) = (End::new(&setup, 2, 1), End::new(&setup, 1, 2));
    end.keeps = true;
    for wr_id in 0..40 {
        let op = SendOp::Write { remote: RemoteAddress { addr: 0x5000, rkey: KEY }, immediate: None };
        peer.post(SendWr { wr_id, op, flags: SendFlags::empty(), sges: Vec::new() });
    }
    let requests = peer.transmit(now);
    end.receive(now, &requests[0]);
    for round in 0..18 {
        for _ in 0..20 {
            end.receive(now, &requests[2 * round + 2]);
            end.receive(now, &requests[0]);
        }
        assert!(end.responder.pending_responses() <= 3, "{}", end.responder.pending_responses());
        // The missing packet arrives; now the next one is missing.
        end.receive(now, &requests[2 * round + 1]);
    }
}

/// A peer has no receive for a READ, which needs none, and then sends nothing more. Packets behind the wait do not fit
/// beside the unanswered READ in front. The request must end nevertheless.
#[test]
fn a_wait_for_a_receive_does_not_end_in_silence() {
    let mut now = Duration::from_secs(1);
    let setup = Setup::default();
    let template = template(&mut End::new(&setup, 2, 1), now);
    let mut end = End::new(&setup, 1, 2);
    for (wr_id, pages) in [(0, 3), (1, 20)] {
        let remote = RemoteAddress { addr: 0x5000, rkey: KEY };
        let sges = vec![Sge { addr: 0x10_0000, length: pages * 1024, lkey: KEY }];
        end.post(SendWr { wr_id, op: SendOp::Read { remote }, flags: SendFlags::SIGNALED, sges });
    }
    assert_eq!(end.transmit(now).len(), 2);
    let bth = Bth::new(Opcode::ACKNOWLEDGE, template.bth.destination, setup.attrs.sq_psn.plus(3));
    let extension = Extension::Aeth(Aeth { syndrome: Syndrome::RnrNak { timer: 1 }, msn: 0 });
    end.receive(now, &build(&Header { bth, extension, ..template }, &[]).unwrap());
    while !end.host.failed {
        now = end.requester.poll_timeout().expect("something is waited for").max(now);
        end.requester.handle_timeout(now, &mut end.host);
        end.transmit(now);
        assert!(now < Duration::from_secs(60));
    }
}

/// Much more than a window is in flight, because the peer acknowledged packets behind a gap. Then it is silent, and its
/// acknowledgements are forgotten. A forged ACK for a few late packets makes all of them count again, but lets no new
/// packet out.
#[test]
fn a_forged_ack_lets_nothing_new_out() {
    let mut now = Duration::from_secs(1);
    let base = Setup::default();
    let setup = Setup { tuning: base.tuning.with_negotiate(true), ..base };
    let (mut peer, mut end) = (End::new(&setup, 2, 1), End::new(&setup, 1, 2));
    peer.keeps = true;
    for wr_id in 0..100 {
        let op = SendOp::Write { remote: RemoteAddress { addr: 0x5000, rkey: KEY }, immediate: None };
        let sges = vec![Sge { addr: 0x10_0000, length: 8 * 1024, lkey: KEY }];
        end.post(SendWr { wr_id, op, flags: SendFlags::SIGNALED, sges });
    }
    let lost = setup.attrs.sq_psn;
    let mut template = None;
    for _ in 0..2 {
        for frame in end.transmit(now) {
            if Packet::parse(&frame).unwrap().header.bth.psn != lost {
                peer.receive(now, &frame);
            }
        }
        for frame in peer.transmit(now) {
            template = Some(Packet::parse(&frame).unwrap().header);
            end.receive(now, &frame);
        }
    }
    let before = end.requester.inspect(now);
    assert!(before.in_flight <= 256 && before.sacked >= 200, "{before:?}");
    // Silence.
    while end.requester.stats().timeouts == 0 {
        now = end.requester.poll_timeout().unwrap().max(now);
        end.requester.handle_timeout(now, &mut end.host);
        end.transmit(now);
    }
    let sent = end.requester.inspect(now).snd_max;
    let template = template.unwrap();
    let bth = Bth::new(Opcode::ACKNOWLEDGE, template.bth.destination, lost.plus(19));
    let extension = Extension::Aeth(Aeth { syndrome: Syndrome::ACK, msn: 0 });
    end.receive(now, &build(&Header { bth, extension, ..template }, &[]).unwrap());
    let after = end.requester.inspect(now);
    assert!(end.transmit(now).is_empty(), "{after:?}");
    assert_eq!((after.snd_max, after.in_flight), (sent, u64::try_from(sent.since(lost)).unwrap() - 20));
    assert!(after.in_flight > after.window.into());
}
