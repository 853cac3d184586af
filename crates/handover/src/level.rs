//! A count, with a flag for threads that wait until it has fallen.

use crate::sync::{AtomicBool, AtomicI64, Ordering, in_order};

/// A count, and a flag that is set while a thread waits for the count to fall. One side lowers the count and then reads
/// the flag; the other side sets the flag and then reads the count. At least one of the two sees the other, so no
/// wake-up is lost.
///
/// All four operations are sequentially consistent, so the threads that change the count need no separate fence.
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
    /// Count 0, without waiters.
    pub fn new() -> Self {
        Self { count: AtomicI64::new(0), awaited: AtomicBool::new(false) }
    }

    /// Returns the count.
    #[inline]
    pub fn get(&self) -> i64 {
        in_order();
        self.count.load(Ordering::SeqCst)
    }

    /// Adds to the count. A caller that lowers it must check [`Self::is_awaited`] afterwards.
    #[inline]
    pub fn change(&self, by: i64) {
        self.count.fetch_add(by, Ordering::SeqCst);
        in_order();
    }

    /// Returns `true` if a thread waits.
    #[inline]
    pub fn is_awaited(&self) -> bool {
        in_order();
        self.awaited.load(Ordering::SeqCst)
    }

    /// Sets the flag for a waiter, which reads the count afterwards. Called under the lock of the waiters.
    pub fn wait(&self) {
        self.awaited.store(true, Ordering::SeqCst);
        in_order();
    }

    /// Clears the flag: there are no waiters left. Called under the lock of the waiters.
    pub fn nobody_waits(&self) {
        self.awaited.store(false, Ordering::Release);
    }
}
