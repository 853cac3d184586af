//! State of a device's pages in the kernel.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use log::error;
use pvrdma_base::threads::{self, ThreadKind};
use pvrdma_handover::{PresentPages, Taken};

use super::fuse::{Connection, Notifier, REQUEST, Served};

/// Pages of a device. They are served as long as a process has them mapped, even after the device has ended.
#[derive(Debug)]
pub(super) struct Pages {
    notifier: Notifier,
    flags: PresentPages,
    /// Time of the last touch, in nanoseconds after `start`.
    last: AtomicU64,
    start: Instant,
}

impl Pages {
    /// Serves `count` pages of a file on a thread, until the file is no longer open or mapped anywhere. `told` is
    /// called for each touch, before the touching processor continues.
    ///
    /// # Errors
    /// No thread or descriptor is available.
    pub(super) fn serve(
        name: &str,
        device: OwnedFd,
        count: u32,
        start: Instant,
        told: impl Fn() + Send + 'static,
    ) -> io::Result<Arc<Self>> {
        let notifier = Notifier::of(&device)?;
        let pages = Arc::new(Self { notifier, flags: PresentPages::new(count), last: AtomicU64::new(0), start });
        let (served, name) = (Arc::clone(&pages), name.to_owned());
        threads::spawn(ThreadKind::DoorbellPages, format!("{name} pages"), move || {
            let connection = Connection::new(device, count);
            let mut buffer = vec![0; REQUEST];
            loop {
                // No lock is taken in here: a virtual processor of the guest waits for the reply, and its VMM may hold
                // a lock of its own meanwhile.
                let touched = |page| {
                    served.mark(page);
                    told();
                };
                match connection.serve(&mut buffer, touched) {
                    Ok(Served::Open | Served::Other) => {}
                    Ok(Served::Ended) => break,
                    Err(problem) => {
                        // Log: the last message of this thread.
                        error!("{name}: doorbell pages: {problem}");
                        break;
                    }
                }
            }
        })?;
        Ok(pages)
    }

    /// Marks a page before its touch is answered.
    fn mark(&self, page: u32) {
        let now = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.last.store(now, Ordering::SeqCst);
        self.flags.mark(page);
    }

    /// Returns the flags of present and touched pages.
    pub(super) const fn flags(&self) -> &PresentPages {
        &self.flags
    }

    /// Returns the time of the last touch.
    pub(super) fn last(&self) -> u64 {
        self.last.load(Ordering::SeqCst)
    }

    /// Takes a page away: stored values are discarded, and the next store to it causes a request.
    ///
    /// # Errors
    /// The kernel failed: the page may still be present.
    pub(super) fn take_away(&self, page: u32) -> io::Result<()> {
        self.flags.take_away(page, || self.notifier.invalidate(page))
    }

    /// Takes all present pages away.
    pub(super) fn take_all(&self) -> Taken {
        self.flags.take_all(|page| self.notifier.invalidate(page))
    }
}
