//! Quiet on the way to a peer, for the sake of a connection of which nothing gets there.
//!
//! Connections that share a queue with less room than all of them need keep it full by the clock of their ACKs: what
//! comes at a random time, as a retransmission after a timeout does, finds no room, again and again, until its
//! connection has used up its retries (IBA 9.7.6.1.3). So when a connection is starved, the others to that peer send
//! nothing for two round trips, and it sends in the second of these, when the queue is empty.

use std::time::Duration;

/// A round trip, at least and at most.
const LEAST: Duration = Duration::from_millis(1);
const MOST: Duration = Duration::from_millis(50);
/// The same while none was measured.
const UNKNOWN: Duration = Duration::from_millis(5);
/// One part in so many of the time is quiet, at most: a peer may be gone for some connections and not for others.
const PART: u32 = 8;

/// When connections to a peer are quiet.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quiet {
    /// From now until then nobody sends, and from then on who is starved.
    turn: Duration,
    ends: Duration,
    /// When it may begin again.
    next: Duration,
}

impl Quiet {
    /// A connection [is starved](crate::Requester::is_starved), and an ACK timeout has just ended. `rtt` is what a
    /// round trip takes, if that was measured. Returns `true` if it is quiet from now on; `false`: it was a short time
    /// ago.
    pub fn ask(&mut self, now: Duration, rtt: Option<Duration>) -> bool {
        let may = now >= self.next;
        if may {
            let rtt = rtt.unwrap_or(UNKNOWN).clamp(LEAST, MOST);
            (self.turn, self.ends) = (now.saturating_add(rtt), now.saturating_add(rtt * 2));
            self.next = now.saturating_add(rtt * 2 * PART);
        }
        may
    }

    /// Until when a connection sends nothing. `None`: it may send.
    pub fn wait(&self, now: Duration, starved: bool) -> Option<Duration> {
        let until = if starved { self.turn } else { self.ends };
        (now < until).then_some(until)
    }

    /// When it is over.
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

    /// Who asks all the time has others wait for an eighth of it.
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
