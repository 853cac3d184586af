//! The thread of a device whose memory is slow.
//!
//! An access to slow memory can block for as long as its owner likes ([`pvrdma_guest_memory::Stall`]). While the memory
//! of a device is slow, the workers, which serve other devices too, leave the tasks of the device to this thread. A
//! requester of another device gives it the part of each request that accesses the slow memory, and holds no lock until
//! that part is done.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use parking_lot::Mutex;
use pvrdma_base::threads::{self, ThreadKind};

/// Maximum number of datagrams that wait for the thread. Further ones are lost.
const MAX_DATAGRAMS: usize = 256;

/// Work for the thread.
type Job = Box<dyn FnOnce() + Send>;

/// Jobs of all devices of an engine without threads, whose caller runs them.
pub(crate) struct Threadless(Option<Mutex<VecDeque<Job>>>);

impl fmt::Debug for Threadless {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Threadless").field(&self.0.is_some()).finish()
    }
}

impl Threadless {
    /// `threaded`: the engine has threads, and so have its devices.
    pub(crate) fn new(threaded: bool) -> Self {
        Self((!threaded).then(Mutex::default))
    }

    /// Runs the next job. Returns `false` if there is none.
    pub(crate) fn run_one(&self) -> bool {
        let job = self.0.as_ref().and_then(|jobs| jobs.lock().pop_front());
        job.is_some_and(|job| {
            job();
            true
        })
    }
}

/// Handle of the thread, which starts with the first job and ends when this is dropped. It is never joined: the owner
/// of the memory determines how long a job lasts, and only this device may wait for it.
#[derive(Debug, Default)]
pub(crate) struct OwnThread {
    jobs: Mutex<Option<Sender<Job>>>,
    /// Cloned for each datagram that waits.
    datagrams: Arc<()>,
}

impl OwnThread {
    /// Queues a job. Returns `false`, and drops the job, if the system cannot start the thread.
    pub(crate) fn give(&self, threadless: &Threadless, job: impl FnOnce() + Send + 'static) -> bool {
        if let Some(jobs) = &threadless.0 {
            jobs.lock().push_back(Box::new(job));
            return true;
        }
        let mut jobs = self.jobs.lock();
        if jobs.is_none() {
            let (sender, received) = channel::<Job>();
            let work = move || received.into_iter().for_each(|job| job());
            *jobs = threads::spawn(ThreadKind::Engine, "rxe-own", work).is_ok().then_some(sender);
        }
        jobs.as_ref().is_some_and(|jobs| jobs.send(Box::new(job)).is_ok())
    }

    /// Queues the delivery of a datagram. Returns `false` if the datagram is lost.
    pub(crate) fn give_datagram(&self, threadless: &Threadless, deliver: impl FnOnce() + Send + 'static) -> bool {
        let waits = Arc::clone(&self.datagrams);
        // The handle itself and this clone count, too.
        Arc::strong_count(&waits) <= MAX_DATAGRAMS + 1
            && self.give(threadless, move || {
                deliver();
                drop(waits);
            })
    }
}
