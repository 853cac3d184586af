//! Which beginning of a responder it is.

use std::sync::atomic::{AtomicU64, Ordering};

/// The time of a responder until it forgets what it has of a message. None comes twice, not in another responder
/// either: a requester that is in the middle of a message never takes one for the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Epoch(u64);

impl Epoch {
    /// A new one.
    pub(crate) fn begin() -> Self {
        // The default is nobody's.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}
