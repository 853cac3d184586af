//! Time limits for replies of workers, and delays between their restarts.

use std::time::{Duration, Instant};

/// Time limits and rates. Tests use their own.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    /// Time limit of a status request.
    pub(super) status: Duration,
    /// Time limit of every other request.
    pub(super) call: Duration,
    /// Time limit of each request during the start. It is longer because an adapter of the host waits for its
    /// addresses.
    pub(super) start: Duration,
    /// A worker that owes a reply for longer is killed.
    pub(super) hung: Duration,
    /// Time for each step of a program that replaces this one, while the guests are served.
    pub(super) take_over: Duration,
    /// Time in which a worker that was told to end has to exit.
    pub(super) stop: Duration,
    /// Time in which a killed process has to exit; half of it when the daemon ends. Only a process with a thread in
    /// uninterruptible sleep or with very much memory takes longer.
    pub(super) kill: Duration,
    /// Delay before the first restart.
    pub(super) first_pause: Duration,
    /// Longest delay before a restart.
    pub(super) longest_pause: Duration,
    /// Lifetime of a worker after which the delays start again at `first_pause`.
    pub(super) settled: Duration,
    /// Rate of a worker's requests.
    pub(super) upcalls: Rate,
    /// Rate of the lines that a worker writes to its standard error.
    pub(super) log: Rate,
    /// Rate at which the interface of an uplink is read.
    pub(super) looks: Rate,
    /// Rate of crashes of a worker that its clients survive. A client that makes each worker crash is disconnected.
    pub(super) crashes: Rate,
}

impl Timing {
    /// Returns these limits, or those of a test of the whole program: clients survive the given number of crashes,
    /// even in immediate succession.
    pub(super) fn or_of_test(self) -> Self {
        let crashes = std::env::var("PVRDMAD_CRASHES").ok().filter(|_| cfg!(feature = "testing"));
        match crashes.and_then(|crashes| crashes.parse().ok()) {
            Some(burst) => {
                let pause = Duration::from_millis(1);
                Self { crashes: Rate { burst, ..self.crashes }, first_pause: pause, longest_pause: pause, ..self }
            }
            None => self,
        }
    }
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            status: Duration::from_secs(1),
            call: Duration::from_secs(10),
            start: patience(Duration::from_secs(20)),
            hung: Duration::from_secs(30),
            take_over: patience(Duration::from_secs(25)),
            stop: Duration::from_secs(3),
            kill: Duration::from_secs(2),
            first_pause: Duration::from_millis(100),
            longest_pause: Duration::from_secs(30),
            settled: Duration::from_secs(60),
            upcalls: Rate { burst: 1000, each: Duration::from_millis(1) },
            log: Rate { burst: 1000, each: Duration::from_millis(10) },
            looks: Rate { burst: 5, each: Duration::from_millis(500) },
            crashes: Rate { burst: 5, each: Duration::from_secs(120) },
        }
    }
}

/// Returns a time, unless a test of programs that hang has shortened it.
fn patience(time: Duration) -> Duration {
    let shortened = std::env::var("PVRDMAD_PATIENCE_MS").ok().filter(|_| cfg!(feature = "testing"));
    shortened.and_then(|millis| millis.parse().ok()).map_or(time, Duration::from_millis)
}

/// A rate: a burst of events at once, and one more per interval.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rate {
    pub(super) burst: u32,
    pub(super) each: Duration,
}

/// The remaining budget of a [`Rate`] (a token bucket).
#[derive(Debug)]
pub(super) struct Budget {
    rate: Rate,
    left: u32,
    /// Time up to which tokens have been added.
    filled: Instant,
}

impl Budget {
    pub(super) const fn new(rate: Rate, now: Instant) -> Self {
        Self { rate, left: rate.burst, filled: now }
    }

    /// Returns the time until the next token, or `None` if there is one now.
    pub(super) fn wait(&mut self, now: Instant) -> Option<Duration> {
        self.fill(now);
        (self.left == 0).then(|| (self.filled + self.rate.each).saturating_duration_since(now))
    }

    /// Takes a token. Returns `false` if there is none.
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
            // The bucket is full, so the remaining fraction of an interval is dropped.
            left if left >= self.rate.burst => (self.left, self.filled) = (self.rate.burst, now),
            left => (self.left, self.filled) = (left, self.filled + self.rate.each.saturating_mul(new)),
        }
    }
}

/// Delay before the next restart: doubles with each worker that ends early.
#[derive(Debug)]
pub(super) struct BackOff {
    next: Duration,
}

impl BackOff {
    pub(super) const fn new(timing: &Timing) -> Self {
        Self { next: timing.first_pause }
    }

    /// Returns the delay after a worker that lived for `life`.
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
