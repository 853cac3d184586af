//! Switches: output queues, marks, and the choice among spines.

use crate::frame::Frame;
use crate::plan::Plan;
use crate::random::{Random, mix};

/// Result of a frame's arrival at an output queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Sent {
    /// It arrives at the other end of the line at this time, in nanoseconds.
    Arrives(u64),
    /// It is lost.
    Lost,
}

/// Counts of all switches.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SwitchCounts {
    /// Frames that found the queue full.
    pub overflowed: u64,
    /// Frames that got a mark.
    pub marked: u64,
    /// Frames that a faulty line lost.
    pub lost: u64,
}

/// An output queue and its line.
#[derive(Clone, Debug)]
pub(crate) struct Port {
    /// Bytes per second.
    rate: u64,
    delay: u64,
    buffer: u64,
    mark: Option<u64>,
    /// Time at which everything that waits has left.
    free: u64,
    /// Frames that are lost, in ten-thousandths.
    pub(crate) loss: u64,
}

impl Port {
    fn new(plan: &Plan, rate: u64) -> Self {
        let scaled = |bytes: u64| bytes.saturating_mul(rate) / plan.host_rate.max(1);
        let delay = u64::try_from(plan.delay.as_nanos()).unwrap_or(u64::MAX);
        Self { rate, delay, buffer: scaled(plan.buffer), mark: plan.mark.map(scaled), free: 0, loss: 0 }
    }

    fn send(&mut self, now: u64, frame: &mut Frame, random: &mut Random, counts: &mut SwitchCounts) -> Sent {
        let waiting = self.free.saturating_sub(now).saturating_mul(self.rate / 1000) / 1_000_000;
        if waiting.saturating_add(frame.wire_len()) > self.buffer {
            counts.overflowed += 1;
            return Sent::Lost;
        }
        if self.mark.is_some_and(|mark| waiting > mark) {
            counts.marked += u64::from(frame.mark());
        }
        self.free = self.free.max(now) + frame.wire_len() * 1_000_000_000 / self.rate.max(1);
        if self.loss > 0 && random.below(10_000) < self.loss {
            counts.lost += 1;
            return Sent::Lost;
        }
        Sent::Arrives(self.free + self.delay)
    }
}

/// A switch, or the host at the end of a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// The leaf of the sender.
    FirstLeaf,
    Spine(u16),
    /// The leaf of the receiver.
    LastLeaf,
    Host,
}

/// All switches.
#[derive(Debug)]
pub(crate) struct Switches {
    leaves: usize,
    hosts: usize,
    spines: usize,
    /// Ports of leaves to spines, of spines to leaves, and of leaves to hosts.
    up: Vec<Port>,
    down: Vec<Port>,
    edge: Vec<Port>,
    /// Lines that routing no longer uses.
    withdrawn: Vec<bool>,
    /// Number that the hash of each leaf contains.
    salt: u64,
    random: Random,
    pub(crate) counts: SwitchCounts,
}

impl Switches {
    pub(crate) fn new(plan: &Plan, seed: u64) -> Self {
        let lines = plan.leaves * plan.spines;
        Self {
            leaves: plan.leaves,
            hosts: plan.hosts,
            spines: plan.spines,
            up: vec![Port::new(plan, plan.spine_rate); lines],
            down: vec![Port::new(plan, plan.spine_rate); lines],
            edge: vec![Port::new(plan, plan.host_rate); plan.all_hosts()],
            withdrawn: vec![false; lines],
            salt: mix(seed ^ 0x5a17),
            random: Random(seed ^ 0x1055),
            counts: SwitchCounts::default(),
        }
    }

    const fn leaf_of(&self, host: usize) -> usize {
        host / self.hosts
    }

    const fn line(&self, leaf: usize, spine: usize) -> usize {
        leaf * self.spines + spine
    }

    /// Sets the loss of the line between a leaf and a spine, in both directions, in ten-thousandths.
    pub(crate) fn set_loss(&mut self, leaf: usize, spine: usize, loss: u64) {
        let line = self.line(leaf, spine);
        for ports in [&mut self.up, &mut self.down] {
            if let Some(port) = ports.get_mut(line) {
                port.loss = loss;
            }
        }
    }

    /// Routing no longer uses the line between a leaf and a spine.
    pub(crate) fn withdraw(&mut self, leaf: usize, spine: usize) {
        let line = self.line(leaf, spine);
        if let Some(withdrawn) = self.withdrawn.get_mut(line) {
            *withdrawn = true;
        }
    }

    /// Selects the spine of a frame by a hash of its addresses and its UDP source port.
    fn spine_of(&self, frame: &Frame) -> usize {
        let (first, last) = (self.leaf_of(frame.from), self.leaf_of(frame.to));
        let flow = (frame.from as u64) << 48 | (frame.to as u64) << 32 | frame.source_port() << 16 | first as u64;
        let hash = mix(mix(flow ^ self.salt).wrapping_add(self.salt));
        let usable =
            |spine: &usize| !self.withdrawn[self.line(first, *spine)] && !self.withdrawn[self.line(last, *spine)];
        let count = (0..self.spines).filter(usable).count().max(1) as u64;
        let chosen = usize::try_from(hash % count).unwrap_or(0);
        (0..self.spines).filter(usable).nth(chosen).unwrap_or(0)
    }

    /// A frame has arrived at a switch. Returns the next place on its path.
    pub(crate) fn forward(&mut self, now: u64, place: Place, frame: &mut Frame) -> (Place, Sent) {
        let (first, last) = (self.leaf_of(frame.from), self.leaf_of(frame.to));
        let (next, port) = match place {
            Place::FirstLeaf if first != last => {
                let spine = self.spine_of(frame);
                let line = self.line(first, spine);
                (Place::Spine(u16::try_from(spine).unwrap_or(0)), self.up.get_mut(line))
            }
            Place::Spine(spine) => {
                let line = self.line(last.min(self.leaves), spine.into());
                (Place::LastLeaf, self.down.get_mut(line))
            }
            Place::FirstLeaf | Place::LastLeaf | Place::Host => (Place::Host, self.edge.get_mut(frame.to)),
        };
        let sent = port.map_or(Sent::Lost, |port| port.send(now, frame, &mut self.random, &mut self.counts));
        (next, sent)
    }
}
