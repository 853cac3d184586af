//! Flag of a thread that waits for work from other threads.

use crate::sync::{AtomicBool, Ordering, fence, in_order};

/// Set by a consumer that found nothing and then checks once more; read by a producer that has published work. At least
/// one of the two sees the other, so no wake-up is lost.
#[derive(Debug)]
pub struct WaitFlag {
    set: AtomicBool,
}

impl Default for WaitFlag {
    fn default() -> Self {
        Self::new()
    }
}

impl WaitFlag {
    /// No thread waits.
    pub fn new() -> Self {
        Self { set: AtomicBool::new(false) }
    }

    /// Announces that the caller waits. The caller must check once more afterwards, because producers that published
    /// work before this call did not see the flag.
    #[inline]
    pub fn set(&self) {
        self.set.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Returns `true` if a thread waits. Called by a producer after it has published work.
    #[inline]
    pub fn is_set(&self) -> bool {
        fence(Ordering::SeqCst);
        self.set.load(Ordering::SeqCst)
    }

    /// Does the same as [`Self::is_set`] and clears the flag, so that only one of several producers notifies the
    /// waiter.
    #[inline]
    pub fn take(&self) -> bool {
        self.is_set() && self.set.swap(false, Ordering::SeqCst)
    }

    /// Does the same as [`Self::is_set`], for work that was announced through the kernel or by a VM exit. That path
    /// already makes the producer's writes visible to all threads, so no fence is needed here.
    #[inline]
    pub fn is_set_when_heard(&self) -> bool {
        in_order();
        self.set.load(Ordering::SeqCst)
    }

    /// Clears the flag: no thread waits.
    #[inline]
    pub fn clear(&self) {
        self.set.store(false, Ordering::SeqCst);
    }
}
