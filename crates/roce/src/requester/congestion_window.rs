//! The congestion window: the amount of data that a connection may have in flight, derived from its losses and delays.
//!
//! Some networks lose packets at random, and a lower rate does not help there. But on a network without ECN, loss at a
//! full queue is the only signal of congestion, and such a queue adds delay. So the window is cut when more than one
//! packet in fifty is lost, and also at any loss while the queueing delay is close to its maximum (`delay`). It is cut
//! at most once per round trip: by a third, or to the amount that arrived, if that is less. A round trip without a cut
//! gives a little back.
//!
//! Lost responses of READs count like lost requests, because the requester determines how many responses are in flight.

use std::time::Duration;

use super::send_state::Seq;

/// One packet in this number may be lost without consequence while delays are low.
const TOLERATED: u64 = 50;
/// Number of consecutive losses that are tolerated in that case, because random losses also come in bursts.
const BURST: u64 = 8;
/// Round trip time while none was measured.
const UNKNOWN_RTT: Duration = Duration::from_millis(5);
/// PSNs that may be in flight regardless of losses.
const MIN: u32 = 1;
/// Divisor of growth, and below it the divisor of recovery. A round trip without a cut gives back one packet, the first
/// fraction of the window, and the second fraction of the distance to the last size that was too large.
const GROWTH: u32 = 64;
const RECOVERY: u32 = 8;
/// Divisor that bounds a cut: it leaves at least this fraction of the PSNs sent in the round trip.
const DEEPEST: u64 = 8;
/// A cut starts from the part of the window that the sender uses, but at least from the window divided by this.
const LEAST_USED: u32 = 4;

/// Lost packets.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Loss {
    count: u64,
    /// Newest lost PSN.
    last: Seq,
    /// One of them was lost again after its retransmission.
    again: bool,
}

impl Loss {
    /// Records the loss of `count` PSNs from `seq` on.
    pub(super) const fn of(seq: Seq, count: u64) -> Self {
        Self { count, last: seq.saturating_add(count.saturating_sub(1)), again: false }
    }

    /// Adds a loss at `seq`, for the first time or `again`.
    pub(super) fn add(&mut self, seq: Seq, again: bool) {
        self.count += 1;
        (self.last, self.again) = (self.last.max(seq), self.again || again);
    }

    /// Returns `true` if there is no loss.
    pub(super) const fn is_none(self) -> bool {
        self.count == 0
    }
}

/// A cut of the window.
#[derive(Clone, Copy, Debug)]
struct Cut {
    at: Duration,
    /// PSNs sent in the round trip before the cut.
    sent: u64,
}

/// The congestion window of a connection.
#[derive(Debug)]
pub(super) struct CongestionWindow {
    psns: u32,
    max: u32,
    /// Size at which the window was too large.
    top: u32,
    /// Round trip under observation: its first PSN, and the PSN after its last.
    from: Seq,
    until: Seq,
    /// PSNs lost in that round trip.
    lost: u64,
    /// The last cut, unless everything sent before it is done.
    cut: Option<Cut>,
    /// Total number of cuts.
    cuts: u64,
    rtt: Duration,
    /// Credit of PSNs without a loss: each loss takes [`TOLERATED`] of them.
    credit: u64,
}

impl CongestionWindow {
    /// Starts without losses. At most `max` PSNs may be in flight.
    pub(super) const fn new(max: u32) -> Self {
        let credit = BURST * TOLERATED;
        Self { psns: max, max, top: max, from: 0, until: 0, lost: 0, cut: None, cuts: 0, rtt: UNKNOWN_RTT, credit }
    }

    /// PSNs that may be in flight.
    #[inline]
    pub(super) const fn psns(&self) -> u32 {
        self.psns
    }

    /// Total number of cuts.
    pub(super) const fn cuts(&self) -> u64 {
        self.cuts
    }

    /// Handles lost packets. `late`: the queueing delay is close to its maximum. `max` is the first PSN that was never
    /// sent.
    pub(super) fn on_lost(&mut self, now: Duration, loss: Loss, late: bool, max: Seq) {
        let sent_since = loss.again || loss.last >= self.until;
        let cut = self.cut.filter(|cut| !sent_since || now.saturating_sub(cut.at) < self.rtt);
        if cut.is_none() && self.cut.is_some() {
            // The round trip is not over, but the packets lost now were sent after the cut, so they belong to a window
            // of their own.
            self.from = max.saturating_sub(self.psns.into());
            self.lost = 0;
        }
        self.lost = self.lost.saturating_add(loss.count);
        let price = loss.count.saturating_mul(TOLERATED);
        let too_much = price > self.credit;
        self.credit = self.credit.saturating_sub(price);
        let sent = match cut {
            Some(cut) => cut.sent,
            None if late || too_much => self.cut_by(3, now, max),
            None => return,
        };
        if self.lost > sent / 2 {
            // Packets that were retransmitted meanwhile and lost again count as well.
            let arrived = sent.saturating_sub(self.lost).max(sent / DEEPEST);
            let arrived = u32::try_from(arrived).unwrap_or(u32::MAX);
            self.psns = self.psns.min(arrived.max(MIN));
            self.top = self.top.min(self.psns.saturating_mul(2));
        }
    }

    /// Handles the lack of any response to the packets in flight.
    pub(super) fn on_silence(&mut self, now: Duration, max: Seq) {
        self.cut_by(2, now, max);
    }

    /// Sets the round trip time.
    pub(super) const fn set_rtt(&mut self, rtt: Duration) {
        self.rtt = rtt;
    }

    /// Reduces the window by one part in `part`. Everything before `max` belongs to this round trip. Returns the number
    /// of PSNs taken away.
    fn cut_by(&mut self, part: u32, now: Duration, max: Seq) -> u64 {
        let sent = max.saturating_sub(self.from);
        let used = u32::try_from(sent).unwrap_or(u32::MAX).max(self.psns / LEAST_USED).min(self.psns);
        (self.psns, self.top) = ((used - used / part).max(MIN), used);
        (self.until, self.cut) = (max, Some(Cut { at: now, sent }));
        self.cuts += 1;
        sent
    }

    /// Handles progress: `acked` more PSNs are done, up to `una`; `max` is the first PSN that was never sent.
    #[inline]
    pub(super) fn on_acked(&mut self, acked: u64, una: Seq, max: Seq) {
        self.credit = self.credit.saturating_add(acked).min(BURST * TOLERATED);
        if una >= self.until {
            self.end_round_trip(una, max);
        }
    }

    fn end_round_trip(&mut self, una: Seq, max: Seq) {
        if self.cut.is_none() {
            let growth = 1 + self.psns / GROWTH + self.top.saturating_sub(self.psns) / RECOVERY;
            self.psns = self.psns.saturating_add(growth).min(self.max);
        }
        (self.from, self.until, self.lost, self.cut) = (una, max.max(una + 1), 0, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1);

    /// Loss of `count` PSNs of the first round trip.
    fn lost(count: u64) -> Loss {
        Loss::of(10, count)
    }

    /// A window with a round trip of that many packets in progress.
    fn window(max: u32) -> CongestionWindow {
        let mut window = CongestionWindow::new(max);
        window.on_acked(0, 10, 10 + Seq::from(max));
        window
    }

    #[test]
    fn one_in_a_hundred_costs_nothing() {
        let mut window = window(256);
        for round in 0..100 {
            // Losses come in bursts and not one by one.
            window.on_lost(NOW, lost(if round % 2 == 0 { 5 } else { 0 }), false, 266 + round * 256);
            window.on_acked(256, 266 + round * 256, 522 + round * 256);
            assert_eq!(window.psns(), 256);
        }
    }

    #[test]
    fn many_losses_in_a_round_trip_cost_a_third_once() {
        let mut window = window(256);
        for _ in 0..8 {
            window.on_lost(NOW, lost(1), false, 266);
            assert_eq!(window.psns(), 256);
        }
        for _ in 0..10 {
            window.on_lost(NOW, lost(1), false, 266);
            assert_eq!(window.psns(), 171);
        }
        // Packets that were sent before the cut belong to it.
        window.on_acked(200, 210, 300);
        window.on_lost(NOW, lost(20), true, 300);
        assert_eq!(window.psns(), 171);
        window.on_acked(56, 266, 437);
        assert_eq!(window.psns(), 171, "a round trip with a cut gives nothing back");
        window.on_acked(171, 437, 608);
        assert_eq!(window.psns(), 171 + 1 + 2 + 10);
    }

    #[test]
    fn what_is_lost_a_round_trip_after_a_cut_costs_again() {
        let mut window = window(256);
        window.set_rtt(Duration::from_micros(100));
        for (microseconds, psns) in [(0, 171), (99, 171), (100, 114), (199, 114), (250, 76)] {
            window.on_lost(
                NOW + Duration::from_micros(microseconds),
                Loss { again: true, ..Loss::of(20, 10) },
                false,
                266,
            );
            assert_eq!(window.psns(), psns);
        }
        // Losses that are noticed late are of packets sent before.
        window.on_lost(NOW + Duration::from_millis(1), Loss::of(40, 10), false, 266);
        assert_eq!(window.psns(), 76);
        window.on_lost(NOW + Duration::from_millis(1), Loss::of(266, 10), false, 276);
        assert_eq!(window.psns(), 51);
    }

    #[test]
    fn any_loss_costs_a_third_if_packets_are_late() {
        let mut window = window(100);
        window.on_lost(NOW, lost(1), true, 110);
        window.on_lost(NOW, lost(1), true, 110);
        assert_eq!(window.psns(), 67);
    }

    #[test]
    fn what_arrived_is_the_window_if_most_was_lost() {
        let mut window = window(256);
        for (count, psns) in [(100, 171), (50, 106), (60, 46), (200, 32)] {
            window.on_lost(NOW, lost(count), false, 266);
            assert_eq!(window.psns(), psns);
        }
        for (una, psns) in [(266, 4), (300, 1), (400, 1)] {
            let max = una + Seq::from(window.psns());
            window.on_acked(0, una, max);
            window.on_lost(NOW, lost(200), false, max);
            assert_eq!(window.psns(), psns);
        }
        // A window that is smaller from the start.
        let mut small = CongestionWindow::new(1);
        small.on_lost(NOW, lost(100), true, 20);
        assert_eq!(small.psns(), 1);
    }

    #[test]
    fn who_sends_little_keeps_some_of_it() {
        let mut window = window(256);
        window.on_acked(256, 266, 270);
        window.on_lost(NOW, lost(1), true, 270);
        assert_eq!(window.psns(), 43);
        window.on_acked(4, 270, 274);
        window.on_silence(NOW, 274);
        assert_eq!(window.psns(), 5);
        for seq in 28..400 {
            window.on_acked(10, seq * 10, seq * 10 + 10);
        }
        assert_eq!(window.psns(), 256);
    }
}
