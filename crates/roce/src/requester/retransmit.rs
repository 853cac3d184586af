//! Reaction of a requester to losses: timeouts, probes, single retransmissions, and going back.

use std::time::Duration;

use pvrdma_verbs::RequesterOps;
use pvrdma_verbs_types::WcStatus;

use super::Requester;
use super::congestion_window::Loss;
use super::loss_recovery::{Attempt, Probe, Setback};
use super::request::{Request, Stage};
use super::send_state::Seq;
use super::timers::Timer;

/// Minimum ACK timeout. With a shorter one, all retries could be used up before a busy host gets its processor back.
/// rxe rounds up to a tick of its kernel, 1 to 10 ms.
const MIN_ACK_TIMEOUT: Duration = Duration::from_millis(4);

impl Requester {
    /// Handles the expiry of deadlines.
    pub fn handle_timeout(&mut self, now: Duration, ops: &mut impl RequesterOps) {
        self.end_rnr_backoff(now);
        if self.timers.has_expired(Timer::Ack, now) {
            self.stats.timeouts += 1;
            self.recovery.on_timeout();
            self.search_path(now, u32::MAX);
            self.retry(now, self.snd.una, Setback::Silence, ops);
            self.recovery.timed_out = true;
            return;
        }
        if self.timers.has_expired(Timer::Reordering, now) {
            let patience = self.recovery.patience(now);
            self.responses.on_timeout(now, patience);
            if self.scoreboard.deadline(patience).is_some_and(|deadline| deadline <= now) {
                self.find_lost(now);
            }
            self.restart_reordering_timer(now);
        }
        if self.timers.has_expired(Timer::Probe, now) {
            self.stats.probes += 1;
            let probes = self.recovery.on_probe();
            self.search_path(now, probes);
            self.probe_oldest(now, Attempt::First);
            self.restart_probe_timer(now, true);
        }
    }

    /// Ends the wait for a receive if it is over. Responses have been expected since before the wait, and the next
    /// packet may not fit into the window beside them, so their timers are restarted in any case.
    pub(super) fn end_rnr_backoff(&mut self, now: Duration) {
        if self.timers.has_expired(Timer::RnrBackoff, now) {
            self.timers.stop(Timer::RnrBackoff);
            self.restart_timers(now);
        }
    }

    pub(super) fn probe_oldest(&mut self, now: Duration, attempt: Attempt) {
        if !self.requests.front().is_some_and(Request::wants_data) {
            self.recovery.probe = Probe::Due(attempt);
        } else if self.responses.on_probe() {
            // The overtaken response is requested again.
        } else if self.probed == Some(self.snd.una) {
            // Only the response that was requested alone has arrived, so the responder does not have the rest of the
            // request.
            self.probed = None;
            self.go_back(now, self.snd.una, Setback::Silence);
        } else {
            self.recovery.probe = Probe::ResponseDue;
        }
    }

    /// Restarts the timers that wait for progress. The local ACK timeout (IBA 9.7.6.1.3) backs off: the architecture
    /// allows up to four times the nominal value. It is at least [`MIN_ACK_TIMEOUT`].
    pub(super) fn restart_timers(&mut self, now: Duration) {
        let waiting = self.snd.una != self.snd.max && !self.timers.is_running(Timer::RnrBackoff);
        self.restart_probe_timer(now, waiting && !self.ended);
        // A QP that is about to fail must end, even if the consumer chose no timeout.
        let ends = self.attrs.timeout != 0 || self.failing.is_some();
        let ack = (ends && waiting).then(|| {
            let nominal = Duration::from_nanos(4096 << self.attrs.timeout.min(31)).max(MIN_ACK_TIMEOUT);
            now.saturating_add(nominal.saturating_mul(1 << self.recovery.backoff.min(2)))
        });
        self.timers.set(Timer::Ack, ack);
    }

    /// Restarts the timer for overtaken packets. The arrival of later packets reveals their loss as well.
    pub(super) fn restart_reordering_timer(&mut self, now: Duration) {
        let (responses, scoreboard) = (self.responses.expects_more(), self.scoreboard.newest() < self.snd.max);
        let deadlines = [
            self.responses.deadline(self.recovery.timer_patience(now, responses)),
            self.scoreboard.deadline(self.recovery.timer_patience(now, scoreboard)),
        ];
        self.timers.set(Timer::Reordering, deadlines.into_iter().flatten().min());
    }

    fn restart_probe_timer(&mut self, now: Duration, in_flight: bool) {
        let response = self.requests.front().is_some_and(Request::wants_data);
        let timeout = self.recovery.probe_timeout(in_flight, response);
        self.timers.set(Timer::Probe, timeout.map(|timeout| now.saturating_add(timeout)));
    }

    /// Goes back to `from` because of a loss, if there are retries left.
    pub(super) fn retry(&mut self, now: Duration, from: Seq, setback: Setback, ops: &mut impl RequesterOps) {
        let Some(left) = self.recovery.retries.checked_sub(1) else {
            return self.fail_at(now, self.snd.una, WcStatus::RetryExceeded, ops);
        };
        self.recovery.retries = left;
        self.go_back(now, from, setback);
        self.restart_timers(now);
    }

    /// Handles the report that the packet at `seq` is missing: retransmits it alone if that is enough, or goes back.
    pub(super) fn retransmit_missing(&mut self, now: Duration, seq: Seq, ops: &mut impl RequesterOps) {
        if !self.recovery.peer_reorders || self.recovery.retries == 0 {
            return self.retry(now, seq, Setback::Nak, ops);
        }
        self.recovery.retries -= 1;
        self.recovery.on_lost(now, Loss::of(seq, 1), self.snd.max);
        self.recovery.retransmit_alone(seq);
        self.restart_timers(now);
    }

    /// Handles an ACK for PSNs that the requester went back over and has not retransmitted yet. Continues after them.
    pub(super) fn skip_acked(&mut self) {
        // The peer buffers packets after a gap. Or the timeout was too early, and the rest is in transit as well.
        self.recovery.peer_reorders |= self.recovery.saw_nak();
        let started = || self.requests.iter().take_while(|request| request.stage == Stage::Started);
        let late = self.recovery.timed_out && !started().any(Request::wants_data);
        self.set_nxt(if late { self.snd.max } else { self.snd.una });
    }

    /// Skips the PSNs that were gone back over up to `from`: the responder kept them and has executed them since. READs
    /// and atomics among them are outstanding again.
    fn track_executed(&mut self, from: Seq) {
        let (nxt, reads) = (self.snd.nxt, &self.reads);
        let skipped = self.requests.iter().skip_while(|request| request.end() <= nxt);
        for request in skipped.take_while(|request| request.first < from).filter(|request| request.wants_data()) {
            let mut at = nxt.max(request.first);
            while at < request.end().min(from) {
                let end = reads.end_of(request, at).min(from);
                // Only one part of a split request at a time takes a resource of the responder.
                self.responses.on_sent(at, end, reads.began_at(request, at));
                at = end;
            }
        }
    }

    /// Retransmits everything from a PSN on (go-back-N). Before it, only responses with data are outstanding.
    pub(super) fn go_back(&mut self, now: Duration, from: Seq, setback: Setback) {
        let from = from.max(self.snd.una);
        match setback {
            Setback::NotReady => {}
            Setback::Nak => self.recovery.on_lost(now, Loss::of(from, 1), self.snd.max),
            Setback::Silence => self.recovery.on_silence(now, self.snd.max),
        }
        self.track_executed(from);
        self.set_nxt(from);
        self.responses.on_go_back(from, self.snd.una);
        self.scoreboard.clear();
        self.recovery.on_go_back(self.snd.span(), setback);
        // The first packet requests an ACK, which reveals what the responder has.
        self.ack_policy.force();
    }
}
