//! Locks guest memory while the VMM goes on.
//!
//! Populating memory takes seconds for a large guest, and a client may not wait for so long for the answer to a
//! DMA_MAP.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use log::error;
use pvrdma_guest_memory::{DmaSpace, PinError};
use pvrdma_verbs::threads::{self, ThreadKind};

/// A thread that locks and populates what was mapped, and sleeps when there is nothing to do.
#[derive(Debug)]
pub(crate) struct Pinner {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Pinner {
    /// Starts with what is mapped already. `failed` hears of memory that could not be locked or populated.
    ///
    /// # Errors
    /// The system has no room for another thread.
    pub(crate) fn start(space: Arc<DmaSpace>, failed: impl Fn(&PinError) + Send + 'static) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = threads::spawn(ThreadKind::Pin, "pin", move || {
            while !stopped.load(Ordering::Acquire) {
                // A wake-up in between is not lost: the next `park` returns at once.
                if !space.pin_some() {
                    if let Err(error) = space.pin_failure() {
                        failed(&error);
                    }
                    thread::park();
                }
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// There is more.
    pub(crate) fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }
}

impl Drop for Pinner {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            // Log: the last of this thread.
            error!("the pinning thread panicked");
        }
    }
}
