//! How long a requester waits when its peer has no receive.
//!
//! The responder names the least wait, which may be 10 µs, and a requester may retry without end (IBA 9.7.6.2.4 and
//! table 45). A thousand queue pairs that wait so would keep a processor busy while nothing happens at all. The first
//! wait is what the responder asks for; from the second on each is at least twice as long as the one before, so that
//! a message comes at most twice as late as without.

use std::time::Duration;

/// The second wait, at least.
const SECOND: Duration = Duration::from_micros(100);

/// The waits for one message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RnrBackoff {
    /// Waits so far.
    waits: u32,
}

impl RnrBackoff {
    /// The longest wait of a requester that nobody wakes when a receive is posted: six retries a second.
    pub const UNTOLD: Duration = Duration::from_micros(163_840);
    /// The longest wait of one that is woken.
    pub const WOKEN: Duration = Duration::from_micros(655_360);

    /// The next wait. `asked` is what the responder asks for; `most` is the longest wait that is not asked for.
    pub fn next_wait(&mut self, asked: Duration, most: Duration) -> Duration {
        let grown = match self.waits.checked_sub(1) {
            None => Duration::ZERO,
            Some(doublings) => SECOND.saturating_mul(1_u32.checked_shl(doublings).unwrap_or(u32::MAX)),
        };
        // 2^31 times the second wait are days.
        self.waits = self.waits.saturating_add(1).min(32);
        asked.max(grown.min(most))
    }

    /// The message has found a receive, or another one is waited for.
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
        // More than that only if the responder asks for it.
        assert_eq!(backoff.next_wait(us(491_520), RnrBackoff::UNTOLD), us(491_520));
        backoff.reset();
        assert_eq!(backoff.next_wait(us(640), RnrBackoff::UNTOLD), us(640));
        assert_eq!(backoff.next_wait(us(640), RnrBackoff::UNTOLD), us(640));
    }
}
