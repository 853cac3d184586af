//! Responder epoch: distinguishes lifetimes of a responder across RESET.

use std::sync::atomic::{AtomicU64, Ordering};

/// Period in which a responder keeps the state of a message. Epochs are unique across all responders, so a requester in
/// the middle of a message never mistakes one responder for another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Epoch(u64);

impl Epoch {
    /// Returns a new epoch.
    pub(crate) fn begin() -> Self {
        // The default epoch, 0, belongs to no responder.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}
