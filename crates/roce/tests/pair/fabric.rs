//! A network for several connections. Each end has its own link to a switch, from which one link leads to each side, or
//! several, one of which a hash of the UDP source port selects. Links have a rate; the switch has queues that overflow,
//! mark and lose frames. Ends react to marks as the engine does. A seed decides all random choices.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use pvrdma_packet::Checksum;
use pvrdma_roce::{
    Congestion, Quiet, ReactionPoint,
    wire::{Ecn, MAX_FRAME, Opcode, Operation, Packet},
};

use super::net::{End, Random, Setup};

/// Faults of one direction of a line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Line {
    /// Bytes per second.
    pub(crate) rate: u64,
    pub(crate) delay: Duration,
    /// Most bytes that wait in front of the line.
    pub(crate) queue: u64,
    /// Frames that find more bytes than this waiting are marked, if their sender reacts to marks.
    pub(crate) mark: u64,
    /// Frames that are lost, and those that up to 16 others may overtake, in ten-thousandths.
    pub(crate) loss: u64,
    pub(crate) reorder: u64,
}

/// A line that frames wait for.
#[derive(Debug)]
struct Link {
    line: Line,
    /// When it will have sent everything that waits.
    free: Duration,
}

fn time_of(bytes: u64, rate: u64) -> Duration {
    Duration::from_nanos(bytes * 1_000_000_000 / rate)
}

impl Link {
    /// Bytes that wait.
    fn backlog(&self, now: Duration) -> u64 {
        let left = self.free.saturating_sub(now).as_nanos() * u128::from(self.line.rate) / 1_000_000_000;
        u64::try_from(left).unwrap()
    }

    /// Adds a frame, and returns the time at which it has left.
    fn take(&mut self, now: Duration, bytes: usize) -> Duration {
        self.free = self.free.max(now) + time_of(bytes as u64, self.line.rate);
        self.free
    }
}

/// An end, and what it remembers about congestion.
#[derive(Debug)]
pub(crate) struct Station {
    pub(crate) end: End,
    reaction: Option<ReactionPoint>,
    seed: u64,
    notified: Option<Duration>,
    /// The rate limit makes it wait until then.
    paced: Option<Duration>,
}

impl Station {
    fn new(setup: &Setup, own: u8, peer: u8) -> Self {
        Self { end: End::new(setup, own, peer), reaction: None, seed: own.into(), notified: None, paced: None }
    }

    fn is_blocked(&mut self, now: Duration) -> bool {
        if self.reaction.as_ref().is_some_and(ReactionPoint::has_recovered) {
            self.reaction = None;
        }
        self.paced = self.reaction.as_mut().and_then(|point| point.blocked_until(now));
        self.paced.is_some()
    }

    /// Everything that it may send now.
    fn transmit(&mut self, now: Duration, quiet: &Quiet) -> Vec<Vec<u8>> {
        let (mut out, mut frames) = ([0; MAX_FRAME], Vec::new());
        self.end.tell_received();
        while !(self.end.responder.next_is_read_response() && self.is_blocked(now)) {
            let End { responder, host, .. } = &mut self.end;
            let Some(length) = responder.poll_transmit(host, &mut out) else { break };
            self.sent(now, length);
            frames.push(out[..length].to_vec());
        }
        if self.reaction.is_some() {
            self.end.requester.request_ack();
        }
        while !self.is_blocked(now) {
            let waits = quiet.wait(now, self.end.requester.is_starved());
            if waits.is_some() && !self.end.requester.is_empty() {
                self.paced = waits;
                break;
            }
            let End { requester, host, .. } = &mut self.end;
            let Some(length) = requester.poll_transmit(now, host, &mut out) else { break };
            self.sent(now, length);
            frames.push(out[..length].to_vec());
        }
        frames
    }

    fn sent(&mut self, now: Duration, bytes: usize) {
        if let Some(point) = &mut self.reaction {
            point.sent(now, bytes as u64);
        }
    }

    /// A frame has arrived. Returns the notification to send for it, if the frame was marked.
    fn receive(&mut self, now: Duration, frame: &[u8], congestion: Option<&Congestion>) -> Option<Vec<u8>> {
        let packet = Packet::parse(frame).ok()?;
        let config = congestion.filter(|_| packet.header.bth.opcode == Opcode::CNP);
        if let Some(config) = config {
            self.reaction.get_or_insert_with(|| ReactionPoint::new(config, now, self.seed)).notify(now);
            self.end.requester.handle_notification(packet.header.network.source_port());
            return None;
        }
        self.end.receive(now, frame);
        let config = congestion.filter(|_| packet.header.network.ecn() == Ecn::Congested)?;
        let acknowledges = packet.header.bth.opcode.info().map(|info| info.operation) == Some(Operation::Acknowledge);
        if acknowledges || self.notified.is_some_and(|last| now < last + config.cnp_interval) {
            return None;
        }
        self.notified = Some(now);
        let (peer, mut out) = (self.end.dest_qpn, [0; MAX_FRAME]);
        // It takes the path of the marked packet, or that of the request that a marked response answers.
        let answers = packet.header.bth.opcode.info().map(|info| info.operation) == Some(Operation::ReadResponse);
        let path = if answers { self.end.requester.path() } else { self.end.responder.path_of(&packet) };
        let length = path.notification(peer, config, &mut out)?;
        Some(out[..length].to_vec())
    }

    fn deadline(&self) -> Option<Duration> {
        self.end.requester.poll_timeout().into_iter().chain(self.paced).min()
    }
}

/// Destination of a frame.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Place {
    Switch,
    End,
}

/// When, in which order, where, of which connection, at which end (or on its way there), and the frame.
type Event = Reverse<(Duration, u64, Place, usize, usize, Vec<u8>)>;

/// Counts of the switch.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    /// Frames that left, and frames that found the queue full.
    pub(crate) frames: u64,
    pub(crate) overflowed: u64,
    pub(crate) marked: u64,
    /// Most bytes that waited.
    pub(crate) most: u64,
    /// Bytes that left.
    pub(crate) bytes: u64,
}

#[derive(Debug)]
pub(crate) struct Fabric {
    pub(crate) now: Duration,
    pub(crate) flows: Vec<[Station; 2]>,
    pub(crate) seen: [Seen; 2],
    /// Quiet periods: of the ends of a side, which have the same peer, or of each host.
    quiet: Vec<[Quiet; 2]>,
    /// Each end is a host of its own.
    pub(crate) hosts: bool,
    /// The links from each end to the switch.
    access: Vec<[Link; 2]>,
    /// The links from the switch to each of the two sides.
    lines: [Vec<Link>; 2],
    /// A number that the switches add to what they hash.
    pub(crate) salt: u64,
    congestion: Option<Congestion>,
    /// Notifications that are lost, in ten-thousandths.
    pub(crate) lost_notifications: u64,
    /// Longest random time that an end waits before it sends.
    pub(crate) jitter: Duration,
    random: Random,
    events: BinaryHeap<Event>,
    count: u64,
}

impl Fabric {
    /// Creates a network of `setups.len()` connections over one line each way. `access` is the rate of each end's own
    /// link.
    pub(crate) fn new(setups: &[Setup], line: Line, access: u64, congestion: Option<Congestion>, seed: u64) -> Self {
        let now = Duration::from_secs(1);
        let own = Line { rate: access, delay: Duration::ZERO, queue: u64::MAX, mark: u64::MAX, loss: 0, reorder: 0 };
        let link = |line| Link { line, free: now };
        let station = |setup: &Setup, index: usize, side: usize| {
            let number = |side: usize| u8::try_from(2 * index + side + 1).unwrap();
            Station::new(setup, number(side), number(1 - side))
        };
        let flows = setups.iter().enumerate().map(|(index, setup)| [0, 1].map(|side| station(setup, index, side)));
        Self {
            now,
            flows: flows.collect(),
            seen: [Seen::default(); 2],
            quiet: vec![[Quiet::default(); 2]; setups.len()],
            hosts: false,
            access: setups.iter().map(|_| [link(own), link(own)]).collect(),
            lines: [vec![link(line)], vec![link(line)]],
            salt: 0,
            congestion,
            lost_notifications: 0,
            jitter: Duration::ZERO,
            random: Random(seed),
            events: BinaryHeap::new(),
            count: 0,
        }
    }

    /// Replaces the line of each direction by `count` equal ones.
    pub(crate) fn with_lines(mut self, count: usize) -> Self {
        for lines in &mut self.lines {
            let line = lines[0].line;
            *lines = (0..count).map(|_| Link { line, free: self.now }).collect();
        }
        self
    }

    /// Changes one of the lines, in both directions.
    pub(crate) fn set_line(&mut self, index: usize, line: Line) {
        self.lines.iter_mut().for_each(|lines| lines[index].line = line);
    }

    /// Returns the line towards a side that a frame takes.
    pub(crate) fn line_of(&self, flow: usize, side: usize, port: u16) -> usize {
        let hashed = Random(self.salt << 32 ^ u64::from(port) << 16 ^ (flow as u64) << 1 ^ side as u64).next();
        usize::try_from(hashed % self.lines[side].len() as u64).unwrap()
    }

    fn push(&mut self, when: Duration, place: Place, flow: usize, side: usize, frame: Vec<u8>) {
        self.count += 1;
        self.events.push(Reverse((when, self.count, place, flow, side, frame)));
    }

    const fn host_of(&self, flow: usize) -> usize {
        if self.hosts { flow } else { 0 }
    }

    /// An end sends what it may.
    pub(crate) fn transmit(&mut self, flow: usize, side: usize) {
        let host = self.host_of(flow);
        let frames = self.flows[flow][side].transmit(self.now, &self.quiet[host][side]);
        for frame in frames {
            self.leave(flow, side, frame);
        }
        let now = self.now;
        self.flows[flow][side].end.handle(now);
    }

    fn leave(&mut self, flow: usize, side: usize, frame: Vec<u8>) {
        let jitter = u64::try_from(self.jitter.as_nanos()).unwrap();
        let pause = if jitter > 0 { self.random.below(jitter) } else { 0 };
        let when = self.access[flow][side].take(self.now + Duration::from_nanos(pause), frame.len());
        self.push(when, Place::Switch, flow, 1 - side, frame);
    }

    /// A frame is at the switch, on its way to a side.
    fn switch(&mut self, flow: usize, side: usize, mut frame: Vec<u8>) {
        let index = self.line_of(flow, side, source_port(&frame));
        let now = self.now;
        let link = &mut self.lines[side][index];
        let (line, backlog, seen) = (link.line, link.backlog(now), &mut self.seen[side]);
        if backlog + frame.len() as u64 > line.queue {
            seen.overflowed += 1;
            return;
        }
        if backlog > line.mark && mark(&mut frame) {
            seen.marked += 1;
        }
        seen.most = seen.most.max(backlog + frame.len() as u64);
        seen.bytes += frame.len() as u64;
        seen.frames += 1;
        let left = link.take(now, frame.len());
        if self.random.below(10_000) < line.loss {
            return;
        }
        let places = if self.random.below(10_000) < line.reorder { self.random.below(17) } else { 0 };
        let late = time_of(places * frame.len() as u64, line.rate);
        self.push(left + line.delay + late, Place::End, flow, side, frame);
    }

    /// Advances to the next event. Returns the end at which it happened, or `None` if there is no further event.
    pub(crate) fn step(&mut self) -> Option<(usize, usize)> {
        let ends = || (0..self.flows.len()).flat_map(|flow| [(flow, 0), (flow, 1)]);
        let timer = ends().filter_map(|(flow, side)| Some((self.flows[flow][side].deadline()?, flow, side))).min();
        let event = self.events.peek().map(|Reverse((when, ..))| *when);
        if let Some((deadline, flow, side)) = timer.filter(|&(deadline, ..)| event.is_none_or(|when| deadline < when)) {
            self.now = self.now.max(deadline);
            let host = self.host_of(flow);
            let Station { end, .. } = &mut self.flows[flow][side];
            let before = end.requester.stats().timeouts;
            end.requester.handle_timeout(self.now, &mut end.host);
            let timed_out = end.requester.stats().timeouts > before;
            if timed_out && end.requester.is_starved() {
                self.quiet[host][side].ask(self.now, end.requester.rtt());
            }
            self.transmit(flow, side);
            return Some((flow, side));
        }
        let Reverse((when, _, place, flow, side, frame)) = self.events.pop()?;
        self.now = self.now.max(when);
        match place {
            Place::Switch => self.switch(flow, side, frame),
            Place::End => {
                let notification = self.flows[flow][side].receive(self.now, &frame, self.congestion.as_ref());
                if let Some(notification) = notification
                    && (self.lost_notifications == 0 || self.random.below(10_000) >= self.lost_notifications)
                {
                    self.leave(flow, side, notification);
                }
                self.transmit(flow, side);
            }
        }
        Some((flow, side))
    }
}

/// The UDP source port of a frame, or 0.
fn source_port(frame: &[u8]) -> u16 {
    Packet::parse(frame).ok().and_then(|packet| packet.header.network.source_port()).unwrap_or(0)
}

/// Marks a frame as having met congestion. Returns `false` if its sender does not react to marks.
fn mark(frame: &mut [u8]) -> bool {
    const NETWORK: usize = 14;
    match frame[NETWORK - 2..NETWORK] {
        [0x08, 0] if frame[NETWORK + 1] & 3 != 0 => {
            frame[NETWORK + 1] |= 3;
            frame[NETWORK + 10..NETWORK + 12].fill(0);
            let mut sum = Checksum::default();
            sum.add(&frame[NETWORK..NETWORK + 20]);
            frame[NETWORK + 10..NETWORK + 12].copy_from_slice(&sum.finish().to_be_bytes());
            true
        }
        [0x86, 0xdd] if frame[NETWORK + 1] & 0x30 != 0 => {
            frame[NETWORK + 1] |= 0x30;
            true
        }
        _ => false,
    }
}
