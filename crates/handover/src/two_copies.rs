//! Two copies of something that many read for long and some change, so that nobody waits for a change.

use crate::sync::{AtomicBool, Ordering, RwLock, RwLockReadGuard, Step, has};

/// Readers take the copy that is active. A change is made to the other one, which then becomes the active one, and when
/// those have left who hold the first, it is made there as well: nobody is left who has seen it without the change. As
/// long as it is being made a reader may see it, and the next time not.
#[derive(Debug)]
pub struct TwoCopies<T> {
    first: RwLock<T>,
    second: RwLock<T>,
    second_is_active: AtomicBool,
}

impl<T> TwoCopies<T> {
    /// Two that are equal.
    pub fn new(first: T, second: T) -> Self {
        Self { first: RwLock::new(first), second: RwLock::new(second), second_is_active: AtomicBool::new(false) }
    }

    #[inline]
    fn copy(&self, second: bool) -> &RwLock<T> {
        if second { &self.second } else { &self.first }
    }

    /// The copy that is active, at some moment.
    #[inline]
    pub fn active(&self) -> &RwLock<T> {
        self.copy(self.second_is_active.load(Ordering::Acquire))
    }

    /// Holds a copy. It waits for a change only if that began since the look at which copy is active.
    #[inline]
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        self.active().read()
    }

    /// Makes a change, twice, and returns what it gives the first time. When this returns nobody holds a copy without
    /// it. One caller at a time.
    pub fn change<R>(&self, mut change: impl FnMut(&mut T) -> R) -> R {
        let active = self.second_is_active.load(Ordering::Relaxed);
        // Only who looked for the active copy before the last change may be in here.
        let out = change(&mut self.copy(!active).write());
        self.second_is_active.store(!active, Ordering::Release);
        if has(Step::Wait) {
            drop(change(&mut self.copy(active).write()));
        }
        out
    }
}
