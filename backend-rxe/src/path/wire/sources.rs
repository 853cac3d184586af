//! Where packets come from. What was found out about a source counts until the directory changes, so that a packet
//! costs a comparison.

use std::sync::Arc;
use std::time::Duration;

use pvrdma_verbs::MacAddr;

use crate::addresses::Addresses;
use crate::drive::Endpoint;
use crate::gid::BoundGid;
use crate::path::directory::{Directory, Node};

/// Sources that are known at a time.
const SLOTS: usize = 64;
/// How often it is noted that a source is still there.
const NOTE: Duration = Duration::from_secs(1);

/// Whether packets of a source are taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    Taken,
    /// A device of this process has the address, and does not send on the wire.
    Spoofed,
    /// The device may not talk to it.
    Refused,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    from: BoundGid,
    /// The directory's generation when it was looked up.
    generation: u64,
    verdict: Verdict,
    /// When it was noted last that a packet came from it.
    noted: Option<Duration>,
}

/// Sources that packets of one device came from.
#[derive(Debug)]
pub(crate) struct Sources {
    directory: Arc<Directory<Endpoint>>,
    addresses: Arc<Addresses>,
    /// Devices of this process reach each other without the wire.
    local: bool,
    slots: Box<[Option<Known>]>,
    /// The time of the batch, if anybody needed it.
    now: Option<Duration>,
}

impl Sources {
    pub(crate) fn new(directory: Arc<Directory<Endpoint>>, addresses: Arc<Addresses>, local: bool) -> Self {
        Self { directory, addresses, local, slots: vec![None; SLOTS].into(), now: None }
    }

    /// Another one than before: what was found out about addresses may hold no more.
    pub(super) fn generation(&self) -> u64 {
        self.directory.generation()
    }

    /// The batch is through.
    pub(super) const fn end_batch(&mut self) {
        self.now = None;
    }

    /// Judges the source of a packet for `node`, which came from an Ethernet address.
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
        known.verdict
    }

    #[cold]
    fn look_up(&self, node: &Node<Endpoint>, from: BoundGid, generation: u64) -> Known {
        let owner = self.directory.find(from);
        let verdict = match &owner {
            Some(owner) if self.local || std::ptr::eq(Arc::as_ptr(owner), node) => Verdict::Spoofed,
            _ if !node.adapter.rules.allow_peer(from.gid) => Verdict::Refused,
            _ => Verdict::Taken,
        };
        Known { from, generation, verdict, noted: None }
    }
}
