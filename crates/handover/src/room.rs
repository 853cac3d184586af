//! Backpressure gate: threads wait until there is room in queues that several of them fill.

use crate::sync::{AtomicUsize, Mutex, Ordering, Step, has};

/// Tells if all queues in front of one consumer have room, and keeps the waiters in a `W`. All of them are notified
/// together.
#[derive(Debug, Default)]
pub struct Room<W> {
    /// Number of full queues.
    full: AtomicUsize,
    waiters: Mutex<W>,
}

impl<W: Default> Room<W> {
    /// Returns `true` if one of the queues was full at some moment.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.full.load(Ordering::Acquire) > 0
    }

    /// Records that one more queue is full.
    pub fn fill(&self) {
        self.full.fetch_add(1, Ordering::AcqRel);
    }

    /// Records that one queue is no longer full. Returns the waiters to notify if that was the last full queue.
    pub fn open(&self) -> Option<W> {
        // This happens under the lock: a waiter that checks under this lock and finds no room is already in the list.
        let mut waiters = self.waiters.lock();
        (self.full.fetch_sub(1, Ordering::AcqRel) == 1).then(|| std::mem::take(&mut *waiters))
    }

    /// Lets `join` add a waiter. Returns `false`, without calling `join`, if there is room now.
    pub fn wait(&self, join: impl FnOnce(&mut W)) -> bool {
        if !self.is_full() {
            return false;
        }
        let mut waiters = self.waiters.lock();
        // This second check is under the lock: a thread that made room since the first check has not seen this waiter.
        let full = !has(Step::Look) || self.is_full();
        if full {
            join(&mut waiters);
        }
        full
    }
}
