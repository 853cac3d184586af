//! What losses and delays mean for how much may be in flight, where no switch marks packets.
//!
//! Some networks lose packets for no reason, and slowing down does not help them. But a queue that grows delays
//! packets, and loses them when it is full. So once for each round trip the share of packets that were lost and the
//! time that they waited decide: more than one in fifty lost takes a third of the window away, a queue that is longer
//! than it should be takes its share (as Swift does), and otherwise the window grows a little.
//!
//! Lost responses of READs do not count: they were sent by the peer, at its rate.

use std::time::Duration;

use super::send_state::Seq;

/// One in so many packets may be lost without a consequence.
const TOLERATED: u64 = 50;
/// Losses in a round trip that say nothing: a few in a small window are many of it.
const FEW: u64 = 2;
/// PSNs that may be in flight whatever is lost.
const MIN_PACKETS: u32 = 8;
/// What a round trip without congestion gives back, in PSNs, and one in which packets wait nearly as long as they may.
const INCREASE: u32 = 4;
const SMALL_INCREASE: u32 = 1;
/// Time that packets may wait on their way, at least: above what a busy host takes from its processes.
const MIN_QUEUE: Duration = Duration::from_micros(500);

/// How long packets wait on their way.
#[derive(Debug, Default)]
struct Delay {
    /// The shortest round trip time that was measured.
    base: Option<Duration>,
    /// The last two since the window was changed. The shorter one counts: one that a scheduler stretched says nothing.
    recent: [Option<Duration>; 2],
}

impl Delay {
    fn on_rtt(&mut self, rtt: Duration) {
        self.base = Some(self.base.map_or(rtt, |base| base.min(rtt)));
        self.recent = [self.recent[1], Some(rtt)];
    }

    /// The time that packets waited lately, and the time that they may. `None`: too little was measured.
    fn waited(&self) -> Option<(Duration, Duration)> {
        let [Some(one), Some(other)] = self.recent else { return None };
        let base = self.base?;
        Some((one.min(other).saturating_sub(base), (base / 2).max(MIN_QUEUE)))
    }
}

/// Limits what may be in flight.
#[derive(Debug)]
pub(super) struct CongestionWindow {
    packets: u32,
    max: u32,
    /// The round trip that is looked at: its first PSN, and the one after its last.
    from: Seq,
    until: Seq,
    lost: u64,
    delay: Delay,
}

impl CongestionWindow {
    /// Nothing was lost, and at most `max` PSNs may be in flight.
    pub(super) fn new(max: u32) -> Self {
        Self { packets: max, max, from: 0, until: 0, lost: 0, delay: Delay::default() }
    }

    /// PSNs that may be in flight.
    #[inline]
    pub(super) const fn packets(&self) -> u32 {
        self.packets
    }

    /// So many packets are lost.
    pub(super) const fn on_lost(&mut self, count: u64) {
        self.lost = self.lost.saturating_add(count);
    }

    /// A round trip took so long.
    pub(super) fn on_rtt(&mut self, rtt: Duration) {
        self.delay.on_rtt(rtt);
    }

    /// Everything before `una` is done; `max` is the first PSN that was never sent.
    #[inline]
    pub(super) fn on_acked(&mut self, una: Seq, max: Seq) {
        if una >= self.until {
            self.end_round_trip(una, max);
        }
    }

    fn end_round_trip(&mut self, una: Seq, max: Seq) {
        let sent = self.until.saturating_sub(self.from);
        let (waited, may) = self.delay.waited().unwrap_or_default();
        let too_long = waited > may;
        let cut = if self.lost.saturating_mul(TOLERATED) > sent && (self.lost > FEW || too_long) {
            self.packets / 3
        } else if too_long {
            self.share(waited.saturating_sub(may), waited)
        } else {
            0
        };
        let more = if waited > may / 2 { SMALL_INCREASE } else { INCREASE };
        if cut > 0 {
            self.packets = self.packets.saturating_sub(cut).max(MIN_PACKETS);
            // What was measured before it tells nothing of what it does.
            self.delay.recent = [None; 2];
        } else {
            self.packets = self.packets.saturating_add(more);
        }
        self.packets = self.packets.min(self.max);
        (self.from, self.until, self.lost) = (una, max.max(una + 1), 0);
    }

    /// As much of the window as `part` is of `whole`, but no more than a third, and something.
    fn share(&self, part: Duration, whole: Duration) -> u32 {
        let share = u128::from(self.packets) * part.as_nanos() / whole.as_nanos().max(1);
        u32::try_from(share).unwrap_or(u32::MAX).clamp(1, (self.packets / 3).max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_losses_in_a_round_trip_cost_a_third_once() {
        let mut window = CongestionWindow::new(256);
        window.on_acked(10, 266);
        // One in a hundred.
        window.on_lost(2);
        window.on_acked(266, 522);
        assert_eq!(window.packets(), 256);
        for (lost, limit) in [(6, 171), (200, 114), (0, 118), (3, 122)] {
            let from = window.from;
            window.on_lost(lost);
            window.on_acked(from + 100, from + 356);
            window.on_acked(from + 256, from + 512);
            assert_eq!(window.packets(), limit, "{lost}");
        }
        for _ in 0..100 {
            window.on_lost(100);
            window.on_acked(window.until, window.until + 100);
        }
        assert_eq!(window.packets(), MIN_PACKETS);
        // A window that is smaller from the beginning.
        let mut small = CongestionWindow::new(4);
        small.on_lost(100);
        small.on_acked(10, 20);
        assert_eq!(small.packets(), 4);
    }

    /// A window in which each round trip takes so long, after so many of them.
    fn after(window: &mut CongestionWindow, round_trips: u32, rtt: Duration, lost: u64) -> u32 {
        for _ in 0..round_trips {
            window.on_rtt(rtt);
            window.on_lost(lost);
            window.on_acked(window.until, window.until + 256);
        }
        window.packets()
    }

    #[test]
    fn a_queue_that_is_too_long_costs_its_share_and_some_losses_nothing() {
        let us = Duration::from_micros;
        let mut window = CongestionWindow::new(256);
        window.on_acked(0, 256);
        assert_eq!(after(&mut window, 20, us(100), 4), 256, "under 2 % are lost, and nothing waits");
        assert_eq!(after(&mut window, 20, us(500), 4), 256, "what waits is short");
        // 1 ms wait, of which half is too much: the shorter of two round trips.
        assert_eq!([1, 1, 1, 1].map(|more| after(&mut window, more, us(1100), 0)), [256, 171, 175, 117]);
        assert!(after(&mut window, 40, us(1100), 0) < 20);
        // One that a scheduler stretched among others.
        let before = after(&mut window, 2, us(100), 0);
        for _ in 0..5 {
            after(&mut window, 1, us(50_000), 0);
            after(&mut window, 2, us(100), 0);
        }
        assert_eq!(window.packets(), before + 15 * INCREASE);
        // A long way may have a longer queue.
        let mut far = CongestionWindow::new(256);
        assert_eq!(after(&mut far, 8, us(50_000), 0), 256);
        assert_eq!(after(&mut far, 8, us(70_000), 0), 256);
        assert!(after(&mut far, 8, us(90_000), 0) < 256);
    }
}
