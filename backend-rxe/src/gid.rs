//! GIDs as they are bound, and the table of those of one adapter.

use std::collections::BTreeMap;

use parking_lot::{RwLock, RwLockWriteGuard};
use pvrdma_verbs::{Gid, GidType, NetworkType, Snapshot};
use serde::Serialize;

use crate::limits::GID_INDICES;

/// A GID as it is bound. All of it is part of the address: RoCE v1 does not reach v2, nor one VLAN another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct BoundGid {
    pub(crate) gid: Gid,
    #[serde(rename = "type")]
    pub(crate) kind: GidType,
    /// Its VLAN. Packets of no VLAN have no tag, or one for their priority.
    pub(crate) vlan: Option<u16>,
}

impl BoundGid {
    /// A GID as packets of this kind carry it.
    pub(crate) const fn on_network(network: NetworkType, gid: Gid, vlan: Option<u16>) -> Self {
        let kind = match network {
            NetworkType::RoceV1 => GidType::RoceV1,
            NetworkType::Ipv4 | NetworkType::Ipv6 => GidType::RoceV2,
        };
        Self { gid, kind, vlan }
    }

    /// Another GID on the same network.
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

/// A GID that the guest has bound and may not use yet.
#[derive(Clone, Copy, Debug)]
struct WaitingGid {
    gid: BoundGid,
    /// What is sent from it waits as well, because it will be known in a moment whether the guest gets it.
    holds: bool,
}

/// The GID table of an adapter (IBA 14.2.5.7).
#[derive(Debug)]
pub(crate) struct GidTable {
    /// Those that may be used.
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
    /// What is bound, in the order of the table.
    pub(crate) fn inspect(&self) -> Snapshot<Vec<GidInspect>> {
        let entries = self.bound.try_read().map(|table| {
            let bound = table.iter().enumerate();
            bound.filter_map(|(index, bound)| Some(GidInspect { index, bound: (*bound)? })).collect()
        });
        entries.into()
    }

    /// What is bound at an index and may be used.
    pub(crate) fn get(&self, index: u8) -> Option<BoundGid> {
        self.bound.read().get(usize::from(index)).copied().flatten()
    }

    /// What is bound at an index, whether it may be used or not.
    pub(crate) fn source(&self, index: u8) -> Option<BoundGid> {
        self.get(index).or_else(|| self.waiting.read().get(&index).map(|waiting| waiting.gid))
    }

    /// Returns `true` if what is sent from a GID waits until it is known whether the guest gets it.
    #[cold]
    pub(crate) fn holds(&self, gid: BoundGid) -> bool {
        self.waiting.read().values().any(|waiting| waiting.holds && waiting.gid == gid)
    }

    /// What is bound at an index may not be used yet.
    pub(crate) fn wait(&self, index: u8, gid: BoundGid, holds: bool) {
        self.waiting.write().insert(index, WaitingGid { gid, holds });
    }

    /// Nothing that is bound at an index waits.
    pub(crate) fn stop_waiting(&self, index: u8) {
        self.waiting.write().remove(&index);
    }

    /// Returns `true` if the GID is bound with this encapsulation and VLAN at an index, where it is most often, or at
    /// another one: an address that was removed and added again may have moved.
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

    /// The table, for changing it.
    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, Box<[Option<BoundGid>]>> {
        self.bound.write()
    }
}
