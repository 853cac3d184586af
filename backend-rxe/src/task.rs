//! Tasks: what the engine schedules, and everybody else wakes.
//!
//! A task is on the ready queue at most once, not counting timers. Those are hints too: one that fires puts its task on
//! the ready queue, and the requester compares its own deadline with the clock.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::FairMutex;
use pvrdma_handover::{Combiner, Pending};
use serde::Serialize;

use crate::budget::Budget;
use crate::ready_queue::ReadyQueue;
use crate::share::Share;

/// The bit of a task that is to be run.
const RUN: u8 = 1;

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
    /// [`RUN`] while it is on the ready queue.
    scheduled: Pending,
    /// Whoever finds the lock of [`Self::run_exclusive`] taken leaves the work to who has it.
    combiner: Combiner,
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
            scheduled: Pending::new(),
            combiner: Combiner::new(),
            woken: AtomicBool::new(false),
        })
    }

    /// Puts the task on the ready queue unless it is there.
    pub(crate) fn schedule(self: &Arc<Self>) {
        if self.scheduled.add(RUN)
            && let Some(queue) = self.queue.upgrade()
        {
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
        self.scheduled.take();
        self.runnable.upgrade().is_some_and(|runnable| runnable.run(budget)) && self.scheduled.add(RUN)
    }

    /// Runs `run` with what `lock` guards, or leaves that to the thread that has it. Returns `true` if `run` did: the
    /// budget ended first.
    #[inline]
    pub(crate) fn run_exclusive<T>(&self, lock: &FairMutex<T>, run: impl FnMut(&mut T) -> bool) -> bool {
        self.combiner.run(lock, run)
    }

    /// Looks at what `lock` guards, unless somebody has it. Whoever came meanwhile to run the task left that to us:
    /// it is scheduled then.
    pub(crate) fn look<T, R>(self: &Arc<Self>, lock: &FairMutex<T>, look: impl FnOnce(&T) -> R) -> Option<R> {
        let (seen, left) = self.combiner.once(lock, |guarded| look(guarded))?;
        if left {
            self.schedule();
        }
        Some(seen)
    }

    /// Does something with what `lock` guards, and waits for who has it. The second is `true` if whoever came meanwhile
    /// to run the task left that to us.
    pub(crate) fn hold<T, R>(&self, lock: &FairMutex<T>, run: impl FnOnce(&mut T) -> R) -> (R, bool) {
        self.combiner.hold(lock, run)
    }

    /// Describes itself.
    pub(crate) fn inspect(&self) -> TaskInspect {
        TaskInspect {
            scheduled: !self.scheduled.is_empty(),
            pending: self.combiner.is_pending(),
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
