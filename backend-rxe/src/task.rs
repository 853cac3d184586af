//! Tasks: what the engine schedules, and everybody else wakes.
//!
//! A task is on the ready queue at most once, not counting timers. Those are hints too: one that fires puts its task on
//! the ready queue, and the requester compares its own deadline with the clock.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Weak};

use parking_lot::FairMutex;
use serde::Serialize;

use crate::budget::Budget;
use crate::ready_queue::ReadyQueue;
use crate::share::Share;

/// Why a run ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Run {
    /// Nothing to do, or waiting for a timer or a peer.
    Idle,
    /// The budget is used up.
    More,
    /// The state or the route changed: decide anew what to do.
    Again,
}

/// What a task runs.
pub(crate) trait Runnable: Send + Sync {
    /// Does what there is to do. Returns `true` if the budget ended first.
    fn run(&self, budget: &mut Budget) -> bool;
}

/// Something that runs when there is work for it, on whatever thread learns of that.
pub(crate) struct Task {
    runnable: Weak<dyn Runnable>,
    queue: Weak<ReadyQueue>,
    /// Of the device that it belongs to.
    share: Arc<Share>,
    /// On the ready queue.
    scheduled: AtomicBool,
    /// There may be work that the thread inside [`Self::run_exclusive`] has not seen.
    pending: AtomicBool,
    /// What it waits for may have come, since it was last asked.
    woken: AtomicBool,
}

/// A task at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct TaskInspect {
    /// It is on the ready queue.
    pub(crate) scheduled: bool,
    /// There may be work that the thread that runs it has not seen.
    pub(crate) pending: bool,
    /// What it waits for may have come.
    pub(crate) woken: bool,
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Task").field("scheduled", &self.scheduled).finish_non_exhaustive()
    }
}

impl Task {
    pub(crate) fn new(queue: &Arc<ReadyQueue>, share: &Arc<Share>, runnable: Weak<dyn Runnable>) -> Arc<Self> {
        Arc::new(Self {
            runnable,
            queue: Arc::downgrade(queue),
            share: Arc::clone(share),
            scheduled: AtomicBool::new(false),
            pending: AtomicBool::new(false),
            woken: AtomicBool::new(false),
        })
    }

    /// Puts the task on the ready queue unless it is there.
    pub(crate) fn schedule(self: &Arc<Self>) {
        if self.scheduled.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(queue) = self.queue.upgrade() {
            queue.push(Arc::clone(self));
        }
    }

    /// What the task waits for may have come.
    pub(crate) fn wake(self: &Arc<Self>) {
        self.woken.store(true, Ordering::SeqCst);
        self.schedule();
    }

    /// Returns `true` if [`Self::wake`] was called since the last time.
    pub(crate) fn take_wake(&self) -> bool {
        self.woken.swap(false, Ordering::SeqCst)
    }

    /// Runs the task from the ready queue. Returns `true` if it belongs back there, and is marked so.
    pub(crate) fn run_scheduled(&self, budget: &mut Budget) -> bool {
        // Before the run: whoever schedules it from now on has to be seen again.
        self.scheduled.store(false, Ordering::SeqCst);
        self.runnable.upgrade().is_some_and(|runnable| runnable.run(budget))
            && !self.scheduled.swap(true, Ordering::AcqRel)
    }

    /// Runs `run` with what `lock` guards, or leaves that to the thread that has it. Returns `true` if `run` did: the
    /// budget ended first.
    #[inline]
    pub(crate) fn run_exclusive<T>(&self, lock: &FairMutex<T>, mut run: impl FnMut(&mut T) -> bool) -> bool {
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
            fence(Ordering::SeqCst);
            if !self.pending.load(Ordering::SeqCst) {
                return false;
            }
            held = lock.try_lock();
        }
        false
    }

    /// Looks at what `lock` guards, unless somebody has it. Whoever came meanwhile to run the task left that to us:
    /// it is scheduled then.
    pub(crate) fn look<T, R>(self: &Arc<Self>, lock: &FairMutex<T>, look: impl FnOnce(&T) -> R) -> Option<R> {
        let guarded = lock.try_lock()?;
        let seen = look(&guarded);
        drop(guarded);
        // As in `run_exclusive`: one of us sees the other.
        fence(Ordering::SeqCst);
        if self.pending.load(Ordering::SeqCst) {
            self.schedule();
        }
        Some(seen)
    }

    /// Describes itself.
    pub(crate) fn inspect(&self) -> TaskInspect {
        TaskInspect {
            scheduled: self.scheduled.load(Ordering::Relaxed),
            pending: self.pending.load(Ordering::Relaxed),
            woken: self.woken.load(Ordering::Relaxed),
        }
    }

    /// The share of the device that it belongs to.
    pub(crate) const fn share(&self) -> &Arc<Share> {
        &self.share
    }

    /// Returns `true` if there is still something to run.
    pub(crate) fn is_alive(&self) -> bool {
        self.runnable.strong_count() > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs whatever comes under a lock.
    struct Exclusive {
        task: Arc<Task>,
        lock: FairMutex<u32>,
    }

    impl Runnable for Exclusive {
        fn run(&self, _budget: &mut Budget) -> bool {
            self.task.run_exclusive(&self.lock, |runs| {
                *runs += 1;
                false
            })
        }
    }

    #[test]
    fn work_that_comes_while_somebody_looks_is_done_afterwards() {
        let queue = Arc::new(ReadyQueue::default());
        let exclusive = Arc::new_cyclic(|me: &Weak<Exclusive>| Exclusive {
            task: Task::new(&queue, &Arc::default(), me.clone() as _),
            lock: FairMutex::new(0),
        });
        let (task, budget) = (&exclusive.task, &mut Budget::new(1, 1));
        let take = || queue.queue.lock().take(std::time::Duration::ZERO, 0).map(|taken| taken.task);
        assert_eq!(task.look(&exclusive.lock, |runs| *runs), Some(0));
        assert!(take().is_none());
        // It finds the lock taken, and leaves the work to who has it.
        let seen = task.look(&exclusive.lock, |runs| {
            assert!(!exclusive.run(budget) && task.inspect().pending);
            *runs
        });
        assert_eq!((seen, task.inspect().scheduled), (Some(0), true));
        assert!(!take().unwrap().run_scheduled(budget));
        assert_eq!(*exclusive.lock.lock(), 1);
        let held = exclusive.lock.lock();
        assert_eq!(task.look(&exclusive.lock, |runs| *runs), None);
        drop(held);
    }
}
