//! Tasks: the units that the engine schedules, and that other parts of the backend wake.
//!
//! A task is on the ready queue at most once, apart from its timers. Timers are only hints: a timer that fires puts its
//! task on the ready queue, and the requester compares its own deadline with the clock.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::FairMutex;
use pvrdma_handover::{Combiner, Pending};
use pvrdma_pacing::Runner;
use serde::Serialize;

use crate::budget::Budget;
use crate::ready_queue::{ReadyQueue, Scheduled};
use crate::share::Share;

/// Bit of a task that is scheduled.
const RUN: u8 = 1;

/// Reason why a run ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Run {
    /// There is nothing to do, or the task waits for a timer or a peer.
    Idle,
    /// The budget is used up.
    More,
    /// The state or the route changed, so the next action must be chosen again.
    Again,
}

/// Work of a task.
pub(crate) trait Runnable: Send + Sync {
    /// Does all work that is pending. Returns `true` if the budget ended first.
    fn run(&self, budget: &mut Budget) -> bool;

    /// Leaves the run to a thread of the device if it must not run on a worker. Returns `false` if it may.
    fn leave(&self) -> bool {
        false
    }
}

/// A unit of work that runs when there is something to do, on the thread that notices it.
pub(crate) struct Task {
    runnable: Weak<dyn Runnable>,
    queue: Weak<ReadyQueue<Self>>,
    /// Share of the device that the task belongs to.
    share: Arc<Share>,
    /// [`RUN`] while it is on the ready queue.
    scheduled: Pending,
    /// A thread that finds the lock of [`Self::run_exclusive`] taken leaves its work to the holder.
    combiner: Combiner,
    /// The event that the task waits for may have happened since the last check.
    woken: AtomicBool,
}

/// State of a task at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct TaskInspect {
    /// The task is on the ready queue.
    pub(crate) scheduled: bool,
    /// There may be work that the thread that runs the task has not seen.
    pub(crate) pending: bool,
    /// The event that the task waits for may have happened.
    pub(crate) woken: bool,
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Task").field("scheduled", &self.scheduled).finish_non_exhaustive()
    }
}

impl Runner for Task {
    fn schedule(self: &Arc<Self>) {
        Self::schedule(self);
    }
}

impl Scheduled for Task {
    fn share(&self) -> &Arc<Share> {
        &self.share
    }

    fn is_alive(&self) -> bool {
        self.runnable.strong_count() > 0
    }
}

impl Task {
    pub(crate) fn new(queue: &Arc<ReadyQueue<Self>>, share: &Arc<Share>, runnable: Weak<dyn Runnable>) -> Arc<Self> {
        Arc::new(Self {
            runnable,
            queue: Arc::downgrade(queue),
            share: Arc::clone(share),
            scheduled: Pending::new(),
            combiner: Combiner::new(),
            woken: AtomicBool::new(false),
        })
    }

    /// Puts the task on the ready queue, unless it is there already.
    pub(crate) fn schedule(self: &Arc<Self>) {
        if self.scheduled.add(RUN)
            && let Some(queue) = self.queue.upgrade()
        {
            queue.push(Arc::clone(self));
        }
    }

    /// Signals that the event that the task waits for may have happened.
    pub(crate) fn wake(self: &Arc<Self>) {
        self.woken.store(true, Ordering::SeqCst);
        self.schedule();
    }

    /// Returns `true` if [`Self::wake`] was called since the last call.
    pub(crate) fn take_wake(&self) -> bool {
        self.woken.swap(false, Ordering::SeqCst)
    }

    /// Runs the task from the ready queue, on a worker. Returns `true` if it belongs back there; it is marked as
    /// scheduled then.
    pub(crate) fn run_scheduled(&self, budget: &mut Budget) -> bool {
        // A task that is left to another thread stays marked, so that it is not queued a second time.
        let left = self.runnable.upgrade().is_some_and(|runnable| runnable.leave());
        !left && self.run_on_own_thread(budget)
    }

    /// As [`Self::run_scheduled`], on the thread that the task was left to.
    pub(crate) fn run_on_own_thread(&self, budget: &mut Budget) -> bool {
        // The bit is cleared before the run, so that the task is queued again if a thread schedules it from now on.
        self.scheduled.take();
        self.runnable.upgrade().is_some_and(|runnable| runnable.run(budget)) && self.scheduled.add(RUN)
    }

    /// Calls `run` with exclusive access to the value in `lock`, or leaves that to the thread that holds the lock.
    /// Returns `true` if `run` returned `true`, because the budget ended first.
    #[inline]
    pub(crate) fn run_exclusive<T>(&self, lock: &FairMutex<T>, run: impl FnMut(&mut T) -> bool) -> bool {
        self.combiner.run(lock, run)
    }

    /// Reads the value in `lock`, unless another thread holds it. If a thread wanted to run the task meanwhile, it left
    /// that to this call, which then schedules the task.
    pub(crate) fn look<T, R>(self: &Arc<Self>, lock: &FairMutex<T>, look: impl FnOnce(&T) -> R) -> Option<R> {
        let (seen, left) = self.combiner.once(lock, |guarded| look(guarded))?;
        if left {
            self.schedule();
        }
        Some(seen)
    }

    /// Calls `run` with the value in `lock`, and waits for its holder. The second result is `true` if another thread
    /// wanted to run the task meanwhile and left that to the caller.
    pub(crate) fn hold<T, R>(&self, lock: &FairMutex<T>, run: impl FnOnce(&mut T) -> R) -> (R, bool) {
        self.combiner.hold(lock, run)
    }

    /// Returns the state of the task for inspection.
    pub(crate) fn inspect(&self) -> TaskInspect {
        TaskInspect {
            scheduled: !self.scheduled.is_empty(),
            pending: self.combiner.is_pending(),
            woken: self.woken.load(Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts runs under a lock.
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
    fn work_that_arrives_during_an_inspection_is_done_afterwards() {
        let queue = Arc::new(ReadyQueue::default());
        let exclusive = Arc::new_cyclic(|me: &Weak<Exclusive>| Exclusive {
            task: Task::new(&queue, &Arc::default(), me.clone() as _),
            lock: FairMutex::new(0),
        });
        let (task, budget) = (&exclusive.task, &mut Budget::new(1, 1));
        let take = || queue.queue.lock().take(std::time::Duration::ZERO, 0).map(|taken| taken.task);
        assert_eq!(task.look(&exclusive.lock, |runs| *runs), Some(0));
        assert!(take().is_none());
        // The run finds the lock taken, and leaves its work to the holder.
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
