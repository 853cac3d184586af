//! Sources of received packets. The verdict on a source is cached until the directory changes, so that a further packet
//! costs only a comparison.

use std::sync::Arc;
use std::time::Duration;

use pvrdma_packet::MacAddr;

use crate::addresses::Addresses;
use crate::drive::Endpoint;
use crate::gid::BoundGid;
use crate::path::directory::{Directory, Node};

/// Number of cached sources.
const SLOTS: usize = 64;
/// Minimum time between two reports that a source is still in use.
const NOTE: Duration = Duration::from_secs(1);

/// Verdict on the packets of a source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    Taken,
    /// Another device of this process owns the address, and may have connections that are older than its arrival here.
    Neighbour,
    /// A device of this process owns the address, and has not sent the packet.
    Spoofed,
    /// The rules do not allow the source.
    Refused,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    from: BoundGid,
    /// Generation of the directory at the lookup.
    generation: u64,
    verdict: Verdict,
    /// The Ethernet address from which a local peer sends.
    neighbour: Option<MacAddr>,
    /// Time of the last report that a packet came from the source.
    noted: Option<Duration>,
}

/// Sources of the packets of one device.
#[derive(Debug)]
pub(crate) struct Sources {
    directory: Arc<Directory<Endpoint>>,
    addresses: Arc<Addresses>,
    /// Devices of this process reach each other by local delivery.
    local: bool,
    slots: Box<[Option<Known>]>,
    /// Time of the current batch, if it was needed.
    now: Option<Duration>,
}

impl Sources {
    pub(crate) fn new(directory: Arc<Directory<Endpoint>>, addresses: Arc<Addresses>, local: bool) -> Self {
        Self { directory, addresses, local, slots: vec![None; SLOTS].into(), now: None }
    }

    /// Returns the generation of the directory. After a change, cached results of lookups may be out of date.
    pub(super) fn generation(&self) -> u64 {
        self.directory.generation()
    }

    /// Ends a batch.
    pub(super) const fn end_batch(&mut self) {
        self.now = None;
    }

    /// Judges the source of a packet for `node` that came from the Ethernet address `station`.
    pub(super) fn judge(&mut self, node: &Node<Endpoint>, from: BoundGid, station: MacAddr) -> Verdict {
        let generation = self.directory.generation();
        let [.., a, _, _, _, b, _, _, _, c] = from.gid.0;
        let index = usize::from(a ^ b ^ c) % SLOTS;
        let known = self.slots.get(index).copied().flatten();
        let known = known.filter(|known| known.from == from && known.generation == generation);
        let mut known = known.unwrap_or_else(|| self.look_up(node, from, generation));
        let now = *self.now.get_or_insert_with(|| self.addresses.now());
        if known.noted.is_none_or(|noted| now.saturating_sub(noted) >= NOTE) {
            self.addresses.seen((from.gid, from.vlan), station);
            known.noted = Some(now);
        }
        if let Some(slot) = self.slots.get_mut(index) {
            *slot = Some(known);
        }
        match known.neighbour {
            Some(mac) if mac != station => Verdict::Spoofed,
            _ => known.verdict,
        }
    }

    #[cold]
    fn look_up(&self, node: &Node<Endpoint>, from: BoundGid, generation: u64) -> Known {
        let owner = self.directory.find(from);
        let neighbour = owner.as_ref().filter(|_| self.local).map(|owner| owner.adapter.origin(from).mac);
        let verdict = match &owner {
            Some(owner) if std::ptr::eq(Arc::as_ptr(owner), node) => Verdict::Spoofed,
            _ if !node.adapter.rules.allow_peer(from.gid) => Verdict::Refused,
            _ if neighbour.is_some() => Verdict::Neighbour,
            _ => Verdict::Taken,
        };
        Known { from, generation, verdict, neighbour, noted: None }
    }
}
