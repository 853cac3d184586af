//! The pages of a device: which are present, and which were touched.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use log::error;
use parking_lot::Mutex;
use pvrdma_verbs::threads::{self, ThreadKind};

use super::fuse::{Connection, Notifier, REQUEST, Served};

/// The pages of a device. They are served as long as somebody has them mapped, also when the device has ended.
#[derive(Debug)]
pub(super) struct Pages {
    notifier: Notifier,
    pages: Box<[Page]>,
    /// Held while pages are taken away: whoever finds one that is away can rely on it. Never by who serves them.
    taking: Mutex<()>,
    /// Touches so far. Counted after the page is marked.
    events: AtomicU64,
    /// When the last touch was, in nanoseconds after `start`.
    last: AtomicU64,
    start: Instant,
}

#[derive(Debug, Default)]
struct Page {
    /// Stores to it are silent, or about to be.
    present: AtomicBool,
    /// It became present since somebody asked.
    touched: AtomicBool,
}

/// What became of pages that were to be taken away.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Taken {
    /// They are away.
    pub(super) pages: u64,
    /// They may be there still.
    pub(super) failed: u64,
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
        let pages = (0..count).map(|_| Page::default()).collect();
        let pages = Arc::new(Self {
            notifier,
            pages,
            taking: Mutex::new(()),
            events: AtomicU64::new(0),
            last: AtomicU64::new(0),
            start,
        });
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
        if let Some(page) = self.page(page) {
            let now = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.last.store(now, Ordering::SeqCst);
            page.present.store(true, Ordering::SeqCst);
            page.touched.store(true, Ordering::SeqCst);
            self.events.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn page(&self, page: u32) -> Option<&Page> {
        self.pages.get(usize::try_from(page).ok()?)
    }

    /// Touches so far.
    pub(super) fn events(&self) -> u64 {
        self.events.load(Ordering::SeqCst)
    }

    /// When the last touch was.
    pub(super) fn last(&self) -> u64 {
        self.last.load(Ordering::SeqCst)
    }

    /// Calls `f` with each page that was touched since the last time.
    pub(super) fn take_touched(&self, mut f: impl FnMut(u32)) {
        for (number, page) in (0..).zip(&self.pages) {
            if page.touched.load(Ordering::SeqCst) && page.touched.swap(false, Ordering::SeqCst) {
                f(number);
            }
        }
    }

    /// Calls `f` with each page that is present.
    pub(super) fn for_present(&self, mut f: impl FnMut(u32)) {
        for (number, page) in (0..).zip(&self.pages) {
            if page.present.load(Ordering::SeqCst) {
                f(number);
            }
        }
    }

    /// Takes a page away: what was stored is gone, and the next store to it is a touch.
    ///
    /// # Errors
    /// The kernel could not: the page may be there still.
    pub(super) fn take_away(&self, page: u32) -> io::Result<()> {
        let _taking = self.taking.lock();
        self.take(page)
    }

    /// [`Self::take_away`], by who holds `taking`.
    fn take(&self, page: u32) -> io::Result<()> {
        let state = self.page(page).ok_or(io::ErrorKind::InvalidInput)?;
        // Cleared first: a touch that races sets it again.
        state.present.store(false, Ordering::SeqCst);
        self.notifier.invalidate(page).inspect_err(|_| {
            // Stores may be silent for good. Whoever asks next is to count on that.
            state.present.store(true, Ordering::SeqCst);
            state.touched.store(true, Ordering::SeqCst);
            self.events.fetch_add(1, Ordering::SeqCst);
        })
    }

    /// Takes all present pages away.
    pub(super) fn take_all(&self) -> Taken {
        let mut taken = Taken::default();
        let _taking = self.taking.lock();
        self.for_present(|page| match self.take(page) {
            Ok(()) => taken.pages = taken.pages.saturating_add(1),
            Err(_) => taken.failed = taken.failed.saturating_add(1),
        });
        taken
    }
}
