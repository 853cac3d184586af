//! The reorder buffer: packets that came before the expected one, because one before them was lost or overtaken.
//!
//! A responder may drop them (go-back-N). Buffering them means that a loss costs a round trip instead of a window: once
//! the missing packet is here, one ACK covers them all.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pvrdma_verbs::Psn;

/// PSNs from the first packet to the last that one buffer holds.
const MAX_SPAN: usize = 256;
/// Bytes that all buffers of one budget hold together.
const MAX_BYTES: usize = 16 << 20;

/// The bytes of frames that reorder buffers may hold together. The QPs of a port share one, by clones.
#[derive(Clone, Debug, Default)]
pub struct ReorderBudget {
    used: Arc<AtomicUsize>,
}

impl ReorderBudget {
    /// Bytes in use.
    #[inline]
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Returns `true` if there is room for so many bytes more. Several QPs that ask at once may go over the bound by a
    /// frame each.
    fn has_room(&self, bytes: usize) -> bool {
        self.used().saturating_add(bytes) <= MAX_BYTES
    }

    fn take(&self, bytes: usize) {
        self.used.fetch_add(bytes, Ordering::Relaxed);
    }

    fn give_back(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Packets of one QP that came before the expected one.
#[derive(Debug)]
pub struct ReorderBuffer {
    budget: ReorderBudget,
    /// PSN of the first slot.
    base: Psn,
    frames: VecDeque<Option<Box<[u8]>>>,
}

impl ReorderBuffer {
    /// An empty buffer that shares `budget` with the other QPs of its port.
    #[inline]
    pub const fn new(budget: ReorderBudget) -> Self {
        Self { budget, base: Psn::new(0), frames: VecDeque::new() }
    }

    /// Returns `true` if it holds no packet.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Packets that it holds.
    pub fn packets(&self) -> usize {
        self.frames.iter().flatten().count()
    }

    /// Buffers an out-of-order frame, or drops it if the buffer is full; then it is retransmitted. `expected` is the
    /// PSN that is missing: what is too far behind it would keep everything else out.
    #[inline]
    pub fn insert(&mut self, expected: Psn, psn: Psn, frame: &[u8]) {
        if !usize::try_from(psn.since(expected)).is_ok_and(|distance| distance <= MAX_SPAN) {
            return;
        }
        if self.frames.is_empty() {
            self.base = psn;
        }
        let distance = psn.since(self.base);
        let (before, at) = (distance.min(0).unsigned_abs() as usize, distance.max(0).unsigned_abs() as usize);
        let length = self.frames.len().saturating_add(before).max(at.saturating_add(1));
        if length > MAX_SPAN || !self.budget.has_room(frame.len()) {
            return;
        }
        for _ in 0..before {
            self.frames.push_front(None);
        }
        if before > 0 {
            self.base = psn;
        }
        self.frames.resize(length, None);
        if let Some(slot @ None) = self.frames.get_mut(at) {
            self.budget.take(frame.len());
            *slot = Some(frame.into());
        }
    }

    /// Takes the frame with this PSN out, and drops those before it.
    #[inline]
    pub fn pop_expected(&mut self, psn: Psn) -> Option<Box<[u8]>> {
        let passed = usize::try_from(psn.since(self.base)).ok()?;
        for _ in 0..passed {
            let frame = self.frames.pop_front()?;
            self.account(frame.as_deref());
        }
        self.base = psn;
        if self.frames.front()?.is_none() {
            return None;
        }
        self.base = psn.plus(1);
        let frame = self.frames.pop_front().flatten();
        self.account(frame.as_deref());
        frame
    }

    /// Drops all packets.
    #[inline]
    pub fn clear(&mut self) {
        while let Some(frame) = self.frames.pop_front() {
            self.account(frame.as_deref());
        }
    }

    /// Gives the bytes of a frame that was taken out back to the budget.
    fn account(&self, frame: Option<&[u8]>) {
        self.budget.give_back(frame.map_or(0, <[u8]>::len));
    }
}

impl Drop for ReorderBuffer {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn psn(number: u32) -> Psn {
        Psn::new(0).plus(0xff_fffe_u32.wrapping_add(number))
    }

    #[test]
    fn frames_come_out_at_their_turn() {
        let budget = ReorderBudget::default();
        let mut buffer = ReorderBuffer::new(budget.clone());
        for number in [5, 3, 7, 4, 5, 13] {
            buffer.insert(psn(1), psn(number), &[u8::try_from(number).unwrap(); 10]);
        }
        // Too far.
        buffer.insert(psn(1), psn(300), &[0; 10]);
        assert_eq!((budget.used(), buffer.packets()), (50, 5));
        let mut take = |number| buffer.pop_expected(psn(number)).map(|frame| frame[0]);
        assert_eq!(
            [take(1), take(2), take(3), take(4), take(5), take(6)],
            [None, None, Some(3), Some(4), Some(5), None]
        );
        assert!(!buffer.is_empty());
        buffer.insert(psn(6), psn(16), b"");
        // The one that was missing was two, in the end.
        assert_eq!(buffer.pop_expected(psn(17)), None);
        assert!(buffer.is_empty());
        assert_eq!(budget.used(), 0);
    }

    /// A packet from the other end of PSN space, as the first behind a gap, must not keep the others out.
    #[test]
    fn sec_c16_a_packet_far_ahead_keeps_nobody_out() {
        let mut buffer = ReorderBuffer::new(ReorderBudget::default());
        buffer.insert(psn(1), psn(1 + (1 << 23) - 1), b"far");
        assert!(buffer.is_empty());
        buffer.insert(psn(1), psn(3), b"near");
        assert_eq!((buffer.pop_expected(psn(3)).as_deref(), buffer.packets()), (Some(&b"near"[..]), 0));
    }

    #[test]
    fn memory_is_bounded_over_all() {
        let budget = ReorderBudget::default();
        let mut all: Vec<_> = (0..10).map(|_| ReorderBuffer::new(budget.clone())).collect();
        for buffer in &mut all {
            for number in 1..257 {
                buffer.insert(psn(0), psn(number), &[0; 65_536]);
            }
        }
        assert_eq!(budget.used(), MAX_BYTES);
        drop(all);
        assert_eq!(budget.used(), 0);
    }
}
