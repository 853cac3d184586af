//! Generation counter: the result of a lookup is used only if nothing has changed since the lookup.

use crate::sync::{AtomicU64, Ordering};

/// Counts changes of data that is looked up first and used later, under a lock that each change waits for.
///
/// A reader reads the generation *before* the lookup. Before it uses the result, it takes the lock and checks that the
/// generation is unchanged. A writer changes the data, then starts a new generation, and then takes and releases the
/// lock: every later holder of the lock sees the new generation and does not use the old data.
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
    /// Starts with generation 0.
    pub fn new() -> Self {
        Self { count: AtomicU64::new(0) }
    }

    /// Returns the current generation.
    #[inline]
    pub fn get(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    /// Ends the current generation: results of earlier lookups are no longer valid.
    pub fn end(&self) {
        self.count.fetch_add(1, Ordering::AcqRel);
    }
}
