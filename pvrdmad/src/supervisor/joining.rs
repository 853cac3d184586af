//! Threads of the supervisor that are joined with a timeout.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use log::error;
use parking_lot::Mutex;
use pvrdma_base::threads::{self, ThreadKind};

/// Thread with a bounded join.
#[derive(Debug)]
pub(super) struct Joinable {
    name: String,
    thread: JoinHandle<()>,
    /// Disconnected when the thread ends.
    end: Mutex<Receiver<()>>,
}

impl Joinable {
    /// Starts a thread.
    ///
    /// # Errors
    /// The system cannot start another thread.
    pub(super) fn spawn(name: String, run: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let (ended, end) = sync_channel::<()>(0);
        let thread = threads::spawn(ThreadKind::Supervisor, name.clone(), move || {
            let _ended = ended;
            run();
        })?;
        Ok(Self { name, thread, end: Mutex::new(end) })
    }

    /// Waits for the end of the thread. After the timeout the thread continues detached, which is logged.
    pub(super) fn join_within(self, patience: Duration) {
        if self.end.into_inner().recv_timeout(patience) != Err(RecvTimeoutError::Disconnected) {
            // Log: the last of this thread.
            error!("the thread '{}' has not ended for {} s", self.name, patience.as_secs());
            return;
        }
        if self.thread.join().is_err() {
            // Log: the last of this thread.
            error!("the thread '{}' panicked", self.name);
        }
    }
}
