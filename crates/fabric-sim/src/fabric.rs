//! The simulated fabric: an event at a time, in an order that the seed determines.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::mem;
use std::time::Duration;

use pvrdma_link::Frames;
use pvrdma_roce::{
    Congestion,
    wire::{MAX_FRAME, Opcode, Packet},
};

use crate::connection::{Receiver, Sender, Setup, Shared, Turn, connect, end_of};
use crate::frame::Frame;
use crate::plan::{Plan, Transport};
use crate::random::Random;
use crate::switches::{Place, Sent, SwitchCounts, Switches};

/// Bytes that wait in front of a host's line, from which on no connection builds packets.
const NIC_QUEUE: u64 = 64 << 10;
/// Time at which a simulation starts: times near 0 are special to nothing, but let no test depend on it.
const START: u64 = 1_000_000_000;

/// A fault of the line between a leaf and a spine, in both directions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    /// The leaf.
    pub leaf: usize,
    /// The spine.
    pub spine: usize,
    /// Frames that are lost, in ten-thousandths.
    pub loss: u64,
    /// Time since the start.
    pub at: Duration,
    /// Time after which routing no longer uses the line.
    pub withdrawn: Option<Duration>,
}

#[derive(Debug)]
enum Kind {
    Arrive(Place, Box<Frame>),
    /// The line of a host is free.
    Free(usize),
    /// A host handles the frames that have arrived.
    Pass(usize),
    Timer(usize),
    Loss(Box<Fault>),
    Withdraw(Box<Fault>),
}

#[derive(Debug)]
struct Event {
    /// Time and order of creation.
    key: Reverse<(u64, u64)>,
    kind: Kind,
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}

impl Eq for Event {}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Event {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key.cmp(&other.key)
    }
}

/// A host: one device with its line.
#[derive(Debug, Default)]
struct Host {
    shared: Shared,
    /// Connections with something to do.
    ready: VecDeque<usize>,
    /// Frames in front of the line: notifications, and all others.
    urgent: VecDeque<Box<Frame>>,
    bulk: VecDeque<Box<Frame>>,
    waiting: u64,
    sending: bool,
    #[expect(clippy::vec_box, reason = "an event moves the box, not the frame")]
    arrived: Vec<Box<Frame>>,
    /// Responders that owe responses.
    owing: Vec<usize>,
}

/// A connection's progress.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Progress {
    /// Messages that were finished.
    pub finished: u64,
    /// Bytes that arrived in order.
    pub written: u64,
    /// Packets sent, and those of them that had been sent before.
    pub packets: u64,
    /// Packets that had been sent before.
    pub retransmitted: u64,
    /// ACK timeouts.
    pub timeouts: u64,
    /// Changes of path.
    pub moved: u64,
    /// The connection was lost.
    pub failed: bool,
}

/// A message that was finished.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Finished {
    /// Its connection.
    pub connection: usize,
    /// Time since the start.
    pub at: Duration,
}

/// Hosts and switches, and the events that are to come.
#[derive(Debug)]
pub struct Fabric {
    plan: Plan,
    now: u64,
    events: BinaryHeap<Event>,
    count: u64,
    hosts: Vec<Host>,
    senders: Vec<Sender>,
    receivers: Vec<Receiver>,
    switches: Switches,
    congestion: Option<Congestion>,
    random: Random,
    frames: Frames,
    #[expect(clippy::vec_box, reason = "an event moves the box, not the frame")]
    spare: Vec<Box<Frame>>,
    done: Vec<u64>,
    finished: VecDeque<Finished>,
}

impl Fabric {
    /// Creates a fabric without connections.
    pub fn new(plan: &Plan, seed: u64) -> Self {
        Self {
            plan: *plan,
            now: START,
            events: BinaryHeap::new(),
            count: 0,
            hosts: (0..plan.all_hosts()).map(|_| Host::default()).collect(),
            senders: Vec::new(),
            receivers: Vec::new(),
            switches: Switches::new(plan, seed),
            congestion: plan.congestion(),
            random: Random(seed),
            frames: Frames::default(),
            spare: Vec::new(),
            done: Vec::new(),
            finished: VecDeque::new(),
        }
    }

    /// Time since the start.
    pub const fn now(&self) -> Duration {
        Duration::from_nanos(self.now - START)
    }

    /// Counts of the switches.
    pub const fn switch_counts(&self) -> SwitchCounts {
        self.switches.counts
    }

    /// Connects two hosts. Returns the number of the connection: they count from 0.
    pub fn connect(&mut self, from: usize, to: usize, transport: Transport) -> usize {
        let index = self.senders.len();
        let psn = u32::try_from(self.random.below(1 << 24)).unwrap_or(0);
        let setup = Setup { index, from, to, transport, congestion: self.congestion, psn };
        if let Some((sender, receiver)) = connect(&setup, &self.hosts[from].shared) {
            self.senders.push(sender);
            self.receivers.push(receiver);
            self.done.push(0);
        }
        index
    }

    /// Adds a fault.
    pub fn add_fault(&mut self, fault: Fault) {
        let at = START + nanos(fault.at);
        self.push(at, Kind::Loss(Box::new(fault)));
        if let Some(after) = fault.withdrawn {
            self.push(at + nanos(after), Kind::Withdraw(Box::new(fault)));
        }
    }

    /// Writes a message.
    pub fn post(&mut self, connection: usize, bytes: u32) {
        self.senders[connection].post(bytes);
        self.make_ready(connection);
        self.pump(self.senders[connection].host);
    }

    /// State of a connection.
    pub fn progress(&self, connection: usize) -> Progress {
        let (sender, stats) = (&self.senders[connection], self.senders[connection].transport.stats());
        Progress {
            finished: self.done[connection],
            written: self.receivers[connection].written(),
            packets: stats.packets,
            retransmitted: stats.retransmitted,
            timeouts: stats.timeouts,
            moved: stats.rehashed,
            failed: sender.has_failed(),
        }
    }

    /// Returns the next message that was finished before `until`, or `None` when that time has come.
    pub fn next_finished(&mut self, until: Duration) -> Option<Finished> {
        let until = START + nanos(until);
        loop {
            if let Some(finished) = self.finished.pop_front() {
                return Some(finished);
            }
            if self.events.peek().is_none_or(|event| event.key.0.0 > until) {
                self.now = self.now.max(until);
                return None;
            }
            self.step();
        }
    }

    fn push(&mut self, at: u64, kind: Kind) {
        self.count += 1;
        self.events.push(Event { key: Reverse((at, self.count)), kind });
    }

    fn step(&mut self) {
        let Some(Event { key: Reverse((at, _)), kind }) = self.events.pop() else { return };
        self.now = at;
        match kind {
            Kind::Arrive(Place::Host, frame) => self.arrive(frame),
            Kind::Arrive(place, frame) => self.forward(place, frame),
            Kind::Free(host) => {
                self.hosts[host].sending = false;
                self.send_next(host);
                self.pump(host);
            }
            Kind::Pass(host) => self.pass(host),
            Kind::Timer(connection) => {
                let sender = &mut self.senders[connection];
                if sender.armed == Some(at) {
                    sender.armed = None;
                    let host = sender.host;
                    self.make_ready(connection);
                    self.pump(host);
                }
            }
            Kind::Loss(fault) => self.switches.set_loss(fault.leaf, fault.spine, fault.loss),
            Kind::Withdraw(fault) => self.switches.withdraw(fault.leaf, fault.spine),
        }
    }

    fn forward(&mut self, place: Place, mut frame: Box<Frame>) {
        match self.switches.forward(self.now, place, &mut frame) {
            (next, Sent::Arrives(at)) => self.push(at, Kind::Arrive(next, frame)),
            (_, Sent::Lost) => self.spare.push(frame),
        }
    }

    /// A frame has arrived at a host, which handles it a little later.
    fn arrive(&mut self, frame: Box<Frame>) {
        let host = frame.to;
        let arrived = &mut self.hosts[host].arrived;
        arrived.push(frame);
        if arrived.len() == 1 {
            let jitter = self.random.below(nanos(self.plan.jitter).max(1));
            self.push(self.now + nanos(self.plan.reaction) + jitter, Kind::Pass(host));
        }
    }

    /// A host handles the frames that have arrived: first it sends notifications, then responses, then it lets
    /// requesters continue, as a port of `backend-rxe` does.
    fn pass(&mut self, host: usize) {
        let mut arrived = mem::take(&mut self.hosts[host].arrived);
        let mut frames = mem::take(&mut self.frames);
        for frame in arrived.drain(..) {
            self.take(&frame, &mut frames);
            self.spare.push(frame);
        }
        self.hosts[host].arrived = arrived;
        self.leave(host, &frames, true);
        for connection in mem::take(&mut self.hosts[host].owing) {
            frames.clear();
            let receiver = &mut self.receivers[connection];
            receiver.owes = false;
            receiver.respond(&mut frames);
            self.leave(host, &frames, false);
        }
        frames.clear();
        self.frames = frames;
        self.pump(host);
    }

    /// Handles a frame. Notifications that it causes are added to `frames`.
    fn take(&mut self, frame: &Frame, frames: &mut Frames) {
        let now = Duration::from_nanos(self.now);
        let mut room = [0; MAX_FRAME];
        let bytes = frame.restore(&mut room);
        let Ok(packet) = Packet::parse(bytes) else { return };
        let (responder, connection) = end_of(packet.header.bth.destination);
        let config = self.congestion;
        if responder {
            let Some(receiver) = self.receivers.get_mut(connection) else { return };
            receiver.take_request(&packet, bytes);
            if let Some(config) = config {
                receiver.notify(&packet, &config, now, frames);
            }
            if !mem::replace(&mut receiver.owes, true) {
                self.hosts[receiver.host].owing.push(connection);
            }
            return;
        }
        let Some(sender) = self.senders.get_mut(connection) else { return };
        if packet.header.bth.opcode == Opcode::CNP {
            if let Some(config) = config {
                sender.take_notification(&config, now, connection as u64, packet.header.network.source_port());
            }
            return;
        }
        sender.take_response(now, &packet);
        self.note_finished(connection);
        self.make_ready(connection);
    }

    fn note_finished(&mut self, connection: usize) {
        let at = self.now();
        for _ in 0..self.senders[connection].take_finished() {
            self.done[connection] += 1;
            self.finished.push_back(Finished { connection, at });
        }
    }

    fn make_ready(&mut self, connection: usize) {
        let sender = &mut self.senders[connection];
        if !mem::replace(&mut sender.ready, true) {
            self.hosts[sender.host].ready.push_back(connection);
        }
    }

    /// Lets connections of a host build packets in turn while there is room in front of its line.
    fn pump(&mut self, host: usize) {
        let mut frames = mem::take(&mut self.frames);
        loop {
            let woken = mem::take(&mut *self.hosts[host].shared.woken.lock());
            for connection in woken {
                self.make_ready(connection);
            }
            if self.hosts[host].waiting >= NIC_QUEUE {
                break;
            }
            let Some(connection) = self.hosts[host].ready.pop_front() else { break };
            frames.clear();
            let sender = &mut self.senders[connection];
            sender.ready = false;
            match sender.run(Duration::from_nanos(self.now), &mut frames) {
                Turn::More => self.make_ready(connection),
                Turn::Idle(deadline) => self.arm(connection, deadline),
            }
            self.leave(host, &frames, false);
        }
        frames.clear();
        self.frames = frames;
    }

    /// Sets the timer of a connection. An earlier timer serves as well.
    fn arm(&mut self, connection: usize, deadline: Option<Duration>) {
        let Some(deadline) = deadline else { return };
        let at = nanos(deadline).max(self.now + 1);
        let armed = &mut self.senders[connection].armed;
        if armed.is_none_or(|armed| armed > at) {
            *armed = Some(at);
            self.push(at, Kind::Timer(connection));
        }
    }

    /// Puts frames in front of the line of a host.
    fn leave(&mut self, host: usize, frames: &Frames, urgent: bool) {
        for bytes in frames.iter() {
            let mut frame = self.spare.pop().unwrap_or_default();
            frame.fill(bytes);
            let host = &mut self.hosts[host];
            host.waiting += frame.wire_len();
            if urgent { &mut host.urgent } else { &mut host.bulk }.push_back(frame);
        }
        self.send_next(host);
    }

    fn send_next(&mut self, index: usize) {
        let host = &mut self.hosts[index];
        if host.sending {
            return;
        }
        let Some(frame) = host.urgent.pop_front().or_else(|| host.bulk.pop_front()) else { return };
        host.sending = true;
        let bytes = frame.wire_len();
        host.waiting = host.waiting.saturating_sub(bytes);
        let free = self.now + bytes * 1_000_000_000 / self.plan.host_rate.max(1);
        self.push(free, Kind::Free(index));
        self.push(free + nanos(self.plan.delay), Kind::Arrive(Place::FirstLeaf, frame));
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
