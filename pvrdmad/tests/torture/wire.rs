//! The wire between the devices that have an uplink. It loses, duplicates and reorders frames and stalls at times, and
//! a hostile peer eavesdrops on it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use pvrdma_base::Snapshot;
use pvrdma_link::{
    Frames, Link, LinkInspect, Readiness,
    memory::{self, MemoryLink},
};
use pvrdma_packet::MacAddr;
use pvrdmad::testing::{Dice, HostilePeer};

use crate::forger::{inspect, is_marked};
use crate::frames::KIND;

/// Capacity of a cable in frames, towards a device and away from it. The seed selects a large or a small one.
const TOWARDS: usize = 512;
const AWAY: [usize; 2] = [512, 24];
/// Frames waiting for a device from which on the wire takes no more. Senders without a pause then wait as well;
/// otherwise the others would not progress.
const CROWDED: u64 = 256;
/// Frames that are taken from a cable at a time.
const CARRY: usize = 64;
/// Interval between checks whether a cable is connected again.
const LOOK: Duration = Duration::from_millis(10);

/// The far ends of all cables.
#[derive(Debug)]
pub(crate) struct Wire {
    ports: Vec<Port>,
    dice: Dice,
    /// Maximum number of consecutive turns in which a port is skipped.
    longest_stop: usize,
    /// Frames that were carried recently.
    recent: VecDeque<Vec<u8>>,
}

/// The far end of a cable.
#[derive(Debug)]
struct Port {
    /// MAC addresses at this cable.
    stations: Vec<MacAddr>,
    towards: MemoryLink,
    away: MemoryLink,
    cable: Arc<Cable>,
    /// Remaining looks in which the port is not served, so that its cable fills.
    stopped: usize,
}

impl Wire {
    pub(crate) const fn new(dice: Dice, longest_stop: usize) -> Self {
        Self { ports: Vec::new(), dice, longest_stop, recent: VecDeque::new() }
    }

    /// Creates a cable to these MAC addresses.
    pub(crate) fn cable(&mut self, stations: Vec<MacAddr>) -> Arc<Cable> {
        let (input, towards) = memory::pair(TOWARDS).unwrap();
        let (output, away) = memory::pair(self.dice.pick(&AWAY)).unwrap();
        let (unplugged, received, lost) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
        let cable = Arc::new(Cable { input, output, unplugged, received, lost });
        self.ports.push(Port { stations, towards, away, cable: Arc::clone(&cable), stopped: 0 });
        cable
    }

    /// Returns `true` if too many frames wait for a device.
    fn is_crowded(&self) -> bool {
        self.ports.iter().any(|port| port.towards.sent() - port.cable.received.load(Ordering::Relaxed) > CROWDED)
    }

    /// Carries the frames that have arrived. Returns their number.
    pub(crate) fn carry(&mut self) -> usize {
        if self.is_crowded() {
            return 0;
        }
        let mut frames = Frames::default();
        for port in &mut self.ports {
            if port.stopped > 0 {
                port.stopped -= 1;
                continue;
            }
            let before = frames.len();
            port.away.receive(&mut frames, CARRY);
            frames.iter_from(before).for_each(|frame| inspect(frame, &port.stations));
            if self.dice.one_in(256) {
                port.stopped = self.dice.below(self.longest_stop);
            }
        }
        let mut order: Vec<&[u8]> = frames.iter().collect();
        if order.len() > 1 && self.dice.one_in(8) {
            let at = self.dice.below(order.len() - 1);
            order.swap(at, at + 1);
        }
        for frame in order {
            let times = match self.dice.below(200) {
                0 => 0,
                1 => 2,
                _ => 1,
            };
            (0..times).for_each(|_| self.give(frame));
            // Recorded frames can be replayed. A frame without a checksum would be accepted as genuine, and one with
            // the forger's mark would be attributed to the forger.
            if frame.get(12..14) != Some(&KIND.to_be_bytes()) && !is_marked(frame) {
                self.recent.push_back(frame.to_vec());
            }
        }
        while self.recent.len() > 32 {
            self.recent.pop_front();
        }
        frames.len()
    }

    /// Sends a few frames of the hostile peer.
    pub(crate) fn attack(&mut self, peer: &mut HostilePeer) {
        if self.is_crowded() {
            return;
        }
        for _ in 0..peer.burst() {
            let frame = peer.frame(|| self.recent());
            frame.iter().for_each(|frame| self.give(frame));
        }
    }

    /// Returns one of the recorded frames.
    fn recent(&mut self) -> Option<Vec<u8>> {
        let at = self.dice.below(self.recent.len().max(1));
        self.recent.get(at).cloned()
    }

    /// Sends a frame to its destination, or to all ports. A frame without room is lost.
    fn give(&self, frame: &[u8]) {
        let mut frames = Frames::default();
        frames.push(frame);
        let named = frame.first_chunk().map(|address| MacAddr(*address));
        let everybody = named.is_none_or(|mac| mac.0[0] & 1 != 0);
        for Port { stations, towards, cable, .. } in &self.ports {
            let wanted = everybody || named.is_some_and(|mac| stations.contains(&mac));
            if wanted && !cable.is_unplugged() {
                towards.send(&frames, 0);
            }
        }
    }
}

/// The device's or switch's end of a cable that can be unplugged. Like a datagram socket without a peer, an unplugged
/// cable accepts frames and loses them, and delivers only frames that it already had.
#[derive(Debug)]
pub(crate) struct Cable {
    input: MemoryLink,
    output: MemoryLink,
    unplugged: AtomicBool,
    /// Frames that the device has received.
    received: AtomicU64,
    lost: AtomicU64,
}

impl Cable {
    pub(crate) fn set_unplugged(&self, unplugged: bool) {
        self.unplugged.store(unplugged, Ordering::Release);
    }

    fn is_unplugged(&self) -> bool {
        self.unplugged.load(Ordering::Acquire)
    }
}

impl Link for Cable {
    fn receive(&self, frames: &mut Frames, most: usize) {
        // Frames that were in the cable when it was unplugged still arrive.
        let before = frames.len();
        self.input.receive(frames, most);
        self.received.fetch_add((frames.len() - before) as u64, Ordering::Relaxed);
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        if !self.is_unplugged() {
            return self.output.send(frames, from);
        }
        let lost = frames.len().saturating_sub(from);
        self.lost.fetch_add(lost as u64, Ordering::Relaxed);
        lost
    }

    fn readiness(&self) -> Readiness {
        let Readiness { readable, .. } = self.input.readiness();
        if self.is_unplugged() {
            return Readiness { readable, wait: Some(LOOK), ..Readiness::default() };
        }
        Readiness { readable, ..self.output.readiness() }
    }

    fn inspect(&self) -> LinkInspect {
        LinkInspect { up: Snapshot::Taken(!self.is_unplugged()), ..self.input.inspect() }
    }

    fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}
