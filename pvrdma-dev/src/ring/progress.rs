//! How far the consumer of a ring has looked, for whoever watches the ring in place of a doorbell.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The producer's index as the consumer saw it last, and how often it looked. One thread at a time stores, any may
/// load.
#[derive(Clone, Debug, Default)]
pub(crate) struct Progress(Arc<AtomicU64>);

/// What [`Progress`] says.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Seen {
    /// The producer's index.
    pub(crate) tail: u32,
    /// Looks so far; starts over after 2^32.
    pub(crate) looks: u32,
}

impl Progress {
    /// The consumer has looked and found this index.
    #[inline]
    pub(super) fn looked(&self, tail: u32) {
        // Nobody else stores, so this needs no read-modify-write. The consumer's own index, which it stores with
        // release order after this, carries it to the guest and from there to whoever sees what the guest posts next.
        let looks = Seen::from(self.0.load(Ordering::Relaxed)).looks.wrapping_add(1);
        self.0.store(u64::from(looks) << 32 | u64::from(tail), Ordering::Relaxed);
    }

    /// What the consumer has seen. To be asked for after the producer's index was loaded.
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
