//! What a requester does about a loss: timeouts, probes, single packets again, and going back.

use std::time::Duration;

use pvrdma_verbs::WcStatus;

use super::recovery::{Probe, Try};
use super::{Request, Requester, Seq, Stage};
use crate::ops::RequesterOps;

impl Requester {
    /// A deadline may have passed.
    pub fn handle_timeout(&mut self, now: Duration, host: &mut impl RequesterOps) {
        if self.rnr_deadline.is_some_and(|deadline| deadline <= now) {
            self.rnr_deadline = None;
        }
        if self.ack_deadline.is_some_and(|deadline| deadline <= now) {
            self.stats.timeouts += 1;
            self.backoff = self.backoff.saturating_add(1);
            self.nak_at = None;
            self.loss_at = None;
            self.retry(now, host);
            self.timed_out = true;
        } else if self.recovery.probe(now) {
            self.stats.probes += 1;
            (self.nak_at, self.loss_at) = (None, None);
            // What was sent again would have come by now.
            self.repairs.clear();
            self.probe_oldest(Try::First);
            self.recovery.restart(now, true);
        }
    }

    pub(super) fn probe_oldest(&mut self, attempt: Try) {
        if self.requests.front().is_some_and(Request::wants_data) {
            self.go_back();
        } else {
            self.probe = Probe::Due(attempt);
        }
    }

    /// Local ACK timeout (IBA 9.7.6.1.3): the architecture allows up to four times the nominal value.
    pub(super) fn restart_timer(&mut self, now: Duration) {
        self.ack_deadline = None;
        let under_way = self.unconfirmed != self.newest && self.rnr_deadline.is_none();
        self.recovery.restart(now, under_way && !self.ended);
        if self.attrs.timeout != 0 && under_way {
            let nominal = Duration::from_nanos(4096 << self.attrs.timeout.min(31));
            self.ack_deadline = Some(now.saturating_add(nominal.saturating_mul(1 << self.backoff.min(2))));
        }
    }

    /// Goes back because something was lost, if there are retries left.
    pub(super) fn retry(&mut self, now: Duration, host: &mut impl RequesterOps) {
        let Some(left) = self.retries.checked_sub(1) else {
            self.fail_at(self.unconfirmed, WcStatus::RetryExceeded, host);
            return;
        };
        self.retries = left;
        self.go_back();
        self.restart_timer(now);
    }

    /// The responder says that the packet at `seq` is missing.
    pub(super) fn resend_missing(&mut self, now: Duration, seq: Seq, host: &mut impl RequesterOps) {
        let alone = self.peer_keeps && seq == self.unconfirmed && self.retries > 0;
        if !alone || self.requests.front().is_none_or(Request::wants_data) {
            return self.retry(now, host);
        }
        self.retries -= 1;
        self.repairs.add(seq);
        self.recovery.resent();
        self.restart_timer(now);
    }

    /// An answer came for what was not sent again yet. Goes on where that leads to.
    pub(super) fn skip(&mut self) {
        // The peer keeps what comes behind a gap; or the timeout was too early, and the rest is on its way as well.
        self.peer_keeps |= self.nak_at.is_some();
        let begun = || self.requests.iter().take_while(|request| request.stage == Stage::Begun);
        let late = self.timed_out && !begun().any(Request::wants_data);
        self.seek(if late { self.newest } else { self.unconfirmed });
    }

    /// Sends everything again from the oldest unconfirmed PSN.
    pub(super) fn go_back(&mut self) {
        self.seek(self.unconfirmed);
        self.data_requests.clear();
        self.probe = Probe::No;
        self.timed_out = false;
        self.repairs.clear();
        self.recovery.lost();
        // The first packet asks for an answer: it tells what the responder has.
        self.unasked = u32::MAX;
    }
}
