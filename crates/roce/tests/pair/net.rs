//! Two ends and the network between them. Time advances to the next event.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use pvrdma_packet::MacAddr;
use pvrdma_roce::{
    DropReason, EgressMarking, Handled, IcrcRule, Origin, Path, ReorderBuffer, Requester, Responder, Tuning,
    admit_connected,
    saved::RestoreError,
    wire::{MAX_FRAME, Packet},
};
use pvrdma_saved_state::{Message, roce as saved};
use pvrdma_verbs_types::{AddressVector, Gid, GidType, Mtu, Psn, QpAttrs, QpState, Qpn, SendWr, WcStatus};

use super::host::Host;

/// The SplitMix64 generator: small, seedable, good enough.
#[derive(Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// True in `per_mille` of 1000 cases.
    pub(crate) fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }
}

/// Faults of the network, in frames per thousand.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Faults {
    pub(crate) loss: u64,
    pub(crate) duplicate: u64,
    pub(crate) reorder: u64,
    pub(crate) corrupt: u64,
}

/// Parameters of both ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) attrs: QpAttrs,
    pub(crate) tuning: Tuning,
    pub(crate) kind: GidType,
    pub(crate) ipv4: bool,
    pub(crate) vlan: Option<u16>,
    /// Both ends react to congestion, and announce that they do.
    pub(crate) ecn: bool,
    /// Rule of both ends for the ICRC.
    pub(crate) icrc: IcrcRule,
}

impl Default for Setup {
    fn default() -> Self {
        let attrs = QpAttrs {
            state: QpState::Rts,
            path_mtu: Mtu::M1024,
            rq_psn: Psn::new(0x00ff_fff0),
            sq_psn: Psn::new(0x00ff_fff0),
            max_rd_atomic: 4,
            max_dest_rd_atomic: 4,
            min_rnr_timer: 12,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            ..QpAttrs::default()
        };
        let (tuning, icrc) = (Tuning::default(), IcrcRule::Always);
        Self { attrs, tuning, kind: GidType::RoceV2, ipv4: true, vlan: None, ecn: false, icrc }
    }
}

/// One side of the connection.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) qpn: Qpn,
    pub(crate) dest_qpn: Qpn,
    pub(crate) path: Path,
    pub(crate) attrs: QpAttrs,
    pub(crate) tuning: Tuning,
    pub(crate) requester: Requester,
    pub(crate) responder: Responder,
    pub(crate) host: Host,
    /// Damaged packets, and packets that passed all checks without an ICRC.
    pub(crate) damaged: u64,
    pub(crate) without_icrc: u64,
    /// Frames that arrived and were not handled.
    arrived: VecDeque<Vec<u8>>,
    /// The responder keeps packets behind a gap, in `reorder`.
    pub(crate) keeps: bool,
    reorder: ReorderBuffer<Vec<u8>>,
    /// The requester handles responses even while it is switched off.
    pub(crate) deaf: bool,
}

fn origin(setup: &Setup, end: u8) -> Origin {
    let mut gid = Gid::default();
    if setup.ipv4 {
        gid.0[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, end]);
    } else {
        gid.0[0] = 0xfd;
        gid.0[15] = end;
    }
    Origin {
        mac: MacAddr([2, 0, 0, 0, 0, end]),
        gid,
        kind: setup.kind,
        vlan: setup.vlan,
        marks: EgressMarking { ecn: setup.ecn, ..EgressMarking::default() },
        icrc: setup.icrc,
    }
}

/// The state without the NAK that tells an agreed peer that nothing is kept.
fn without_sequence_naks(state: saved::Responder) -> saved::Responder {
    if state.sack() != saved::Agreement::On || state.ended {
        return state;
    }
    let is_nak = |response: &saved::Response| response.kind == Some(saved::ResponseKind::Nak(0x60));
    let is_ack = |response: &saved::Response| matches!(response.kind, Some(saved::ResponseKind::Ack(_)));
    let mut responses: Vec<_> = state.responses.into_iter().filter(|response| !is_nak(response)).collect();
    // ACKs that become neighbours are merged, and the last one says what is newest.
    responses.dedup_by(|later, earlier| {
        let same = is_ack(later) && is_ack(earlier);
        if same {
            *earlier = *later;
        }
        same
    });
    if let Some(last) = responses.last_mut().filter(|last| is_ack(last)) {
        (last.psn, last.msn) = (state.ack_psn, state.ack_msn);
    }
    saved::Responder { responses, nak_sent: 0, has_sent_nak: false, ..state }
}

impl End {
    pub(crate) fn new(setup: &Setup, own: u8, peer: u8) -> Self {
        let (local, remote) = (origin(setup, own), origin(setup, peer));
        let (qpn, dest_qpn) = (Qpn::new(0x100 + u32::from(own)), Qpn::new(0x100 + u32::from(peer)));
        let av = AddressVector {
            dgid: remote.gid,
            dmac: remote.mac,
            hop_limit: 64,
            traffic_class: 0x6a,
            service_level: 3,
            ..AddressVector::default()
        };
        let attrs = QpAttrs { dest_qpn, av, ..setup.attrs };
        let path = Path::connected(&local, &av, qpn, dest_qpn).unwrap();
        let mut host = Host::new();
        host.max_dest_rd_atomic = attrs.max_dest_rd_atomic;
        host.rnr_timer = attrs.min_rnr_timer;
        let responder = Responder::new(&attrs, path).accepting_offers();
        Self {
            qpn,
            dest_qpn,
            path,
            attrs,
            tuning: setup.tuning,
            requester: Requester::new(&attrs, path, setup.tuning),
            responder: if setup.tuning.multipath { responder.following_paths() } else { responder },
            host,
            damaged: 0,
            without_icrc: 0,
            arrived: VecDeque::new(),
            keeps: false,
            reorder: ReorderBuffer::new(),
            deaf: false,
        }
    }

    /// Returns all frames that can be sent now.
    pub(crate) fn transmit(&mut self, now: Duration) -> Vec<Vec<u8>> {
        let (mut out, mut frames) = ([0; MAX_FRAME], Vec::new());
        self.tell_received();
        while let Some(length) = self.responder.poll_transmit(&mut self.host, &mut out) {
            frames.push(out[..length].to_vec());
        }
        while let Some(length) = self.requester.poll_transmit(now, &mut self.host, &mut out) {
            frames.push(out[..length].to_vec());
        }
        frames
    }

    /// Lets the next NAK report the packets that arrived behind a gap.
    pub(crate) fn tell_received(&mut self) {
        if let Some(missing) = self.responder.wants_received() {
            self.responder.set_received(self.reorder.received(missing));
        }
    }

    /// A frame arrives and is handled.
    pub(crate) fn receive(&mut self, now: Duration, frame: &[u8]) {
        self.arrived.push_back(frame.to_vec());
        self.handle(now);
    }

    /// The responder loses what it keeps behind a gap.
    pub(crate) fn lose_kept(&mut self) {
        self.reorder.clear();
        self.responder.forget_received();
    }

    /// Both halves go on as new ones, with what was saved of the old. Everything that arrived and was not executed is
    /// lost.
    pub(crate) fn replace(&mut self, now: Duration) {
        let (requester, responder) = (self.requester.save(now), self.responder.save());
        self.restore(now, &requester.encode_to_vec(), &responder.encode_to_vec()).unwrap();
        assert_eq!(self.requester.save(now), requester);
        assert_eq!(without_sequence_naks(self.responder.save()), without_sequence_naks(responder));
    }

    /// Goes on with halves from saved bytes.
    pub(crate) fn restore(&mut self, now: Duration, requester: &[u8], responder: &[u8]) -> Result<(), RestoreError> {
        let undecodable = |_| RestoreError::Missing { field: "whole" };
        let requester = saved::Requester::decode(requester).map_err(undecodable)?;
        let responder = saved::Responder::decode(responder).map_err(undecodable)?;
        let responder = Responder::restore(&self.attrs, self.path, responder)?;
        self.requester = Requester::restore(&self.attrs, self.path, self.tuning, now, requester)?;
        self.responder = responder;
        self.reorder.clear();
        self.arrived.clear();
        Ok(())
    }

    /// Changes the path, as a modify request does.
    pub(crate) fn set_path(&mut self, path: Path) {
        self.path = path;
        self.requester.set_attrs(&self.attrs, path);
        self.responder.set_attrs(&self.attrs, path);
    }

    /// Packets that it keeps behind a gap.
    pub(crate) fn kept(&self) -> usize {
        self.reorder.packets()
    }

    pub(crate) fn post(&mut self, work: SendWr) {
        self.requester.post(work, &mut self.host);
    }

    /// Returns `true` if nothing that arrived waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.arrived.is_empty()
    }

    /// Handles received packets, as long as no owed response has to be sent before.
    pub(crate) fn handle(&mut self, now: Duration) {
        while let Some(frame) = self.arrived.pop_front() {
            let Ok(packet) = Packet::parse(&frame) else { continue };
            let admitted = admit_connected(&packet, self.qpn, &self.path);
            self.damaged += u64::from(matches!(admitted, Err(DropReason::Damaged(_))));
            let Ok(info) = admitted else { continue };
            self.without_icrc += u64::from(packet.omits_icrc());
            if self.deaf {
                continue;
            }
            if info.operation.is_response() {
                self.requester.handle_packet(now, &packet, &mut self.host);
                continue;
            }
            if self.host.failed {
                continue;
            }
            match self.responder.handle_packet(&packet, &mut self.host) {
                Handled::Deferred => {
                    self.arrived.push_front(frame);
                    return;
                }
                Handled::OutOfOrder if self.keeps => {
                    self.reorder.insert(self.responder.expected_psn(), packet.header.bth.psn, || Some(frame.to_vec()));
                }
                Handled::OutOfOrder => {}
                Handled::Done | Handled::Dropped => self.catch_up(),
            }
        }
    }

    /// Handles a kept packet next, or reports that one is missing.
    fn catch_up(&mut self) {
        if self.reorder.is_empty() {
            return;
        }
        if let Some(next) = self.reorder.pop_expected(self.responder.expected_psn()) {
            self.arrived.push_front(next);
        } else if !self.reorder.is_empty() {
            self.responder.nak_expected();
        }
    }
}

/// A frame on its way: when, in which order, where to.
type Flight = Reverse<(Duration, u64, usize, Vec<u8>)>;

#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) now: Duration,
    pub(crate) ends: [End; 2],
    pub(crate) faults: Faults,
    pub(crate) random: Random,
    /// Frames each end sent.
    pub(crate) frames: [Vec<Vec<u8>>; 2],
    pub(crate) keep_frames: bool,
    flights: BinaryHeap<Flight>,
    count: u64,
}

impl Pair {
    pub(crate) fn new(setup: &Setup, seed: u64) -> Self {
        Self::between([setup, setup], seed)
    }

    /// A pair of ends with separate setups.
    pub(crate) fn between([one, other]: [&Setup; 2], seed: u64) -> Self {
        Self {
            now: Duration::from_secs(1),
            ends: [End::new(one, 1, 2), End::new(other, 2, 1)],
            faults: Faults::default(),
            random: Random(seed),
            frames: [Vec::new(), Vec::new()],
            keep_frames: false,
            flights: BinaryHeap::new(),
            count: 0,
        }
    }

    fn send(&mut self, from: usize, frame: &[u8]) {
        if self.keep_frames {
            self.frames[from].push(frame.to_vec());
        }
        let copies = if self.random.chance(self.faults.duplicate) { 2 } else { 1 };
        for _ in 0..copies {
            if self.random.chance(self.faults.loss) {
                continue;
            }
            let mut frame = frame.to_vec();
            if self.random.chance(self.faults.corrupt) {
                let bit = usize::try_from(self.random.below(frame.len() as u64 * 8)).unwrap();
                frame[bit / 8] ^= 1 << (bit % 8);
            }
            let late = if self.random.chance(self.faults.reorder) { self.random.below(200) } else { 0 };
            self.count += 1;
            let when = self.now + Duration::from_micros(10 + late);
            self.flights.push(Reverse((when, self.count, 1 - from, frame)));
        }
    }

    /// Lets both ends send; a random few frames at a time, so that they overtake each other in every way.
    fn transmit(&mut self) {
        let mut out = [0; MAX_FRAME];
        for from in 0..2 {
            for half in 0..2 {
                for _ in 0..1 + self.random.below(20) {
                    let end = &mut self.ends[from];
                    end.tell_received();
                    let length = if half == 0 {
                        end.responder.poll_transmit(&mut end.host, &mut out)
                    } else {
                        end.requester.poll_transmit(self.now, &mut end.host, &mut out)
                    };
                    let Some(length) = length else { break };
                    self.send(from, &out[..length]);
                }
            }
        }
    }

    /// Advances to the next event. Returns `false` if there is none.
    pub(crate) fn step(&mut self) -> bool {
        let sent = self.count;
        self.transmit();
        if self.ends.iter().any(|end| end.host.failed && !end.responder.has_responses()) {
            for end in &mut self.ends {
                if end.host.failed && !end.responder.has_responses() {
                    end.requester.flush(&mut end.host);
                }
            }
        }
        let more = self.count != sent || self.ends.iter().any(|end| !end.arrived.is_empty());
        let arrival = self.flights.peek().map(|Reverse((when, ..))| *when);
        let timeout = self.ends.iter().filter_map(|end| end.requester.poll_timeout()).min();
        let soon = more.then(|| self.now + Duration::from_micros(1));
        let Some(next) = [arrival, timeout, soon].into_iter().flatten().min() else { return false };
        self.now = self.now.max(next);
        while let Some(Reverse((when, ..))) = self.flights.peek() {
            if *when > self.now {
                break;
            }
            let Some(Reverse((_, _, to, frame))) = self.flights.pop() else { break };
            self.ends[to].arrived.push_back(frame);
        }
        for end in &mut self.ends {
            end.handle(self.now);
            end.requester.handle_timeout(self.now, &mut end.host);
        }
        true
    }

    /// Runs until nothing more happens.
    pub(crate) fn run(&mut self) {
        let mut steps = 0;
        while self.step() {
            steps += 1;
            assert!(steps < 1_000_000, "no end in sight at {:?}", self.now);
        }
    }

    /// Describes the state of both ends, for the message of a failed test.
    pub(crate) fn report(&self) -> String {
        let end = |end: &End| {
            let (events, sent) = (&end.host.events, &end.host.sent);
            let bad = sent.iter().find(|ended| ended.status != WcStatus::Success);
            let (requester, responder) = (end.requester.inspect(self.now), end.responder.inspect());
            format!("{requester:?}\n{responder:?}\nended {} first bad {bad:?} events {events:?}\n", sent.len())
        };
        format!("{:?} {:?}\n{}\n{}", self.now, self.faults, end(&self.ends[0]), end(&self.ends[1]))
    }
}
