//! What a loss means for how much may be in flight.
//!
//! Some networks lose packets for no reason, and slowing down does not help them. But a queue that overflows is the
//! only thing that a network without ECN says about congestion. So the share of packets that are lost decides: each
//! round trip in which more than one in fifty was lost takes a third of the limit away, and each other one gives a
//! little back.
//!
//! Lost responses of READs do not count: they were sent by the peer, at its rate.

use super::send_state::Seq;

/// One in so many packets may be lost without a consequence.
const TOLERATED: u64 = 50;
/// Losses in a round trip that say nothing: a few in a small window are many of it.
const FEW: u64 = 2;
/// PSNs that may be in flight whatever is lost.
const MIN_LIMIT: u32 = 8;
/// What a round trip without many losses gives back, in PSNs.
const INCREASE: u32 = 4;

/// Limits what may be in flight by what is lost.
#[derive(Debug)]
pub(super) struct LossRate {
    limit: u32,
    max: u32,
    /// The round trip that is looked at: its first PSN, and the one after its last.
    from: Seq,
    until: Seq,
    lost: u64,
}

impl LossRate {
    /// Nothing was lost, and at most `max` PSNs may be in flight.
    pub(super) const fn new(max: u32) -> Self {
        Self { limit: max, max, from: 0, until: 0, lost: 0 }
    }

    /// PSNs that may be in flight.
    #[inline]
    pub(super) const fn limit(&self) -> u32 {
        self.limit
    }

    /// So many packets are lost.
    pub(super) const fn on_lost(&mut self, count: u64) {
        self.lost = self.lost.saturating_add(count);
    }

    /// Everything before `una` is done; `max` is the first PSN that was never sent.
    #[inline]
    pub(super) fn on_acked(&mut self, una: Seq, max: Seq) {
        if una >= self.until {
            self.end_round_trip(una, max);
        }
    }

    fn end_round_trip(&mut self, una: Seq, max: Seq) {
        let packets = self.until.saturating_sub(self.from);
        self.limit = if self.lost > FEW && self.lost.saturating_mul(TOLERATED) > packets {
            (self.limit - self.limit / 3).max(MIN_LIMIT)
        } else {
            self.limit.saturating_add(INCREASE)
        };
        self.limit = self.limit.min(self.max);
        (self.from, self.until, self.lost) = (una, max.max(una + 1), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_losses_in_a_round_trip_cost_a_third_once() {
        let mut rate = LossRate::new(256);
        rate.on_acked(10, 266);
        // One in a hundred.
        rate.on_lost(2);
        rate.on_acked(266, 522);
        assert_eq!(rate.limit(), 256);
        for (lost, limit) in [(6, 171), (200, 114), (0, 118), (3, 122)] {
            let from = rate.from;
            rate.on_lost(lost);
            rate.on_acked(from + 100, from + 356);
            rate.on_acked(from + 256, from + 512);
            assert_eq!(rate.limit(), limit, "{lost}");
        }
        for _ in 0..100 {
            rate.on_lost(100);
            rate.on_acked(rate.until, rate.until + 100);
        }
        assert_eq!(rate.limit(), MIN_LIMIT);
        // A window that is smaller from the beginning.
        let mut small = LossRate::new(4);
        small.on_lost(100);
        small.on_acked(10, 20);
        assert_eq!(small.limit(), 4);
    }
}
