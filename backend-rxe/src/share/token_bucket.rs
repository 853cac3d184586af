//! A token bucket: so many bytes a second, and so many at once.

use std::time::Duration;

/// Bytes that may be used at once where nothing else is said: as many as come in this time, and at least
/// [`LEAST_BURST`].
const BURST_TIME: Duration = Duration::from_millis(10);
const LEAST_BURST: u64 = 64 << 10;
/// Who has to wait does so for as many bytes as come in this time: a thousand times a second is often enough.
const PATIENCE: Duration = Duration::from_millis(1);

/// A token bucket. What is used beyond it has to be waited for afterwards.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenBucket {
    /// Bytes per second.
    rate: u64,
    /// Bytes at most.
    burst: u64,
    /// Bytes that may be used, in units of 1/10^9 byte. Below 0: so many were used too early.
    tokens: i128,
    at: Duration,
}

/// Units of a byte.
const SCALE: i128 = 1_000_000_000;

impl TokenBucket {
    /// A full bucket. Nothing is as fast as 0 bytes a second, so that counts as 1.
    pub(crate) fn new(rate: u64, burst: Option<u64>) -> Self {
        let burst = burst.unwrap_or_else(|| bytes_in(rate, BURST_TIME).max(LEAST_BURST)).max(1);
        Self { rate: rate.max(1), burst, tokens: i128::from(burst) * SCALE, at: Duration::ZERO }
    }

    /// When there is something to use again, if that is not now.
    pub(crate) fn blocked_until(&mut self, now: Duration) -> Option<Duration> {
        self.refill(now);
        if self.tokens > 0 {
            return None;
        }
        let wanted = i128::from(bytes_in(self.rate, PATIENCE).clamp(1, self.burst)) * SCALE;
        let missing = wanted.saturating_sub(self.tokens);
        // Rounded up: otherwise it would be asked again at once.
        let nanos = (missing / i128::from(self.rate)).saturating_add(1);
        Some(now.saturating_add(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))))
    }

    /// Bytes that may be used now.
    pub(crate) fn available(&mut self, now: Duration) -> u64 {
        self.refill(now);
        u64::try_from(self.tokens / SCALE).unwrap_or(0)
    }

    /// So many bytes were used.
    pub(crate) fn spend(&mut self, bytes: u64) {
        self.tokens = self.tokens.saturating_sub(i128::from(bytes).saturating_mul(SCALE));
    }

    fn refill(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.at).as_nanos();
        let new = i128::try_from(passed).unwrap_or(i128::MAX).saturating_mul(i128::from(self.rate));
        self.tokens = self.tokens.saturating_add(new).min(i128::from(self.burst).saturating_mul(SCALE));
        self.at = self.at.max(now);
    }
}

/// Bytes of a time at a rate.
fn bytes_in(rate: u64, time: Duration) -> u64 {
    let bytes = u128::from(rate).saturating_mul(time.as_nanos()) / 1_000_000_000;
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn what_is_used_too_early_is_waited_for() {
        let mut bucket = TokenBucket::new(1_000_000, Some(1000));
        assert_eq!((bucket.available(Duration::ZERO), bucket.blocked_until(Duration::ZERO)), (1000, None));
        bucket.spend(5000);
        assert_eq!(bucket.available(Duration::ZERO), 0);
        // 4000 are owed, and 1000 are what a millisecond brings.
        let until = bucket.blocked_until(Duration::ZERO).unwrap();
        assert_eq!(until.as_millis(), 5);
        assert_eq!(bucket.blocked_until(until), None);
        assert_eq!(bucket.available(until), 1000);
        // No more than a burst is saved up, and a clock that seems to go back brings nothing.
        assert_eq!(bucket.available(until + 1000 * MS), 1000);
        bucket.spend(1000);
        assert_eq!(bucket.available(MS), 0);
    }

    #[test]
    fn a_burst_is_what_comes_in_ten_milliseconds() {
        assert_eq!(TokenBucket::new(1000, None).available(Duration::ZERO), 64 << 10);
        assert_eq!(TokenBucket::new(100_000_000, None).available(Duration::ZERO), 1_000_000);
        let mut empty = TokenBucket::new(1000, Some(10));
        empty.spend(9);
        assert_eq!(empty.blocked_until(Duration::ZERO), None);
        empty.spend(1);
        assert!(empty.blocked_until(Duration::ZERO).is_some(), "nothing is left, and nothing is owed");
    }

    #[test]
    fn a_bucket_of_any_size_works() {
        for (rate, burst) in [(0, Some(0)), (1, None), (u64::MAX, Some(u64::MAX)), (u64::MAX, None)] {
            let mut bucket = TokenBucket::new(rate, burst);
            assert!(bucket.available(MS) > 0);
            bucket.spend(u64::MAX);
            bucket.spend(u64::MAX);
            assert!(bucket.blocked_until(MS).is_none_or(|until| until > MS));
        }
    }
}
