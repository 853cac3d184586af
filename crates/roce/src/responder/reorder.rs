//! Packets that came before their time, because one in front of them was lost.
//!
//! A responder may drop them (go-back-N). Keeping them means that a loss costs a round trip instead of a window: once the
//! missing packet is here, one acknowledgement confirms them all.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pvrdma_verbs::Psn;

/// Distance from the first to the last that a QP keeps.
const SPAN: usize = 256;
/// Bytes that the QPs of a port keep together.
const MAX_BYTES: usize = 16 << 20;

/// What all QPs of a port keep.
pub type BufferedBytes = Arc<AtomicUsize>;

/// Packets of one QP that came before the expected one.
#[derive(Debug)]
pub struct ReorderBuffer {
    kept: BufferedBytes,
    /// PSN of the first slot.
    base: Psn,
    frames: VecDeque<Option<Box<[u8]>>>,
    /// A missing packet has come: the next one shows whether the peer has more to send again.
    filled: bool,
    /// The peer sends again what is missing and nothing else.
    selective: bool,
}

impl ReorderBuffer {
    /// An empty buffer that shares the byte bound `kept` with the other QPs of its port.
    pub const fn new(kept: BufferedBytes) -> Self {
        Self { kept, base: Psn::new(0), frames: VecDeque::new(), filled: false, selective: false }
    }

    /// Returns `true` if no packet waits.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// A packet has come.
    pub fn observe(&mut self, expected: Psn, psn: Psn) {
        if self.filled {
            self.selective = !psn.precedes(expected);
            self.filled = false;
        }
    }

    /// Keeps a frame, if there is room. It is lost otherwise, and comes again. Gives how many packets right in front of it were
    /// not known to be missing, if the peer makes use of that. `expected`, of which it hears in any case, is not among them.
    pub fn insert(&mut self, expected: Psn, psn: Psn, frame: &[u8]) -> u32 {
        let end = if self.frames.is_empty() {
            self.base = psn;
            expected.plus(1)
        } else {
            self.base.plus(u32::try_from(self.frames.len()).unwrap_or(0))
        };
        let new = u32::try_from(psn.since(end)).unwrap_or(0);
        let distance = psn.since(self.base);
        let (before, at) = (distance.min(0).unsigned_abs() as usize, distance.max(0).unsigned_abs() as usize);
        let length = self.frames.len().saturating_add(before).max(at.saturating_add(1));
        if length > SPAN || self.kept.load(Ordering::Relaxed).saturating_add(frame.len()) > MAX_BYTES {
            return 0;
        }
        for _ in 0..before {
            self.frames.push_front(None);
        }
        if before > 0 {
            self.base = psn;
        }
        self.frames.resize(length, None);
        if let Some(slot @ None) = self.frames.get_mut(at) {
            self.kept.fetch_add(frame.len(), Ordering::Relaxed);
            *slot = Some(frame.into());
        }
        if self.selective { new } else { 0 }
    }

    /// Takes the frame with this PSN and forgets those before it.
    pub fn pop_expected(&mut self, psn: Psn) -> Option<Box<[u8]>> {
        let passed = usize::try_from(psn.since(self.base)).ok()?;
        for _ in 0..passed {
            let frame = self.frames.pop_front()?;
            self.forget(frame.as_deref());
        }
        self.base = psn;
        if self.frames.front()?.is_none() {
            return None;
        }
        self.base = psn.plus(1);
        self.filled = true;
        let frame = self.frames.pop_front().flatten();
        self.forget(frame.as_deref());
        frame
    }

    /// Drops all packets.
    pub fn clear(&mut self) {
        while let Some(frame) = self.frames.pop_front() {
            self.forget(frame.as_deref());
        }
    }

    fn forget(&self, frame: Option<&[u8]>) {
        self.kept.fetch_sub(frame.map_or(0, <[u8]>::len), Ordering::Relaxed);
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
        let kept = BufferedBytes::default();
        let mut buffer = ReorderBuffer::new(Arc::clone(&kept));
        // A gap that was filled, and a new packet behind it: the peer repeats what is missing and nothing else.
        assert_eq!(buffer.insert(psn(0), psn(2), b""), 0);
        assert!(buffer.pop_expected(psn(2)).is_some());
        buffer.observe(psn(3), psn(3));
        let mut missing = Vec::new();
        for number in [5, 3, 7, 4, 5, 13] {
            missing.push(buffer.insert(psn(1), psn(number), &[u8::try_from(number).unwrap(); 10]));
        }
        assert_eq!(missing, [3, 0, 1, 0, 0, 5]);
        assert_eq!(buffer.insert(psn(1), psn(300), &[0; 10]), 0, "too far");
        assert_eq!(kept.load(Ordering::Relaxed), 50);
        let mut take = |number| buffer.pop_expected(psn(number)).map(|frame| frame[0]);
        assert_eq!(
            [take(1), take(2), take(3), take(4), take(5), take(6)],
            [None, None, Some(3), Some(4), Some(5), None]
        );
        assert!(!buffer.is_empty());
        // It goes back after all.
        buffer.observe(psn(6), psn(4));
        assert_eq!(buffer.insert(psn(6), psn(16), b""), 0);
        // The one that was missing was two, in the end.
        assert_eq!(buffer.pop_expected(psn(17)), None);
        assert!(buffer.is_empty());
        assert_eq!(kept.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn memory_is_bounded_over_all() {
        let kept = BufferedBytes::default();
        let mut all: Vec<_> = (0..10).map(|_| ReorderBuffer::new(Arc::clone(&kept))).collect();
        for buffer in &mut all {
            for number in 1..257 {
                assert_eq!(buffer.insert(psn(0), psn(number), &[0; 65_536]), 0);
            }
        }
        assert_eq!(kept.load(Ordering::Relaxed), MAX_BYTES);
        drop(all);
        assert_eq!(kept.load(Ordering::Relaxed), 0);
    }
}
