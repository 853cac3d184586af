//! A token bucket: limits the rate in bytes per second, and the size of a burst.

use std::time::Duration;

/// Period that determines the default burst: the bytes of this time at the rate, at least [`LEAST_BURST`].
const BURST_TIME: Duration = Duration::from_millis(10);
const LEAST_BURST: u64 = 64 << 10;
/// Minimum wait, so that a throttled sender wakes at most 1000 times per second.
const PATIENCE: Duration = Duration::from_millis(1);

/// A token bucket that can be overdrawn: a sender waits afterwards for the bytes that it took in excess.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenBucket {
    /// Bytes per second.
    rate: u64,
    /// Maximum number of bytes in the bucket.
    burst: u64,
    /// Available bytes, in units of 1/10^9 byte. Negative if the bucket is overdrawn.
    tokens: i128,
    at: Duration,
}

/// Units of a byte.
const SCALE: i128 = 1_000_000_000;

impl TokenBucket {
    /// Creates a full bucket. A rate of 0 would block forever, so it counts as 1.
    pub(crate) fn new(rate: u64, burst: Option<u64>) -> Self {
        let burst = burst.unwrap_or_else(|| bytes_in(rate, BURST_TIME).max(LEAST_BURST)).max(1);
        Self { rate: rate.max(1), burst, tokens: i128::from(burst) * SCALE, at: Duration::ZERO }
    }

    /// Returns the time at which bytes are available again, if none are now.
    pub(crate) fn blocked_until(&mut self, now: Duration) -> Option<Duration> {
        self.refill(now);
        if self.tokens > 0 {
            return None;
        }
        let wanted = i128::from(bytes_in(self.rate, PATIENCE).clamp(1, self.burst)) * SCALE;
        let missing = wanted.saturating_sub(self.tokens);
        // The time is rounded up: otherwise the caller would have to ask again immediately.
        let nanos = (missing / i128::from(self.rate)).saturating_add(1);
        Some(now.saturating_add(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))))
    }

    /// Returns the number of bytes that are available now.
    pub(crate) fn available(&mut self, now: Duration) -> u64 {
        self.refill(now);
        u64::try_from(self.tokens / SCALE).unwrap_or(0)
    }

    /// Accounts for bytes that were used.
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

/// Returns the bytes of a time at a rate.
fn bytes_in(rate: u64, time: Duration) -> u64 {
    let bytes = u128::from(rate).saturating_mul(time.as_nanos()) / 1_000_000_000;
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn overdrawn_bytes_are_waited_for() {
        let mut bucket = TokenBucket::new(1_000_000, Some(1000));
        assert_eq!((bucket.available(Duration::ZERO), bucket.blocked_until(Duration::ZERO)), (1000, None));
        bucket.spend(5000);
        assert_eq!(bucket.available(Duration::ZERO), 0);
        // 4000 bytes are owed, and a millisecond brings 1000.
        let until = bucket.blocked_until(Duration::ZERO).unwrap();
        assert_eq!(until.as_millis(), 5);
        assert_eq!(bucket.blocked_until(until), None);
        assert_eq!(bucket.available(until), 1000);
        // No more than a burst accumulates, and a clock that seems to go back adds nothing.
        assert_eq!(bucket.available(until + 1000 * MS), 1000);
        bucket.spend(1000);
        assert_eq!(bucket.available(MS), 0);
    }

    #[test]
    fn a_burst_is_ten_milliseconds_of_the_rate() {
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
