//! Progress of a ring's consumer, for the thread that watches the ring in place of doorbells.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Producer's index as last loaded by the consumer, and the number of these loads. Only one thread at a time stores,
/// any thread may load.
#[derive(Clone, Debug, Default)]
pub(crate) struct Progress(Arc<AtomicU64>);

/// Value of a [`Progress`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Seen {
    /// Producer's index.
    pub(crate) tail: u32,
    /// Number of loads so far, modulo 2^32.
    pub(crate) looks: u32,
}

impl Progress {
    /// Records that the consumer has loaded this index.
    #[inline]
    pub(super) fn looked(&self, tail: u32) {
        // There is only one writer, so this needs no read-modify-write. Relaxed order suffices: the consumer stores its
        // own index with release order after this, so a watcher that sees a request that the guest posted after reading
        // that index sees this store as well.
        let looks = Seen::from(self.0.load(Ordering::Relaxed)).looks.wrapping_add(1);
        self.0.store(u64::from(looks) << 32 | u64::from(tail), Ordering::Relaxed);
    }

    /// Returns the consumer's progress. Must be called after the producer's index was loaded.
    #[inline]
    pub(crate) fn seen(&self) -> Seen {
        self.0.load(Ordering::Relaxed).into()
    }
}

impl From<u64> for Seen {
    fn from(both: u64) -> Self {
        let [a, b, c, d, e, f, g, h] = both.to_le_bytes();
        Self { tail: u32::from_le_bytes([a, b, c, d]), looks: u32::from_le_bytes([e, f, g, h]) }
    }
}
