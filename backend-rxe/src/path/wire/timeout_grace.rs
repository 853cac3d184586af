//! Suppresses ACK timeouts while received packets still wait in the socket.
//!
//! On a busy machine, the port's thread may be scheduled later than the thread that handles deadlines. The ACK that
//! seems lost is then still in the socket.

use std::time::Duration;

use pvrdma_verbs_types::Qpn;

use crate::port::Port;
use crate::port::counters::PortCounters;

/// Time until the next check.
const AGAIN: Duration = Duration::from_micros(200);
/// Number of batches after which the queue pair has certainly got all packets that had arrived by the deadline.
const PASSES: u64 = 16;

/// Grace period of a requester whose deadline has passed.
#[derive(Debug, Default)]
pub(super) struct TimeoutGrace {
    /// Number of batches that the queue pair's receive queue had handled when the deadline was found to have passed.
    since: Option<u64>,
    until: Option<Duration>,
}

impl TimeoutGrace {
    /// Returns `true` if the deadline has passed and no grace period is left.
    pub(super) fn is_over(&mut self, deadline: Option<Duration>, now: Duration, (port, qpn): (&Port, Qpn)) -> bool {
        self.until = None;
        if deadline.is_none_or(|deadline| deadline > now) {
            self.since = None;
            return false;
        }
        let passes = port.passes(qpn);
        let since = *self.since.get_or_insert(passes);
        let over = passes.wrapping_sub(since) >= PASSES || !port.has_unread(qpn);
        if over {
            self.since = None;
        } else {
            PortCounters::bump(&port.counters.wire_unread);
            self.until = Some(now.saturating_add(AGAIN));
        }
        over
    }

    /// Returns the deadline to use in place of `deadline`.
    pub(super) fn deadline(&self, deadline: Option<Duration>) -> Option<Duration> {
        self.until.or(deadline)
    }
}
