//! Objects of the guest: contexts own protection domains and completion queues; domains own the other objects.

mod affordable;
mod budget;
mod context;
mod cq;
mod mr;
mod pd;
mod qp;
mod srq;
mod table;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_base::Random;
use pvrdma_verbs::Hca;
use pvrdma_verbs_types::{Gid, GidType};
use serde::Serialize;

use crate::error::CmdError;
use crate::limits::Limits;
use crate::stats::ObjectCounts;

pub(crate) use affordable::affordable;
pub(crate) use context::{Context, KERNEL};
pub(crate) use cq::Cq;
pub(crate) use mr::Mr;
pub(crate) use pd::Pd;
pub(crate) use qp::{FIRST_HANDLE, GSI_HANDLE, Qp};
pub(crate) use srq::Srq;
pub(crate) use table::{HandleTable, TablePosition, Vacancy};

/// Entry of the GID table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct GidInspect {
    /// Index in the table.
    pub index: u8,
    /// GID.
    pub gid: Gid,
    /// Encapsulation.
    #[serde(rename = "type")]
    pub kind: GidType,
    /// VLAN chosen by the guest.
    pub vlan: Option<u16>,
}

/// All objects that the guest created.
pub(crate) struct Objects<H: Hca> {
    pub(crate) contexts: HandleTable<Context>,
    pub(crate) pds: HandleTable<Pd<H>>,
    pub(crate) mrs: HandleTable<Mr<H>>,
    pub(crate) cqs: HandleTable<Cq<H>>,
    pub(crate) srqs: HandleTable<Srq<H>>,
    pub(crate) qps: HandleTable<Qp<H>>,
    /// Bound GIDs.
    pub(crate) gids: Mutex<GidTable>,
}

impl<H: Hca> Objects<H> {
    /// Creates empty tables.
    ///
    /// # Errors
    /// The kernel provides no random numbers.
    pub(crate) fn new(limits: &Limits, mut random: Random) -> io::Result<Self> {
        let begin = (random.draw()?, random.draw()?);
        Ok(Self {
            // Handle 0 denotes the kernel.
            contexts: HandleTable::new("context", 1, limits.max_uar),
            pds: HandleTable::new("protection domain", 0, limits.verbs.max_pd),
            mrs: HandleTable::new("memory region", 0, limits.verbs.max_mr),
            cqs: HandleTable::new("completion queue", 0, limits.verbs.max_cq),
            srqs: HandleTable::new("shared receive queue", 0, limits.verbs.max_srq),
            // QP numbers contain the handle.
            qps: HandleTable::beginning("queue pair", FIRST_HANDLE..limits.verbs.max_qp, begin),
            gids: Mutex::default(),
        })
    }

    /// Changes the limits. May be called only while there are no objects.
    pub(crate) fn set_limits(&self, limits: &Limits) {
        self.contexts.set_end(limits.max_uar);
        self.pds.set_end(limits.verbs.max_pd);
        self.mrs.set_end(limits.verbs.max_mr);
        self.cqs.set_end(limits.verbs.max_cq);
        self.srqs.set_end(limits.verbs.max_srq);
        self.qps.set_end(limits.verbs.max_qp);
    }

    /// Returns the number of objects of each kind. Does not wait for a command.
    pub(crate) fn counts(&self) -> ObjectCounts {
        ObjectCounts {
            contexts: self.contexts.len(),
            pds: self.pds.len(),
            mrs: self.mrs.len(),
            cqs: self.cqs.len(),
            srqs: self.srqs.len(),
            qps: self.qps.len(),
            gids: self.gids.try_lock().map(|gids| gids.len()),
        }
    }
}

impl<T> HandleTable<T> {
    /// Returns the object with a handle, or the error of a command with an invalid handle.
    pub(crate) fn find(&self, handle: u32) -> Result<Arc<T>, CmdError> {
        self.get(handle).ok_or_else(|| CmdError::NoSuch(self.what(), handle))
    }

    /// Removes and returns the object with a handle, or returns the error of a command with an invalid handle.
    pub(crate) fn take(&self, handle: u32) -> Result<Arc<T>, CmdError> {
        self.remove(handle).ok_or_else(|| CmdError::NoSuch(self.what(), handle))
    }

    /// Returns a free handle, or the error of a command when there is none.
    pub(crate) fn room(&self) -> Result<Vacancy, CmdError> {
        self.vacancy().ok_or_else(|| CmdError::NoRoom(self.what()))
    }
}

/// GID table as set by the guest.
#[derive(Debug, Default)]
pub(crate) struct GidTable(BTreeMap<u8, GidInspect>);

impl GidTable {
    /// Sets an entry, replacing the previous one.
    pub(crate) fn insert(&mut self, entry: GidInspect) {
        self.0.insert(entry.index, entry);
    }

    /// Removes an entry. Returns `true` if there was one.
    pub(crate) fn remove(&mut self, index: u8) -> bool {
        self.0.remove(&index).is_some()
    }

    /// Returns the number of entries.
    pub(crate) fn len(&self) -> u32 {
        u32::try_from(self.0.len()).unwrap_or(u32::MAX)
    }

    /// Returns all entries.
    pub(crate) fn entries(&self) -> Vec<GidInspect> {
        self.0.values().copied().collect()
    }

    /// Removes all entries and returns their indices.
    pub(crate) fn drain(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.0).into_keys().collect()
    }
}

#[cfg(test)]
mod tests {
    use pvrdma_verbs_types::{Gid, GidType};

    use super::*;

    #[test]
    fn gids() {
        let mut set = GidTable::default();
        for index in [0, 63, 64, 255, 255] {
            set.insert(GidInspect { index, gid: Gid::default(), kind: GidType::RoceV2, vlan: None });
        }
        assert_eq!(set.len(), 4);
        assert!(set.remove(63) && !set.remove(63));
        assert_eq!(set.drain(), [0, 64, 255]);
        assert_eq!(set.len(), 0);
    }
}
