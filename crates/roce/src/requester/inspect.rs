//! Inspection: the state of a requester as data.

use std::time::Duration;

use pvrdma_verbs_types::Psn;
use serde::Serialize;

use super::sack::Sack;
use super::send_state::wire_psn;
use super::timers::Timer;
use super::{Requester, RequesterStats};

/// Converts to whole microseconds.
fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// A running timer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct RunningTimer {
    /// Purpose: `ack`, `rnr_backoff`, `reordering` or `probe`.
    timer: Timer,
    /// Microseconds until its deadline, 0 if that has passed.
    pub due_in_us: u64,
}

/// Reason why a requester with requests sends nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SendWait {
    /// The peer had no receive, and the time for which it asked to wait has not passed.
    Rnr,
    /// As many PSNs are in flight as the window allows.
    Window,
    /// All packets that may be sent were sent, and are not acknowledged.
    Ack,
}

/// Snapshot of a requester.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct RequesterInspect {
    /// Requests that were posted and are not done.
    pub requests: usize,
    /// Oldest PSN that is not done.
    pub snd_una: Psn,
    /// Every PSN before this one is known to have been executed by the peer.
    pub snd_executed: Psn,
    /// Next PSN to send.
    pub snd_nxt: Psn,
    /// First PSN that was never sent.
    pub snd_max: Psn,
    /// First PSN of the next request that is posted.
    pub snd_posted: Psn,
    /// PSNs in flight.
    pub in_flight: u64,
    /// PSNs that may be in flight now.
    pub window: u32,
    /// RDMA READs and atomics that were sent and are not done.
    pub outstanding_rd_atomic: usize,
    /// Smoothed round trip time in microseconds, `null` before the first measurement.
    pub srtt_us: Option<u64>,
    /// Variation of the round trip time in microseconds.
    pub rttvar_us: Option<u64>,
    /// Retransmissions left before the connection fails.
    pub retries_left: u8,
    /// Retransmissions after RNR NAKs left before the connection fails.
    pub rnr_retries_left: u8,
    /// Consecutive ACK timeouts.
    pub backoff: u32,
    /// The peer was observed to keep packets that arrive after a gap.
    pub peer_reorders: bool,
    /// The peer reports the packets that it keeps after a gap (selective acknowledgements).
    pub sack: bool,
    /// New packets leave without an ICRC, because both ends agreed on that.
    pub omits_icrc: bool,
    /// PSNs that the peer keeps after a gap now.
    pub sacked: u64,
    /// Running timers.
    pub timers: Vec<RunningTimer>,
    /// The QP is in SQD: no new request is started.
    pub draining: bool,
    /// The QP is in its error state.
    pub ended: bool,
    /// Counters.
    pub stats: RequesterStats,
}

impl Requester {
    /// Returns `true` if packets of posted requests were not sent yet, or have to be retransmitted in order.
    pub fn has_unsent(&self) -> bool {
        self.snd.nxt < self.snd.posted
    }

    /// Returns the reason why [`Self::poll_transmit`] builds no packet, if there are requests that are not done. To be
    /// called after it has built none.
    pub fn send_wait(&self) -> Option<SendWait> {
        if self.ended || self.is_empty() {
            None
        } else if self.timers.is_running(Timer::RnrBackoff) {
            Some(SendWait::Rnr)
        } else if self.has_unsent() && self.in_flight() >= self.recovery.window().into() {
            Some(SendWait::Window)
        } else {
            (self.in_flight() > 0).then_some(SendWait::Ack)
        }
    }

    /// Exports the state. `now` is on the clock of the other methods.
    pub fn inspect(&self, now: Duration) -> RequesterInspect {
        let rtt = self.recovery.rtt_estimate();
        let running = self.timers.running();
        RequesterInspect {
            requests: self.requests.len(),
            snd_una: wire_psn(self.snd.una),
            snd_executed: wire_psn(self.snd.executed),
            snd_nxt: wire_psn(self.snd.nxt),
            snd_max: wire_psn(self.snd.max),
            snd_posted: wire_psn(self.snd.posted),
            in_flight: self.in_flight(),
            window: self.recovery.window(),
            outstanding_rd_atomic: self.responses.outstanding(),
            srtt_us: rtt.map(|(srtt, _)| micros(srtt)),
            rttvar_us: rtt.map(|(_, rttvar)| micros(rttvar)),
            retries_left: self.recovery.retries,
            rnr_retries_left: self.recovery.rnr_retries,
            backoff: self.recovery.backoff,
            peer_reorders: self.recovery.peer_reorders,
            sack: self.sack == Sack::On,
            omits_icrc: self.omits_icrc,
            sacked: self.scoreboard.received(),
            timers: running
                .map(|(timer, at)| RunningTimer { timer, due_in_us: micros(at.saturating_sub(now)) })
                .collect(),
            draining: self.draining,
            ended: self.ended,
            stats: self.stats,
        }
    }
}
