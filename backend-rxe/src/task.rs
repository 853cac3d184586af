//! Tasks: what the engine schedules, and everybody else wakes.
//!
//! A task is on the ready queue at most once, not counting timers. Those are hints too: one that fires puts its task on
//! the ready queue, and the requester compares its own deadline with the clock.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Condvar, FairMutex, Mutex};
use serde::Serialize;

use crate::timer::{TimerKey, Timers};

/// How much one run may do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    bytes: u64,
    requests: u32,
}

impl Budget {
    pub(crate) const fn new(bytes: u64, requests: u32) -> Self {
        Self { bytes, requests }
    }

    /// Returns `true` if nothing more may be started.
    #[inline]
    pub(crate) const fn spent(&self) -> bool {
        self.bytes == 0 || self.requests == 0
    }

    /// Bytes that may be copied in one go.
    #[inline]
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    #[inline]
    pub(crate) const fn take_bytes(&mut self, count: u64) {
        self.bytes = self.bytes.saturating_sub(count);
    }

    #[inline]
    pub(crate) const fn take_request(&mut self) {
        self.requests = self.requests.saturating_sub(1);
    }
}

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
    pub(crate) fn new(queue: &Arc<ReadyQueue>, runnable: Weak<dyn Runnable>) -> Arc<Self> {
        Arc::new(Self {
            runnable,
            queue: Arc::downgrade(queue),
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

    fn is_alive(&self) -> bool {
        self.runnable.strong_count() > 0
    }
}

/// What is inside a [`ReadyQueue`].
#[derive(Debug, Default)]
pub(crate) struct Queue {
    ready: VecDeque<Arc<Task>>,
    pub(crate) timers: Timers<Arc<Task>>,
    /// Workers that wait.
    pub(crate) idle: usize,
    pub(crate) stopping: bool,
}

impl Queue {
    /// Puts a task back that a worker has marked as scheduled. Nobody is woken for it.
    pub(crate) fn push_back(&mut self, task: Arc<Task>) {
        self.ready.push_back(task);
    }

    /// Returns `true` if nothing is ready and no timer is armed.
    pub(crate) fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.timers.first().is_none()
    }

    /// Moves due timers to the ready queue and takes its first task that is still wanted.
    pub(crate) fn take(&mut self, now: Duration) -> Option<Arc<Task>> {
        while let Some(task) = self.timers.pop_due(now) {
            self.ready.push_back(task);
        }
        std::iter::from_fn(|| self.ready.pop_front()).find(|task| task.is_alive())
    }
}

/// Tasks that are ready, and timers of those that wait.
#[derive(Debug, Default)]
pub(crate) struct ReadyQueue {
    pub(crate) queue: Mutex<Queue>,
    /// Notified when an idle worker has something to do.
    pub(crate) work: Condvar,
}

impl ReadyQueue {
    fn push(&self, task: Arc<Task>) {
        let mut queue = self.queue.lock();
        queue.ready.push_back(task);
        if queue.idle > 0 {
            self.work.notify_one();
        }
    }

    /// Schedules a task for `deadline`, in place of an older timer of it.
    pub(crate) fn arm(&self, task: &Arc<Task>, deadline: Duration, old: Option<TimerKey>) -> TimerKey {
        let mut queue = self.queue.lock();
        if let Some(old) = old {
            queue.timers.remove(old);
        }
        let first = queue.timers.first().is_none_or(|first| deadline < first);
        let key = queue.timers.insert(deadline, Arc::clone(task));
        if first && queue.idle > 0 {
            self.work.notify_one();
        }
        key
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
            task: Task::new(&queue, me.clone() as _),
            lock: FairMutex::new(0),
        });
        let (task, budget) = (&exclusive.task, &mut Budget::new(1, 1));
        let take = || queue.queue.lock().take(Duration::ZERO);
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
