//! Bound GIDs, and the GID table of an adapter.

use std::collections::BTreeMap;

use parking_lot::{RwLock, RwLockWriteGuard};
use pvrdma_base::Snapshot;
use pvrdma_verbs_types::{Gid, GidType, NetworkType};
use serde::Serialize;

use crate::limits::GID_INDICES;

/// A bound GID. All fields are part of the address: RoCE v1 does not reach RoCE v2, nor one VLAN another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct BoundGid {
    pub(crate) gid: Gid,
    #[serde(rename = "type")]
    pub(crate) kind: GidType,
    /// VLAN of the GID. Packets without a VLAN are untagged, or have a priority tag.
    pub(crate) vlan: Option<u16>,
}

impl BoundGid {
    /// Returns the GID that packets of this kind carry.
    pub(crate) const fn on_network(network: NetworkType, gid: Gid, vlan: Option<u16>) -> Self {
        let kind = match network {
            NetworkType::RoceV1 => GidType::RoceV1,
            NetworkType::Ipv4 | NetworkType::Ipv6 => GidType::RoceV2,
        };
        Self { gid, kind, vlan }
    }

    /// Returns another GID on the same network.
    pub(crate) const fn beside(self, gid: Gid) -> Self {
        Self { gid, ..self }
    }
}

/// An entry of a GID table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct GidInspect {
    /// Index in the table.
    index: usize,
    #[serde(flatten)]
    bound: BoundGid,
}

/// A GID that the guest has bound and cannot use yet.
#[derive(Clone, Copy, Debug)]
struct WaitingGid {
    gid: BoundGid,
    /// Packets from the GID wait as well, because a probe will soon decide if the guest gets it.
    holds: bool,
}

/// The GID table of an adapter (IBA 14.2.5.7).
#[derive(Debug)]
pub(crate) struct GidTable {
    /// GIDs that can be used.
    bound: RwLock<Box<[Option<BoundGid>]>>,
    waiting: RwLock<BTreeMap<u8, WaitingGid>>,
}

impl Default for GidTable {
    fn default() -> Self {
        let bound = RwLock::new(vec![None; GID_INDICES].into_boxed_slice());
        Self { bound, waiting: RwLock::default() }
    }
}

impl GidTable {
    /// Returns the bound GIDs, in the order of the table.
    pub(crate) fn inspect(&self) -> Snapshot<Vec<GidInspect>> {
        let entries = self.bound.try_read().map(|table| {
            let bound = table.iter().enumerate();
            bound.filter_map(|(index, bound)| Some(GidInspect { index, bound: (*bound)? })).collect()
        });
        entries.into()
    }

    /// Returns the GID at an index, if it is bound and can be used.
    pub(crate) fn get(&self, index: u8) -> Option<BoundGid> {
        self.bound.read().get(usize::from(index)).copied().flatten()
    }

    /// Returns the GID that is bound at an index, usable or not.
    pub(crate) fn source(&self, index: u8) -> Option<BoundGid> {
        self.get(index).or_else(|| self.waiting.read().get(&index).map(|waiting| waiting.gid))
    }

    /// Returns `true` if packets from a GID wait until it is known if the guest gets it.
    #[cold]
    pub(crate) fn holds(&self, gid: BoundGid) -> bool {
        self.waiting.read().values().any(|waiting| waiting.holds && waiting.gid == gid)
    }

    /// Marks the GID that is bound at an index as waiting.
    pub(crate) fn wait(&self, index: u8, gid: BoundGid, holds: bool) {
        self.waiting.write().insert(index, WaitingGid { gid, holds });
    }

    /// Removes the mark that the GID at an index waits.
    pub(crate) fn stop_waiting(&self, index: u8) {
        self.waiting.write().remove(&index);
    }

    /// Returns `true` if the GID is bound with this encapsulation and VLAN. Looks at `index` first, because the GID is
    /// usually still there; it has moved if its address was removed and added again.
    #[inline]
    pub(crate) fn contains_at(&self, index: u8, gid: BoundGid) -> bool {
        let bound = self.bound.read();
        bound.get(usize::from(index)).is_some_and(|bound| *bound == Some(gid)) || bound.contains(&Some(gid))
    }

    /// Returns `true` if the GID is bound with this encapsulation and VLAN.
    pub(crate) fn contains(&self, gid: BoundGid) -> bool {
        self.bound.read().iter().flatten().any(|&bound| bound == gid)
    }

    /// Returns `true` if the GID is bound with another VLAN.
    #[cold]
    pub(crate) fn is_in_other_vlan(&self, gid: BoundGid) -> bool {
        self.bound.read().iter().flatten().any(|bound| bound.gid == gid.gid && bound.kind == gid.kind && *bound != gid)
    }

    /// Returns the table for modification.
    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, Box<[Option<BoundGid>]>> {
        self.bound.write()
    }
}
