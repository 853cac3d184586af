//! Creates address handles on a thread of its own.
//!
//! The host's kernel resolves the address of a peer before it returns a handle, which takes seconds if there is no
//! answer. The thread that serves the guest must not wait for that.

use std::io;
use std::sync::mpsc::{SyncSender, sync_channel};

use pvrdma_base::threads::{self, ThreadKind};

/// Maximum number of waiting look-ups. Queue pairs that are created and destroyed may leave some behind.
const MOST: usize = 1024;

/// One look-up.
type Job = Box<dyn FnOnce() + Send>;

/// Thread of a device that looks peers up, one after the other. It ends some time after this value is dropped.
#[derive(Debug)]
pub(crate) struct Resolver(SyncSender<Job>);

impl Resolver {
    /// Starts the thread.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn start(device: &str) -> io::Result<Self> {
        let (sender, jobs) = sync_channel::<Job>(MOST);
        threads::spawn(ThreadKind::HostManagement, format!("resolve-{device}"), move || {
            for job in jobs {
                job();
            }
        })?;
        Ok(Self(sender))
    }

    /// Queues a look-up. Returns `false` if too many are waiting.
    pub(crate) fn ask(&self, job: impl FnOnce() + Send + 'static) -> bool {
        self.0.try_send(Box::new(job)).is_ok()
    }
}
