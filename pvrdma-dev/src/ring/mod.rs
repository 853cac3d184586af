//! The index rules of the guest's rings (spec §6).
//!
//! A ring has two words in its state page: the producer's index, written by one side, and the consumer's, written by
//! the other. Guests can write both, so the one that belongs to the device lives here and is only ever *stored* to
//! memory; the other is loaded once per batch, checked, and then trusted for as long as the batch lasts. Nothing but
//! the device's own word is written to the state page: a user queue's page may be one that its process must not be able
//! to change through us (spec §13 B10).

mod progress;

use std::sync::atomic::Ordering;

use pvrdma_guest_memory::{Direction, DmaError, DmaSpace, DmaView, PAGE_SIZE, PageList};
use pvrdma_verbs::{IndexError, QueueError};
use serde::Serialize;
use thiserror::Error;
use vm_memory::{ByteValued, VolatileSlice};

use crate::abi::ring::{PROD_TO_CONS, RX_PROD_TAIL, TX_PROD_TAIL};
use crate::abi::wqe::{RQ_HEADER, SGE_SIZE, SQ_HEADER};

pub(crate) use progress::{Progress, Seen};

/// Largest ring; twice as much must fit an index.
const MAX_ENTRIES: u32 = 1 << 30;

/// Why a ring cannot be made from what the guest named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(crate) enum RingShapeError {
    /// Not a power of two, or too many.
    #[error("{0} elements are not a power of two in 1..=2^30")]
    Entries(u32),
    /// An element does not fit a page.
    #[error("{0} scatter/gather entries do not fit a page")]
    Elements(u32),
    /// The elements do not fit the pages.
    #[error("{needed} bytes of elements do not fit {pages} pages")]
    TooFewPages {
        /// Bytes the elements take.
        needed: u64,
        /// Pages there are for them.
        pages: u32,
    },
    /// The element pages are not inside the object, behind its ring-state page.
    #[error("element pages {first}+{count} are not inside an object of {pages} pages")]
    PageRange {
        /// Index of the first element page.
        first: u32,
        /// Element pages.
        count: u32,
        /// Pages of the object.
        pages: u32,
    },
}

/// Bytes from one send element to the next: the power of two that holds the header and the SGEs (spec §6.3). `None` if
/// that is more than a page.
pub(crate) fn send_stride(max_sge: u32) -> Option<u32> {
    stride(SQ_HEADER, max_sge)
}

/// Bytes from one receive element to the next, as [`send_stride`].
pub(crate) fn recv_stride(max_sge: u32) -> Option<u32> {
    stride(RQ_HEADER, max_sge)
}

fn stride(header: usize, max_sge: u32) -> Option<u32> {
    let bytes = u32::try_from(header).ok()?.checked_add(max_sge.checked_mul(u32::try_from(SGE_SIZE).ok()?)?)?;
    bytes.checked_next_power_of_two().filter(|s| u64::from(*s) <= PAGE_SIZE)
}

/// Which pair of words in the ring-state page (spec §6.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StateWords {
    /// Bytes 0..8: send queues.
    Tx,
    /// Bytes 8..16: everything else.
    Rx,
}

impl StateWords {
    /// Offset of the producer's word in the state page.
    const fn prod_tail(self) -> u64 {
        match self {
            Self::Tx => TX_PROD_TAIL,
            Self::Rx => RX_PROD_TAIL,
        }
    }
}

/// Where a ring lies, before it is checked.
#[derive(Debug)]
pub(crate) struct RingShape {
    /// The whole object; page 0 holds the ring state.
    pub(crate) pages: PageList,
    /// First page of elements.
    pub(crate) first_page: u32,
    /// Pages of elements.
    pub(crate) page_count: u32,
    /// Elements, a power of two.
    pub(crate) entries: u32,
    /// Bytes per element, a power of two of at most a page.
    pub(crate) stride: u32,
    /// Its words.
    pub(crate) words: StateWords,
}

/// A checked ring: elements and indices, without knowing which side we are.
#[derive(Debug)]
struct Ring {
    /// The pages of the elements.
    pages: PageList,
    stride: u32,
    entries: u32,
    /// Bus address of the producer's word; the consumer's is [`PROD_TO_CONS`] behind it, in the same page.
    prod_tail: u64,
    /// Where the last element was found: elements are used in order, so the next is most likely there as well.
    near: Run,
}

/// Adjacent bytes of an object.
#[derive(Clone, Copy, Debug, Default)]
struct Run {
    /// Byte offset of the first in the object.
    offset: u64,
    /// Bus address of the first.
    bus: u64,
    /// Bytes.
    len: u64,
}

impl Ring {
    fn new(shape: RingShape) -> Result<Self, RingShapeError> {
        let RingShape { pages, first_page: first, page_count: count, entries, stride, words } = shape;
        if !entries.is_power_of_two() || entries > MAX_ENTRIES {
            return Err(RingShapeError::Entries(entries));
        }
        if !stride.is_power_of_two() || u64::from(stride) > PAGE_SIZE {
            return Err(RingShapeError::Elements(stride));
        }
        let range = RingShapeError::PageRange { first, count, pages: pages.pages() };
        let (state, _) = pages.locate(0).filter(|_| first >= 1).ok_or(range)?;
        // The other pages of the object are another ring's, which has a list of its own.
        let pages = pages.part(first, count).ok_or(range)?;
        let needed = u64::from(entries) * u64::from(stride);
        if needed > u64::from(count) * PAGE_SIZE {
            return Err(RingShapeError::TooFewPages { needed, pages: count });
        }
        Ok(Self {
            stride,
            entries,
            // Page addresses are page aligned and do not reach the top of the address space.
            prod_tail: state | words.prod_tail(),
            near: Run::default(),
            pages,
        })
    }

    const fn words(&self) -> RingWords {
        RingWords { entries: self.entries, prod_tail: self.prod_tail }
    }

    const fn cons_head(&self) -> u64 {
        self.prod_tail + PROD_TO_CONS
    }

    /// Indices run over twice the number of elements (spec §6.1).
    const fn mask(&self) -> u32 {
        (self.entries << 1) - 1
    }

    const fn next(&self, index: u32) -> u32 {
        index.wrapping_add(1) & self.mask()
    }

    const fn distance(&self, tail: u32, head: u32) -> u32 {
        tail.wrapping_sub(head) & self.mask()
    }

    /// Checks the index of a producer that may be at most a ring ahead of `head`, and not behind the `taken` elements
    /// from there on (spec §6.6).
    const fn check_producer_index(&self, index: u32, head: u32, taken: u32) -> Result<(), IndexError> {
        let capacity = self.entries;
        let ahead = self.distance(index, head);
        if index > self.mask() {
            Err(IndexError::OutOfRange { index, capacity })
        } else if ahead > capacity {
            Err(IndexError::TooFarAhead { index, capacity })
        } else if ahead < taken {
            Err(IndexError::BehindTaken { index, capacity })
        } else {
            Ok(())
        }
    }

    /// Checks the index of a consumer, which may be anywhere between `tail` and a ring behind it.
    const fn check_consumer_index(&self, index: u32, tail: u32) -> Result<(), IndexError> {
        let capacity = self.entries;
        if index > self.mask() {
            Err(IndexError::OutOfRange { index, capacity })
        } else if self.distance(tail, index) > capacity {
            Err(IndexError::TooFarAhead { index, capacity })
        } else {
            Ok(())
        }
    }

    #[inline(always)]
    fn element<'v>(
        &mut self,
        view: &'v DmaView<'_>,
        index: u32,
        direction: Direction,
    ) -> Result<VolatileSlice<'v>, QueueError> {
        let slot = u64::from(index & (self.entries - 1));
        let offset = slot * u64::from(self.stride);
        let mut into = offset.wrapping_sub(self.near.offset);
        if into >= self.near.len {
            // The shape was checked, so the element is there and does not cross a page.
            let (bus, len) = self.pages.locate(offset).ok_or(DmaError::Unmapped { addr: offset, len: 0 })?;
            self.near = Run { offset, bus, len };
            into = 0;
        }
        Ok(view.slice(self.near.bus + into, self.stride as usize, direction)?)
    }
}

/// Where the indices of a ring are: enough to look at a ring that somebody else drives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingWords {
    entries: u32,
    prod_tail: u64,
}

/// A ring at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct RingInspect {
    /// Elements.
    pub size: u32,
    /// Index of the consumer, which runs over twice the size. `None` if the memory is not accessible, or its map is
    /// being changed.
    pub head: Option<u32>,
    /// Index of the producer, as `head`.
    pub tail: Option<u32>,
    /// Elements that were produced and not consumed. `None` if an index is invalid.
    pub used: Option<u32>,
}

impl RingWords {
    /// Those of a ring of `entries` elements whose state page is at this bus address.
    pub(crate) const fn at(state_page: u64, words: StateWords, entries: u32) -> Self {
        Self { entries, prod_tail: state_page | words.prod_tail() }
    }

    /// Loads the producer's index as it is, valid or not.
    ///
    /// # Errors
    /// The ring's memory has gone.
    #[inline]
    pub(crate) fn producer_index(self, view: &DmaView<'_>) -> Result<u32, DmaError> {
        view.load_u32(self.prod_tail, Ordering::Acquire)
    }

    /// Bus address of the state page.
    pub(crate) const fn state_page(self) -> u64 {
        self.prod_tail & !(PAGE_SIZE - 1)
    }

    /// Reads both indices, unless the map of guest memory is being changed.
    pub(crate) fn inspect(&self, memory: &DmaSpace) -> RingInspect {
        let view = memory.try_view();
        let index = |address| view.as_ref()?.load_u32(address, Ordering::Acquire).ok();
        let (head, tail) = (index(self.prod_tail + PROD_TO_CONS), index(self.prod_tail));
        let mask = (self.entries << 1) - 1;
        let used = head.zip(tail).filter(|&(head, tail)| head <= mask && tail <= mask);
        let used = used.map(|(head, tail)| tail.wrapping_sub(head) & mask).filter(|&used| used <= self.entries);
        RingInspect { size: self.entries, head, tail, used }
    }
}

/// A ring that the guest fills: send, receive and shared receive queues.
///
/// Elements are taken in two steps, so that a send queue can hold its slots until the requests are done: [`Self::take`]
/// moves on to the next element, [`Self::retire`] gives the oldest taken one back. `head ≤ next ≤ tail` in ring order.
#[derive(Debug)]
pub(crate) struct ConsumerRing {
    ring: Ring,
    /// The guest's index as last seen.
    tail: u32,
    /// What is taken next.
    next: u32,
    /// The index we publish.
    head: u32,
    /// An invalid index was seen: nothing is taken until [`Self::reset`] (spec §6.6).
    broken: Option<IndexError>,
    /// What `tail` was when it was loaded, if somebody watches.
    progress: Option<Progress>,
}

/// Bytes that a ring takes, of either side and with what stands around it.
pub(crate) const RING_BYTES: usize = size_of::<ConsumerRing>() + 96;

impl ConsumerRing {
    pub(crate) fn new(shape: RingShape) -> Result<Self, RingShapeError> {
        Ok(Self { ring: Ring::new(shape)?, tail: 0, next: 0, head: 0, broken: None, progress: None })
    }

    /// Where its indices are.
    pub(crate) const fn words(&self) -> RingWords {
        self.ring.words()
    }

    /// How far it has looked, for whoever watches it.
    pub(crate) fn watch(&mut self) -> Progress {
        self.progress.get_or_insert_default().clone()
    }

    /// Lends the next element, if there is one. It stays the next one until [`Self::take`].
    // Always inline: otherwise the slice goes through memory and is read back before it has been written.
    #[inline(always)]
    pub(crate) fn peek<'v>(&mut self, view: &'v DmaView<'_>) -> Result<Option<VolatileSlice<'v>>, QueueError> {
        if self.next == self.tail {
            self.load_producer_index(view)?;
            if self.next == self.tail {
                return Ok(None);
            }
        }
        self.ring.element(view, self.next, Direction::Read).map(Some)
    }

    /// Moves past the element that [`Self::peek`] lent.
    #[inline]
    pub(crate) fn take(&mut self) {
        if self.next != self.tail {
            self.next = self.ring.next(self.next);
        }
    }

    /// Gives the oldest taken element back to the guest; does nothing when all are.
    #[inline]
    pub(crate) fn retire(&mut self, view: &DmaView<'_>) {
        if self.head != self.next {
            self.head = self.ring.next(self.head);
            // A guest that took its ring away does not need to know.
            let _ = view.store_u32(self.ring.cons_head(), self.head, Ordering::Release);
        }
    }

    /// Elements published and not taken.
    pub(crate) fn posted(&mut self, view: &DmaView<'_>) -> Result<u32, QueueError> {
        self.load_producer_index(view)?;
        Ok(self.ring.distance(self.tail, self.next))
    }

    /// Starts over at index 0. The guest zeroes the words itself.
    pub(crate) fn reset(&mut self) {
        let Self { ring: _, tail, next, head, broken, progress } = self;
        (*tail, *next, *head, *broken) = (0, 0, 0, None);
        if let Some(progress) = progress {
            progress.looked(0);
        }
    }

    /// Loads and checks the producer's index. An invalid one breaks the ring: whatever the guest stores later, the same
    /// error is returned until [`Self::reset`].
    #[inline(never)]
    fn load_producer_index(&mut self, view: &DmaView<'_>) -> Result<(), QueueError> {
        if let Some(error) = self.broken {
            return Err(error.into());
        }
        let index = view.load_u32(self.ring.prod_tail, Ordering::Acquire)?;
        let taken = self.ring.distance(self.next, self.head);
        if let Err(error) = self.ring.check_producer_index(index, self.head, taken) {
            self.broken = Some(error);
            return Err(error.into());
        }
        self.tail = index;
        if let Some(progress) = &self.progress {
            progress.looked(index);
        }
        Ok(())
    }
}

/// A ring that the device fills: completion and event queues.
#[derive(Debug)]
pub(crate) struct ProducerRing {
    ring: Ring,
    /// The index we publish.
    tail: u32,
    /// The guest's index as last seen. It only moves on, so a stale value errs on the side of "full".
    head: u32,
}

impl ProducerRing {
    pub(crate) fn new(shape: RingShape) -> Result<Self, RingShapeError> {
        Ok(Self { ring: Ring::new(shape)?, tail: 0, head: 0 })
    }

    /// Where its indices are.
    pub(crate) const fn words(&self) -> RingWords {
        self.ring.words()
    }

    /// Writes one element, given as words in the guest's byte order, and publishes it. Returns `false` if the ring
    /// is full: nothing was written then.
    ///
    /// # Errors
    /// The consumer's index is invalid, or the ring's memory has gone.
    #[inline]
    pub(crate) fn push<T: ByteValued>(&mut self, view: &DmaView<'_>, element: &[T]) -> Result<bool, QueueError> {
        let written = self.write(view, element)?;
        if written && let Err(error) = self.publish(view) {
            self.tail = self.tail.wrapping_sub(1) & self.ring.mask();
            return Err(error);
        }
        Ok(written)
    }

    /// Writes one element that [`Self::publish`] will show. Returns `false` if the ring is full.
    ///
    /// # Errors
    /// As for [`Self::push`].
    #[inline]
    pub(crate) fn write<T: ByteValued>(&mut self, view: &DmaView<'_>, element: &[T]) -> Result<bool, QueueError> {
        if self.ring.distance(self.tail, self.head) >= self.ring.entries {
            self.load_consumer_index(view)?;
            if self.ring.distance(self.tail, self.head) >= self.ring.entries {
                return Ok(false);
            }
        }
        let slot = self.ring.element(view, self.tail, Direction::Write)?;
        // All of the slot, but of a length that the compiler knows.
        let len = size_of_val(element);
        let slot =
            slot.subslice(0, len).map_err(|_| DmaError::Unmapped { addr: self.ring.near.bus, len: len as u64 })?;
        slot.copy_from(element);
        self.tail = self.ring.next(self.tail);
        Ok(true)
    }

    /// Shows the guest what was written.
    ///
    /// # Errors
    /// The ring's memory has gone.
    #[inline]
    pub(crate) fn publish(&mut self, view: &DmaView<'_>) -> Result<(), QueueError> {
        // The consumer that sees the index must see the elements (spec §6.5).
        Ok(view.store_u32(self.ring.prod_tail, self.tail, Ordering::Release)?)
    }

    /// Returns `true` if the guest has consumed everything.
    ///
    /// # Errors
    /// As for [`Self::push`].
    pub(crate) fn is_empty(&mut self, view: &DmaView<'_>) -> Result<bool, QueueError> {
        self.load_consumer_index(view)?;
        Ok(self.tail == self.head)
    }

    /// The consumer's index, and entries that it has not consumed.
    ///
    /// # Errors
    /// As for [`Self::push`].
    pub(crate) fn unconsumed(&mut self, view: &DmaView<'_>) -> Result<(u32, u32), QueueError> {
        self.load_consumer_index(view)?;
        Ok((self.head, self.ring.distance(self.tail, self.head)))
    }

    /// Loads and checks the consumer's index.
    fn load_consumer_index(&mut self, view: &DmaView<'_>) -> Result<(), QueueError> {
        let index = view.load_u32(self.ring.cons_head(), Ordering::Acquire)?;
        self.ring.check_consumer_index(index, self.tail)?;
        self.head = index;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
