//! Goodput over links with a rate, a queue and a delay, that lose and reorder packets.
//!
//! The numbers are those of two of our engines on one machine: a full packet takes 1.26 us, and a window of 256 of them
//! waits in front of the receiver.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use pvrdma_roce::Tuning;
use pvrdma_verbs_types::{Mtu, QpAttrs, RemoteAddress, SendData, SendFlags, SendOp, SendWr, Sge, WcStatus};

use super::host::KEY;
use super::net::{End, Random, Setup};

const PACKET: Duration = Duration::from_nanos(1260);
/// A packet without payload.
const SMALL: Duration = Duration::from_nanos(50);
const DELAY: Duration = Duration::from_micros(20);
/// Packets of a message.
const PACKETS: u32 = 256;
const MTU: u32 = 256;
const MESSAGES: u64 = 40;

/// Faults of a link, in packets per ten thousand.
#[derive(Clone, Copy, Debug, Default)]
struct Faults {
    loss: u64,
    /// By up to 16 places.
    reorder: u64,
    /// Packets that fit into the queue in front of the link. 0: all do.
    queue: u32,
}

/// A frame on its way: when, in which order, where to.
type Flight = Reverse<(Duration, u64, usize, Vec<u8>)>;

struct Network {
    now: Duration,
    ends: [End; 2],
    faults: Faults,
    random: Random,
    /// When each direction will have sent everything that waits in front of it.
    free: [Duration; 2],
    flights: BinaryHeap<Flight>,
    sent: u64,
    /// The timer that was set for the requester, as the engine does: an earlier timer also serves a later deadline. And
    /// the number of times that one was set, each of which wakes a thread.
    armed: Option<Duration>,
    wake_ups: u64,
}

impl Network {
    fn new(setup: &Setup, faults: Faults, seed: u64) -> Self {
        let mut ends = [End::new(setup, 1, 2), End::new(setup, 2, 1)];
        ends.iter_mut().for_each(|end| end.keeps = true);
        let now = Duration::from_secs(1);
        Self {
            now,
            ends,
            faults,
            random: Random(seed),
            free: [now; 2],
            flights: BinaryHeap::new(),
            sent: 0,
            armed: None,
            wake_ups: 0,
        }
    }

    fn send(&mut self, from: usize, frame: Vec<u8>) {
        let cost = if frame.len() > MTU as usize { PACKET } else { SMALL };
        let free = self.free[from].max(self.now) + cost;
        if self.faults.queue > 0 && free - self.now > PACKET * self.faults.queue {
            return;
        }
        self.free[from] = free;
        if self.random.below(10_000) < self.faults.loss {
            return;
        }
        let late = if self.random.below(10_000) < self.faults.reorder { self.random.below(17) } else { 0 };
        self.sent += 1;
        let when = free + DELAY + PACKET * u32::try_from(late).unwrap();
        self.flights.push(Reverse((when, self.sent, 1 - from, frame)));
    }

    /// Moves to the next thing that happens.
    fn step(&mut self) {
        for from in 0..2 {
            for frame in self.ends[from].transmit(self.now) {
                self.send(from, frame);
            }
            self.ends[from].handle(self.now);
        }
        let arrival = self.flights.peek().map(|Reverse((when, ..))| *when);
        let timeout = self.ends.iter().filter_map(|end| end.requester.poll_timeout()).min();
        let next = [arrival, timeout].into_iter().flatten().min().expect("nothing will happen");
        self.now = self.now.max(next);
        while let Some(Reverse((when, ..))) = self.flights.peek()
            && *when <= self.now
            && let Some(Reverse((_, _, to, frame))) = self.flights.pop()
        {
            self.ends[to].receive(self.now, &frame);
        }
        for end in &mut self.ends {
            end.requester.handle_timeout(self.now, &mut end.host);
        }
        let serves = |armed: Duration, deadline| armed <= deadline && armed > self.now;
        if let Some(deadline) = self.ends[0].requester.poll_timeout()
            && !self.armed.is_some_and(|armed| serves(armed, deadline))
        {
            self.armed = Some(deadline);
            self.wake_ups += 1;
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Write,
    Send,
    Read,
}

fn setup() -> Setup {
    let base = Setup::default();
    let attrs = QpAttrs { path_mtu: Mtu::M256, max_rd_atomic: 16, max_dest_rd_atomic: 16, ..base.attrs };
    Setup { attrs, tuning: base.tuning.with_negotiate(true), ..base }
}

fn request(kind: Kind, wr_id: u64) -> SendWr {
    let remote = RemoteAddress { addr: 0x100_0000, rkey: KEY };
    let op = match kind {
        Kind::Write => SendOp::Write { remote, immediate: None },
        Kind::Send => SendOp::Send { data: SendData::None, to: None },
        Kind::Read => SendOp::Read { remote },
    };
    let sges = vec![Sge { addr: 0x200_0000, length: PACKETS * MTU, lkey: KEY }];
    SendWr { wr_id, op, flags: SendFlags::SIGNALED, sges }
}

/// Returns the number of packets that arrive per packet time, and the number of packets sent for each of them.
fn goodput(setup: &Setup, kind: Kind, faults: Faults, seed: u64) -> (f64, f64) {
    let (goodput, packets, _) = transfer(setup, kind, faults, seed);
    (goodput, packets)
}

/// Same as [`goodput`], with the number of wake-ups for setting or serving a timer, per message.
fn transfer(setup: &Setup, kind: Kind, faults: Faults, seed: u64) -> (f64, f64, f64) {
    let mut network = Network::new(setup, faults, seed);
    let began = network.now;
    for wr_id in 0..MESSAGES {
        network.ends[0].post(request(kind, wr_id));
        network.ends[1].host.post_receive(wr_id, 0x300_0000, PACKETS * MTU);
    }
    while network.ends[0].host.sent.len() < usize::try_from(MESSAGES).unwrap() {
        network.step();
        assert!(network.now - began < Duration::from_secs(1), "{kind:?} {faults:?} seed {seed}: no end in sight");
    }
    assert!(network.ends[0].host.sent.iter().all(|ended| ended.status == WcStatus::Success));
    let packets = u32::try_from(MESSAGES).unwrap() * PACKETS;
    let full = PACKET * packets;
    let (requester, responder) = (network.ends[0].requester.stats(), network.ends[1].responder.stats());
    let sent = if let Kind::Read = kind { responder.responses } else { requester.packets };
    let wake_ups = network.wake_ups as f64 / MESSAGES as f64;
    (full.as_secs_f64() / (network.now - began).as_secs_f64(), sent as f64 / f64::from(packets), wake_ups)
}

/// Returns the share of the fault-free goodput that remains with the faults, and the packets sent for each necessary
/// one, over several seeds.
fn kept(setup: &Setup, kind: Kind, faults: Faults) -> (f64, f64) {
    let clean = goodput(setup, kind, Faults::default(), 1).0;
    let runs: Vec<_> = (1..=8).map(|seed| goodput(setup, kind, faults, seed)).collect();
    let mean = |part: fn(&(f64, f64)) -> f64| runs.iter().map(part).sum::<f64>() / runs.len() as f64;
    (mean(|run| run.0) / clean, mean(|run| run.1))
}

/// Two ends of this implementation negotiate selective acknowledgements, so a loss costs only the lost packet. Programs
/// usually have few READs outstanding, and a gap in one of them must not delay the next.
#[test]
fn a_loss_costs_what_was_lost() {
    let kinds =
        [(Kind::Write, 16), (Kind::Send, 16), (Kind::Read, 16), (Kind::Read, 4), (Kind::Read, 2), (Kind::Read, 1)];
    for (loss, least, alone) in [(10, 0.97, 0.97), (100, 0.9, 0.7)] {
        for (kind, reads) in kinds {
            let base = setup();
            let attrs = QpAttrs { max_rd_atomic: reads, max_dest_rd_atomic: reads, ..base.attrs };
            let (kept, packets) = kept(&Setup { attrs, ..base }, kind, Faults { loss, ..Faults::default() });
            let what = format!("{kind:?}, {reads} READs at a time, loss {loss} per 10,000");
            println!("{what}: {kept:.3} of the goodput, {packets:.3} packets for one");
            assert!(kept >= if reads > 1 { least } else { alone }, "{what}: {kept:.3}");
            assert!(packets < 1.0 + 3.0 * loss as f64 / 10_000.0, "{what}: {packets:.3}");
        }
    }
}

#[test]
fn reordering_costs_little() {
    for kind in [Kind::Write, Kind::Send, Kind::Read] {
        let (kept, packets) = kept(&setup(), kind, Faults { reorder: 100, ..Faults::default() });
        println!("{kind:?} reordered: {kept:.3} of the goodput, {packets:.3} packets for one");
        assert!(kept >= 0.95 && packets < 1.02, "{kind:?}: {kept:.3}, {packets:.3}");
    }
}

/// Later packets reveal missing ones: losses and reordering set hardly more timers than a network without them.
#[test]
fn faults_wake_nobody() {
    for kind in [Kind::Write, Kind::Read] {
        let (_, _, clean) = transfer(&setup(), kind, Faults::default(), 1);
        for faults in [Faults { loss: 100, ..Faults::default() }, Faults { reorder: 100, ..Faults::default() }] {
            let runs = (1..=4).map(|seed| transfer(&setup(), kind, faults, seed).2);
            let mean = runs.sum::<f64>() / 4.0;
            println!("{kind:?} {faults:?}: {mean:.2} timers for a message, {clean:.2} without faults");
            assert!(mean <= clean + 0.5, "{kind:?} {faults:?}: {mean:.2}, {clean:.2} without faults");
        }
    }
}

/// A queue that overflows without marks: a sender with many losses slows down until the queue no longer overflows.
#[test]
fn losses_without_ecn_slow_a_flow_down() {
    for kind in [Kind::Write, Kind::Send] {
        let (goodput, packets) = goodput(&setup(), kind, Faults { queue: 64, ..Faults::default() }, 1);
        println!("{kind:?} over a short queue: {goodput:.3} of the link, {packets:.3} packets for one");
        assert!(goodput > 0.8 && packets < 1.3, "{kind:?}: {goodput:.3}, {packets:.3}");
    }
}

/// Without selective acknowledgements at the peer, a loss costs round trips as before.
#[test]
fn without_an_agreement_a_loss_costs_round_trips() {
    let plain = Setup { tuning: Tuning::default(), ..setup() };
    for (kind, least) in [(Kind::Write, 0.3), (Kind::Send, 0.3), (Kind::Read, 0.8)] {
        let (kept, packets) = kept(&plain, kind, Faults { loss: 100, ..Faults::default() });
        println!("{kind:?} without an agreement: {kept:.3} of the goodput, {packets:.3} packets for one");
        assert!(kept >= least, "{kind:?}: {kept:.3}");
    }
}
