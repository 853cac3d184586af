//! One ring in guest memory, for unit tests of code that uses rings.

use std::sync::Arc;

use pvrdma_pages::{PAGE_SIZE, PageList, PageListBuilder};
use pvrdma_pci_function::InterruptSink;

use super::{GuestMemory, Placement};
use crate::intr::Interrupts;

/// Pages of one object: ring state and elements.
pub(crate) struct RingMemory {
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) pages: Vec<u64>,
}

impl RingMemory {
    /// Allocates scattered, zeroed pages.
    pub(crate) fn new(pages: usize) -> Self {
        Self::in_memory(&GuestMemory::new(4 << 20), pages)
    }

    pub(crate) fn in_memory(memory: &Arc<GuestMemory>, pages: usize) -> Self {
        Self { memory: Arc::clone(memory), pages: memory.alloc(pages, Placement::Scattered) }
    }

    pub(crate) fn list(&self) -> PageList {
        let mut builder = PageListBuilder::default();
        for &page in &self.pages {
            builder.push(page).unwrap();
        }
        builder.finish()
    }

    /// Address of the ring state.
    pub(crate) fn state(&self) -> u64 {
        self.pages[0]
    }

    /// Address of the element that `index` names in a ring of `entries` elements of `stride` bytes.
    pub(crate) fn slot(&self, index: u32, entries: u32, stride: u32) -> u64 {
        let offset = u64::from(index % entries) * u64::from(stride);
        self.pages[1 + usize::try_from(offset / PAGE_SIZE).unwrap()] + offset % PAGE_SIZE
    }
}

/// Returns interrupts that pass everything on to `sink`.
pub(crate) fn open_interrupts(sink: Arc<dyn InterruptSink>) -> Arc<Interrupts> {
    let interrupts = Interrupts::new(sink, false);
    interrupts.set_bus_master(true);
    interrupts.set_msix(true);
    interrupts.set_mask(0);
    interrupts
}
