//! The congestion window: how much a connection may have in flight, from what its losses and its delays say about the
//! network.
//!
//! Some networks lose packets for no reason, and slowing down does not help them. But a queue that overflows is the
//! only thing that a network without ECN says about congestion, and such a queue takes time. So the window is cut when
//! more than one packet in fifty is lost, and when any is lost while packets wait on the way about as long as they ever
//! do (`delay`). It is cut once in a round trip: by a third, and to what arrived of it, if that is less. A round trip
//! without a cut gives a little back.
//!
//! Lost responses of READs count like lost requests: who requests decides how many responses are in flight.

use std::time::Duration;

use super::send_state::Seq;

/// One in so many packets may be lost without a consequence, as long as nothing is late.
const TOLERATED: u64 = 50;
/// Losses in a row that say nothing then: chance has it that they come together.
const BURST: u64 = 8;
/// A round trip, while none was measured.
const UNKNOWN_RTT: Duration = Duration::from_millis(5);
/// PSNs that may be in flight whatever is lost.
const MIN: u32 = 1;
/// A round trip without a cut gives back a packet, one part in so many of the window, and one part in so many of what
/// is missing to where it was last known to be too much.
const GROWTH: u32 = 64;
const RECOVERY: u32 = 8;
/// No cut leaves less than one part in so many of what was sent in the round trip.
const DEEPEST: u64 = 8;
/// The window of who sends less than it allows is cut to no less than one part in so many at a time.
const LEAST_USED: u32 = 4;

/// Packets that are lost.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Loss {
    count: u64,
    /// The newest of them.
    last: Seq,
    /// One was lost again, after it was retransmitted.
    again: bool,
}

impl Loss {
    /// So many PSNs from `seq` on.
    pub(super) const fn of(seq: Seq, count: u64) -> Self {
        Self { count, last: seq.saturating_add(count.saturating_sub(1)), again: false }
    }

    /// One more, at `seq`, for the first time or `again`.
    pub(super) fn add(&mut self, seq: Seq, again: bool) {
        self.count += 1;
        (self.last, self.again) = (self.last.max(seq), self.again || again);
    }

    /// Returns `true` if there are none.
    pub(super) const fn is_none(self) -> bool {
        self.count == 0
    }
}

/// A cut.
#[derive(Clone, Copy, Debug)]
struct Cut {
    at: Duration,
    /// PSNs that were sent in the round trip before it.
    sent: u64,
}

/// The congestion window of a connection.
#[derive(Debug)]
pub(super) struct CongestionWindow {
    psns: u32,
    max: u32,
    /// Where it was too much.
    top: u32,
    /// The round trip that is looked at: its first PSN, and the one after its last.
    from: Seq,
    until: Seq,
    /// PSNs that were lost in it.
    lost: u64,
    /// The last cut, if not everything from before it is done.
    cut: Option<Cut>,
    /// Cuts in all.
    cuts: u64,
    rtt: Duration,
    /// PSNs for which there was no loss: each loss takes [`TOLERATED`] of them.
    credit: u64,
}

impl CongestionWindow {
    /// Nothing was lost, and at most `max` PSNs may be in flight.
    pub(super) const fn new(max: u32) -> Self {
        let credit = BURST * TOLERATED;
        Self { psns: max, max, top: max, from: 0, until: 0, lost: 0, cut: None, cuts: 0, rtt: UNKNOWN_RTT, credit }
    }

    /// PSNs that may be in flight.
    #[inline]
    pub(super) const fn psns(&self) -> u32 {
        self.psns
    }

    /// How often it was cut.
    pub(super) const fn cuts(&self) -> u64 {
        self.cuts
    }

    /// Packets are lost. `late`: packets wait on the way as long as they ever do. `max` is the first PSN that was never
    /// sent.
    pub(super) fn on_lost(&mut self, now: Duration, loss: Loss, late: bool, max: Seq) {
        let sent_since = loss.again || loss.last >= self.until;
        let cut = self.cut.filter(|cut| !sent_since || now.saturating_sub(cut.at) < self.rtt);
        if cut.is_none() && self.cut.is_some() {
            // It is not over, but what is lost now was sent after the cut: a window of it.
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
            // What was retransmitted meanwhile and lost again counts as well.
            let arrived = sent.saturating_sub(self.lost).max(sent / DEEPEST);
            let arrived = u32::try_from(arrived).unwrap_or(u32::MAX);
            self.psns = self.psns.min(arrived.max(MIN));
            self.top = self.top.min(self.psns.saturating_mul(2));
        }
    }

    /// Nothing is heard of what is in flight.
    pub(super) fn on_silence(&mut self, now: Duration, max: Seq) {
        self.cut_by(2, now, max);
    }

    /// How long a round trip takes.
    pub(super) const fn set_rtt(&mut self, rtt: Duration) {
        self.rtt = rtt;
    }

    /// Takes one part in so many away. Everything before `max` belongs to this round trip. Returns how much that is.
    fn cut_by(&mut self, part: u32, now: Duration, max: Seq) -> u64 {
        let sent = max.saturating_sub(self.from);
        let used = u32::try_from(sent).unwrap_or(u32::MAX).max(self.psns / LEAST_USED).min(self.psns);
        (self.psns, self.top) = ((used - used / part).max(MIN), used);
        (self.until, self.cut) = (max, Some(Cut { at: now, sent }));
        self.cuts += 1;
        sent
    }

    /// `acked` more PSNs are done, up to `una`; `max` is the first PSN that was never sent.
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

    /// So many of the first round trip.
    fn lost(count: u64) -> Loss {
        Loss::of(10, count)
    }

    /// A window of which a round trip of as many packets has begun.
    fn window(max: u32) -> CongestionWindow {
        let mut window = CongestionWindow::new(max);
        window.on_acked(0, 10, 10 + Seq::from(max));
        window
    }

    #[test]
    fn one_in_a_hundred_costs_nothing() {
        let mut window = window(256);
        for round in 0..100 {
            // Not one by one.
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
        // What was sent before the cut belongs to it.
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
        // What is noticed late was sent before.
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
        // A window that is smaller from the beginning.
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
