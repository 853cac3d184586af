//! Requests in flight: posted to the host and not completed.
//!
//! A completion of the host carries the `wr_id` that the backend assigned to its request. It encodes the kind of queue
//! that the request was posted to and the epoch of that queue: a reset begins a new epoch, and completions of an
//! earlier epoch are ignored.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use pvrdma_verbs_types::WcOpcode;

use crate::mr::Bind;
use crate::verbs::HostAh;

/// Bit 63: the request is a receive.
const RECV: u64 = 1 << 63;
/// Bits 62:32: the epoch.
const EPOCH_MASK: u32 = 0x7fff_ffff;

/// Epoch of a queue: from its creation, or a reset, to the next reset.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Epoch(u32);

impl Epoch {
    /// Returns an epoch that no other queue has. Values repeat after 2^31 resets, which take a guest a day or more; a
    /// completion would need to stay in the host's queue for that long to be attributed to a later epoch.
    pub(crate) fn begin() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed) & EPOCH_MASK)
    }
}

/// Contents of the `wr_id` of a request posted to the host. (The guest's own `wr_id` is kept here.)
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct WrId {
    pub(crate) recv: bool,
    pub(crate) epoch: Epoch,
    pub(crate) number: u32,
}

impl WrId {
    pub(crate) const fn encode(self) -> u64 {
        (if self.recv { RECV } else { 0 }) | (self.epoch.0 as u64) << 32 | self.number as u64
    }

    #[expect(clippy::cast_possible_truncation, reason = "takes the number apart")]
    pub(crate) const fn decode(value: u64) -> Self {
        Self { recv: value & RECV != 0, epoch: Epoch((value >> 32) as u32 & EPOCH_MASK), number: value as u32 }
    }
}

/// A send in flight.
#[derive(Debug)]
pub(crate) struct SendEntry {
    /// The `wr_id` of the guest.
    pub(crate) wr_id: u64,
    pub(crate) opcode: WcOpcode,
    /// The guest has requested a completion on success.
    pub(crate) signaled: bool,
    /// Length that the completion reports, in bytes.
    pub(crate) byte_len: u32,
    /// Address handle, kept alive until the host has completed the request.
    pub(crate) _ah: Option<Arc<HostAh>>,
    /// Effect of the request's end on a fast-registered region.
    pub(crate) bind: Option<Bind>,
}

/// Sends of a QP that are in flight, oldest first.
#[derive(Debug)]
pub(crate) struct SendInflight {
    pub(crate) epoch: Epoch,
    entries: VecDeque<SendEntry>,
    /// Number of the oldest send.
    first: u32,
}

impl SendInflight {
    pub(crate) fn new() -> Self {
        Self { epoch: Epoch::begin(), entries: VecDeque::new(), first: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the number of the next request.
    pub(crate) fn next(&self) -> u32 {
        // The number of entries is at most the size of the host's queue, so the conversion cannot fail.
        self.first.wrapping_add(u32::try_from(self.entries.len()).unwrap_or(u32::MAX))
    }

    pub(crate) fn push(&mut self, entry: SendEntry) {
        self.entries.push_back(entry);
    }

    /// Removes the newest send, after the host has refused it.
    pub(crate) fn pop_newest(&mut self) -> Option<SendEntry> {
        self.entries.pop_back()
    }

    /// Returns `true` if the host has a request of this number.
    pub(crate) fn is_in_flight(&self, number: u32) -> bool {
        (number.wrapping_sub(self.first) as usize) < self.entries.len()
    }

    /// Removes the oldest sends, up to and including `number`; none if that is not in flight.
    pub(crate) fn complete(&mut self, number: u32) -> impl Iterator<Item = SendEntry> {
        let count = if self.is_in_flight(number) { number.wrapping_sub(self.first).wrapping_add(1) } else { 0 };
        self.first = self.first.wrapping_add(count);
        self.entries.drain(..count as usize)
    }

    /// Removes all sends.
    pub(crate) fn restart(&mut self) -> Vec<SendEntry> {
        self.epoch = Epoch::begin();
        self.first = 0;
        self.entries.drain(..).collect()
    }
}

/// Receives in flight, which may complete in any order.
#[derive(Debug)]
pub(crate) struct RecvInflight {
    pub(crate) epoch: Epoch,
    /// The `wr_id`s of the guest, by number.
    slots: Vec<Option<u64>>,
    free: Vec<u32>,
}

impl RecvInflight {
    pub(crate) fn new(size: u32) -> Self {
        let (slots, free) = (vec![None; size as usize], (0..size).rev().collect());
        Self { epoch: Epoch::begin(), slots, free }
    }

    /// Returns the number of receives that the host has.
    pub(crate) fn len(&self) -> usize {
        self.slots.len().saturating_sub(self.free.len())
    }

    pub(crate) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.free.len() == self.slots.len()
    }

    /// Adds a receive and returns its number.
    pub(crate) fn push(&mut self, wr_id: u64) -> Option<u32> {
        let number = self.free.pop()?;
        *self.slots.get_mut(number as usize)? = Some(wr_id);
        Some(number)
    }

    /// Removes a receive and returns the guest's `wr_id`.
    pub(crate) fn complete(&mut self, number: u32) -> Option<u64> {
        let wr_id = self.slots.get_mut(number as usize)?.take()?;
        self.free.push(number);
        Some(wr_id)
    }

    /// Removes all receives, in no particular order.
    pub(crate) fn take_all(&mut self) -> Vec<u64> {
        let all = self.slots.iter().flatten().copied().collect();
        self.restart();
        all
    }

    /// Removes everything.
    pub(crate) fn restart(&mut self) {
        let size = u32::try_from(self.slots.len()).unwrap_or(u32::MAX);
        *self = Self::new(size);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(wr_id: u64) -> SendEntry {
        SendEntry { wr_id, opcode: WcOpcode::Send, signaled: true, byte_len: 0, _ah: None, bind: None }
    }

    #[test]
    fn a_wr_id_holds_queue_epoch_and_number() {
        for recv in [false, true] {
            let wr_id = WrId { recv, epoch: Epoch(EPOCH_MASK), number: u32::MAX };
            assert_eq!(WrId::decode(wr_id.encode()), wr_id);
        }
        assert_ne!(Epoch::begin(), Epoch::begin());
    }

    #[test]
    fn sends_complete_in_order_and_once() {
        let mut inflight = SendInflight::new();
        inflight.first = u32::MAX - 1;
        for i in 0..4 {
            inflight.push(entry(i));
        }
        assert_eq!(inflight.next(), 2);
        assert_eq!(inflight.complete(0).map(|entry| entry.wr_id).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!((inflight.complete(0).count(), inflight.complete(2).count()), (0, 0));
        assert_eq!(inflight.pop_newest().map(|e| e.wr_id), Some(3));
        assert!(inflight.is_empty());
    }

    #[test]
    fn receives_complete_in_any_order_and_once() {
        let mut inflight = RecvInflight::new(2);
        let (a, b) = (inflight.push(10).unwrap(), inflight.push(11).unwrap());
        assert!(inflight.push(12).is_none() && !inflight.has_room() && inflight.len() == 2);
        assert_eq!((inflight.complete(b), inflight.complete(b), inflight.complete(9)), (Some(11), None, None));
        assert_eq!(inflight.complete(a), Some(10));
        assert!(inflight.is_empty());
    }

    #[test]
    fn an_epoch_is_no_other_queues_and_ends_with_a_restart() {
        let (mut sends, mut receives) = (SendInflight::new(), RecvInflight::new(4));
        assert_ne!(sends.epoch, receives.epoch);
        let (first, second) = (sends.epoch, receives.epoch);
        sends.push(entry(1));
        let (a, b) = (receives.push(10).unwrap(), receives.push(11).unwrap());
        assert_eq!(sends.restart().iter().map(|entry| entry.wr_id).collect::<Vec<_>>(), [1]);
        let mut all = receives.take_all();
        all.sort_unstable();
        assert_eq!(all, [10, 11]);
        assert!(sends.epoch != first && receives.epoch != second && sends.is_empty() && receives.is_empty());
        assert_eq!((receives.complete(a), receives.complete(b)), (None, None));
        assert_eq!((0..9).filter(|&wr_id| receives.push(wr_id).is_some()).count(), 4);
    }

    /// Numbers of sends wrap, and numbers of receives are indices into a table.
    #[test]
    fn numbers_that_are_not_in_flight_complete_nothing() {
        let mut sends = SendInflight::new();
        sends.first = u32::MAX;
        sends.push(entry(1));
        sends.push(entry(2));
        for number in [1, 2, u32::MAX - 1, u32::MAX / 2] {
            assert!(!sends.is_in_flight(number) && sends.complete(number).count() == 0, "{number}");
        }
        assert!(sends.is_in_flight(u32::MAX) && sends.is_in_flight(0));
        let mut receives = RecvInflight::new(1);
        assert_eq!((receives.complete(0), receives.complete(u32::MAX)), (None, None));
        receives.push(5).unwrap();
        assert_eq!(receives.complete(1), None);
    }
}
