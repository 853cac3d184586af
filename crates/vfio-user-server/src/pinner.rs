//! Locks guest memory in the background.
//!
//! Populating the memory of a large guest takes seconds, and a client must not wait that long for the reply to a
//! DMA_MAP.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use log::error;
use pvrdma_base::threads::{self, ThreadKind};
use pvrdma_guest_memory::{DmaSpace, PinError, PinRefusal};
use rustix::process::{Resource, getrlimit};

/// Thread that locks and populates mapped memory, and sleeps when there is nothing to do.
#[derive(Debug)]
pub(crate) struct Pinner {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Pinner {
    /// Starts with the memory that is mapped already. `failed` is called for memory that cannot be locked or populated.
    ///
    /// # Errors
    /// The system cannot start another thread.
    pub(crate) fn start(space: Arc<DmaSpace>, failed: impl Fn(&PinError) + Send + 'static) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = threads::spawn(ThreadKind::Pin, "pin", move || {
            while !stopped.load(Ordering::Acquire) {
                // A wake-up between `pin_step` and `park` is not lost, because `park` then returns at once.
                if !space.pin_step() {
                    if let Err(error) = space.pin_error() {
                        failed(&error);
                    }
                    thread::park();
                }
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// Wakes the thread after memory was mapped.
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

/// Describes why guest memory could not be locked. Names the limit to raise if a limit of the process is the reason.
pub fn pin_advice(error: &PinError) -> String {
    // Root has no limit, but the threads of a worker cannot query the user that they run as.
    advice_of(error, getrlimit(Resource::Memlock).maximum)
}

fn advice_of(error: &PinError, limit: Option<u64>) -> String {
    match error.reason {
        PinRefusal::Kernel(_) if limit.is_some() => {
            format!("{error}: raise it (systemd: LimitMEMLOCK=) or use pin=registered")
        }
        PinRefusal::Kernel(_) | PinRefusal::Device(_) => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_cannot_be_locked() {
        let error = |reason| PinError { needed: 64 << 20, locked: 0, limit: "8 KiB".to_owned(), reason };
        let kernel = error(PinRefusal::Kernel("Cannot allocate memory (os error 12)".to_owned()));
        let said = "cannot keep 67108864 bytes of guest memory resident: Cannot allocate memory (os error 12); 0 bytes \
                    are locked already, RLIMIT_MEMLOCK is 8 KiB";
        let cure = ": raise it (systemd: LimitMEMLOCK=) or use pin=registered";
        assert_eq!(advice_of(&kernel, Some(8192)), format!("{said}{cure}"));
        assert_eq!(advice_of(&kernel, None), said);
        let own = error(PinRefusal::Device("the device's limit of locked memory is 4096 bytes".to_owned()));
        assert_eq!(advice_of(&own, Some(8192)), own.to_string());
    }
}
