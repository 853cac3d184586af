//! What was posted to the host and has not completed.
//!
//! The host returns the number that we gave a request. It holds what kind of queue it was posted to and which life of that
//! queue, so that whatever is left in the host's queues of an earlier life (before a reset) means nothing.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use pvrdma_verbs::WcOpcode;

use crate::mr::Bind;
use crate::verbs::HostAh;

/// Bit 63: a receive.
const RECV: u64 = 1 << 63;
/// Bits 62:32: the life.
const LIFE_MASK: u32 = 0x7fff_ffff;

/// One life of a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Life(u32);

impl Life {
    /// One that no other queue has, until two thousand million later.
    pub(crate) fn begin() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed) & LIFE_MASK)
    }
}

/// The number of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ticket {
    pub(crate) recv: bool,
    pub(crate) life: Life,
    pub(crate) number: u32,
}

impl Ticket {
    pub(crate) const fn encode(self) -> u64 {
        (if self.recv { RECV } else { 0 }) | (self.life.0 as u64) << 32 | self.number as u64
    }

    #[expect(clippy::cast_possible_truncation, reason = "takes the number apart")]
    pub(crate) const fn decode(value: u64) -> Self {
        Self { recv: value & RECV != 0, life: Life((value >> 32) as u32 & LIFE_MASK), number: value as u32 }
    }
}

/// A send under way.
#[derive(Debug)]
pub(crate) struct SendEntry {
    /// The guest's name for it.
    pub(crate) wr_id: u64,
    pub(crate) opcode: WcOpcode,
    /// The guest wants to hear of success.
    pub(crate) signaled: bool,
    /// Bytes that the completion reports.
    pub(crate) byte_len: u32,
    /// Kept until the host is done with it.
    pub(crate) _ah: Option<Arc<HostAh>>,
    /// What its end means for a fast-registered region.
    pub(crate) bind: Option<Bind>,
}

/// The sends of a QP that are under way, oldest first.
#[derive(Debug)]
pub(crate) struct SendFlight {
    pub(crate) life: Life,
    entries: VecDeque<SendEntry>,
    /// Number of the oldest.
    first: u32,
}

impl SendFlight {
    pub(crate) fn new() -> Self {
        Self { life: Life::begin(), entries: VecDeque::new(), first: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Number of the next request.
    pub(crate) fn next(&self) -> u32 {
        // At most as many as the host's queue holds.
        self.first.wrapping_add(u32::try_from(self.entries.len()).unwrap_or(u32::MAX))
    }

    pub(crate) fn push(&mut self, entry: SendEntry) {
        self.entries.push_back(entry);
    }

    /// Takes back what the host did not take.
    pub(crate) fn pop_newest(&mut self) -> Option<SendEntry> {
        self.entries.pop_back()
    }

    /// Whether the host has a request of this number.
    pub(crate) fn is_under_way(&self, number: u32) -> bool {
        (number.wrapping_sub(self.first) as usize) < self.entries.len()
    }

    /// Takes the oldest, up to and with `number`; none when that is not under way.
    pub(crate) fn complete(&mut self, number: u32) -> impl Iterator<Item = SendEntry> {
        let count = if self.is_under_way(number) { number.wrapping_sub(self.first).wrapping_add(1) } else { 0 };
        self.first = self.first.wrapping_add(count);
        self.entries.drain(..count as usize)
    }

    /// Forgets everything.
    pub(crate) fn restart(&mut self) -> Vec<SendEntry> {
        self.life = Life::begin();
        self.first = 0;
        self.entries.drain(..).collect()
    }
}

/// Receives under way, which may complete in any order.
#[derive(Debug)]
pub(crate) struct RecvFlight {
    pub(crate) life: Life,
    /// The guest's names.
    slots: Vec<Option<u64>>,
    free: Vec<u32>,
}

impl RecvFlight {
    pub(crate) fn new(size: u32) -> Self {
        let (slots, free) = (vec![None; size as usize], (0..size).rev().collect());
        Self { life: Life::begin(), slots, free }
    }

    pub(crate) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.free.len() == self.slots.len()
    }

    /// Notes a receive and gives its number.
    pub(crate) fn push(&mut self, wr_id: u64) -> Option<u32> {
        let number = self.free.pop()?;
        *self.slots.get_mut(number as usize)? = Some(wr_id);
        Some(number)
    }

    /// Takes a receive out.
    pub(crate) fn complete(&mut self, number: u32) -> Option<u64> {
        let wr_id = self.slots.get_mut(number as usize)?.take()?;
        self.free.push(number);
        Some(wr_id)
    }

    /// Takes everything out, in no order.
    pub(crate) fn take_all(&mut self) -> Vec<u64> {
        let all = self.slots.iter().flatten().copied().collect();
        self.restart();
        all
    }

    /// Forgets everything.
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
    fn tickets() {
        for recv in [false, true] {
            let ticket = Ticket { recv, life: Life(LIFE_MASK), number: u32::MAX };
            assert_eq!(Ticket::decode(ticket.encode()), ticket);
        }
        assert_ne!(Life::begin(), Life::begin());
    }

    #[test]
    fn sends_complete_in_order_and_once() {
        let mut flight = SendFlight::new();
        flight.first = u32::MAX - 1;
        for i in 0..4 {
            flight.push(entry(i));
        }
        assert_eq!(flight.next(), 2);
        assert_eq!(flight.complete(0).map(|entry| entry.wr_id).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!((flight.complete(0).count(), flight.complete(2).count()), (0, 0));
        assert_eq!(flight.pop_newest().map(|e| e.wr_id), Some(3));
        assert!(flight.is_empty());
    }

    #[test]
    fn receives_complete_in_any_order_and_once() {
        let mut flight = RecvFlight::new(2);
        let (a, b) = (flight.push(10).unwrap(), flight.push(11).unwrap());
        assert!(flight.push(12).is_none() && !flight.has_room());
        assert_eq!((flight.complete(b), flight.complete(b), flight.complete(9)), (Some(11), None, None));
        assert_eq!(flight.complete(a), Some(10));
        assert!(flight.is_empty());
    }
}
