//! The engine: a clock, and worker threads for the ready queue and its timers.

use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::MutexGuard;
use pvrdma_base::threads::{self, ThreadKind};
use pvrdma_link::Clock;

use crate::budget::Budget;
use crate::own_thread::Threadless;
use crate::ready_queue::{ReadyQueue, Scheduled};
use crate::task::Task;
use crate::timer::TimerKey;

/// State that workers and adapters share.
#[derive(Debug)]
pub(crate) struct Engine {
    ready: Arc<ReadyQueue<Task>>,
    clock: Arc<dyn Clock>,
    /// Budget of a run on a worker.
    worker_budget: Budget,
    /// Budget of a run on a thread that must return to other work.
    pub(crate) inline_budget: Budget,
    /// Work of the threads of devices with slow memory, for an engine without threads.
    pub(crate) threadless: Threadless,
}

impl Engine {
    /// Creates an engine. `threaded`: it gets workers.
    pub(crate) fn new(clock: Arc<dyn Clock>, worker_budget: Budget, inline_budget: Budget, threaded: bool) -> Self {
        let threadless = Threadless::new(threaded);
        Self { ready: Arc::default(), clock, worker_budget, inline_budget, threadless }
    }

    /// Returns the ready queue of this engine.
    pub(crate) const fn ready_queue(&self) -> &Arc<ReadyQueue<Task>> {
        &self.ready
    }

    pub(crate) fn now(&self) -> Duration {
        self.clock.now()
    }

    /// Schedules a task for `deadline`, in place of an older timer of the task.
    pub(crate) fn arm(&self, task: &Arc<Task>, deadline: Duration, old: Option<TimerKey>) -> TimerKey {
        self.ready.arm(task, deadline, old)
    }

    /// Schedules a task for `deadline`, or for no time, in place of the timer of the task in `timer`.
    pub(crate) fn set_timer(&self, task: &Arc<Task>, deadline: Option<Duration>, timer: &mut Option<TimerKey>) {
        let old = timer.take();
        match deadline {
            Some(deadline) => *timer = Some(self.arm(task, deadline, old)),
            None => old.into_iter().for_each(|old| self.disarm(old)),
        }
    }

    /// Removes a timer. Timers of dead tasks would keep their memory until they fire, which may take hours.
    pub(crate) fn disarm(&self, key: TimerKey) {
        self.ready.queue.lock().timers.remove(key);
    }

    /// Returns the earliest deadline.
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        self.ready.queue.lock().next_deadline()
    }

    /// Runs one task that is ready or due. Returns `false` if there is none.
    pub(crate) fn run_one(&self) -> bool {
        let taken = self.ready.queue.lock().take(self.clock.now(), self.worker_budget.most());
        let Some(taken) = taken else { return self.threadless.run_one() };
        let (cost, more) = self.run(&taken.task);
        self.ready.queue.lock().finish(taken, cost, more);
        true
    }

    /// Runs a task. Returns its cost, and whether it has to go back to the queue.
    fn run(&self, task: &Arc<Task>) -> (u64, bool) {
        let (share, began) = (task.share(), self.clock.now());
        let given = share.limit(self.worker_budget, || began);
        let mut budget = given;
        let more = task.run_scheduled(&mut budget);
        let cost = budget.cost(&given);
        share.spend(budget.used(), cost);
        share.add_worker_time(self.clock.now().saturating_sub(began));
        (cost, more)
    }

    /// Runs a task on the thread of its device. The device is accounted for as with its other threads.
    pub(crate) fn run_on_own_thread(&self, task: &Arc<Task>) {
        let (share, given) = (task.share(), task.share().limit(self.worker_budget, || self.now()));
        let mut budget = given;
        let more = task.run_on_own_thread(&mut budget);
        let cost = budget.cost(&given);
        share.spend(budget.used(), cost);
        share.ran_elsewhere(&self.ready.contention, cost, false);
        if more {
            self.ready.push(Arc::clone(task));
        }
    }

    fn work(&self) {
        let mut queue = self.ready.queue.lock();
        while !queue.stopping {
            let next = if queue.is_empty() { None } else { queue.take(self.clock.now(), self.worker_budget.most()) };
            if let Some(taken) = next {
                // The run may drop the last reference to the task's object, and its destructor must not run under the
                // lock of the queue.
                let (cost, more) = MutexGuard::unlocked(&mut queue, || self.run(&taken.task));
                // Remaining work queues behind the other tasks. No other worker is woken for it, because this thread
                // checks the queue next: a long transfer stays on one processor while there is no other work.
                queue.finish(taken, cost, more);
                continue;
            }
            let deadline = queue.next_deadline();
            queue.idle += 1;
            match deadline {
                None => self.ready.work.wait(&mut queue),
                Some(deadline) => {
                    let left = deadline.saturating_sub(self.clock.now());
                    let _ = self.ready.work.wait_for(&mut queue, left);
                }
            }
            queue.idle -= 1;
        }
    }
}

/// The worker threads. Dropping them ends the threads.
#[derive(Debug)]
pub(crate) struct Workers {
    engine: Arc<Engine>,
    threads: Vec<JoinHandle<()>>,
}

impl Workers {
    pub(crate) fn start(engine: Arc<Engine>, count: usize) -> io::Result<Self> {
        let mut workers = Self { engine, threads: Vec::new() };
        for index in 0..count {
            let engine = Arc::clone(&workers.engine);
            let thread = threads::spawn(ThreadKind::Engine, format!("rxe-{index}"), move || engine.work())?;
            workers.threads.push(thread);
        }
        Ok(workers)
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.engine.ready.queue.lock().stopping = true;
        self.engine.ready.work.notify_all();
        for thread in self.threads.drain(..) {
            // A worker may drop the last reference to the backend. It cannot join itself, but it ends right after this.
            if thread.thread().id() != thread::current().id() && thread.join().is_err() {
                // Log: the last of this thread.
                log::error!("a worker thread of the adapter panicked");
            }
        }
    }
}
