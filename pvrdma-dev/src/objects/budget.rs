//! Bounds the memory that page lists of a guest's objects take in this process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pvrdma_guest_memory::PageList;

use crate::error::CmdError;

/// Extents that may be held and are held.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: AtomicU64,
    used: AtomicU64,
}

impl Budget {
    /// Room for `limit` extents.
    pub(crate) fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit: AtomicU64::new(limit), used: AtomicU64::new(0) })
    }

    /// Another limit. What is held beyond it stays, and nothing comes to it.
    pub(crate) fn set_limit(&self, limit: u64) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// Extents held now.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Takes room for `extents` until the charge is dropped.
    pub(crate) fn charge(self: &Arc<Self>, extents: u64) -> Result<Charge, CmdError> {
        let limit = self.limit.load(Ordering::Relaxed);
        let fits = |used: u64| used.checked_add(extents).filter(|&sum| sum <= limit);
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
            .map(|_| Charge { budget: Arc::clone(self), extents })
            .map_err(|_| CmdError::NoRoom("page list"))
    }

    /// Takes room for `copies` of a page list.
    pub(crate) fn charge_pages(self: &Arc<Self>, pages: &PageList, copies: u64) -> Result<Charge, CmdError> {
        self.charge((pages.extents().len() as u64).saturating_mul(copies))
    }
}

/// Room taken.
#[derive(Debug)]
pub(crate) struct Charge {
    budget: Arc<Budget>,
    extents: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.extents, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charges_are_bounded_and_given_back() {
        let budget = Budget::new(10);
        let first = budget.charge(6).unwrap();
        assert!(budget.charge(5).is_err());
        assert!(budget.charge(u64::MAX).is_err());
        let second = budget.charge(4).unwrap();
        assert_eq!(budget.used(), 10);
        drop(first);
        assert!(budget.charge(6).is_ok());
        // Less than what is held.
        budget.set_limit(3);
        assert!(budget.charge(1).is_err());
        budget.set_limit(11);
        assert!(budget.charge(7).is_ok());
        drop(second);
        assert_eq!(budget.used(), 0);
    }
}
