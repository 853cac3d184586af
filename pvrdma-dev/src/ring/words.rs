//! Location of a ring's indices.

use std::sync::atomic::Ordering;

use pvrdma_guest_memory::{DmaError, DmaSpace, DmaView};
use pvrdma_pages::PAGE_SIZE;
use serde::Serialize;

use super::state_words::StateWords;
use crate::abi::ring::PROD_TO_CONS;

/// Location of a ring's indices: enough to inspect a ring that another object operates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingWords {
    entries: u32,
    prod_tail: u64,
}

/// State of a ring at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct RingInspect {
    /// Number of elements.
    pub size: u32,
    /// Index of the consumer, modulo twice the size. `None` if the memory is not accessible, or its map is being
    /// changed.
    pub head: Option<u32>,
    /// Index of the producer, likewise.
    pub tail: Option<u32>,
    /// Number of elements produced and not consumed. `None` if an index is invalid.
    pub used: Option<u32>,
}

impl RingWords {
    /// Returns the location for a ring of `entries` elements whose producer's word is at this bus address.
    pub(super) const fn new(entries: u32, prod_tail: u64) -> Self {
        Self { entries, prod_tail }
    }

    /// Returns the location for a ring of `entries` elements whose state page is at this bus address.
    pub(crate) const fn at(state_page: u64, words: StateWords, entries: u32) -> Self {
        Self { entries, prod_tail: state_page | words.prod_tail() }
    }

    /// Returns the number of elements.
    pub(crate) const fn entries(self) -> u32 {
        self.entries
    }

    /// Loads the producer's index without checking it.
    ///
    /// # Errors
    /// The ring's memory is no longer mapped.
    #[inline]
    pub(crate) fn producer_index(self, view: &DmaView<'_>) -> Result<u32, DmaError> {
        view.load_u32(self.prod_tail, Ordering::Acquire)
    }

    /// Returns the bus address of the state page.
    pub(crate) const fn state_page(self) -> u64 {
        self.prod_tail & !(PAGE_SIZE - 1)
    }

    /// Reads both indices, unless the map of guest memory is being changed, or an access may block for long.
    pub(crate) fn inspect(&self, memory: &DmaSpace) -> RingInspect {
        let view = (!memory.is_slow()).then(|| memory.try_view()).flatten();
        let index = |address| view.as_ref()?.load_u32(address, Ordering::Acquire).ok();
        let (head, tail) = (index(self.prod_tail + PROD_TO_CONS), index(self.prod_tail));
        let mask = (self.entries << 1) - 1;
        let used = head.zip(tail).filter(|&(head, tail)| head <= mask && tail <= mask);
        let used = used.map(|(head, tail)| tail.wrapping_sub(head) & mask).filter(|&used| used <= self.entries);
        RingInspect { size: self.entries, head, tail, used }
    }
}
