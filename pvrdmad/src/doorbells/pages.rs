//! The pages of a device, as the kernel has them.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use log::error;
use pvrdma_handover::{PresentPages, Taken};
use pvrdma_verbs::threads::{self, ThreadKind};

use super::fuse::{Connection, Notifier, REQUEST, Served};

/// The pages of a device. They are served as long as somebody has them mapped, also when the device has ended.
#[derive(Debug)]
pub(super) struct Pages {
    notifier: Notifier,
    flags: PresentPages,
    /// When the last touch was, in nanoseconds after `start`.
    last: AtomicU64,
    start: Instant,
}

impl Pages {
    /// Serves `count` pages of a file on a thread, until nobody has the file open or mapped. `told` is called for each
    /// touch, before whoever touched goes on.
    ///
    /// # Errors
    /// There is no room for a thread or a descriptor.
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
                // No lock is taken in here: a processor of the guest, perhaps with a lock of its VMM's, waits for it.
                let touched = |page| {
                    served.mark(page);
                    told();
                };
                match connection.serve(&mut buffer, touched) {
                    Ok(Served::Open | Served::Other) => {}
                    Ok(Served::Ended) => break,
                    Err(problem) => {
                        // Log: the last of this thread.
                        error!("{name}: doorbell pages: {problem}");
                        break;
                    }
                }
            }
        })?;
        Ok(pages)
    }

    /// Marks a page before the touch of it is answered.
    fn mark(&self, page: u32) {
        let now = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.last.store(now, Ordering::SeqCst);
        self.flags.mark(page);
    }

    /// Which are present, and which were touched.
    pub(super) const fn flags(&self) -> &PresentPages {
        &self.flags
    }

    /// When the last touch was.
    pub(super) fn last(&self) -> u64 {
        self.last.load(Ordering::SeqCst)
    }

    /// Takes a page away: what was stored is gone, and the next store to it is a touch.
    ///
    /// # Errors
    /// The kernel could not: the page may be there still.
    pub(super) fn take_away(&self, page: u32) -> io::Result<()> {
        self.flags.take_away(page, || self.notifier.invalidate(page))
    }

    /// Takes all present pages away.
    pub(super) fn take_all(&self) -> Taken {
        self.flags.take_all(|page| self.notifier.invalidate(page))
    }
}
