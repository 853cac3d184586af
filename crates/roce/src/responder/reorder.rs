//! The reorder buffer: packets that arrived before the expected one, because an earlier packet was lost or overtaken.
//!
//! A responder may drop such packets (go-back-N). With buffering, a loss costs a round trip instead of a window: once
//! the missing packet arrives, one ACK covers them all.

use std::collections::VecDeque;

use pvrdma_verbs_types::Psn;

use crate::wire::SackMap;

/// Largest distance from the missing packet that a buffer holds, in PSNs.
const MAX_SPAN: usize = SackMap::MAX_DISTANCE as usize;

/// Out-of-order packets of one QP. The owner decides how a frame is kept, and how much memory that may take.
#[derive(Debug)]
pub struct ReorderBuffer<F> {
    /// Frames in PSN order.
    frames: VecDeque<(Psn, F)>,
}

impl<F> Default for ReorderBuffer<F> {
    fn default() -> Self {
        Self::new()
    }
}

impl<F> ReorderBuffer<F> {
    /// Creates an empty buffer.
    #[inline]
    pub const fn new() -> Self {
        Self { frames: VecDeque::new() }
    }

    /// Returns `true` if the buffer holds no packet.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Number of packets in the buffer.
    pub fn packets(&self) -> usize {
        self.frames.len()
    }

    /// Buffers an out-of-order frame, which `keep` stores. Returns `false` if the frame is dropped, to be
    /// retransmitted. `expected` is the missing PSN; a frame too far after it is refused, because it would keep all
    /// others out.
    #[inline]
    pub fn insert(&mut self, expected: Psn, psn: Psn, keep: impl FnOnce() -> Option<F>) -> bool {
        if !usize::try_from(psn.since(expected)).is_ok_and(|distance| distance <= MAX_SPAN) {
            return false;
        }
        let at = match self.frames.back() {
            Some((last, _)) if psn.since(*last) <= 0 => {
                match self.frames.binary_search_by(|(other, _)| other.since(psn).cmp(&0)) {
                    Ok(_) => return true,
                    Err(at) => at,
                }
            }
            _ => self.frames.len(),
        };
        let Some(frame) = keep() else { return false };
        self.frames.insert(at, (psn, frame));
        true
    }

    /// Map of the packets in the buffer; `expected` is the missing PSN.
    pub fn received(&self, expected: Psn) -> SackMap {
        let mut map = SackMap::default();
        self.frames.iter().for_each(|(psn, _)| map.insert(expected, *psn));
        map
    }

    /// Takes the frame with this PSN out, and drops earlier ones.
    #[inline]
    pub fn pop_expected(&mut self, psn: Psn) -> Option<F> {
        while self.frames.front().is_some_and(|(first, _)| first.since(psn) < 0) {
            self.frames.pop_front();
        }
        let frame = match self.frames.front() {
            Some((first, _)) if *first == psn => self.frames.pop_front().map(|(_, frame)| frame),
            _ => None,
        };
        if self.frames.is_empty() {
            self.clear();
        }
        frame
    }

    /// Drops all packets, and releases the memory that holds them.
    #[inline]
    pub fn clear(&mut self) {
        self.frames = VecDeque::new();
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
        let mut buffer = ReorderBuffer::new();
        for number in [5, 3, 7, 4, 13] {
            assert!(buffer.insert(psn(1), psn(number), || Some(number)));
        }
        assert!(buffer.insert(psn(1), psn(5), || unreachable!("it is there already")));
        assert!(!buffer.insert(psn(1), psn(1026), || unreachable!("it is too far")));
        assert!(!buffer.insert(psn(1), psn(6), || None));
        assert_eq!(buffer.packets(), 5);
        assert_eq!(buffer.received(psn(1)).distances().collect::<Vec<_>>(), [2, 3, 4, 6, 12]);
        let mut take = |number| buffer.pop_expected(psn(number));
        assert_eq!(
            [take(1), take(2), take(3), take(4), take(5), take(6)],
            [None, None, Some(3), Some(4), Some(5), None]
        );
        assert!(!buffer.is_empty());
        assert!(buffer.insert(psn(6), psn(16), || Some(16)));
        // Two packets were missing, not one.
        assert_eq!(buffer.pop_expected(psn(17)), None);
        assert!(buffer.is_empty());
    }

    /// Tests every sequence of five arrivals and lookups at five PSNs around the wrap against a sorted map.
    #[test]
    fn every_short_sequence() {
        const PSNS: u32 = 5;
        const STEPS: u32 = 5;
        for sequence in 0..(2 * PSNS).pow(STEPS) {
            let mut buffer = ReorderBuffer::new();
            let mut reference = std::collections::BTreeMap::new();
            let mut expected = 0;
            for step in 0..STEPS {
                let choice = sequence / (2 * PSNS).pow(step) % (2 * PSNS);
                let number = choice % PSNS;
                if choice < PSNS {
                    let taken = number >= expected;
                    assert_eq!(buffer.insert(psn(expected), psn(number), || Some(step)), taken, "{sequence}: {step}");
                    if taken {
                        reference.entry(number).or_insert(step);
                    }
                } else if number >= expected {
                    reference = reference.split_off(&number);
                    assert_eq!(buffer.pop_expected(psn(number)), reference.remove(&number), "{sequence}: {step}");
                    expected = number;
                }
                assert_eq!(buffer.packets(), reference.len(), "{sequence}: {step}");
                let behind = reference.keys().filter(|&&other| other > expected).map(|other| other - expected);
                assert!(buffer.received(psn(expected)).distances().eq(behind), "{sequence}: {step}");
            }
        }
    }

    /// A packet from the far end of PSN space that arrives first after a gap must not keep the others out.
    #[test]
    fn a_packet_far_ahead_blocks_no_other() {
        let mut buffer = ReorderBuffer::new();
        assert!(!buffer.insert(psn(1), psn(1 + (1 << 23) - 1), || Some("far")));
        assert!(buffer.is_empty());
        assert!(buffer.insert(psn(1), psn(3), || Some("near")));
        assert_eq!((buffer.pop_expected(psn(3)), buffer.packets()), (Some("near"), 0));
    }
}
