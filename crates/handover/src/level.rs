//! Some wait until a count has fallen.

use crate::sync::{AtomicBool, AtomicI64, Ordering, in_order};

/// A count, and whether somebody waits for it to fall. Whoever lowers it, and then asks whether somebody waits, and
/// whoever begins to wait, and then looks at the count: one of the two sees the other.
///
/// All four operations are sequentially consistent, so that there is no fence on the way of those who change the count.
#[derive(Debug)]
pub struct Level {
    count: AtomicI64,
    awaited: AtomicBool,
}

impl Default for Level {
    fn default() -> Self {
        Self::new()
    }
}

impl Level {
    /// Nothing, and nobody waits.
    pub fn new() -> Self {
        Self { count: AtomicI64::new(0), awaited: AtomicBool::new(false) }
    }

    /// The count.
    #[inline]
    pub fn get(&self) -> i64 {
        in_order();
        self.count.load(Ordering::SeqCst)
    }

    /// Adds to the count. Who made it lower asks after that whether somebody waits.
    #[inline]
    pub fn change(&self, by: i64) {
        self.count.fetch_add(by, Ordering::SeqCst);
        in_order();
    }

    /// Returns `true` if somebody waits.
    #[inline]
    pub fn is_awaited(&self) -> bool {
        in_order();
        self.awaited.load(Ordering::SeqCst)
    }

    /// Somebody waits, and looks at the count after this. Called under the lock of those who wait.
    pub fn wait(&self) {
        self.awaited.store(true, Ordering::SeqCst);
        in_order();
    }

    /// Nobody waits any more. Called under the same lock.
    pub fn nobody_waits(&self) {
        self.awaited.store(false, Ordering::Release);
    }
}
