//! What was looked up is used only if nothing has changed since.

use crate::sync::{AtomicU64, Ordering};

/// Changes of something that is looked up now and used later, behind a lock that a change waits for.
///
/// Who looks up reads the generation *before*. Who uses it takes the lock, and then sees whether the generation is
/// still that one. Who changes something makes it a new generation after that, and then waits once for the lock:
/// nobody who has it after that uses what was there before.
#[derive(Debug)]
pub struct Generation {
    count: AtomicU64,
}

impl Default for Generation {
    fn default() -> Self {
        Self::new()
    }
}

impl Generation {
    /// The first.
    pub fn new() -> Self {
        Self { count: AtomicU64::new(0) }
    }

    /// The one that it is now.
    #[inline]
    pub fn get(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    /// What was looked up before counts no more.
    pub fn end(&self) {
        self.count.fetch_add(1, Ordering::AcqRel);
    }
}
