//! Doorbell pages that are memory, without a kernel that maps them.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use pvrdma_pci_function::{Bar, Deferred, MsixPlace, PciFunction};
use pvrdma_verbs::Hca;

use crate::device::PvrdmaDevice;
use crate::watcher::{Depth, DoorbellWatcher, MappedDoorbells, Outcome};

/// A function whose doorbell pages, except for the first, are memory: a store to a present page is silent, and a store
/// to another page is noticed once. Rings are looked at only by [`MappedPages::pass`] and [`MappedPages::idle`]. Time
/// advances only by [`MappedPages::advance`].
pub struct MappedPages {
    function: Arc<dyn PciFunction>,
    device: Arc<dyn MappedDoorbells>,
    pages: Arc<Pages>,
}

/// State of the watcher of a [`MappedPages`].
#[derive(Debug, Default)]
struct Pages {
    present: Mutex<BTreeSet<u32>>,
    touched: Mutex<Vec<u32>>,
    faults: AtomicU64,
    arms: AtomicU64,
    wakes: AtomicU64,
    now: AtomicU64,
}

impl fmt::Debug for MappedPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MappedPages").field("pages", &self.pages).finish_non_exhaustive()
    }
}

impl DoorbellWatcher for Pages {
    fn now(&self) -> u64 {
        self.now.load(Ordering::SeqCst)
    }

    fn wake(&self) {
        self.wakes.fetch_add(1, Ordering::SeqCst);
    }

    fn renew(&self, page: u32) {
        self.present.lock().remove(&page);
        self.touched.lock().retain(|&touched| touched != page);
    }
}

impl MappedPages {
    /// Makes the doorbell pages of a device memory.
    pub fn new<H: Hca + 'static>(device: &Arc<PvrdmaDevice<H>>) -> Arc<Self> {
        let pages = Arc::new(Pages::default());
        assert!(device.set_doorbell_watcher(Arc::<Pages>::clone(&pages)), "the pages have a watcher already");
        Arc::new(Self {
            function: Arc::<PvrdmaDevice<H>>::clone(device),
            device: Arc::<PvrdmaDevice<H>>::clone(device),
            pages,
        })
    }

    /// Makes the doorbell pages of a device memory that takes the place of another one's, which any page may have been
    /// present in.
    pub fn following<H: Hca + 'static>(device: &Arc<PvrdmaDevice<H>>, previous: &Self) -> Arc<Self> {
        let pages = Self::new(device);
        pages.advance(previous.now());
        if previous.faults() > 0 {
            pages.pages.present.lock().extend(pages.window());
            pages.pages.touched.lock().extend(pages.window());
        }
        pages
    }

    /// Advances the time.
    pub fn advance(&self, nanoseconds: u64) {
        self.pages.now.fetch_add(nanoseconds, Ordering::SeqCst);
    }

    /// Returns the time.
    pub fn now(&self) -> u64 {
        self.pages.now()
    }

    /// Does the pass of a watcher that is awake.
    pub fn pass(&self) -> Outcome {
        self.poll(Depth::Hot)
    }

    /// Does the pass of a watcher before it rests because nothing is posted.
    pub fn rest(&self) -> Outcome {
        self.poll(Depth::Rest)
    }

    /// Prepares for sleep like a watcher: revokes the pages and looks at all rings once more.
    pub fn idle(&self) -> Outcome {
        let present = std::mem::take(&mut *self.pages.present.lock());
        self.pages.arms.fetch_add(present.len() as u64, Ordering::SeqCst);
        self.poll(Depth::All)
    }

    fn poll(&self, depth: Depth) -> Outcome {
        let touched = std::mem::take(&mut *self.pages.touched.lock());
        for page in touched {
            self.device.page_touched(page);
        }
        self.device.poll_doorbells(self.pages.now(), depth)
    }

    /// Returns the number of stores that were noticed.
    pub fn faults(&self) -> u64 {
        self.pages.faults.load(Ordering::SeqCst)
    }

    /// Returns the number of pages that were revoked.
    pub fn arms(&self) -> u64 {
        self.pages.arms.load(Ordering::SeqCst)
    }

    /// Returns how often a sleeping watcher was woken for a look.
    pub fn wakes(&self) -> u64 {
        self.pages.wakes.load(Ordering::SeqCst)
    }

    /// Returns the pages that the device allows to be memory.
    pub fn window(&self) -> Range<u32> {
        self.device.doorbell_pages()
    }
}

impl PciFunction for MappedPages {
    fn bars(&self) -> [Option<Bar>; 6] {
        self.function.bars()
    }

    fn config_size(&self) -> usize {
        self.function.config_size()
    }

    fn config_read(&self, offset: usize, data: &mut [u8]) {
        self.function.config_read(offset, data);
    }

    fn config_write(&self, offset: usize, data: &[u8]) {
        self.function.config_write(offset, data);
    }

    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]) {
        self.function.bar_read(bar, offset, data);
    }

    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]) -> Deferred {
        let page = (offset / 4096) as u32;
        if bar != 2 || !self.device.doorbell_pages().contains(&page) {
            return self.function.bar_write(bar, offset, data);
        }
        if self.pages.present.lock().insert(page) {
            self.pages.faults.fetch_add(1, Ordering::SeqCst);
            self.pages.touched.lock().push(page);
        }
        Deferred::Pending
    }

    fn run_deferred(&self) {
        self.function.run_deferred();
    }

    fn msix(&self) -> Option<MsixPlace> {
        self.function.msix()
    }

    fn reset(&self) {
        self.function.reset();
    }
}
