//! Suppresses ACK timeouts while received packets still wait in the socket.
//!
//! On a busy machine the port's thread gets the processor later than the one that looks after deadlines, and then what
//! seems lost lies in the socket.

use std::time::Duration;

use pvrdma_verbs::Qpn;

use crate::port::Port;
use crate::port::counters::PortCounters;

/// When to look again.
const AGAIN: Duration = Duration::from_micros(200);
/// After this many batches the queue pair got everything that had come by the deadline. More may have come behind it.
const PASSES: u64 = 16;

/// Patience of a requester whose deadline has passed.
#[derive(Debug, Default)]
pub(super) struct TimeoutGrace {
    /// Batches that the queue pair's receive queue had got when the deadline had passed.
    since: Option<u64>,
    until: Option<Duration>,
}

impl TimeoutGrace {
    /// Returns `true` if the deadline has passed and counts.
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

    /// The deadline in place of `deadline`.
    pub(super) fn deadline(&self, deadline: Option<Duration>) -> Option<Duration> {
        self.until.or(deadline)
    }
}
