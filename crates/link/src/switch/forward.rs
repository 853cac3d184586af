//! Forwarding: the destinations of frames.

use std::collections::HashMap;
use std::sync::Arc;

use pvrdma_packet::MacAddr;

use super::counters::SwitchCounters;
use super::direct::Round;
use super::mailbox::{Delivery, Mailbox, Source, UPLINK, UnknownUnicast};
use crate::{Clock, Frames, Offload};

/// Returns `true` if the destination of a frame, or an address, is a group.
pub(super) const fn is_group(frame: &[u8]) -> bool {
    matches!(frame, [first, ..] if *first & 1 != 0)
}

/// The ports of a switch.
#[derive(Debug, Default)]
pub(super) struct Ports {
    by_mac: HashMap<MacAddr, Arc<Mailbox>>,
    /// The only port, which uses the uplink alone.
    sole: Option<Source>,
}

/// Ports that a frame goes to.
#[derive(Clone, Copy, Debug)]
pub(super) enum Local<'p> {
    /// None: the destination is the sender itself, or this is not a frame.
    None,
    /// The port with the destination address.
    One(&'p Arc<Mailbox>),
    /// The port with the destination address, whose station may be beyond the uplink.
    Silent(&'p Arc<Mailbox>),
    /// All ports: the destination is a group.
    All,
    /// No port has the address: all ports with [`UnknownUnicast::Flood`].
    Unknown,
}

impl Ports {
    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<Mailbox>> {
        self.by_mac.values()
    }

    pub(super) fn get(&self, mac: MacAddr) -> Option<Arc<Mailbox>> {
        self.by_mac.get(&mac).cloned()
    }

    pub(super) fn addresses(&self) -> Vec<MacAddr> {
        self.by_mac.keys().copied().collect()
    }

    pub(super) fn are_several(&self) -> bool {
        self.by_mac.len() > 1
    }

    /// Returns `true` if this is the only port.
    pub(super) fn is_sole(&self, port: &Mailbox) -> bool {
        self.sole == Some(port.id)
    }

    pub(super) fn contains(&self, port: &Mailbox) -> bool {
        self.by_mac.get(&port.mac).is_some_and(|known| known.id == port.id)
    }

    pub(super) fn insert(&mut self, port: &Arc<Mailbox>) {
        self.by_mac.insert(port.mac, Arc::clone(port));
        self.changed();
    }

    /// Removes a port. Returns `true` if it was present.
    pub(super) fn remove(&mut self, port: &Mailbox) -> bool {
        let found = self.contains(port);
        if found {
            self.by_mac.remove(&port.mac);
            self.changed();
        }
        found
    }

    /// Removes all ports and returns them.
    pub(super) fn clear(&mut self) -> Vec<Arc<Mailbox>> {
        self.sole = None;
        self.by_mac.drain().map(|(_, port)| port).collect()
    }

    fn changed(&mut self) {
        self.sole = if self.are_several() { None } else { self.all().next().map(|port| port.id) };
    }

    /// Returns the ports that a frame of `source` goes to.
    pub(super) fn local(&self, frame: &[u8], source: Source) -> Local<'_> {
        let Some(&destination) = frame.first_chunk() else { return Local::None };
        if is_group(frame) {
            return Local::All;
        }
        match self.by_mac.get(&MacAddr(destination)) {
            Some(port) if port.id == source => Local::None,
            // Frames from the uplink are not sent back there, wherever the station is.
            Some(port) if source != UPLINK && port.is_silent() => Local::Silent(port),
            Some(port) => Local::One(port),
            None => Local::Unknown,
        }
    }

    /// Returns all ports except `source` that get frames to groups, or with `unknown`, frames to addresses that no port
    /// has.
    fn others(&self, source: Source, unknown: bool) -> impl Iterator<Item = &Arc<Mailbox>> {
        let takes = move |port: &&Arc<Mailbox>| port.id != source && !(unknown && port.unknown == UnknownUnicast::Drop);
        self.by_mac.values().filter(takes)
    }
}

impl Local<'_> {
    /// Returns `true` if the uplink gets such a frame, too.
    pub(super) const fn goes_up(&self) -> bool {
        matches!(self, Self::All | Self::Unknown | Self::Silent(_))
    }
}

/// Appends frames of one source to mailboxes. Locks a mailbox only once for a run of frames to it.
#[derive(Debug)]
pub(super) struct Forwarder<'p> {
    ports: &'p Ports,
    source: Source,
    open: Option<(Source, Delivery<'p>)>,
    /// The other end of the uplink sends back the frames that a port has sent to a group.
    hairpin: bool,
}

impl<'p> Forwarder<'p> {
    pub(super) const fn new(ports: &'p Ports, source: Source) -> Self {
        Self { ports, source, open: None, hairpin: false }
    }

    fn put(&mut self, mailbox: &'p Mailbox, frame: &[u8], offload: Offload) {
        if self.open.as_ref().is_none_or(|(id, _)| *id != mailbox.id) {
            // The previous queue is released first, because a thread must never hold the locks of two queues.
            self.open = None;
            self.open = Some((mailbox.id, mailbox.open(self.source)));
        }
        if let Some((_, delivery)) = &mut self.open {
            delivery.push(frame, offload);
        }
    }

    /// Delivers a frame. Returns `true` if a port was found for it.
    pub(super) fn deliver(&mut self, frame: &[u8], offload: Offload, local: Local<'p>) -> bool {
        let unknown = match local {
            Local::None => return false,
            Local::One(port) | Local::Silent(port) => {
                self.put(port, frame, offload);
                return true;
            }
            Local::All => false,
            Local::Unknown => true,
        };
        let mut found = false;
        for port in self.ports.others(self.source, unknown) {
            if self.hairpin && is_from(frame, port.mac) {
                continue;
            }
            found = true;
            self.put(port, frame, offload);
        }
        found
    }
}

/// Returns `true` if a frame has this source address.
pub(super) fn is_from(frame: &[u8], mac: MacAddr) -> bool {
    frame.get(6..12) == Some(&mac.0)
}

/// Frames from the uplink that go to a single port each, in order, until they are delivered.
#[derive(Debug, Default)]
pub(super) struct Sorted {
    ports: Vec<Arc<Mailbox>>,
    /// Pairs of an index into `ports` and the index of a frame.
    order: Vec<(usize, usize)>,
    /// Indices of the frames of one port.
    list: Vec<usize>,
}

impl Sorted {
    fn add(&mut self, port: &Arc<Mailbox>, index: usize) {
        let known = self.ports.iter().rposition(|known| known.id == port.id);
        let place = known.unwrap_or_else(|| {
            self.ports.push(Arc::clone(port));
            self.ports.len().saturating_sub(1)
        });
        self.order.push((place, index));
    }

    /// Adds a frame for the same port as the previous one.
    fn add_again(&mut self, index: usize) {
        if let Some(&(place, _)) = self.order.last() {
            self.order.push((place, index));
        }
    }

    /// Delivers its frames to each port, and removes them from here.
    pub(super) fn bring(&mut self, frames: &Frames, round: &mut Round, clock: &dyn Clock) {
        let Self { ports, order, list } = self;
        order.sort_by_key(|&(place, _)| place);
        for run in order.chunk_by(|(one, _), (other, _)| one == other) {
            list.clear();
            list.extend(run.iter().map(|&(_, index)| index));
            if let Some(port) = run.first().and_then(|&(place, _)| ports.get(place)) {
                port.bring(frames, list, round, clock);
            }
        }
        ports.clear();
        order.clear();
    }
}

/// Sorts frames from the uplink from index `from` on, until one does not go to a single port. Returns the index of that
/// one.
pub(super) fn sort(ports: &Ports, frames: &Frames, from: usize, sorted: &mut Sorted) -> usize {
    // Consecutive frames often go to the same port, which saves the lookup.
    let mut last: Option<&[u8; 6]> = None;
    for (frame, index) in frames.iter_from(from).zip(from..) {
        let destination = frame.first_chunk();
        if last.is_some() && destination == last {
            sorted.add_again(index);
            continue;
        }
        match ports.local(frame, UPLINK) {
            Local::One(port) => sorted.add(port, index),
            _ => return index,
        }
        last = destination;
    }
    frames.len()
}

/// Delivers one frame from the uplink to all its ports.
pub(super) fn deliver(ports: &Ports, frames: &Frames, index: usize, counters: &SwitchCounters, hairpin: bool) {
    let (frame, offload) = (frames.get(index).unwrap_or_default(), frames.offload(index));
    let mut forwarder = Forwarder { hairpin, ..Forwarder::new(ports, UPLINK) };
    if !forwarder.deliver(frame, offload, ports.local(frame, UPLINK)) {
        counters.switch_dropped_unknown.increment();
    }
}
