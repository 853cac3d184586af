//! Wait of a requester whose peer has no receive posted.
//!
//! The responder names the minimum wait, which may be 10 µs, and a requester may retry without end (IBA 9.7.6.2.4 and
//! table 45). A thousand such queue pairs would keep a processor busy without any progress. The first wait is the one
//! that the responder asks for. From the second on, each wait is at least twice as long as the one before, so a message
//! is delayed by at most a factor of two.

use std::time::Duration;

/// Lower bound of the second wait.
const SECOND: Duration = Duration::from_micros(100);

/// Waits for one message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RnrBackoff {
    /// Number of waits so far.
    waits: u32,
}

impl RnrBackoff {
    /// Maximum wait of a requester that is not notified when a receive is posted: six retries a second.
    pub const UNTOLD: Duration = Duration::from_micros(163_840);
    /// Longest wait of a requester that is notified.
    pub const WOKEN: Duration = Duration::from_micros(655_360);

    /// Returns the next wait: the one that the responder asks for (`asked`), or a longer one of at most `most`.
    pub fn next_wait(&mut self, asked: Duration, most: Duration) -> Duration {
        let grown = match self.waits.checked_sub(1) {
            None => Duration::ZERO,
            Some(doublings) => SECOND.saturating_mul(1_u32.checked_shl(doublings).unwrap_or(u32::MAX)),
        };
        // The exponent is bounded: 2^31 times the second wait are days already.
        self.waits = self.waits.saturating_add(1).min(32);
        asked.max(grown.min(most))
    }

    /// Starts over: the message has found a receive, or the wait is for another message.
    pub const fn reset(&mut self) {
        self.waits = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_from_the_second_on_and_have_an_end() {
        let us = Duration::from_micros;
        let mut backoff = RnrBackoff::default();
        let waits: Vec<_> = (0..40).map(|_| backoff.next_wait(us(10), RnrBackoff::WOKEN)).collect();
        assert_eq!(waits[..5], [10, 100, 200, 400, 800].map(us));
        assert!(waits.iter().skip(16).all(|&wait| wait == RnrBackoff::WOKEN), "{waits:?}");
        // Longer waits only if the responder asks for them.
        assert_eq!(backoff.next_wait(us(491_520), RnrBackoff::UNTOLD), us(491_520));
        backoff.reset();
        assert_eq!(backoff.next_wait(us(640), RnrBackoff::UNTOLD), us(640));
        assert_eq!(backoff.next_wait(us(640), RnrBackoff::UNTOLD), us(640));
    }
}
