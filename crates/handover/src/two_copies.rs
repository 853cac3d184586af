//! Two copies of a value with rare changes and many readers that hold it for long. No reader waits for a change.

use crate::sync::{AtomicBool, Ordering, RwLock, RwLockReadGuard, Step, has};

/// Readers take the active copy. A change is made to the other copy, which then becomes active. Once the readers of the
/// first copy have left, the change is made there as well: from then on no reader holds a copy without it. While a
/// change is in progress, a reader may see it once and miss it the next time.
#[derive(Debug)]
pub struct TwoCopies<T> {
    first: RwLock<T>,
    second: RwLock<T>,
    second_is_active: AtomicBool,
}

impl<T> TwoCopies<T> {
    /// Creates the pair from two equal values.
    pub fn new(first: T, second: T) -> Self {
        Self { first: RwLock::new(first), second: RwLock::new(second), second_is_active: AtomicBool::new(false) }
    }

    #[inline]
    fn copy(&self, second: bool) -> &RwLock<T> {
        if second { &self.second } else { &self.first }
    }

    /// Returns the lock of the copy that was active at some moment.
    #[inline]
    pub fn active(&self) -> &RwLock<T> {
        self.copy(self.second_is_active.load(Ordering::Acquire))
    }

    /// Locks the active copy for reading. It waits for a change only if that change began after the active copy was
    /// looked up.
    #[inline]
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        self.active().read()
    }

    /// Makes a change to both copies, and returns the result of the first call. When this returns, no reader holds a
    /// copy without the change. One caller at a time.
    pub fn change<R>(&self, mut change: impl FnMut(&mut T) -> R) -> R {
        let active = self.second_is_active.load(Ordering::Relaxed);
        // Only readers that looked up the active copy before the previous change can still hold this one.
        let out = change(&mut self.copy(!active).write());
        self.second_is_active.store(!active, Ordering::Release);
        if has(Step::Wait) {
            drop(change(&mut self.copy(active).write()));
        }
        out
    }
}
