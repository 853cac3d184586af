//! A lock whose waiters do not wait: a thread that finds it held leaves its work to the holder (*flat combining*,
//! Hendler et al., SPAA 2010, with one bit for all threads).

use crate::sync::{AtomicBool, FairMutex, Ordering, fence};

/// Flag beside a lock: set while there may be work that the holder of the lock has not seen.
#[derive(Debug)]
pub struct Combiner {
    pending: AtomicBool,
}

impl Default for Combiner {
    fn default() -> Self {
        Self::new()
    }
}

impl Combiner {
    /// No work is pending.
    pub fn new() -> Self {
        Self { pending: AtomicBool::new(false) }
    }

    /// Runs `run` on the data behind `lock`, or leaves that to the current holder. If the caller published work before
    /// this call, `run` will start at least once after that. Returns `true` if `run` returned `true`, which ends the
    /// loop early.
    #[inline]
    pub fn run<T>(&self, lock: &FairMutex<T>, mut run: impl FnMut(&mut T) -> bool) -> bool {
        let mut held = lock.try_lock();
        if held.is_none() {
            // This thread sets the flag and then tries the lock again; the holder unlocks and then reads the flag. The
            // fences ensure that at least one of the two sees the other, so no work is left behind.
            self.pending.store(true, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            held = lock.try_lock();
        }
        while let Some(mut guarded) = held {
            // This must be a swap rather than a store: clearing the flag must acquire the writes of the thread that set
            // it.
            self.pending.swap(false, Ordering::SeqCst);
            let more = run(&mut guarded);
            drop(guarded);
            if more {
                return true;
            }
            if !self.is_pending_after_unlock() {
                return false;
            }
            held = lock.try_lock();
        }
        false
    }

    /// Runs `run` once on the data behind `lock`, or returns `None` if the lock is held. If the second value is `true`,
    /// another thread left work meanwhile, and the caller must arrange for it to run.
    pub fn once<T, R>(&self, lock: &FairMutex<T>, run: impl FnOnce(&mut T) -> R) -> Option<(R, bool)> {
        let mut guarded = lock.try_lock()?;
        let result = run(&mut guarded);
        drop(guarded);
        Some((result, self.is_pending_after_unlock()))
    }

    /// Does the same as [`Self::once`], but waits for the lock.
    pub fn hold<T, R>(&self, lock: &FairMutex<T>, run: impl FnOnce(&mut T) -> R) -> (R, bool) {
        let mut guarded = lock.lock();
        let result = run(&mut guarded);
        drop(guarded);
        (result, self.is_pending_after_unlock())
    }

    /// Returns `true` if work was left. To be called right after unlocking.
    fn is_pending_after_unlock(&self) -> bool {
        fence(Ordering::SeqCst);
        self.pending.load(Ordering::SeqCst)
    }

    /// Returns `true` if work was pending at some moment. For inspection only.
    pub fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Relaxed)
    }
}
