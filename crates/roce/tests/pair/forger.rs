//! Two ends that may negotiate selective acknowledgements and packets without an ICRC, with a forger between them. It
//! drops, repeats, delays, edits and invents packets with a valid ICRC, or without one, as a script of bytes says. The
//! fuzzer `fuzz_selective` generates such scripts.

use std::time::Duration;

use pvrdma_roce::{
    IcrcRule, Tuning,
    wire::{
        AGREED_RESOURCES, Aeth, Bth, Extension, Header, MAX_FRAME, NakCode, Opcode, Packet, SackMap, Syndrome, build,
    },
};
use pvrdma_verbs_types::{Mtu, Psn, QpAttrs, RemoteAddress, SendData, SendFlags, SendOp, SendWr, Sge, WcStatus};

use super::host::KEY;
use super::net::{End, Setup};

/// Addresses in an end's memory: sources, targets of the peer, targets of READs, and messages. Each operation has its
/// own slot in each.
const SOURCE: u64 = 0x100_0000;
const TARGET: u64 = 0x200_0000;
const LANDING: u64 = 0x300_0000;
const RECEIVES: u64 = 0x400_0000;
const SLOT: u64 = LENGTH as u64;
/// Bytes of a slot.
const LENGTH: u32 = 0x8000;
/// Distance between the addresses that an end sends from and those that the peer reads.
const READ: u64 = 0x80_0000;
/// Operations of an end.
const OPERATIONS: u64 = 40;
/// PSNs of the longest READ request.
const CHUNK: u64 = 64;
/// READs and atomics that may be outstanding.
const RESOURCES: u8 = 4;
/// Longest time that the posted requests may take once the forger has stopped.
const BOUND: Duration = Duration::from_secs(30);

/// A script of bytes. Beyond its end it consists of zeros.
#[derive(Debug)]
struct Script<'a>(&'a [u8]);

impl Script<'_> {
    fn next(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    /// Which end.
    fn side(&mut self) -> usize {
        usize::from(self.next() & 1)
    }
}

/// The byte at one place of the slot of an end's operation.
fn byte(side: usize, id: u64, at: u64) -> u8 {
    (id.wrapping_mul(31) ^ at.wrapping_mul(7) ^ (at >> 8) ^ (side as u64 * 0x55) ^ 0x80).to_le_bytes()[0]
}

fn bytes(side: usize, id: u64, length: u32) -> Vec<u8> {
    (0..length.into()).map(|at| byte(side, id, at)).collect()
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Write,
    Read,
    /// Which message of the end it is.
    Send(usize),
    Add,
}

#[derive(Debug)]
struct Play {
    now: Duration,
    ends: [End; 2],
    /// Frames on their way to each end.
    flying: [Vec<Vec<u8>>; 2],
    /// Requests that were posted at each end.
    posted: [Vec<(Kind, u32)>; 2],
    /// Numbers of messages of each end, and of receives.
    sends: [usize; 2],
    receives: [u64; 2],
    /// The header of some packet to each end.
    templates: [Option<Header>; 2],
    /// Forged packets contain no false statements: no acknowledgement of packets that were not executed, and no false
    /// data.
    honest: bool,
    /// An end permits packets without an ICRC.
    omits: bool,
}

fn setup(negotiate: bool, icrc: IcrcRule) -> Setup {
    let base = Setup::default();
    let attrs = QpAttrs {
        path_mtu: Mtu::M256,
        timeout: 8,
        max_rd_atomic: RESOURCES,
        max_dest_rd_atomic: RESOURCES,
        ..base.attrs
    };
    Setup { attrs, tuning: Tuning::default().with_negotiate(negotiate).with_multipath(true), icrc, ..base }
}

impl Play {
    fn new(choice: u8) -> Self {
        let rule = |bit: u8| if choice & bit == 0 { IcrcRule::Always } else { IcrcRule::UnlessAgreed };
        let setups = [setup(choice & 1 == 0, rule(0x40)), setup(choice & 2 == 0, rule(0x80))];
        let mut ends = [End::new(&setups[0], 1, 2), End::new(&setups[1], 2, 1)];
        for (side, end) in ends.iter_mut().enumerate() {
            end.keeps = choice >> (4 + side) & 1 == 0;
        }
        Self {
            now: Duration::from_secs(1),
            ends,
            flying: [Vec::new(), Vec::new()],
            posted: [Vec::new(), Vec::new()],
            sends: [0; 2],
            receives: [0; 2],
            templates: [None; 2],
            honest: choice & 4 == 0,
            omits: choice & 0xc0 != 0,
        }
    }

    fn post(&mut self, side: usize, kind: u8, length: u8) {
        let (end, posted) = (&self.ends[side], &mut self.posted[side]);
        let id = posted.len() as u64;
        if id == OPERATIONS || end.host.failed || !end.requester.has_room() {
            return;
        }
        let length = u32::from(length) * 97;
        let slot = |base: u64| base + id * SLOT;
        let remote = |base| RemoteAddress { addr: slot(base), rkey: KEY };
        let (kind, op, at, length) = match kind % 8 {
            0..=2 => (Kind::Write, SendOp::Write { remote: remote(TARGET), immediate: None }, SOURCE, length),
            3 | 4 => (Kind::Read, SendOp::Read { remote: remote(SOURCE + READ) }, LANDING, length),
            5 => (Kind::Add, SendOp::FetchAdd { remote: remote(TARGET), add: 1 }, LANDING, 8),
            _ => {
                self.sends[side] += 1;
                (Kind::Send(self.sends[side] - 1), SendOp::Send { data: SendData::None, to: None }, SOURCE, length)
            }
        };
        posted.push((kind, length));
        let reader = matches!(kind, Kind::Read);
        let owner = if reader { 1 - side } else { side };
        self.ends[owner].host.memory.write(slot(SOURCE) + u64::from(reader) * READ, &bytes(owner, id, length));
        let end = &mut self.ends[side];
        let sges = vec![Sge { addr: slot(at), length, lkey: KEY }];
        end.post(SendWr { wr_id: id, op, flags: SendFlags::SIGNALED, sges });
    }

    fn post_receives(&mut self, side: usize, count: u64) {
        for _ in 0..count.min(OPERATIONS - self.receives[side]) {
            let id = self.receives[side];
            self.receives[side] += 1;
            self.ends[side].host.post_receive(id, RECEIVES + id * SLOT, LENGTH);
        }
    }

    /// An end sends at most `most` packets of each of its halves.
    fn transmit(&mut self, side: usize, most: u32) -> bool {
        let (mut out, before) = ([0; MAX_FRAME], self.flying[1 - side].len());
        for _ in 0..most {
            let end = &mut self.ends[side];
            end.tell_received();
            let Some(length) = end.responder.poll_transmit(&mut end.host, &mut out) else { break };
            self.flying[1 - side].push(out[..length].to_vec());
        }
        for _ in 0..most {
            let Some(frame) = self.send_request(side) else { break };
            self.flying[1 - side].push(frame);
        }
        if let Some(last) = self.flying[1 - side].last() {
            self.templates[1 - side] = Some(Packet::parse(last).unwrap().header);
        }
        self.flying[1 - side].len() > before
    }

    fn send_request(&mut self, side: usize) -> Option<Vec<u8>> {
        let mut out = [0; MAX_FRAME];
        let end = &mut self.ends[side];
        let before = end.requester.inspect(self.now);
        let length = end.requester.poll_transmit(self.now, &mut end.host, &mut out);
        let after = end.requester.inspect(self.now);
        if after.snd_max != before.snd_max {
            // A new packet leaves only if the window has room for it, or if nothing is in flight.
            let room = u64::from(before.window);
            assert!(before.in_flight == 0 || after.in_flight <= room, "{before:?}\n{after:?}");
            let span = after.snd_max.since(after.snd_una);
            assert!(before.in_flight == 0 || i64::from(span) <= 1024, "{before:?}\n{after:?}");
        }
        length.map(|length| out[..length].to_vec())
    }

    fn deliver(&mut self, side: usize, at: usize, leave: bool) {
        let flying = &mut self.flying[side];
        if flying.is_empty() {
            return;
        }
        let at = at % flying.len();
        let frame = if leave { flying[at].clone() } else { flying.remove(at) };
        self.receive(side, &frame);
    }

    fn receive(&mut self, side: usize, frame: &[u8]) {
        let end = &mut self.ends[side];
        end.receive(self.now, frame);
        if end.host.failed && !end.responder.has_responses() {
            end.requester.flush(&mut end.host);
        }
        // At most two responses for each resource, with an ACK between any two of them, and a NAK with an ACK on each
        // side of it.
        let owed = end.responder.pending_responses();
        // An end that agreed keeps more resources, so that it can repeat what was lost.
        let most = |agreed| if agreed { AGREED_RESOURCES } else { usize::from(RESOURCES) };
        let kept = end.responder.inspect().resources;
        let limit = 2 * (usize::from(RESOURCES) + most(kept > usize::from(RESOURCES))) + 3;
        assert!(owed <= limit && kept <= AGREED_RESOURCES, "{owed} responses are owed: {:?}", end.responder.inspect());
        let state = end.requester.inspect(self.now);
        let limit = most(state.sack);
        assert!(state.outstanding_rd_atomic <= limit, "{state:?}");
        assert!(end.kept() <= 1024);
        assert!(state.in_flight <= 1024 + CHUNK, "{state:?}");
    }

    /// Time passes until a timer of an end is due.
    fn tick(&mut self, side: usize) {
        if let Some(when) = self.ends[side].requester.poll_timeout() {
            self.now = self.now.max(when);
            self.expire();
        }
    }

    fn expire(&mut self) {
        for end in &mut self.ends {
            end.requester.handle_timeout(self.now, &mut end.host);
        }
    }

    /// Changes a packet that is on its way.
    fn edit(&mut self, side: usize, script: &mut Script<'_>) {
        let (at, what, value) = (usize::from(script.next()), script.next(), script.next());
        let count = self.flying[side].len().max(1);
        let Some(frame) = self.flying[side].get_mut(at % count) else { return };
        let packet = Packet::parse(frame).unwrap();
        let (mut header, mut payload) = (packet.header, packet.payload.to_vec());
        let is_nak = matches!(header.extension, Extension::Aeth(_)) && header.bth.opcode == Opcode::ACKNOWLEDGE;
        match what % 8 {
            // The bits of the negotiation.
            0 => header.bth.reserved7 = value,
            1 if self.omits => header.bth.reserved7 = [0, 0x2d, 0x53, 0x36, 0x65][usize::from(value % 5)],
            1 => header.bth.reserved7 = [0, 0x2d, 0x53][usize::from(value % 3)],
            // The packets that a NAK reports as received.
            2 if is_nak => payload.iter_mut().step_by(1 + usize::from(value % 5)).for_each(|byte| *byte ^= value),
            3 if is_nak => payload.truncate(usize::from(value)),
            4 if is_nak => payload.extend(std::iter::repeat_n(value, 4 * usize::from(value % 40))),
            _ if self.honest => return,
            5 => header.bth.psn = header.bth.psn.plus(i32::from(value.cast_signed()).cast_unsigned()),
            6 => match &mut header.extension {
                Extension::Aeth(aeth) | Extension::AtomicAckEth(aeth, _) => aeth.syndrome = Syndrome::from_byte(value),
                Extension::Reth(reth) => reth.length ^= u32::from(value),
                _ => return,
            },
            _ => payload.truncate(usize::from(value)),
        }
        if let Ok(forged) = build(&header, &payload) {
            *frame = forged;
            // The packet has no ICRC.
            if self.omits
                && what & 0x80 != 0
                && let Some(icrc) = frame.last_chunk_mut::<4>()
            {
                icrc.fill(0);
            }
        }
    }

    /// Sends an end an ACK or NAK that its peer never sent.
    fn invent(&mut self, side: usize, script: &mut Script<'_>) {
        let Some(template) = self.templates[side] else { return };
        let (kind, near, bits) = (script.next(), script.next(), script.next());
        // An honest forger names only packets before which everything was executed.
        let distance = if self.honest { -i32::from(near % 4) } else { i32::from(near.cast_signed()) };
        let psn = self.ends[1 - side].responder.expected_psn().plus(distance.cast_unsigned());
        let syndrome = match kind % 8 {
            0 => Syndrome::RnrNak { timer: kind >> 3 },
            1 if !self.honest => Syndrome::ACK,
            2 if !self.honest => Syndrome::from_byte(bits),
            _ => Syndrome::Nak(NakCode::SequenceError),
        };
        let mut map = SackMap::default();
        if syndrome == Syndrome::Nak(NakCode::SequenceError) {
            let mut distance = 0;
            for _ in 0..bits % 64 {
                distance += 1 + u32::from(script.next());
                map.insert(Psn::new(0), Psn::new(distance));
            }
        }
        let mut bth = Bth::new(Opcode::ACKNOWLEDGE, template.bth.destination, psn);
        bth.reserved7 = match kind >> 6 {
            0 => 0x53,
            1 => 0x65,
            _ => 0,
        };
        let extension = Extension::Aeth(Aeth { syndrome, msn: 0 });
        let mut payload = vec![0; map.wire_len()];
        for distance in map.distances() {
            payload[(distance as usize - 1) / 8] |= 1 << ((distance - 1) % 8);
        }
        let frame = build(&Header { bth, extension, ..template }, &payload).unwrap();
        self.receive(side, &frame);
    }

    fn step(&mut self, script: &mut Script<'_>) {
        let (command, side) = (script.next(), script.side());
        match command % 16 {
            0 | 1 => {
                let (kind, length) = (script.next(), script.next());
                self.post(side, kind, length);
            }
            2 | 3 => {
                let most = u32::from(script.next());
                self.transmit(side, most);
            }
            4 | 5 => (0..script.next()).for_each(|_| self.deliver(side, 0, false)),
            6 => self.deliver(side, script.next().into(), false),
            7 => self.deliver(side, script.next().into(), true),
            8 => {
                let (at, count) = (usize::from(script.next()), usize::from(script.next() % 8));
                let flying = &mut self.flying[side];
                let at = at.min(flying.len());
                flying.drain(at..(at + count).min(flying.len()));
            }
            9 => self.flying[side].clear(),
            10 => self.tick(side),
            11 => {
                self.now += Duration::from_micros(u64::from(script.next()) * 16);
                self.expire();
            }
            12 => self.edit(side, script),
            13 | 14 => self.invent(side, script),
            _ => self.post_receives(side, u64::from(script.next() % 8)),
        }
    }

    /// The forger has stopped: every request that was posted must complete.
    fn finish(&mut self) {
        let limit = self.now + BOUND;
        (0..2).for_each(|side| self.post_receives(side, OPERATIONS));
        let mut rounds = 0;
        while self.ends.iter().any(|end| !end.requester.is_empty()) {
            let mut moved = false;
            for side in 0..2 {
                moved |= self.transmit(side, 64);
            }
            for side in 0..2 {
                for frame in std::mem::take(&mut self.flying[side]) {
                    self.receive(side, &frame);
                    moved = true;
                }
            }
            self.now += Duration::from_micros(5);
            if !moved {
                let next = self.ends.iter().filter_map(|end| end.requester.poll_timeout()).min();
                let ended = self.ends.iter().all(|end| end.requester.is_empty());
                self.now = self.now.max(next.unwrap_or(if ended { self.now } else { Duration::MAX }));
            }
            rounds += 1;
            assert!(self.now < limit && rounds < 100_000, "no end in sight: {}", self.report());
            self.expire();
        }
    }

    fn report(&self) -> String {
        let of = |end: &End| format!("{:?}\n{:?}", end.requester.inspect(self.now), end.responder.inspect());
        format!("{:?}\n{}\n{}", self.now, of(&self.ends[0]), of(&self.ends[1]))
    }

    /// Checks that every request ended once and in order. Unless the forger lied about execution, the effect of each
    /// successful request is checked, too.
    fn check(&self) {
        for (side, posted) in self.posted.iter().enumerate() {
            let (host, peer) = (&self.ends[side].host, &self.ends[1 - side].host);
            assert!(host.sent.iter().map(|ended| ended.wr_id).eq(0..posted.len() as u64), "{:?}", host.sent);
            if !self.honest {
                continue;
            }
            assert!(!host.failed || host.sent.iter().any(|ended| ended.status != WcStatus::Success));
            let done = host.sent.iter().zip(posted).take_while(|(ended, _)| ended.status == WcStatus::Success);
            let mut adds = 0;
            for (ended, &(kind, length)) in done {
                let (id, size) = (ended.wr_id, length as usize);
                match kind {
                    Kind::Write => assert_eq!(peer.memory.get(TARGET + id * SLOT, size), bytes(side, id, length)),
                    Kind::Read => assert_eq!(host.memory.get(LANDING + id * SLOT, size), bytes(1 - side, id, length)),
                    Kind::Send(index) => {
                        let (received, _) = &peer.received[index];
                        let at = RECEIVES + received.wr_id * SLOT;
                        assert_eq!((received.status, received.byte_len), (WcStatus::Success, length));
                        assert_eq!(peer.memory.get(at, size), bytes(side, id, length));
                    }
                    Kind::Add => {
                        adds += 1;
                        assert_eq!(peer.memory.get(TARGET + id * SLOT, 8), [1, 0, 0, 0, 0, 0, 0, 0], "once");
                    }
                }
            }
            assert!(peer.atomics >= adds);
        }
    }
}

/// Plays a script to its end.
pub(crate) fn play(input: &[u8]) {
    let mut script = Script(input);
    let mut play = Play::new(script.next());
    while !script.0.is_empty() {
        play.step(&mut script);
    }
    play.finish();
    play.check();
}
