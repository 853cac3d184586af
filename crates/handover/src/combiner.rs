//! Work under a lock that nobody waits for: who finds it taken leaves the work to who has it (*flat combining*, Hendler
//! et al., SPAA 2010, with one bit for all).

use crate::sync::{AtomicBool, FairMutex, Ordering, fence};

/// Says that there may be work that the thread which has the lock has not seen.
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
    /// Nothing is left.
    pub fn new() -> Self {
        Self { pending: AtomicBool::new(false) }
    }

    /// Runs `run` with what `lock` guards, or leaves that to the thread that has it: whoever brings work and then calls
    /// this can be sure that `run` begins once more after that. Returns `true` if `run` did, which ends it early.
    #[inline]
    pub fn run<T>(&self, lock: &FairMutex<T>, mut run: impl FnMut(&mut T) -> bool) -> bool {
        let mut held = lock.try_lock();
        if held.is_none() {
            // Between our mark and our second attempt, and between the holder's unlock and its look at the mark: one of
            // us sees the other.
            self.pending.store(true, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            held = lock.try_lock();
        }
        while let Some(mut guarded) = held {
            // swap, not store: clearing the flag must acquire the writes of the thread that set it.
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

    /// Runs `run` once with what `lock` guards, unless somebody has it. The second is `true` if somebody left work
    /// meanwhile: the caller has it run then.
    pub fn once<T, R>(&self, lock: &FairMutex<T>, run: impl FnOnce(&mut T) -> R) -> Option<(R, bool)> {
        let mut guarded = lock.try_lock()?;
        let result = run(&mut guarded);
        drop(guarded);
        Some((result, self.is_pending_after_unlock()))
    }

    /// The same, by who waits for the lock.
    pub fn hold<T, R>(&self, lock: &FairMutex<T>, run: impl FnOnce(&mut T) -> R) -> (R, bool) {
        let mut guarded = lock.lock();
        let result = run(&mut guarded);
        drop(guarded);
        (result, self.is_pending_after_unlock())
    }

    /// Returns `true` if work was left. For whoever has just unlocked.
    fn is_pending_after_unlock(&self) -> bool {
        fence(Ordering::SeqCst);
        self.pending.load(Ordering::SeqCst)
    }

    /// Returns `true` if work was left, at some moment; for display.
    pub fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Relaxed)
    }
}
