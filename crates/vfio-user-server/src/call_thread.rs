//! A thread of one device, for calls of the kernel whose duration the device's client chooses.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use pvrdma_base::threads::{self, ThreadKind};

/// How long [`CallThread::cancel`] waits for a call that has begun. Without asynchronous operations the client may
/// make a call last for ever, and its connection ends all the same.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long the thread stays without a request. Slow signals are rare, and an idle device needs no thread for them.
const IDLE: Duration = Duration::from_secs(1);

/// An interrupt to deliver.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Cause {
    /// The eventfd of an MSI-X vector.
    Vector(u16),
    /// The eventfd of the legacy line.
    Line,
}

/// Makes calls one after the other, for threads that must not wait for them. The thread starts with a request and ends
/// after [`IDLE`] without one, with [`Self::cancel`], or when this is dropped. Several requests of one cause are one
/// call.
///
/// The thread is never joined: a call may last as long as the client likes, and only this device waits for it.
pub(super) struct CallThread {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Queue {
    due: BTreeSet<Cause>,
    /// The thread is there, or about to be.
    running: bool,
    /// It ends when nothing is due.
    ending: bool,
}

struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
    /// Held by the thread during a call.
    busy: Mutex<()>,
    call: Box<dyn Fn(Cause) + Send + Sync>,
}

impl fmt::Debug for CallThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallThread").field("queue", &self.shared.queue).finish_non_exhaustive()
    }
}

impl CallThread {
    /// Makes its calls by `call`. No thread is started yet.
    pub(super) fn new(call: impl Fn(Cause) + Send + Sync + 'static) -> Self {
        let shared =
            Shared { queue: Mutex::default(), changed: Condvar::new(), busy: Mutex::default(), call: Box::new(call) };
        Self { shared: Arc::new(shared) }
    }

    /// Leaves a call to the thread. Returns `false` if the system has no room for a thread.
    pub(super) fn request(&self, cause: Cause) -> bool {
        let mut queue = self.shared.queue.lock();
        queue.due.insert(cause);
        queue.ending = false;
        let running = std::mem::replace(&mut queue.running, true);
        drop(queue);
        if running {
            self.shared.changed.notify_one();
            return true;
        }
        let shared = Arc::clone(&self.shared);
        let started = threads::spawn(ThreadKind::Interrupts, "interrupts", move || shared.run());
        if started.is_err() {
            // The next request tries again.
            *self.shared.queue.lock() = Queue::default();
        }
        started.is_ok()
    }

    /// Drops all requests, ends the thread, and waits for a call that has begun, but no longer than [`PATIENCE`].
    /// The caller has made sure that calls that begin from now on do nothing.
    pub(super) fn cancel(&self) {
        self.end();
        drop(self.shared.busy.try_lock_for(PATIENCE));
    }

    /// Waits for a call that has begun.
    #[cfg(test)]
    pub(super) fn settle(&self) {
        drop(self.shared.busy.lock());
    }

    fn end(&self) {
        let mut queue = self.shared.queue.lock();
        queue.due.clear();
        queue.ending = true;
        drop(queue);
        self.shared.changed.notify_one();
    }
}

impl Drop for CallThread {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    fn run(&self) {
        while let Some(due) = self.next() {
            for cause in due {
                let _busy = self.busy.lock();
                (self.call)(cause);
            }
        }
    }

    /// Waits for requests and takes them all, so that no cause keeps another waiting. `None`: the thread is to end.
    fn next(&self) -> Option<BTreeSet<Cause>> {
        let mut queue = self.queue.lock();
        let mut idle = false;
        loop {
            if !queue.due.is_empty() {
                return Some(std::mem::take(&mut queue.due));
            }
            // A request that comes from here on finds no thread running and starts the next one.
            if queue.ending || idle {
                *queue = Queue::default();
                return None;
            }
            idle = self.changed.wait_for(&mut queue, IDLE).timed_out();
        }
    }
}
