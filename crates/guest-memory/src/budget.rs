//! Budget for memory that a guest and its peers make this process allocate, beside the guest's own memory.
//!
//! A device has one [`MemoryBudget`]. Code that allocates memory on behalf of a guest or a peer first charges it to the
//! budget, and refuses the request if the budget is exceeded. It charges per batch, or when a queue grows, and not per
//! message.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use thiserror::Error;

/// Purpose of an allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kept {
    /// Objects, with their page lists and the minimum that each of them needs to make progress.
    Objects,
    /// Requests taken from their rings ahead of their turn.
    Requests,
    /// Packets of peers that wait for other packets.
    Packets,
    /// Batches of packets in transit, and transmit queues of links.
    Queues,
    /// Bookkeeping of locked guest pages and their users.
    Pins,
    /// Saved state on its way to or from a VMM, and the log of written pages.
    Migration,
}

impl Kept {
    /// All purposes, in the order of their numbers.
    pub const ALL: [Self; 6] =
        [Self::Objects, Self::Requests, Self::Packets, Self::Queues, Self::Pins, Self::Migration];

    /// Returns the name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Objects => "objects",
            Self::Requests => "requests",
            Self::Packets => "packets",
            Self::Queues => "queues",
            Self::Pins => "pins",
            Self::Migration => "migration",
        }
    }
}

/// Error: an allocation exceeds the device's memory budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the device may keep {limit} bytes (max_memory) and keeps {used}: no room for {bytes} bytes of {}", .kept.name())]
pub struct OverBudget {
    /// Purpose of the allocation.
    pub kept: Kept,
    /// Bytes requested.
    pub bytes: u64,
    /// Bytes in use.
    pub used: u64,
    /// Limit of the budget in bytes.
    pub limit: u64,
}

/// Counters of one purpose.
#[derive(Debug, Default)]
struct Tally {
    used: AtomicU64,
    refused: AtomicU64,
}

/// Limit and current use of the memory that a device makes this process allocate.
#[derive(Debug)]
pub struct MemoryBudget {
    limit: AtomicU64,
    used: AtomicU64,
    kinds: [Tally; Kept::ALL.len()],
}

impl MemoryBudget {
    /// Default limit of a device in bytes.
    pub const DEFAULT_LIMIT: u64 = 384 << 20;

    /// Creates a budget of `limit` bytes.
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit: AtomicU64::new(limit), used: AtomicU64::new(0), kinds: Default::default() })
    }

    /// Returns the limit in bytes.
    #[inline]
    pub fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    /// Changes the limit. Existing charges above it stay; new ones are refused.
    pub fn set_limit(&self, limit: u64) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// Returns the bytes in use.
    #[inline]
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Returns the bytes in use for one purpose.
    pub fn used_for(&self, kept: Kept) -> u64 {
        self.tally(kept).used.load(Ordering::Relaxed)
    }

    /// Returns how many charges for one purpose were refused.
    pub fn refused(&self, kept: Kept) -> u64 {
        self.tally(kept).refused.load(Ordering::Relaxed)
    }

    /// Returns `true` if more than half is in use: caches should then free memory that can be allocated again.
    #[inline]
    pub fn is_scarce(&self) -> bool {
        self.used() > self.limit() / 2
    }

    /// Charges bytes until the returned charge is dropped.
    ///
    /// # Errors
    /// The budget has no room for them.
    pub fn charge(self: &Arc<Self>, kept: Kept, bytes: u64) -> Result<Charge, OverBudget> {
        let limit = self.limit();
        let fits = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= limit && bytes <= u32::MAX.into());
        let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        let (Ok(_), Ok(size)) = (taken, u32::try_from(bytes)) else {
            self.tally(kept).refused.fetch_add(1, Ordering::Relaxed);
            return Err(OverBudget { kept, bytes, used: self.used(), limit });
        };
        self.tally(kept).used.fetch_add(bytes, Ordering::Relaxed);
        Ok(Charge { budget: Arc::clone(self), bytes: size, kept })
    }

    const fn tally(&self, kept: Kept) -> &Tally {
        // There is one tally per kind, so the index is always valid.
        &self.kinds[kept as usize]
    }
}

/// Bytes charged to a [`MemoryBudget`]; dropping it returns them.
#[derive(Debug)]
pub struct Charge {
    budget: Arc<MemoryBudget>,
    /// A u32, because every object holds a charge, which therefore should be small.
    bytes: u32,
    kept: Kept,
}

impl Charge {
    /// Returns the number of bytes charged.
    pub const fn bytes(&self) -> u64 {
        self.bytes as u64
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let bytes = self.bytes();
        self.budget.used.fetch_sub(bytes, Ordering::Relaxed);
        self.budget.tally(self.kept).used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charges_are_bounded_and_given_back() {
        let budget = MemoryBudget::new(10);
        let first = budget.charge(Kept::Objects, 6).unwrap();
        let error = budget.charge(Kept::Packets, 5).unwrap_err();
        assert_eq!(error, OverBudget { kept: Kept::Packets, bytes: 5, used: 6, limit: 10 });
        assert!(budget.charge(Kept::Objects, u64::MAX).is_err());
        let second = budget.charge(Kept::Packets, 4).unwrap();
        assert_eq!(Kept::ALL.map(|kept| budget.used_for(kept)), [6, 0, 4, 0, 0, 0]);
        assert_eq!(Kept::ALL.map(|kept| budget.refused(kept)), [1, 0, 1, 0, 0, 0]);
        assert!(budget.used() == 10 && budget.is_scarce());
        drop(first);
        assert!(budget.charge(Kept::Objects, 6).is_ok());
        budget.set_limit(3);
        assert!(budget.charge(Kept::Objects, 1).is_err());
        budget.set_limit(11);
        assert!(budget.charge(Kept::Objects, 7).is_ok());
        drop(second);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_charge_is_small() {
        assert_eq!(size_of::<Charge>(), 16);
        assert_eq!(Kept::ALL.map(|kept| kept as usize), [0, 1, 2, 3, 4, 5]);
    }
}
