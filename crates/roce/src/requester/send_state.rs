//! Send sequence state in PSN space.

use pvrdma_verbs_types::Psn;

use crate::wire::SackMap;

/// A PSN that does not wrap. Its low 24 bits are on the wire. PSNs of one QP can be compared as numbers, however many
/// requests are posted.
pub(super) type Seq = u64;

/// Number of PSNs until the numbers on the wire wrap.
const WRAP: Seq = 1 << 24;

/// Largest distance from the oldest unacked PSN to the newest in flight, if the responder keeps packets after a gap:
/// the range of a map.
pub(super) const MAX_SPAN: Seq = SackMap::MAX_DISTANCE as Seq;

/// The PSN on the wire.
pub(super) fn wire_psn(seq: Seq) -> Psn {
    Psn::new(u32::try_from(seq % WRAP).unwrap_or(0))
}

/// The send sequence variables, named as those of TCP (RFC 9293, 3.3.1) and in their order.
///
/// ```text
///          una              executed              nxt               max               posted
///  done  ───┤ responses missing ├──── unacked ──────┤ to retransmit ───┤ never sent ───────┤
/// ```
///
/// Going back means moving `nxt` to `una`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SendState {
    /// Oldest PSN that is not done. Everything before it was executed, and every response with data has arrived.
    pub(super) una: Seq,
    /// Everything before this PSN is known to have been executed by the responder. From `una` on there can be READs and
    /// atomics whose responses were lost; the SENDs and WRITEs between them are not retransmitted.
    pub(super) executed: Seq,
    /// Next PSN to send.
    pub(super) nxt: Seq,
    /// First PSN that was never sent.
    pub(super) max: Seq,
    /// First PSN of the next request that is posted.
    pub(super) posted: Seq,
}

impl SendState {
    /// Starts with nothing sent; `first` is the first PSN.
    pub(super) fn new(first: Psn) -> Self {
        // The first turn of PSN space is skipped, so that PSNs before the first one are positive numbers as well.
        let first = WRAP + Seq::from(first.get());
        Self { una: first, executed: first, nxt: first, max: first, posted: first }
    }

    /// Extends the PSN of a received packet to the nearest value to `una`.
    pub(super) fn extend(&self, psn: Psn) -> Seq {
        self.una.saturating_add_signed(psn.since(wire_psn(self.una)).into())
    }

    /// Returns `true` if this PSN was sent and is not done.
    pub(super) fn is_outstanding(&self, seq: Seq) -> bool {
        (self.una..self.max).contains(&seq)
    }

    /// Number of PSNs from the oldest that is not done to the next to send. PSNs that a loss made the requester go back
    /// over do not count.
    pub(super) const fn span(&self) -> u64 {
        self.nxt.saturating_sub(self.una)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn psns_are_extended_to_the_nearest() {
        let mut snd = SendState::new(Psn::new(0x00ff_fffe));
        snd.nxt += 4;
        snd.max += 4;
        assert_eq!((snd.extend(Psn::new(1)), snd.span()), (snd.una + 3, 4));
        assert_eq!(snd.extend(Psn::new(0x00ff_fff0)), snd.una - 14);
        assert_eq!(wire_psn(snd.una + 2), Psn::new(0));
        assert!(snd.is_outstanding(snd.una) && snd.is_outstanding(snd.una + 3));
        assert!(!snd.is_outstanding(snd.una - 1) && !snd.is_outstanding(snd.max));
    }

    /// Tests every PSN on the wire from the ends and the middle of PSN space: it extends to the candidate nearest to
    /// `una`, and is outstanding exactly when it lies in the window.
    #[test]
    fn every_psn_is_extended() {
        const WINDOW: Seq = 1000;
        for first in [0, 1, WRAP / 2, WRAP - 1] {
            let mut snd = SendState::new(Psn::new(u32::try_from(first).unwrap()));
            snd.max = snd.una + WINDOW;
            for number in 0..u32::try_from(WRAP).unwrap() {
                let ahead = (Seq::from(number) + WRAP - first) % WRAP;
                let nearest = if ahead < WRAP / 2 { snd.una + ahead } else { snd.una + ahead - WRAP };
                let seq = snd.extend(Psn::new(number));
                assert_eq!((seq, snd.is_outstanding(seq)), (nearest, ahead < WINDOW), "{number:#x} at {first:#x}");
            }
        }
    }
}
