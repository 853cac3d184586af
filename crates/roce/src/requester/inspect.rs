//! A requester as data.

use std::time::Duration;

use pvrdma_verbs::Psn;
use serde::Serialize;

use super::selective::Sack;
use super::send_state::wire_psn;
use super::timers::Timer;
use super::{Requester, RequesterStats};

/// Whole microseconds.
fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// A timer that runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct RunningTimer {
    /// What it is for: `ack`, `rnr_backoff`, `reordering` or `probe`.
    timer: Timer,
    /// Microseconds until its deadline, 0 if that has passed.
    pub due_in_us: u64,
}

/// A requester at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct RequesterInspect {
    /// Requests that were posted and are not done.
    pub requests: usize,
    /// Oldest PSN that is not done.
    pub snd_una: Psn,
    /// Every PSN before it is known to have been executed by the peer.
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
    /// Smoothed round trip time in microseconds, once it was measured.
    pub srtt_us: Option<u64>,
    /// Variation of the round trip time in microseconds.
    pub rttvar_us: Option<u64>,
    /// Retransmissions that are left before the peer is given up.
    pub retries_left: u8,
    /// Retransmissions after RNR NAKs that are left.
    pub rnr_retries_left: u8,
    /// ACK timeouts in a row.
    pub backoff: u32,
    /// The peer was seen to keep packets that come behind a gap.
    pub peer_reorders: bool,
    /// The peer says what it keeps behind a gap (selective acknowledgements).
    pub sack: bool,
    /// PSNs that it keeps there now.
    pub sacked: u64,
    /// The timers that run.
    pub timers: Vec<RunningTimer>,
    /// In SQD: nothing new is started.
    pub draining: bool,
    /// The QP is in its error state.
    pub ended: bool,
    /// What happened so far.
    pub stats: RequesterStats,
}

impl Requester {
    /// Describes itself. `now` is on the clock of its other methods.
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
