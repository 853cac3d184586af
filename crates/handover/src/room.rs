//! Some wait until there is room in front of something that several fill.

use crate::sync::{AtomicUsize, Mutex, Ordering, Step, has};

/// Whether there is room in all queues in front of one thing, and who waits for it, in a `W`: all of them are told at
/// once.
#[derive(Debug, Default)]
pub struct Room<W> {
    /// Queues that are full.
    full: AtomicUsize,
    waiters: Mutex<W>,
}

impl<W: Default> Room<W> {
    /// Returns `true` if one of the queues is full, at some moment.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.full.load(Ordering::Acquire) > 0
    }

    /// One more queue is full.
    pub fn fill(&self) {
        self.full.fetch_add(1, Ordering::AcqRel);
    }

    /// One queue is not full any more. Returns who is to be told, if that was the last one.
    pub fn open(&self) -> Option<W> {
        // Under the lock: who looks there and finds no room is seen.
        let mut waiters = self.waiters.lock();
        (self.full.fetch_sub(1, Ordering::AcqRel) == 1).then(|| std::mem::take(&mut *waiters))
    }

    /// Has `join` add somebody to those who wait. Returns `false`, and adds nobody, if there is room now.
    pub fn wait(&self, join: impl FnOnce(&mut W)) -> bool {
        if !self.is_full() {
            return false;
        }
        let mut waiters = self.waiters.lock();
        // Under the lock: who made room between the two looks did not see us.
        let full = !has(Step::Look) || self.is_full();
        if full {
            join(&mut waiters);
        }
        full
    }
}
