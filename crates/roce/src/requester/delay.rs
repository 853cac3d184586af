//! Detects that the queueing delay is close to its maximum. A packet lost at that time was probably dropped by a full
//! queue.
//!
//! Round trip times through a queue grow until it overflows, and shrink when senders slow down. A network with random
//! losses loses packets at any delay. So a loss indicates congestion if the last few round trip times were all closer
//! to the longest than to the shortest one, and much longer than the shortest.

use std::time::Duration;

/// Delay that is never significant: a busy processor takes as much.
const TOLERATED: Duration = Duration::from_millis(1);
/// The same as a fraction of the shortest round trip time.
const TOLERATED_PART: u32 = 8;
/// Number of consecutive round trips that are examined.
const RECENT: usize = 4;
/// Minimum time for which the shortest and longest round trip times are remembered. They expire because routes change.
const MEMORY: Duration = Duration::from_secs(10);

/// Shortest and longest of a set of round trip times.
#[derive(Clone, Copy, Debug)]
struct Range {
    shortest: Duration,
    longest: Duration,
}

impl Range {
    const NONE: Self = Self { shortest: Duration::MAX, longest: Duration::ZERO };

    fn and(self, other: Self) -> Self {
        Self { shortest: self.shortest.min(other.shortest), longest: self.longest.max(other.longest) }
    }
}

/// Round trip times of the recent past.
#[derive(Clone, Copy, Debug)]
pub(super) struct Delay {
    recent: [Duration; RECENT],
    next: usize,
    /// Range since the start of the current period, and range of the [`MEMORY`] before it.
    new: Range,
    since: Duration,
    old: Range,
}

impl Default for Delay {
    fn default() -> Self {
        let recent = [Duration::ZERO; RECENT];
        Self { recent, next: 0, new: Range::NONE, since: Duration::ZERO, old: Range::NONE }
    }
}

impl Delay {
    /// Adds a round trip time.
    pub(super) fn add(&mut self, now: Duration, rtt: Duration) {
        if now.saturating_sub(self.since) >= MEMORY {
            (self.old, self.new, self.since) = (self.new, Range::NONE, now);
        }
        self.new = self.new.and(Range { shortest: rtt, longest: rtt });
        if let Some(place) = self.recent.get_mut(self.next) {
            *place = rtt;
        }
        self.next = (self.next + 1) % RECENT;
    }

    /// Returns `true` if the last few packets had more than half of the maximum queueing delay.
    pub(super) fn is_late(&self) -> bool {
        let Range { shortest, longest } = self.new.and(self.old);
        let recent = self.recent.into_iter().min().unwrap_or_default();
        let (delay, most) = (recent.saturating_sub(shortest), longest.saturating_sub(shortest));
        delay > TOLERATED.max(shortest / TOLERATED_PART) && delay > most / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// State after a packet every 100 us, with these round trip times in microseconds.
    fn after(rtts: impl IntoIterator<Item = u64>) -> Delay {
        let mut delay = Delay::default();
        for (number, rtt) in (0..).zip(rtts) {
            delay.add(Duration::from_micros(100) * number, Duration::from_micros(rtt));
        }
        delay
    }

    #[test]
    fn late_is_nearer_to_the_longest_and_far_from_the_shortest() {
        for (rtts, late) in [
            (&[][..], false),
            (&[5000], false),
            (&[100, 4000, 5000, 5000, 4900], true),
            (&[100, 5000, 5000, 100, 5000, 5000, 5000], false),
            (&[100, 9000, 4500, 5000, 5000, 5000], false),
            (&[100, 9000, 4600, 5000, 5000, 5000], true),
            // Delay of a busy processor.
            (&[100, 1000, 1000, 1000, 1000], false),
            // A long path.
            (&[40_000, 44_000, 44_000, 44_000, 44_000], false),
            (&[40_000, 46_000, 46_000, 46_000, 46_000], true),
        ] {
            assert_eq!(after(rtts.iter().copied()).is_late(), late, "{rtts:?}");
        }
    }

    #[test]
    fn another_route_is_learnt() {
        let mut delay = after([100]);
        for (seconds, late) in [(1, true), (9, true), (19, true), (29, false)] {
            (0..4).for_each(|_| delay.add(Duration::from_secs(seconds), Duration::from_millis(30)));
            assert_eq!(delay.is_late(), late, "{seconds}");
        }
    }
}
