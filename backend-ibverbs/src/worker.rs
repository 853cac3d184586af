//! Threads that block until an event or a request to end.

use std::io;
use std::os::fd::OwnedFd;
use std::thread::{self, JoinHandle, ThreadId};

use pvrdma_base::threads::{self, ThreadKind};
use rustix::event::{EventfdFlags, PollFd};
use rustix::io::Errno;

/// A thread that is told to end when this value is dropped.
#[derive(Debug)]
pub(crate) struct Worker {
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
    id: ThreadId,
}

impl Worker {
    /// Starts the thread. `run` must return once the file that is passed to it is readable.
    pub(crate) fn start(kind: ThreadKind, name: &str, run: impl FnOnce(&OwnedFd) + Send + 'static) -> io::Result<Self> {
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        let stopped = stop.try_clone()?;
        let thread = threads::spawn(kind, name, move || run(&stopped))?;
        let id = thread.thread().id();
        Ok(Self { stop, thread: Some(thread), id })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if rustix::io::write(&self.stop, &1_u64.to_ne_bytes()).is_ok()
            && self.id != thread::current().id()
            && let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            // Log: the last of this thread.
            log::error!("a thread of the host's adapter panicked");
        }
    }
}

/// Waits until one of these files is ready.
pub(crate) fn wait(files: &mut [PollFd<'_>]) -> io::Result<()> {
    loop {
        match rustix::event::poll(files, None) {
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
            Ok(_) => return Ok(()),
        }
    }
}
