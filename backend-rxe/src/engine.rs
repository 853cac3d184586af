//! Worker threads, the ready queue and timers.
//!
//! A QP is on the ready queue at most once, not counting timers. Those are hints too: one that fires puts its QP on the
//! ready queue, and the requester compares its own deadline with the clock.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::qp::{Budget, Qp};
use crate::timer::{TimerKey, Timers};
use pvrdma_ether_link::Clock;

#[derive(Debug, Default)]
struct Queue {
    ready: VecDeque<Weak<Qp>>,
    timers: Timers,
    idle: usize,
    stopping: bool,
}

/// What workers and adapters share.
#[derive(Debug)]
pub(crate) struct Engine {
    queue: Mutex<Queue>,
    wake: Condvar,
    clock: Arc<dyn Clock>,
    worker_budget: Budget,
}

impl Engine {
    pub(crate) fn new(clock: Arc<dyn Clock>, worker_budget: Budget) -> Self {
        Self { queue: Mutex::default(), wake: Condvar::new(), clock, worker_budget }
    }

    pub(crate) fn now(&self) -> Duration {
        self.clock.now()
    }

    /// Puts a QP on the ready queue unless it is there.
    pub(crate) fn kick(&self, qp: &Qp) {
        if qp.scheduled.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut queue = self.queue.lock();
        queue.ready.push_back(Weak::clone(&qp.me));
        if queue.idle > 0 {
            self.wake.notify_one();
        }
    }

    /// Has a QP run at `deadline`, in place of an older timer of it.
    pub(crate) fn arm(&self, qp: &Qp, deadline: Duration, old: Option<TimerKey>) -> TimerKey {
        let mut queue = self.queue.lock();
        if let Some(old) = old {
            queue.timers.remove(old);
        }
        let first = queue.timers.first().is_none_or(|first| deadline < first);
        let key = queue.timers.insert(deadline, Weak::clone(&qp.me));
        if first && queue.idle > 0 {
            self.wake.notify_one();
        }
        key
    }

    /// Takes a timer back: those of dead QPs would keep their memory until they fire, which may be hours.
    pub(crate) fn disarm(&self, key: TimerKey) {
        self.queue.lock().timers.remove(key);
    }

    /// The earliest deadline.
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        self.queue.lock().timers.first()
    }

    /// Runs one QP that is ready or due. `false` when there is none.
    pub(crate) fn run_one(&self) -> bool {
        let qp = Self::take(&mut self.queue.lock(), self.clock.now());
        if let Some(qp) = &qp {
            self.run(qp);
        }
        qp.is_some()
    }

    fn run(&self, qp: &Qp) {
        // Before the run: what is kicked from now on has to be seen again.
        qp.scheduled.store(false, Ordering::SeqCst);
        // What is left waits for its turn behind the others. Nobody is woken for it: this thread looks at the queue next,
        // and a long transfer stays on one processor while there is nothing else to do.
        if qp.drive(self.worker_budget) && !qp.scheduled.swap(true, Ordering::AcqRel) {
            self.queue.lock().ready.push_back(Weak::clone(&qp.me));
        }
    }

    /// Moves due timers to the ready queue and takes its first live QP. References are not dropped in here: the last one
    /// may end the engine, which needs the queue.
    fn take(queue: &mut Queue, now: Duration) -> Option<Arc<Qp>> {
        while let Some(qp) = queue.timers.pop_due(now) {
            queue.ready.push_back(qp);
        }
        std::iter::from_fn(|| queue.ready.pop_front()).find_map(|qp| qp.upgrade())
    }

    fn work(&self) {
        let mut queue = self.queue.lock();
        while !queue.stopping {
            let next = if queue.timers.first().is_none() && queue.ready.is_empty() {
                None
            } else {
                Self::take(&mut queue, self.clock.now())
            };
            if let Some(qp) = next {
                MutexGuard::unlocked(&mut queue, || {
                    self.run(&qp);
                    // It may be the last reference; what its drop does must not happen under the queue's lock.
                    drop(qp);
                });
                continue;
            }
            let deadline = queue.timers.first();
            queue.idle += 1;
            match deadline {
                None => self.wake.wait(&mut queue),
                Some(deadline) => {
                    let left = deadline.saturating_sub(self.clock.now());
                    let _ = self.wake.wait_for(&mut queue, left);
                }
            }
            queue.idle -= 1;
        }
    }
}

/// The worker threads. Dropping them ends them.
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
            let thread = thread::Builder::new().name(format!("rxe-{index}")).spawn(move || engine.work())?;
            workers.threads.push(thread);
        }
        Ok(workers)
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.engine.queue.lock().stopping = true;
        self.engine.wake.notify_all();
        for thread in self.threads.drain(..) {
            // A worker may hold the last reference to everything; it cannot wait for itself and ends on its own.
            if thread.thread().id() != thread::current().id() && thread.join().is_err() {
                log::error!("a worker thread of the adapter panicked");
            }
        }
    }
}
