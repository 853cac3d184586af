//! Guest rings and the validation of their indices (spec §6).
//!
//! A ring has two words in its state page: the producer's index, written by one side, and the consumer's, written by
//! the other. The guest can write both. The device therefore keeps its own index here and only ever *stores* it to
//! memory. It loads the other one once per batch, checks it, and uses the checked value for the whole batch. It writes
//! nothing else to the state page: the page of a user queue may be one that its process must not be able to change
//! through the device (spec §13 B10).

mod progress;
mod state_words;
mod words;

use std::sync::atomic::Ordering;

use pvrdma_guest_memory::{Direction, DmaError, DmaView};
use pvrdma_pages::{PAGE_SIZE, PageList};
use pvrdma_verbs::{IndexError, QueueError, RingPosition, SavedRing};
use thiserror::Error;
use vm_memory::{ByteValued, VolatileSlice};

use crate::abi::ring::PROD_TO_CONS;
use crate::abi::wqe::{RQ_HEADER, SGE_SIZE, SQ_HEADER};

pub(crate) use progress::{Progress, Seen};
pub(crate) use state_words::StateWords;
pub use words::RingInspect;
pub(crate) use words::RingWords;

/// Maximum number of elements; twice as many must fit an index.
const MAX_ENTRIES: u32 = 1 << 30;

/// Reason why a ring cannot be created with the guest's parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(crate) enum RingShapeError {
    /// The number of elements is not a power of two, or too large.
    #[error("{0} elements are not a power of two in 1..=2^30")]
    Entries(u32),
    /// An element does not fit a page.
    #[error("{0} scatter/gather entries do not fit a page")]
    Elements(u32),
    /// The elements do not fit the pages.
    #[error("{needed} bytes of elements do not fit {pages} pages")]
    TooFewPages {
        /// Bytes that the elements need.
        needed: u64,
        /// Number of pages for them.
        pages: u32,
    },
    /// The element pages are not inside the object, behind its ring-state page.
    #[error("element pages {first}+{count} are not inside an object of {pages} pages")]
    PageRange {
        /// Index of the first element page.
        first: u32,
        /// Number of element pages.
        count: u32,
        /// Number of pages of the object.
        pages: u32,
    },
    /// A saved position is not one of such a ring.
    #[error("no ring of {entries} elements is at index {index:#x}")]
    Position {
        /// Index.
        index: u32,
        /// Number of elements.
        entries: u32,
    },
}

/// Returns the distance in bytes between send elements: the power of two that holds the header and the SGEs (spec
/// §6.3). `None` if that is more than a page.
pub(crate) fn send_stride(max_sge: u32) -> Option<u32> {
    stride(SQ_HEADER, max_sge)
}

/// Returns the distance in bytes between receive elements, as [`send_stride`].
pub(crate) fn recv_stride(max_sge: u32) -> Option<u32> {
    stride(RQ_HEADER, max_sge)
}

fn stride(header: usize, max_sge: u32) -> Option<u32> {
    let bytes = u32::try_from(header).ok()?.checked_add(max_sge.checked_mul(u32::try_from(SGE_SIZE).ok()?)?)?;
    bytes.checked_next_power_of_two().filter(|s| u64::from(*s) <= PAGE_SIZE)
}

/// Location of a ring, before it is checked.
#[derive(Debug)]
pub(crate) struct RingShape {
    /// The whole object; page 0 holds the ring state.
    pub(crate) pages: PageList,
    /// Index of the first page of elements.
    pub(crate) first_page: u32,
    /// Number of pages of elements.
    pub(crate) page_count: u32,
    /// Number of elements, a power of two.
    pub(crate) entries: u32,
    /// Bytes per element, a power of two of at most a page.
    pub(crate) stride: u32,
    /// Index words.
    pub(crate) words: StateWords,
}

/// A checked ring: elements and indices, for either side of it.
#[derive(Debug)]
struct Ring {
    /// Pages of the elements.
    pages: PageList,
    stride: u32,
    entries: u32,
    /// Bus address of the producer's word; the consumer's word is at offset [`PROD_TO_CONS`] from it, in the same page.
    prod_tail: u64,
    /// Contiguous run that contains the last element. Elements are used in order, so it most likely contains the next
    /// one as well.
    near: Run,
}

/// Contiguous bytes of an object.
#[derive(Clone, Copy, Debug, Default)]
struct Run {
    /// Offset of the first byte in the object.
    offset: u64,
    /// Bus address of the first byte.
    bus: u64,
    /// Length in bytes.
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
        // The other pages of the object belong to another ring, which has its own list.
        let pages = pages.part(first, count).ok_or(range)?;
        let needed = u64::from(entries) * u64::from(stride);
        if needed > u64::from(count) * PAGE_SIZE {
            return Err(RingShapeError::TooFewPages { needed, pages: count });
        }
        Ok(Self {
            stride,
            entries,
            // The sum cannot overflow: page addresses are page aligned and do not reach the top of the address space.
            prod_tail: state | words.prod_tail(),
            near: Run::default(),
            pages,
        })
    }

    const fn words(&self) -> RingWords {
        RingWords::new(self.entries, self.prod_tail)
    }

    const fn cons_head(&self) -> u64 {
        self.prod_tail + PROD_TO_CONS
    }

    /// Returns the mask of indices, which count modulo twice the number of elements (spec §6.1).
    const fn mask(&self) -> u32 {
        (self.entries << 1).wrapping_sub(1)
    }

    const fn next(&self, index: u32) -> u32 {
        index.wrapping_add(1) & self.mask()
    }

    const fn distance(&self, tail: u32, head: u32) -> u32 {
        tail.wrapping_sub(head) & self.mask()
    }

    /// Checks the producer's index. It must be at most a ring ahead of `head`, and not behind the `taken` elements that
    /// follow `head` (spec §6.6).
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

    /// Checks the consumer's index: it must lie between `tail` and a ring behind it.
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
        let slot = u64::from(index & (self.mask() >> 1));
        let offset = slot.wrapping_mul(self.stride.into());
        let mut into = offset.wrapping_sub(self.near.offset);
        if into >= self.near.len {
            // The shape was checked, so the element exists and does not cross a page.
            let (bus, len) = self.pages.locate(offset).ok_or(DmaError::Unmapped { addr: offset, len: 0 })?;
            self.near = Run { offset, bus, len };
            into = 0;
        }
        Ok(view.slice(self.near.bus.wrapping_add(into), self.stride as usize, direction)?)
    }
}

/// A ring that the guest fills: send, receive and shared receive queues.
///
/// Elements are consumed in two steps, so that a send queue can keep its slots until the requests are complete:
/// [`Self::take`] moves on to the next element, and [`Self::retire`] returns the oldest taken one. `head ≤ next ≤ tail`
/// in ring order.
#[derive(Debug)]
pub(crate) struct ConsumerRing {
    ring: Ring,
    /// Guest's index as last loaded.
    tail: u32,
    /// Index of the next element to take.
    next: u32,
    /// Index that the device publishes.
    head: u32,
    /// Set when an invalid index was loaded: nothing is taken until [`Self::reset`] (spec §6.6).
    broken: Option<IndexError>,
    /// Publishes `tail` whenever it is loaded, if the ring is watched.
    progress: Option<Progress>,
}

/// Memory in bytes that a ring needs, of either side and with its bookkeeping.
pub(crate) const RING_BYTES: usize = size_of::<ConsumerRing>() + 96;

impl ConsumerRing {
    pub(crate) fn new(shape: RingShape) -> Result<Self, RingShapeError> {
        Ok(Self { ring: Ring::new(shape)?, tail: 0, next: 0, head: 0, broken: None, progress: None })
    }

    /// Returns the location of its indices.
    pub(crate) const fn words(&self) -> RingWords {
        self.ring.words()
    }

    /// Moves a new ring to a saved position.
    ///
    /// # Errors
    /// The position is not one of such a ring.
    pub(crate) fn at(mut self, position: RingPosition) -> Result<Self, RingShapeError> {
        let RingPosition { next, head, broken } = position;
        let entries = self.ring.entries;
        for index in [next, head] {
            if index > self.ring.mask() || self.ring.distance(next, head) > entries {
                return Err(RingShapeError::Position { index, entries });
            }
        }
        // The guest's index is loaded, and checked, when the next element is needed.
        (self.tail, self.next, self.head, self.broken) = (next, next, head, broken);
        Ok(self)
    }

    /// Returns the state of the ring.
    pub(crate) fn save(&self) -> SavedRing {
        let Self { ring, tail: _, next, head, broken, progress: _ } = self;
        let position = RingPosition { next: *next, head: *head, broken: *broken };
        SavedRing { pages: ring.pages.clone(), position }
    }

    /// Returns the progress of this consumer, for the watcher of the ring.
    pub(crate) fn watch(&mut self) -> Progress {
        self.progress.get_or_insert_default().clone()
    }

    /// Returns the next element, if there is one. It stays the next one until [`Self::take`].
    // Always inline: otherwise the slice would be passed through memory, and read back before the store has completed.
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

    /// Moves past the element that [`Self::peek`] returned.
    #[inline]
    pub(crate) fn take(&mut self) {
        if self.next != self.tail {
            self.next = self.ring.next(self.next);
        }
    }

    /// Returns the oldest taken element to the guest; does nothing if all have been returned.
    #[inline]
    pub(crate) fn retire(&mut self, view: &DmaView<'_>) {
        if self.head != self.next {
            self.head = self.ring.next(self.head);
            // An error can be ignored, because a guest that has unmapped its ring does not need the index.
            let _ = view.store_u32(self.ring.cons_head(), self.head, Ordering::Release);
        }
    }

    /// Returns the number of elements published and not taken.
    pub(crate) fn posted(&mut self, view: &DmaView<'_>) -> Result<u32, QueueError> {
        self.load_producer_index(view)?;
        Ok(self.ring.distance(self.tail, self.next))
    }

    /// Starts over at index 0. The guest itself zeroes the words.
    pub(crate) fn reset(&mut self) {
        let Self { ring: _, tail, next, head, broken, progress } = self;
        (*tail, *next, *head, *broken) = (0, 0, 0, None);
        if let Some(progress) = progress {
            progress.looked(0);
        }
    }

    /// Loads and checks the producer's index. An invalid one breaks the ring: the same error is returned until
    /// [`Self::reset`], whatever the guest stores later.
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
    /// Index that the device publishes.
    tail: u32,
    /// The guest's index as last loaded. It only advances, so a stale value can only make the ring look fuller than it
    /// is.
    head: u32,
}

impl ProducerRing {
    pub(crate) fn new(shape: RingShape) -> Result<Self, RingShapeError> {
        Ok(Self { ring: Ring::new(shape)?, tail: 0, head: 0 })
    }

    /// Moves a new ring to a saved position.
    ///
    /// # Errors
    /// The position is not one of such a ring.
    pub(crate) fn at(mut self, tail: u32) -> Result<Self, RingShapeError> {
        let entries = self.ring.entries;
        if tail > self.ring.mask() {
            return Err(RingShapeError::Position { index: tail, entries });
        }
        self.tail = tail;
        // The ring counts as full, so that the guest's index is loaded and checked when the next element is written.
        self.head = tail.wrapping_sub(entries) & self.ring.mask();
        Ok(self)
    }

    /// Returns the pages of the elements, and the index that the device publishes.
    pub(crate) const fn save(&self) -> (&PageList, u32) {
        let Self { ring, tail, head: _ } = self;
        (&ring.pages, *tail)
    }

    /// Returns the location of its indices.
    pub(crate) const fn words(&self) -> RingWords {
        self.ring.words()
    }

    /// Writes one element, given as words in the guest's byte order, and publishes it. Returns `false` if the ring is
    /// full; nothing was written then.
    ///
    /// # Errors
    /// The consumer's index is invalid, or the ring's memory is no longer mapped.
    #[inline]
    pub(crate) fn push<T: ByteValued>(&mut self, view: &DmaView<'_>, element: &[T]) -> Result<bool, QueueError> {
        let written = self.write(view, element)?;
        if written && let Err(error) = self.publish(view) {
            self.tail = self.tail.wrapping_sub(1) & self.ring.mask();
            return Err(error);
        }
        Ok(written)
    }

    /// Writes one element without publishing it, see [`Self::publish`]. Returns `false` if the ring is full.
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
        // This is the whole slot, with a length that the compiler knows.
        let len = size_of_val(element);
        let slot =
            slot.subslice(0, len).map_err(|_| DmaError::Unmapped { addr: self.ring.near.bus, len: len as u64 })?;
        slot.copy_from(element);
        self.tail = self.ring.next(self.tail);
        Ok(true)
    }

    /// Publishes the elements written so far.
    ///
    /// # Errors
    /// The ring's memory is no longer mapped.
    #[inline]
    pub(crate) fn publish(&mut self, view: &DmaView<'_>) -> Result<(), QueueError> {
        // Release order: a consumer that sees the index must also see the elements (spec §6.5).
        Ok(view.store_u32(self.ring.prod_tail, self.tail, Ordering::Release)?)
    }

    /// Returns `true` if the guest has consumed all elements.
    ///
    /// # Errors
    /// As for [`Self::push`].
    pub(crate) fn is_empty(&mut self, view: &DmaView<'_>) -> Result<bool, QueueError> {
        self.load_consumer_index(view)?;
        Ok(self.tail == self.head)
    }

    /// Returns the consumer's index and the number of elements that it has not consumed.
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
