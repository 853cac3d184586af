//! How long the supervisor waits for a worker, and before it starts the next one.

use std::time::{Duration, Instant};

/// Times and rates; tests have their own.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    /// For a status.
    pub(super) status: Duration,
    /// For everything else that is asked.
    pub(super) call: Duration,
    /// For each request of the start. The host's adapter waits for its addresses.
    pub(super) start: Duration,
    /// A reply that is owed for longer ends the worker.
    pub(super) hung: Duration,
    /// For a worker that was told to end.
    pub(super) stop: Duration,
    /// For a process that was killed: half of it at the end of the daemon. Longer takes only one with a thread that no
    /// signal interrupts, or with very much memory.
    pub(super) kill: Duration,
    /// Before the first new start.
    pub(super) first_pause: Duration,
    /// Before any new start.
    pub(super) longest_pause: Duration,
    /// A worker that lives so long starts the pauses anew.
    pub(super) settled: Duration,
    /// Requests of a worker.
    pub(super) upcalls: Rate,
    /// Lines of a worker's standard error.
    pub(super) log: Rate,
    /// Looks at the interface of an uplink.
    pub(super) looks: Rate,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            status: Duration::from_secs(1),
            call: Duration::from_secs(10),
            start: Duration::from_secs(20),
            hung: Duration::from_secs(30),
            stop: Duration::from_secs(3),
            kill: Duration::from_secs(2),
            first_pause: Duration::from_millis(100),
            longest_pause: Duration::from_secs(30),
            settled: Duration::from_secs(60),
            upcalls: Rate { burst: 1000, each: Duration::from_millis(1) },
            log: Rate { burst: 1000, each: Duration::from_millis(10) },
            looks: Rate { burst: 5, each: Duration::from_millis(500) },
        }
    }
}

/// So many at once, and one more for each interval.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rate {
    pub(super) burst: u32,
    pub(super) each: Duration,
}

/// What is left of a [`Rate`].
#[derive(Debug)]
pub(super) struct Budget {
    rate: Rate,
    left: u32,
    /// When the last one was added.
    filled: Instant,
}

impl Budget {
    pub(super) const fn new(rate: Rate, now: Instant) -> Self {
        Self { rate, left: rate.burst, filled: now }
    }

    /// How long until there is one, if there is none.
    pub(super) fn wait(&mut self, now: Instant) -> Option<Duration> {
        self.fill(now);
        (self.left == 0).then(|| (self.filled + self.rate.each).saturating_duration_since(now))
    }

    /// Takes one. `false`: there is none.
    pub(super) fn take(&mut self, now: Instant) -> bool {
        self.fill(now);
        match self.left.checked_sub(1) {
            Some(left) => {
                self.left = left;
                true
            }
            None => false,
        }
    }

    fn fill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.filled);
        let new = passed.as_nanos().checked_div(self.rate.each.as_nanos()).unwrap_or(0);
        let new = u32::try_from(new).unwrap_or(u32::MAX);
        match self.left.saturating_add(new) {
            // Full: what has passed is not saved.
            left if left >= self.rate.burst => (self.left, self.filled) = (self.rate.burst, now),
            left => (self.left, self.filled) = (left, self.filled + self.rate.each.saturating_mul(new)),
        }
    }
}

/// The pause before the next start.
#[derive(Debug)]
pub(super) struct BackOff {
    next: Duration,
}

impl BackOff {
    pub(super) const fn new(timing: &Timing) -> Self {
        Self { next: timing.first_pause }
    }

    /// The pause after a worker that lived for `life`.
    pub(super) fn pause(&mut self, life: Duration, timing: &Timing) -> Duration {
        if life >= timing.settled {
            self.next = timing.first_pause;
        }
        let pause = self.next;
        self.next = pause.saturating_mul(2).min(timing.longest_pause);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_and_start_anew() {
        let timing = Timing::default();
        let mut pauses = BackOff::new(&timing);
        let short: Vec<_> = (0..11).map(|_| pauses.pause(Duration::ZERO, &timing).as_millis()).collect();
        assert_eq!(short, [100, 200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 30_000, 30_000]);
        assert_eq!(pauses.pause(timing.settled, &timing), timing.first_pause);
        assert_eq!(pauses.pause(Duration::ZERO, &timing), timing.first_pause * 2);
    }

    #[test]
    fn a_budget_comes_back_with_time() {
        let start = Instant::now();
        let mut budget = Budget::new(Rate { burst: 3, each: Duration::from_millis(10) }, start);
        let later = |ms| start + Duration::from_millis(ms);
        assert_eq!((0..5).filter(|_| budget.take(start)).count(), 3);
        assert_eq!(budget.wait(later(4)), Some(Duration::from_millis(6)));
        assert!(budget.take(later(14)) && !budget.take(later(19)) && budget.take(later(20)));
        assert_eq!(budget.wait(later(10_000)), None);
        assert_eq!((0..5).filter(|_| budget.take(later(10_000))).count(), 3);
    }
}
