//! Receive queues, of one QP or shared (spec §8.2).

use pvrdma_guest_memory::DmaView;
use pvrdma_pages::PageList;
use pvrdma_verbs::{QueueError, RecvSource, RingPosition, SavedRing};
use pvrdma_verbs_types::RecvWr;

use super::gather::{HEAD, gather};
use crate::abi::layout::GuestLayout;
use crate::abi::wqe::{RQ_HEADER, RecvHeader};
use crate::ring::{ConsumerRing, Progress, RingShape, RingShapeError, RingWords, StateWords, recv_stride};

/// Consumer of a receive queue. A slot returns to the guest as soon as it is copied, because receives of a shared queue
/// complete in any order (spec §6.5).
#[derive(Debug)]
pub(crate) struct RecvRing {
    ring: ConsumerRing,
    max_sge: u32,
}

impl RecvRing {
    /// `pages` is the whole object; page 0 holds the ring state.
    pub(crate) fn new(
        pages: PageList,
        first_page: u32,
        page_count: u32,
        entries: u32,
        max_sge: u32,
    ) -> Result<Self, RingShapeError> {
        let stride = recv_stride(max_sge).ok_or(RingShapeError::Elements(max_sge))?;
        let shape = RingShape { pages, first_page, page_count, entries, stride, words: StateWords::Rx };
        Ok(Self { ring: ConsumerRing::new(shape)?, max_sge })
    }

    /// Returns the location of the indices of its ring.
    pub(crate) const fn words(&self) -> RingWords {
        self.ring.words()
    }

    /// Moves a new ring to a saved position.
    ///
    /// # Errors
    /// The position is not one of such a ring.
    pub(crate) fn at(self, position: RingPosition) -> Result<Self, RingShapeError> {
        Ok(Self { ring: self.ring.at(position)?, ..self })
    }

    /// Returns the progress of the ring, for the watcher.
    pub(crate) fn watch(&mut self) -> Progress {
        self.ring.watch()
    }
}

impl RecvSource for RecvRing {
    fn pop(&mut self, view: &DmaView<'_>, work: &mut RecvWr) -> Result<bool, QueueError> {
        let Some(element) = self.ring.peek(view)? else { return Ok(false) };
        let mut head = [0; HEAD];
        let copied = element.copy_to(&mut head);
        let Some((header, sges)) = head.get(..copied).and_then(|h| h.split_first_chunk::<RQ_HEADER>()) else {
            return Ok(false);
        };
        let RecvHeader { wr_id, num_sge: count } = RecvHeader::decode(header);
        work.wr_id = wr_id;
        work.sges.clear();
        work.malformed = count > self.max_sge;
        if !work.malformed {
            gather(&element, sges, copied, count, &mut work.sges);
        }
        self.ring.take();
        self.ring.retire(view);
        Ok(true)
    }

    fn posted(&mut self, view: &DmaView<'_>) -> Result<u32, QueueError> {
        self.ring.posted(view)
    }

    fn reset(&mut self) {
        self.ring.reset();
    }

    fn save(&self) -> Option<SavedRing> {
        Some(self.ring.save())
    }
}

#[cfg(test)]
mod tests;
