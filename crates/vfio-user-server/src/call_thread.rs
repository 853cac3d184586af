//! Thread of one device for system calls whose duration the device's client determines.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use pvrdma_base::threads::{self, ThreadKind};

/// Time for which [`CallThread::cancel`] waits for a call in progress. Without asynchronous operations, the client can
/// make a call last forever; its connection ends nevertheless.
const PATIENCE: Duration = Duration::from_secs(1);

/// Time after which an idle thread ends. Slow signals are rare, and an idle device needs no thread for them.
const IDLE: Duration = Duration::from_secs(1);

/// Interrupt to deliver.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Cause {
    /// Eventfd of an MSI-X vector.
    Vector(u16),
    /// Eventfd of the legacy line.
    Line,
}

/// Makes calls one after the other, for threads that must not wait for them. The thread starts with a request. It ends
/// after [`IDLE`] without one, with [`Self::cancel`], or when this is dropped. Pending requests with the same cause are
/// merged into one call.
///
/// The thread is never joined: the client determines how long a call lasts, and only this device may wait for it.
pub(super) struct CallThread {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Queue {
    due: BTreeSet<Cause>,
    /// The thread runs or is about to start.
    running: bool,
    /// The thread ends once no request is pending.
    ending: bool,
    /// The thread has taken requests whose calls are not all made.
    calling: bool,
}

struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
    /// Notified when the thread has made all calls that it has taken.
    called: Condvar,
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
    /// Creates a handle whose thread executes `call`. No thread is started yet.
    pub(super) fn new(call: impl Fn(Cause) + Send + Sync + 'static) -> Self {
        let (changed, called) = (Condvar::new(), Condvar::new());
        let shared = Shared { queue: Mutex::default(), changed, called, busy: Mutex::default(), call: Box::new(call) };
        Self { shared: Arc::new(shared) }
    }

    /// Queues a call for the thread. Returns `false` if the system cannot start a thread.
    pub(super) fn request(&self, cause: Cause) -> bool {
        let mut queue = self.shared.queue.lock();
        queue.due.insert(cause);
        queue.ending = false;
        if queue.running {
            drop(queue);
            self.shared.changed.notify_one();
            return true;
        }
        // The queue stays locked meanwhile: a call that another thread queues for a thread that does not start would be
        // lost.
        let shared = Arc::clone(&self.shared);
        let started = threads::spawn(ThreadKind::Interrupts, "interrupts", move || shared.run());
        queue.running = started.is_ok();
        if !queue.running {
            // The next request tries again.
            *queue = Queue::default();
        }
        queue.running
    }

    /// Drops all requests, ends the thread, and waits for a call in progress for at most [`PATIENCE`]. The caller has
    /// ensured that calls that start from now on do nothing.
    pub(super) fn cancel(&self) {
        self.end();
        drop(self.shared.busy.try_lock_for(PATIENCE));
    }

    /// Waits until all requests so far have led to their calls, for at most `patience`. Returns `false` if they
    /// have not.
    pub(super) fn drain(&self, patience: Duration) -> bool {
        let mut queue = self.shared.queue.lock();
        let is_pending = |queue: &mut Queue| queue.calling || !queue.due.is_empty();
        !self.shared.called.wait_while_for(&mut queue, is_pending, patience).timed_out()
    }

    /// Waits for a call in progress.
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

    /// Waits for requests and takes them all, so that no cause starves another. Returns `None` if the thread is to end.
    fn next(&self) -> Option<BTreeSet<Cause>> {
        let mut queue = self.queue.lock();
        let mut idle = false;
        if std::mem::replace(&mut queue.calling, false) {
            self.called.notify_all();
        }
        loop {
            if !queue.due.is_empty() {
                queue.calling = true;
                return Some(std::mem::take(&mut queue.due));
            }
            // `running` is cleared under the lock, so that a later request starts a new thread.
            if queue.ending || idle {
                *queue = Queue::default();
                return None;
            }
            idle = self.changed.wait_for(&mut queue, IDLE).timed_out();
        }
    }
}
