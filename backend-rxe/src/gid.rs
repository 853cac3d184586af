//! GIDs as they are bound, and the table of those of one adapter.

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

/// The GID table of an adapter (IBA 14.2.5.7).
#[derive(Debug)]
pub(crate) struct GidTable(RwLock<Box<[Option<BoundGid>]>>);

impl Default for GidTable {
    fn default() -> Self {
        Self(RwLock::new(vec![None; GID_INDICES].into_boxed_slice()))
    }
}

impl GidTable {
    /// What is bound, in the order of the table.
    pub(crate) fn inspect(&self) -> Snapshot<Vec<GidInspect>> {
        let entries = self.0.try_read().map(|table| {
            let bound = table.iter().enumerate();
            bound.filter_map(|(index, bound)| Some(GidInspect { index, bound: (*bound)? })).collect()
        });
        entries.into()
    }

    /// What is bound at an index.
    pub(crate) fn get(&self, index: u8) -> Option<BoundGid> {
        self.0.read().get(usize::from(index)).copied().flatten()
    }

    /// Returns `true` if the GID is bound with this encapsulation and VLAN.
    pub(crate) fn contains(&self, gid: BoundGid) -> bool {
        self.0.read().iter().flatten().any(|&bound| bound == gid)
    }

    /// Returns `true` if the GID is bound with another VLAN.
    #[cold]
    pub(crate) fn is_in_other_vlan(&self, gid: BoundGid) -> bool {
        self.0.read().iter().flatten().any(|bound| bound.gid == gid.gid && bound.kind == gid.kind && *bound != gid)
    }

    /// The table, for changing it.
    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, Box<[Option<BoundGid>]>> {
        self.0.write()
    }
}
