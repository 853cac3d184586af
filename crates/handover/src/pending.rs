//! Pending work as bits, for an object that is on a queue at most once.

use crate::sync::{AtomicU8, Ordering};

/// Kinds of work that are due and have not started. The thread that adds the first bit puts the object on a queue. The
/// thread that takes the object from the queue takes the bits *before* it looks for the work, so work that arrives
/// later queues the object again.
#[derive(Debug)]
pub struct Pending {
    bits: AtomicU8,
}

impl Default for Pending {
    fn default() -> Self {
        Self::new()
    }
}

impl Pending {
    /// No work is due.
    pub fn new() -> Self {
        Self { bits: AtomicU8::new(0) }
    }

    /// Adds bits. Returns `true` if there were none before: the object is on no queue, and the caller must put it
    /// there.
    #[inline]
    pub fn add(&self, bits: u8) -> bool {
        self.bits.fetch_or(bits, Ordering::AcqRel) == 0
    }

    /// Takes all bits. All writes that preceded the addition of one of them are visible from here on. A bit that is
    /// added later puts the object on the queue again.
    #[inline]
    pub fn take(&self) -> u8 {
        // This must be a swap rather than a store. A store would not acquire the writes that precede a bit that it
        // clears, so the load of a ring that follows could be reordered before it and miss an entry.
        self.bits.swap(0, Ordering::AcqRel)
    }

    /// Returns `true` if there were no bits at some moment.
    pub fn is_empty(&self) -> bool {
        self.bits.load(Ordering::Acquire) == 0
    }
}
