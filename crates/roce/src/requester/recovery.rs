//! How much may be under way, and noticing a loss before the ACK timeout does.
//!
//! The ACK timeout of a QP is tens of milliseconds, because the architecture makes it the time after which a peer is given up
//! step by step. Between two hosts of one network a round trip takes a hundred microseconds, and what is lost twice, or whose
//! NAK is lost, would stand still for hundreds of round trips. So when nothing has been confirmed for a few round trips, the
//! oldest packet is sent again ("probe"); that spends no retry, and a peer that has it sees a duplicate, which it answers. If it
//! confirms no more than this one packet, so is the next, and if that confirms no more either, the following are lost, too.
//!
//! After a loss only a few packets follow the one that is sent again until something is confirmed: most responders have
//! dropped them (go-back-N), and those that kept what came behind the gap need none. One that was seen to keep them gets the
//! missing packet alone, and the flow goes on meanwhile.

use std::time::Duration;

use super::Seq;

/// PSNs under way right after a loss.
const AFTER_LOSS: u32 = 8;
/// Shortest time without progress that leads to a probe: above what a busy scheduler takes away.
const SHORTEST: Duration = Duration::from_micros(500);
/// Probes in a row; after these the ACK timeout decides.
const MOST_PROBES: u32 = 3;

/// Whether the oldest packet is sent once more, out of turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Probe {
    No,
    Due(Try),
    /// This one was.
    Sent(Seq, Try),
}

/// What the probe before told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Try {
    /// There was none.
    First,
    /// Its packet had been missing, or the answer to an earlier packet came late.
    Second,
}

/// Round trip times, as RFC 6298 keeps them.
#[derive(Clone, Copy, Debug)]
struct RoundTrip {
    smooth: Duration,
    variation: Duration,
}

#[derive(Debug)]
pub(super) struct Recovery {
    /// PSNs that may be unconfirmed now, and at most.
    window: u32,
    most: u32,
    round_trip: Option<RoundTrip>,
    /// The end of a packet that waits for its ACK, and when it was sent.
    sample: Option<(Seq, Duration)>,
    /// Probes since the last progress.
    probes: u32,
    deadline: Option<Duration>,
}

impl Recovery {
    pub(super) const fn new(most: u32) -> Self {
        Self { window: most, most, round_trip: None, sample: None, probes: 0, deadline: None }
    }

    /// PSNs that may be unconfirmed.
    pub(super) const fn window(&self) -> u32 {
        self.window
    }

    /// When to probe.
    pub(super) const fn deadline(&self) -> Option<Duration> {
        self.deadline
    }

    /// A packet that asks for an ACK was sent for the first time.
    pub(super) fn sent(&mut self, now: Duration, end: Seq) {
        self.sample.get_or_insert((end, now));
    }

    /// `by` more PSNs are confirmed, up to `unconfirmed`.
    pub(super) fn progress(&mut self, now: Duration, unconfirmed: Seq, by: Seq) {
        self.probes = 0;
        let by = u32::try_from(by).unwrap_or(u32::MAX);
        self.window = self.window.saturating_add(by).min(self.most);
        let Some((_, sent)) = self.sample.filter(|&(end, _)| end <= unconfirmed) else { return };
        self.sample = None;
        let took = now.saturating_sub(sent);
        self.round_trip = Some(match self.round_trip {
            None => RoundTrip { smooth: took, variation: took / 2 },
            Some(RoundTrip { smooth, variation }) => {
                RoundTrip { smooth: (smooth * 7 + took) / 8, variation: (variation * 3 + smooth.abs_diff(took)) / 4 }
            }
        });
    }

    /// Something was lost, and is about to be sent again.
    pub(super) fn lost(&mut self) {
        self.window = AFTER_LOSS.min(self.most);
        self.resent();
    }

    /// One packet is about to be sent again.
    pub(super) const fn resent(&mut self) {
        // The answer to the first attempt and that to the second look the same.
        self.sample = None;
    }

    /// Starts waiting for progress anew, if something is under way.
    pub(super) fn restart(&mut self, now: Duration, under_way: bool) {
        let wait = self.round_trip.filter(|_| under_way && self.probes < MOST_PROBES).map(|round_trip| {
            (round_trip.smooth + round_trip.variation * 4).max(SHORTEST).saturating_mul(1 << self.probes)
        });
        self.deadline = wait.map(|wait| now.saturating_add(wait));
    }

    /// Whether it is time for a probe, which is counted.
    pub(super) fn probe(&mut self, now: Duration) -> bool {
        let due = self.deadline.is_some_and(|deadline| deadline <= now);
        if due {
            self.probes += 1;
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(microseconds: u64) -> Duration {
        Duration::from_micros(microseconds)
    }

    #[test]
    fn probes_follow_the_round_trip_and_end() {
        let mut recovery = Recovery::new(256);
        recovery.restart(us(0), true);
        assert_eq!(recovery.deadline(), None, "nothing is known of the peer");
        recovery.sent(us(0), 10);
        recovery.progress(us(1000), 10, 10);
        let mut now = us(1000);
        for wait in [3000, 6000, 12_000] {
            recovery.restart(now, true);
            assert_eq!(recovery.deadline(), Some(now + us(wait)));
            assert!(!recovery.probe(now));
            now += us(wait);
            assert!(recovery.probe(now));
        }
        recovery.restart(now, true);
        assert_eq!(recovery.deadline(), None);
        recovery.progress(now, 11, 1);
        recovery.restart(now, true);
        assert!(recovery.deadline().is_some());
        recovery.restart(now, false);
        assert_eq!(recovery.deadline(), None);
    }

    #[test]
    fn the_window_shrinks_with_a_loss_and_grows_with_what_is_confirmed() {
        let mut recovery = Recovery::new(256);
        recovery.sent(us(0), 1);
        recovery.lost();
        assert_eq!(recovery.window(), 8);
        recovery.progress(us(5), 8, 8);
        assert_eq!((recovery.window(), recovery.round_trip.is_none()), (16, true));
        recovery.progress(us(5), 1000, 992);
        assert_eq!(recovery.window(), 256);
    }
}
