//! Backoff shared by all connections to a peer: while one of them is starved, the others pause.
//!
//! Connections that share a queue that is too small for all of them keep it full, paced by their ACKs. A packet that
//! arrives at a random time, such as a retransmission after a timeout, finds no room again and again, until its
//! connection has used up its retries (IBA 9.7.6.1.3). So when a connection is starved, the other connections to that
//! peer send nothing for two round trips, and the starved one sends in the second of these, when the queue is empty.

use std::time::Duration;

/// Lower and upper bound of a round trip.
const LEAST: Duration = Duration::from_millis(1);
const MOST: Duration = Duration::from_millis(50);
/// Round trip time while none was measured.
const UNKNOWN: Duration = Duration::from_millis(5);
/// Divisor of time that bounds quiet periods. They are bounded because a peer may have disappeared for some connections
/// only.
const PART: u32 = 8;

/// Quiet periods of the connections to a peer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quiet {
    /// Until this time no connection sends. From then on, until the end of the period, only starved connections do.
    turn: Duration,
    ends: Duration,
    /// Earliest start of the next quiet period.
    next: Duration,
}

impl Quiet {
    /// Requests a quiet period for a connection that [is starved](crate::Requester::is_starved) and whose ACK timeout
    /// has just expired. `rtt` is the round trip time, if one was measured. Returns `true` if a quiet period starts
    /// now, `false` if the last one was too recent.
    pub fn ask(&mut self, now: Duration, rtt: Option<Duration>) -> bool {
        let may = now >= self.next;
        if may {
            let rtt = rtt.unwrap_or(UNKNOWN).clamp(LEAST, MOST);
            (self.turn, self.ends) = (now.saturating_add(rtt), now.saturating_add(rtt * 2));
            self.next = now.saturating_add(rtt * 2 * PART);
        }
        may
    }

    /// Returns the time until which a connection must not send. `None`: it may send.
    pub fn wait(&self, now: Duration, starved: bool) -> Option<Duration> {
        let until = if starved { self.turn } else { self.ends };
        (now < until).then_some(until)
    }

    /// End of the quiet period.
    pub const fn ends(&self) -> Duration {
        self.ends
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn the_starved_sends_while_the_others_wait() {
        let mut quiet = Quiet::default();
        assert_eq!([quiet.wait(ms(0), true), quiet.wait(ms(0), false)], [None, None]);
        assert!(quiet.ask(ms(100), Some(ms(5))));
        for (at, starved, other) in [
            (100, Some(ms(105)), Some(ms(110))),
            (104, Some(ms(105)), Some(ms(110))),
            (105, None, Some(ms(110))),
            (110, None, None),
        ] {
            assert_eq!([quiet.wait(ms(at), true), quiet.wait(ms(at), false)], [starved, other], "{at}");
        }
    }

    /// A connection that asks all the time pauses the others for an eighth of it.
    #[test]
    fn most_of_the_time_is_not_quiet() {
        for (rtt, share) in [(Some(Duration::ZERO), 125), (None, 125), (Some(Duration::from_secs(9)), 125)] {
            let mut quiet = Quiet::default();
            let waits = (0..8000).filter(|&at| {
                quiet.ask(ms(at), rtt);
                quiet.wait(ms(at), false).is_some()
            });
            assert_eq!(waits.count() / 8, share, "{rtt:?}");
        }
    }
}
