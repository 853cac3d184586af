//! Interface of the device for the owner of its doorbell pages.

use std::ops::Range;
use std::sync::Arc;

use pvrdma_verbs::Hca;

use crate::datapath::infer;
use crate::device::PvrdmaDevice;
use crate::watcher::{Depth, DoorbellWatcher, MappedDoorbells, Outcome};

impl<H: Hca> PvrdmaDevice<H> {
    /// Sets the watcher of the rings of processes whose doorbell page is memory. Call it once, before a state is
    /// restored and before the guest runs.
    ///
    /// Returns `true` if there was none before.
    pub fn set_doorbell_watcher(&self, watcher: Arc<dyn DoorbellWatcher>) -> bool {
        self.core().set_watcher(watcher)
    }
}

impl<H: Hca> MappedDoorbells for PvrdmaDevice<H> {
    fn doorbell_pages(&self) -> Range<u32> {
        1..self.core().limits().max_uar
    }

    fn page_touched(&self, page: u32) {
        self.core().watch_page(page, infer::SHORTEST);
    }

    fn page_mapped(&self, page: u32) -> bool {
        self.core().watch_page(page, infer::POLLED)
    }

    fn pages_trapped(&self, pages: &[u32], now: u64) {
        self.core().unwatch_pages(pages, now);
    }

    fn poll_doorbells(&self, now: u64, depth: Depth) -> Outcome {
        self.core().poll_doorbells(now, depth)
    }
}
