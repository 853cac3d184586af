//! Makes address handles on a thread of its own.
//!
//! The host's kernel looks a peer up before it gives a handle for it, which takes seconds if nobody answers. Whoever
//! waits for that must not be the thread that serves the guest.

use std::io;
use std::sync::mpsc::{SyncSender, sync_channel};

use pvrdma_verbs::threads::{self, ThreadKind};

/// Look-ups that wait at most. Queue pairs that come and go may leave some behind.
const MOST: usize = 1024;

/// One look-up.
type Job = Box<dyn FnOnce() + Send>;

/// The thread of a device that looks peers up, one after the other. It ends some time after this is dropped.
#[derive(Debug)]
pub(crate) struct Resolver(SyncSender<Job>);

impl Resolver {
    /// Starts it.
    ///
    /// # Errors
    /// There is no thread.
    pub(crate) fn start(device: &str) -> io::Result<Self> {
        let (sender, jobs) = sync_channel::<Job>(MOST);
        threads::spawn(ThreadKind::HostManagement, format!("resolve-{device}"), move || {
            for job in jobs {
                job();
            }
        })?;
        Ok(Self(sender))
    }

    /// Has a look-up done. Returns `false` if too many wait already.
    pub(crate) fn ask(&self, job: impl FnOnce() + Send + 'static) -> bool {
        self.0.try_send(Box::new(job)).is_ok()
    }
}
