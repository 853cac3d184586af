//! The requester of a reliable connection: cuts requests into packets, takes the responses, retransmits what was lost
//! (IBA 9.7.2, 9.7.6, 9.7.7).
//!
//! Requests get their PSNs when they are posted. Four marks move through PSN space, which [`SendState`] explains. The
//! files:
//!
//! * `transmit`, with `packet_plan`, `read_grid` and `ack_policy`: what is sent next;
//! * `acks`, with `response_tracker`: what ACKs, NAKs and responses with data do;
//! * `retransmit`, with `loss_recovery`, `congestion_window`, `rtt` and `delay`: what happens when something was lost;
//! * `selective`, with `scoreboard`: the same if the responder says what it has;
//! * `multipath`, with `path_choice`: which of several equal paths packets take;
//! * `timers`: when something has to happen by itself;
//! * `inspect`: how it all looks from outside.

mod ack_policy;
mod acks;
mod congestion_window;
mod delay;
pub(crate) mod inspect;
mod loss_recovery;
mod multipath;
pub(crate) mod packet_plan;
mod path_choice;
mod read_grid;
mod request;
mod response_tracker;
mod retransmit;
mod rtt;
mod scoreboard;
mod selective;
mod send_state;
mod timers;
mod transmit;

use std::collections::VecDeque;
use std::time::Duration;

use pvrdma_verbs::{MAX_MESSAGE, QpAttrs, Qpn, SendOp, SendWr, Sge, WcStatus};
use serde::Serialize;

use crate::ops::{RequesterOps, is_local};
use crate::path::{Path, packets};
use ack_policy::AckPolicy;
use loss_recovery::{LossRecovery, Probe};
use path_choice::Multipath;
use read_grid::ReadGrid;
use request::{Request, Stage};
use response_tracker::ResponseTracker;
use scoreboard::Scoreboard;
use selective::Sack;
use send_state::{SendState, Seq};
use timers::TimerTable;

/// Finished requests that are kept for their buffers.
const MAX_SPARE: usize = 8;
/// READ requests that share the congestion window, if the peer allows so many.
const READS_AT_A_TIME: u32 = 4;
/// ACK timeouts in a row after which a connection is starved.
const STARVED: u32 = 2;

/// How a requester uses the network. Nothing but `negotiate` needs the peer's consent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tuning {
    /// PSNs that may be in flight at a time. Against a software responder keep it below what its socket buffer holds.
    pub window: u32,
    /// Longest RDMA READ request in packets; longer reads become several requests. At most half of `window` is used.
    pub read_chunk: u32,
    /// Requests that may be posted and not done.
    pub requests: usize,
    /// Fast registrations that may be posted and not started: each holds a list of pages.
    pub page_lists: usize,
    /// First requests offer to take selective acknowledgements ([`crate::wire::OFFER`]).
    pub negotiate: bool,
    /// A connection that agreed on these may take other paths than its own, by another UDP source port.
    pub multipath: bool,
}

impl Default for Tuning {
    fn default() -> Self {
        Self { window: 256, read_chunk: 64, requests: 128, page_lists: 8, negotiate: false, multipath: false }
    }
}

/// Counters of a requester. They start at 0 with it and only grow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct RequesterStats {
    /// Packets sent.
    pub packets: u64,
    /// Of these, packets that had been sent before.
    pub retransmitted: u64,
    /// Times that the oldest packet was retransmitted because nothing was acknowledged for a few round trips.
    pub probes: u64,
    /// ACK timeouts.
    pub timeouts: u64,
    /// Sequence NAKs acted upon.
    pub sequence_naks: u64,
    /// Times that missing responses of a READ or atomic were requested again, because later ones had come.
    pub lost_responses: u64,
    /// RNR NAKs acted upon.
    pub rnr_naks: u64,
    /// Times that the connection took another path, because of congestion or because nothing was heard.
    pub rehashed: u64,
    /// Responses that belonged to nothing outstanding.
    pub stale: u64,
}

/// The requester half of a connected QP.
#[derive(Debug)]
pub struct Requester {
    path: Path,
    remote: Qpn,
    attrs: QpAttrs,
    tuning: Tuning,
    requests: VecDeque<Request>,
    /// Fast registrations among them that were not started.
    page_lists: usize,
    spare: Vec<SendWr>,
    snd: SendState,
    /// The request that `snd.nxt` is in, as an index of `requests`.
    nxt_request: usize,
    /// How READs are split into requests.
    reads: ReadGrid,
    /// READs and atomics sent between `snd.una` and `snd.nxt`.
    responses: ResponseTracker,
    /// The PSN after a response that was requested alone, as a probe.
    probed: Option<Seq>,
    ack_policy: AckPolicy,
    recovery: LossRecovery,
    sack: Sack,
    scoreboard: Scoreboard,
    multipath: Multipath,
    timers: TimerTable,
    draining: bool,
    /// A PSN of the request with which the QP ends, as soon as those before it are done, and its status.
    failing: Option<(Seq, WcStatus)>,
    ended: bool,
    ident: u16,
    stats: RequesterStats,
}

impl Requester {
    /// A requester in RTS, with the peer, limits and numbers of `attrs`.
    pub fn new(attrs: &QpAttrs, path: Path, tuning: Tuning) -> Self {
        let snd = SendState::new(attrs.sq_psn);
        Self {
            path,
            remote: attrs.dest_qpn,
            attrs: *attrs,
            tuning,
            requests: VecDeque::new(),
            page_lists: 0,
            spare: Vec::new(),
            snd,
            nxt_request: 0,
            reads: ReadGrid::new(tuning.read_chunk.min(tuning.window / 2).max(1)),
            responses: ResponseTracker::new(snd.una),
            probed: None,
            ack_policy: AckPolicy::default(),
            recovery: LossRecovery::new(tuning.window, attrs.retry_cnt, attrs.rnr_retry),
            sack: if tuning.negotiate { Sack::Offered } else { Sack::Off },
            scoreboard: Scoreboard::default(),
            multipath: Multipath::new(
                tuning.multipath,
                u64::from(attrs.sq_psn.get()) << 24 ^ u64::from(attrs.dest_qpn.get()),
            ),
            timers: TimerTable::default(),
            draining: false,
            failing: None,
            ended: false,
            ident: 0,
            stats: RequesterStats::default(),
        }
    }

    /// What happened so far.
    pub const fn stats(&self) -> RequesterStats {
        self.stats
    }

    /// Where packets go now.
    pub const fn path(&self) -> Path {
        self.path
    }

    /// Sets AckReq on the next packet; used before a pause, so that the ACK timer is not left to the next packet that
    /// asks by itself.
    pub const fn request_ack(&mut self) {
        self.ack_policy.force();
    }

    /// Takes over what a modify request may change in RTS and SQD: path, timeout, retries, number of reads. PSNs, path
    /// MTU and peer stay.
    pub fn set_attrs(&mut self, attrs: &QpAttrs, path: Path) {
        let QpAttrs { timeout, retry_cnt, rnr_retry, max_rd_atomic, .. } = *attrs;
        self.attrs = QpAttrs { timeout, retry_cnt, rnr_retry, max_rd_atomic, ..self.attrs };
        self.path = path;
        self.path.turn(self.multipath.entropy());
        self.recovery.retries = self.recovery.retries.min(retry_cnt);
        self.recovery.rnr_retries = self.recovery.rnr_retries.min(rnr_retry);
    }

    /// Returns `true` if another request can be posted.
    pub fn has_room(&self) -> bool {
        !self.ended && self.requests.len() < self.tuning.requests && !self.has_most_page_lists()
    }

    /// Returns `true` if another fast registration has to start before the next request can be posted.
    pub const fn has_most_page_lists(&self) -> bool {
        self.page_lists >= self.tuning.page_lists
    }

    /// Bytes that a posted request takes, with so many SGEs.
    pub fn bytes_of_request(sges: usize) -> usize {
        size_of::<Request>().saturating_add(sges.next_power_of_two().saturating_mul(size_of::<Sge>()))
    }

    /// Changes how many requests, and fast registrations that were not started, may be posted. If these are fewer than
    /// there may be now, nothing is posted, and the memory of more is given back.
    pub fn set_room(&mut self, requests: usize, page_lists: usize) {
        if requests < self.tuning.requests {
            self.requests.shrink_to(requests);
            self.spare = Vec::new();
        }
        (self.tuning.requests, self.tuning.page_lists) = (requests, page_lists);
    }

    /// Returns `true` if no request is posted.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// PSNs that are in flight: sent, and neither acknowledged nor responded to. What a loss made us go back over is
    /// not among them, nor what has come behind a gap: responses that are here, packets that the responder says it has.
    pub fn in_flight(&self) -> u64 {
        self.snd.span().saturating_sub(self.scoreboard.received()).saturating_sub(self.responses.early())
    }

    /// Has READ requests ask for what the congestion window allows.
    fn set_read_length(&mut self) {
        let at_a_time = u32::from(self.attrs.max_rd_atomic).clamp(1, READS_AT_A_TIME);
        let length = (self.recovery.congestion_window() / at_a_time).max(1);
        // Powers of two, so that it does not change all the time. If there can be no more requests than these, smaller
        // steps, so that they fill the window.
        let digits = if u32::from(self.attrs.max_rd_atomic) > READS_AT_A_TIME { 0 } else { 2 };
        let step = 1 << length.ilog2().saturating_sub(digits);
        let length = (length / step * step).min(self.tuning.read_chunk).min(self.tuning.window / 2).max(1);
        self.reads.set(length, self.snd.una, self.snd.max);
    }

    /// The responder has agreed to selective acknowledgements.
    #[inline]
    fn has_agreed(&self) -> bool {
        self.sack == Sack::On
    }

    /// PSNs that are in flight and not known to be lost.
    fn pipe(&self) -> u64 {
        self.in_flight().saturating_sub(self.scoreboard.to_retransmit())
    }

    /// The time after which an ACK is late: smoothed RTT and four times its variation. `None`: nothing was measured.
    pub fn rto(&self) -> Option<Duration> {
        self.recovery.rtt_estimate().map(|(srtt, rttvar)| srtt + rttvar * 4)
    }

    /// Returns `true` if nothing was acknowledged for several ACK timeouts.
    pub const fn is_starved(&self) -> bool {
        self.recovery.backoff >= STARVED
    }

    /// The smoothed RTT. `None`: nothing was measured.
    pub fn rtt(&self) -> Option<Duration> {
        self.recovery.rtt_estimate().map(|(srtt, _)| srtt)
    }

    /// Returns `true` if the next packet was sent before.
    pub fn next_is_retransmission(&self) -> bool {
        self.snd.nxt < self.snd.max
            || matches!(self.recovery.probe, Probe::Due(_))
            || self.recovery.retransmit.is_some()
            || self.scoreboard.has_lost()
            || self.responses.has_lost()
    }

    /// A request whose buffers can be used for the next [`Self::post`].
    pub fn spare(&mut self) -> SendWr {
        self.spare.pop().unwrap_or_default()
    }

    /// Takes a request. After an error it is flushed at once.
    pub fn post(&mut self, wr: SendWr, ops: &mut impl RequesterOps) {
        if self.ended {
            ops.finish(&wr, WcStatus::Flushed, 0);
            return;
        }
        let length = match wr.op {
            SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => Some(8),
            _ => u32::try_from(Sge::total_length(&wr.sges)).ok().filter(|&length| length <= MAX_MESSAGE),
        };
        let (count, stage) = match (&wr.op, length) {
            (op, _) if is_local(op) => (0, Stage::Posted),
            (_, None) => (0, Stage::Failed(WcStatus::LocalLength)),
            (SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }, _) => (1, Stage::Posted),
            (_, Some(length)) => (packets(length, self.attrs.path_mtu), Stage::Posted),
        };
        self.page_lists += usize::from(matches!(wr.op, SendOp::FastRegister(_)));
        let first = self.snd.posted;
        self.snd.posted += Seq::from(count);
        self.requests.push_back(Request { wr, first, count, length: length.unwrap_or(0), stage });
    }

    /// In SQD nothing new is started; what was started is finished.
    pub const fn set_draining(&mut self, draining: bool) {
        self.draining = draining;
    }

    /// Returns `true` if nothing is outstanding: started and not finished.
    pub fn is_idle(&self) -> bool {
        self.requests.front().is_none_or(|request| request.stage == Stage::Posted)
    }

    /// The QP went to its error state for another reason: flushes everything.
    pub fn flush(&mut self, ops: &mut impl RequesterOps) {
        self.ended = true;
        self.timers.stop_all();
        self.page_lists = 0;
        for request in self.requests.drain(..) {
            ops.finish(&request.wr, WcStatus::Flushed, 0);
        }
    }

    /// When [`Self::handle_timeout`] is due.
    pub fn poll_timeout(&self) -> Option<Duration> {
        self.timers.next_timeout()
    }

    /// Moves `snd.nxt` among the requests that were started.
    fn set_nxt(&mut self, nxt: Seq) {
        self.snd.nxt = nxt;
        let found = self.requests.iter().position(|request| request.stage != Stage::Started || nxt < request.end());
        self.nxt_request = found.unwrap_or(self.requests.len());
    }

    /// Completes the requests that are done, in order.
    fn complete_done(&mut self, ops: &mut impl RequesterOps) {
        while let Some(front) = self.requests.front() {
            if let Some((seq, status)) = self.failing
                && front.contains(seq)
            {
                return self.fail_front(status, ops);
            }
            match front.stage {
                Stage::Failed(status) => return self.fail_front(status, ops),
                Stage::Started if self.snd.una >= front.end() => {}
                Stage::Started | Stage::Posted => return,
            }
            let Some(request) = self.requests.pop_front() else { return };
            self.nxt_request = self.nxt_request.saturating_sub(1);
            ops.finish(&request.wr, WcStatus::Success, request.byte_len());
            if self.spare.len() < MAX_SPARE {
                self.spare.push(request.wr);
            }
        }
    }

    /// The request that holds `seq` failed: it completes with an error, and the QP ends. The first error that consumers
    /// see must be the cause, so requests before it, whose responses are late or lost, complete first. They have the
    /// retries that are left for that.
    fn fail_at(&mut self, now: Duration, seq: Seq, status: WcStatus, ops: &mut impl RequesterOps) {
        if self.failing.is_none_or(|(before, _)| before > seq) {
            self.failing = Some((seq, status));
        }
        self.complete_done(ops);
        if !self.ended {
            self.restart_timers(now);
        }
    }

    fn fail_front(&mut self, status: WcStatus, ops: &mut impl RequesterOps) {
        if let Some(request) = self.requests.pop_front() {
            ops.finish(&request.wr, status, 0);
        }
        self.flush(ops);
        ops.failed();
    }
}
