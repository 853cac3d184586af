//! Things to do, as bits, for something that is on a queue at most once.

use crate::sync::{AtomicU8, Ordering};

/// What is to be done and nobody has begun with. Whoever adds the first bit puts the thing on a queue; whoever takes it
/// from there takes the bits *before* it looks at what there is to do.
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
    /// Nothing is to be done.
    pub fn new() -> Self {
        Self { bits: AtomicU8::new(0) }
    }

    /// Adds bits. Returns `true` if there were none: it is on no queue, and the caller puts it there.
    #[inline]
    pub fn add(&self, bits: u8) -> bool {
        self.bits.fetch_or(bits, Ordering::AcqRel) == 0
    }

    /// Takes all bits. Whatever was written before one of them was added is seen from here on; what is added later
    /// puts the thing on the queue again.
    #[inline]
    pub fn take(&self) -> u8 {
        // swap, not store: a store would not acquire what was written before a bit that it clears, and the load of a
        // ring behind it could come first.
        self.bits.swap(0, Ordering::AcqRel)
    }

    /// Returns `true` if there are none, at some moment.
    pub fn is_empty(&self) -> bool {
        self.bits.load(Ordering::Acquire) == 0
    }
}
