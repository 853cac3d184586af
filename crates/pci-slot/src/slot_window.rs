//! Doorbell pages that are temporarily memory, wherever the guest has placed their BAR.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::sync::Arc;

use log::warn;
use parking_lot::Mutex;
use pvrdma_pci_function::{DOORBELL_PAGE_SIZE, DoorbellPages, DoorbellWindow};

/// Maps pages of its own into the guest's memory space: KVM's memory slots.
pub trait PageMapper: Send + Sync {
    /// Maps its page number `page` at this guest address. It is mapped nowhere else then.
    ///
    /// # Errors
    /// There is no such page, or the system refuses: the address is in use, or there are too many mappings. The page is
    /// not mapped then.
    fn map(&self, page: u32, address: u64) -> io::Result<()>;

    /// Unmaps the page if it is mapped. When this returns, the guest cannot reach it any more, and it is all zeros.
    ///
    /// # Errors
    /// The system refuses. The page stays mapped.
    fn unmap(&self, page: u32) -> io::Result<()>;
}

/// Doorbell pages of one function, see [`Slot::doorbell_window`](crate::Slot::doorbell_window).
pub struct SlotWindow {
    mapper: Arc<dyn PageMapper>,
    pages: DoorbellPages,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Address of the BAR, while it is decoded.
    base: Option<u64>,
    mapped: BTreeSet<u32>,
    /// A page that could not be unmapped was logged already.
    complained: bool,
}

impl fmt::Debug for SlotWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotWindow").field("pages", &self.pages).field("state", &self.state).finish_non_exhaustive()
    }
}

impl SlotWindow {
    pub(crate) fn new(mapper: Arc<dyn PageMapper>, pages: DoorbellPages) -> Self {
        Self { mapper, pages, state: Mutex::default() }
    }

    /// BAR of the pages.
    pub(crate) const fn bar(&self) -> usize {
        self.pages.bar
    }

    /// Sets the address at which the BAR is decoded; `None` if it is not. Pages that are memory trap again, because the
    /// processor that moves the BAR expects the old address range to be free.
    pub(crate) fn follow(&self, base: Option<u64>) {
        let mut state = self.state.lock();
        if state.base == base {
            return;
        }
        let State { mapped, complained, .. } = &mut *state;
        mapped.retain(|&page| match self.mapper.unmap(page) {
            Ok(()) => false,
            Err(error) => {
                if !std::mem::replace(complained, true) {
                    // Log: once for a function.
                    warn!("doorbell page {page} stays where its BAR was: {error}");
                }
                true
            }
        });
        state.base = base;
    }
}

impl DoorbellWindow for SlotWindow {
    fn map(&self, page: u32) -> io::Result<()> {
        let mut state = self.state.lock();
        if state.mapped.contains(&page) {
            return Ok(());
        }
        let base = state.base.ok_or_else(|| io::Error::other("the BAR answers nowhere"))?;
        let address = u64::from(page).checked_mul(DOORBELL_PAGE_SIZE).and_then(|offset| base.checked_add(offset));
        let address = address.filter(|_| self.pages.pages.contains(&page));
        self.mapper.map(page, address.ok_or_else(|| io::Error::other("there is no such page"))?)?;
        state.mapped.insert(page);
        Ok(())
    }

    fn unmap(&self, page: u32) -> io::Result<()> {
        let mut state = self.state.lock();
        if state.mapped.contains(&page) {
            self.mapper.unmap(page)?;
            state.mapped.remove(&page);
        }
        Ok(())
    }
}

impl Drop for SlotWindow {
    fn drop(&mut self) {
        self.follow(None);
    }
}
