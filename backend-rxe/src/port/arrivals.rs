//! Batches of received frames. A packet that must wait keeps its whole batch alive instead of being copied: after a
//! loss, most received packets wait for a while, and copying all of them would be costly.

use std::ops::Deref;
use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_link::Frames;

use super::kept::{CopiedPacket, PacketBudget};

/// Maximum number of batches of a port, free and kept. When all are kept, packets that have to wait are copied.
const MAX_BATCHES: usize = 24;
/// Maximum buffer size in bytes of a batch that can be kept: the largest delivery of a link, and one more frame.
pub(super) const MAX_BYTES: usize = 320 << 10;
/// Minimum length of a frame that keeps its batch. Copying a shorter frame is as fast.
const MIN_SHARED: usize = 512;

/// Maximum number of bytes of kept batches, including the queue entries of their packets.
pub(super) const MOST: usize = MAX_BATCHES * (MAX_BYTES + MAX_BYTES / 4);

/// A batch of received frames.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(super) frames: Frames,
    /// The batch is one of the `MAX_BATCHES`, so that its packets can keep it.
    counts: bool,
}

impl Batch {
    /// Returns a frame, or an empty slice if there is none at this index.
    #[inline]
    fn frame(&self, index: usize) -> &[u8] {
        self.frames.get(index).unwrap_or_default()
    }
}

/// A frame that is kept.
#[derive(Debug)]
pub(crate) enum KeptPacket {
    /// A reference to the batch in which it arrived.
    Shared(Arc<Batch>, usize),
    /// A copy.
    Copied(CopiedPacket),
}

impl Deref for KeptPacket {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Shared(batch, index) => batch.frame(*index),
            Self::Copied(packet) => packet,
        }
    }
}

/// A received frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival<'a> {
    pub(crate) frame: &'a [u8],
    batch: Option<(&'a Arc<Batch>, usize)>,
}

impl<'a> Arrival<'a> {
    /// Creates an arrival for a frame of a batch.
    #[inline]
    pub(super) fn new(batch: &'a Arc<Batch>, index: usize) -> Self {
        Self { frame: batch.frame(index), batch: Some((batch, index)) }
    }

    /// Creates an arrival for a frame that the port does not own: it is copied if it is kept.
    pub(crate) const fn alone(frame: &'a [u8]) -> Self {
        Self { frame, batch: None }
    }

    /// Keeps the frame for later. Returns `None` if there is no room for it.
    pub(crate) fn keep(self, budget: &Arc<PacketBudget>) -> Option<KeptPacket> {
        match self.batch {
            Some((batch, index)) if batch.counts && self.frame.len() >= MIN_SHARED => {
                Some(KeptPacket::Shared(Arc::clone(batch), index))
            }
            _ => budget.keep(self.frame).map(KeptPacket::Copied),
        }
    }
}

/// The batches of a port, the one that was used last first.
#[derive(Debug, Default)]
pub(super) struct Batches(Mutex<Vec<Arc<Batch>>>);

impl Batches {
    /// Returns a batch without other references, filled by `receive`. Only the thread that reads for the port has such
    /// a batch, one at a time.
    pub(super) fn fill(&self, receive: impl FnOnce(&mut Frames)) -> Arc<Batch> {
        let mut batches = self.0.lock();
        let free = batches.iter_mut().position(|batch| Arc::get_mut(batch).is_some());
        let room = batches.len() < MAX_BATCHES;
        let mut batch = free.map_or_else(Arc::default, |at| batches.remove(at));
        drop(batches);
        if let Some(batch) = Arc::get_mut(&mut batch) {
            if batch.frames.capacity() < MAX_BYTES {
                // The buffer is allocated in full now, because growing step by step could leave it half as large again.
                // Pages that are never written take no memory.
                batch.frames.reserve(MAX_BYTES);
            }
            // Frames of the batch may have been in use when it was put back, so it was not cleared then.
            batch.frames.clear();
            receive(&mut batch.frames);
            batch.counts = (free.is_some() || room) && batch.frames.capacity() <= MAX_BYTES;
        }
        batch
    }

    /// Takes a batch back, whether some of its frames are kept or not.
    pub(super) fn put_back(&self, mut batch: Arc<Batch>) {
        if let Some(batch) = Arc::get_mut(&mut batch) {
            // A buffer larger than the limit could never be kept, so it is replaced.
            let large = batch.frames.capacity() > MAX_BYTES && batch.frames.reserved() <= MAX_BYTES;
            if large {
                batch.frames = Frames::default();
            }
        }
        let mut batches = self.0.lock();
        if batches.len() < MAX_BATCHES {
            batches.insert(0, batch);
        }
    }
}

#[cfg(test)]
mod tests {
    use pvrdma_guest_memory::MemoryBudget;

    use super::*;

    fn fill(batches: &Batches, number: u8, len: usize) -> Arc<Batch> {
        batches.fill(|frames| (0..2).for_each(|_| frames.push(&vec![number; len])))
    }

    #[test]
    fn packets_keep_a_bounded_number_of_batches() {
        let (batches, budget) = (Batches::default(), PacketBudget::new(&MemoryBudget::new(4 << 20)));
        let mut kept = Vec::new();
        for number in 0..40 {
            let batch = fill(&batches, number, 4096);
            kept.extend(Arrival::new(&batch, 1).keep(&budget));
            batches.put_back(batch);
        }
        let shared = |packet: &KeptPacket| matches!(packet, KeptPacket::Shared(..));
        assert_eq!(kept.iter().filter(|packet| shared(packet)).count(), MAX_BATCHES);
        assert!(kept.iter().zip(0..).all(|(packet, number)| **packet == [number; 4096]));
        assert_eq!(batches.0.lock().len(), MAX_BATCHES);
        // Batches are free and reused once their packets have been dropped.
        kept.clear();
        let batch = fill(&batches, 99, 4096);
        assert!(batch.frames.iter().eq([[99; 4096]; 2]), "no batch arrives twice");
        assert!(Arrival::new(&batch, 0).keep(&budget).is_some_and(|packet| shared(&packet)));
        batches.put_back(batch);
        assert_eq!((batches.0.lock().len(), budget.used()), (MAX_BATCHES, 0));
    }

    /// A peer that sends little cannot make the port keep a large buffer.
    #[test]
    fn small_frames_and_large_buffers_are_not_kept() {
        let (batches, budget) = (Batches::default(), PacketBudget::new(&MemoryBudget::new(8 << 20)));
        let keeps = |batch: &Arc<Batch>| matches!(Arrival::new(batch, 0).keep(&budget), Some(KeptPacket::Shared(..)));
        let small = fill(&batches, 1, MIN_SHARED - 1);
        assert!(!keeps(&small));
        batches.put_back(small);
        let large = fill(&batches, 2, MAX_BYTES / 2 + 1);
        assert!(!keeps(&large));
        batches.put_back(large);
        let next = fill(&batches, 3, 4096);
        assert!(!keeps(&next), "the buffer is still large");
        batches.put_back(next);
        assert!(keeps(&fill(&batches, 4, 4096)));
    }
}
