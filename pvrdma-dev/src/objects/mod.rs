//! The guest's objects: contexts own protection domains and completion queues, domains own the rest.

mod budget;
mod context;
mod cq;
mod mr;
mod pd;
mod qp;
mod srq;
mod table;

use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_verbs::Hca;

use crate::config::Limits;
use crate::error::CmdError;
use crate::stats::ObjectCounts;

pub(crate) use budget::{Budget, Charge};
pub(crate) use context::{Context, KERNEL};
pub(crate) use cq::Cq;
pub(crate) use mr::Mr;
pub(crate) use pd::Pd;
pub(crate) use qp::{FIRST_HANDLE, GSI_HANDLE, Qp};
pub(crate) use srq::Srq;
pub(crate) use table::{HandleTable, Vacancy};

/// Everything a guest made.
pub(crate) struct Objects<H: Hca> {
    pub(crate) contexts: HandleTable<Context>,
    pub(crate) pds: HandleTable<Pd<H>>,
    pub(crate) mrs: HandleTable<Mr<H>>,
    pub(crate) cqs: HandleTable<Cq<H>>,
    pub(crate) srqs: HandleTable<Srq<H>>,
    pub(crate) qps: HandleTable<Qp<H>>,
    /// Which GID indices are bound.
    pub(crate) gids: Mutex<GidIndices>,
    /// Memory for page lists.
    pub(crate) budget: Arc<Budget>,
}

impl<H: Hca> Objects<H> {
    /// Empty tables.
    pub(crate) fn new(limits: &Limits) -> Self {
        Self {
            // Handle 0 means the kernel.
            contexts: HandleTable::new("context", 1, limits.max_uar),
            pds: HandleTable::new("protection domain", 0, limits.max_pd),
            mrs: HandleTable::new("memory region", 0, limits.max_mr),
            cqs: HandleTable::new("completion queue", 0, limits.max_cq),
            srqs: HandleTable::new("shared receive queue", 0, limits.max_srq),
            qps: HandleTable::new("queue pair", FIRST_HANDLE, limits.max_qp),
            gids: Mutex::new(GidIndices::default()),
            budget: Budget::new(limits.max_extents),
        }
    }

    /// How many of each there are.
    pub(crate) fn counts(&self) -> ObjectCounts {
        ObjectCounts {
            contexts: self.contexts.len(),
            pds: self.pds.len(),
            mrs: self.mrs.len(),
            cqs: self.cqs.len(),
            srqs: self.srqs.len(),
            qps: self.qps.len(),
            gids: self.gids.lock().len(),
        }
    }
}

impl<T> HandleTable<T> {
    /// The object with a handle, or the error that a command with a wrong handle gets.
    pub(crate) fn find(&self, handle: u32) -> Result<Arc<T>, CmdError> {
        self.get(handle).ok_or_else(|| CmdError::NoSuch(self.what(), handle))
    }

    /// Takes out the object with a handle, or the error that a command with a wrong handle gets.
    pub(crate) fn take(&self, handle: u32) -> Result<Arc<T>, CmdError> {
        self.remove(handle).ok_or_else(|| CmdError::NoSuch(self.what(), handle))
    }

    /// A free handle, or the error that a command gets when there is none.
    pub(crate) fn room(&self) -> Result<Vacancy, CmdError> {
        self.vacancy().ok_or_else(|| CmdError::NoRoom(self.what()))
    }
}

/// A set of GID table indices.
#[derive(Debug, Default)]
pub(crate) struct GidIndices([u64; 4]);

impl GidIndices {
    const fn place(index: u8) -> (usize, u64) {
        ((index >> 6) as usize, 1 << (index & 63))
    }

    /// Adds an index.
    pub(crate) fn insert(&mut self, index: u8) {
        let (word, bit) = Self::place(index);
        if let Some(word) = self.0.get_mut(word) {
            *word |= bit;
        }
    }

    /// Takes an index out. Returns `true` if it was in.
    pub(crate) fn remove(&mut self, index: u8) -> bool {
        let (word, bit) = Self::place(index);
        let Some(word) = self.0.get_mut(word) else { return false };
        let was = *word & bit != 0;
        *word &= !bit;
        was
    }

    /// How many are in.
    pub(crate) fn len(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// Takes all out.
    pub(crate) fn drain(&mut self) -> Vec<u8> {
        let all = (0..=u8::MAX).filter(|&index| self.remove(index)).collect();
        self.0 = [0; 4];
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gid_indices() {
        let mut set = GidIndices::default();
        for index in [0, 63, 64, 255, 255] {
            set.insert(index);
        }
        assert_eq!(set.len(), 4);
        assert!(set.remove(63) && !set.remove(63));
        assert_eq!(set.drain(), [0, 64, 255]);
        assert_eq!(set.len(), 0);
    }
}
