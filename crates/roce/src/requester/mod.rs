//! The requester of a reliable connection: divides requests into packets, processes the responses, and retransmits lost
//! packets (IBA 9.7.2, 9.7.6, 9.7.7).
//!
//! Requests get their PSNs when they are posted. Four marks move through PSN space; see [`SendState`]. The files:
//!
//! * `transmit`, with `packet_plan`, `read_grid` and `ack_policy`: choice of the next packet;
//! * `acks`, with `response_tracker`: processing of ACKs, NAKs and responses with data;
//! * `retransmit`, with `loss_recovery`, `congestion_window`, `rtt` and `delay`: recovery from losses;
//! * `selective`, with `scoreboard`: the same if the responder reports the packets that it has;
//! * `multipath`, with `path_choice`: selection among equal-cost paths;
//! * `timers`: deadlines;
//! * `inspect`: export of the state;
//! * `save`: saving and restoring.

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
mod resume;
mod retransmit;
mod rtt;
mod sack;
mod save;
mod scoreboard;
mod selective;
mod send_state;
mod timers;
mod transmit;

use std::collections::VecDeque;
use std::time::Duration;

use pvrdma_verbs::RequesterOps;
use pvrdma_verbs_types::{QpAttrs, Qpn, SendOp, SendWr, Sge, WcStatus};
use serde::Serialize;

use crate::path::Path;
use ack_policy::AckPolicy;
use loss_recovery::{LossRecovery, Probe};
use path_choice::Multipath;
use read_grid::ReadGrid;
use request::{Request, Stage};
use response_tracker::ResponseTracker;
use sack::Sack;
use scoreboard::Scoreboard;
use send_state::{SendState, Seq};
use timers::TimerTable;

/// Finished requests that are kept to reuse their buffers.
const MAX_SPARE: usize = 8;
/// Number of READ requests that share the congestion window, if the peer allows that many.
const READS_AT_A_TIME: u32 = 4;
/// Consecutive ACK timeouts after which a connection is starved.
const STARVED: u32 = 2;

/// Network parameters of a requester. Only `negotiate` depends on the consent of the peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Tuning {
    /// PSNs that may be in flight. Against a software responder, keep it below the capacity of its socket buffer.
    pub window: u32,
    /// Maximum length of an RDMA READ request in packets; longer reads become several requests. At most half of
    /// `window` is used.
    pub read_chunk: u32,
    /// Requests that may be posted and not done.
    pub requests: usize,
    /// Fast registrations that may be posted and not started: each holds a page list.
    pub page_lists: usize,
    /// The first requests offer to accept selective acknowledgements ([`crate::wire::OFFER`]).
    pub negotiate: bool,
    /// A connection with selective acknowledgements may take other paths than its own, by another UDP source port.
    pub multipath: bool,
}

impl Default for Tuning {
    fn default() -> Self {
        Self { window: 256, read_chunk: 64, requests: 128, page_lists: 8, negotiate: false, multipath: false }
    }
}

impl Tuning {
    /// Returns the tuning with another value of `window`.
    #[must_use]
    pub const fn with_window(mut self, window: u32) -> Self {
        self.window = window;
        self
    }

    /// Returns the tuning with another value of `read_chunk`.
    #[must_use]
    pub const fn with_read_chunk(mut self, read_chunk: u32) -> Self {
        self.read_chunk = read_chunk;
        self
    }

    /// Returns the tuning with another value of `requests`.
    #[must_use]
    pub const fn with_requests(mut self, requests: usize) -> Self {
        self.requests = requests;
        self
    }

    /// Returns the tuning with another value of `page_lists`.
    #[must_use]
    pub const fn with_page_lists(mut self, page_lists: usize) -> Self {
        self.page_lists = page_lists;
        self
    }

    /// Returns the tuning with another value of `negotiate`.
    #[must_use]
    pub const fn with_negotiate(mut self, negotiate: bool) -> Self {
        self.negotiate = negotiate;
        self
    }

    /// Returns the tuning with another value of `multipath`.
    #[must_use]
    pub const fn with_multipath(mut self, multipath: bool) -> Self {
        self.multipath = multipath;
        self
    }
}

/// Counters of a requester. They start at 0 when it is created, and only grow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct RequesterStats {
    /// Packets sent.
    pub packets: u64,
    /// Packets sent that had been sent before.
    pub retransmitted: u64,
    /// Retransmissions of the oldest packet because nothing was acknowledged for a few round trips.
    pub probes: u64,
    /// ACK timeouts.
    pub timeouts: u64,
    /// Sequence NAKs acted upon.
    pub sequence_naks: u64,
    /// Repeated requests for missing responses of a READ or atomic after later ones had arrived.
    pub lost_responses: u64,
    /// RNR NAKs acted upon.
    pub rnr_naks: u64,
    /// Changes of path, because of congestion or because no response arrived.
    pub rehashed: u64,
    /// Responses that belonged to no outstanding request.
    pub stale: u64,
    /// Packets sent without an ICRC. Not saved.
    pub without_icrc: u64,
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
    /// Request that contains `snd.nxt`, as an index of `requests`.
    nxt_request: usize,
    /// Division of READs into requests.
    reads: ReadGrid,
    /// READs and atomics sent between `snd.una` and `snd.nxt`.
    responses: ResponseTracker,
    /// PSN after a response that was requested alone, as a probe.
    probed: Option<Seq>,
    ack_policy: AckPolicy,
    recovery: LossRecovery,
    sack: Sack,
    /// The newest response permits requests without an ICRC.
    omits_icrc: bool,
    scoreboard: Scoreboard,
    multipath: Multipath,
    timers: TimerTable,
    draining: bool,
    /// A PSN of the request that ends the QP as soon as all requests before it are done, and its status.
    failing: Option<(Seq, WcStatus)>,
    ended: bool,
    ident: u16,
    stats: RequesterStats,
}

impl Requester {
    /// Creates a requester in RTS, with the peer, limits and numbers of `attrs`.
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
            omits_icrc: false,
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

    /// Counters.
    pub const fn stats(&self) -> RequesterStats {
        self.stats
    }

    /// Current path of packets.
    pub const fn path(&self) -> Path {
        self.path
    }

    /// Sets AckReq on the next packet. Used before a pause: otherwise the ACK would have to wait for the next packet
    /// that requests one anyway.
    pub const fn request_ack(&mut self) {
        self.ack_policy.force();
    }

    /// Applies the attributes that a modify request may change in RTS and SQD: path, timeout, retries, number of READs.
    /// PSNs, path MTU and peer stay.
    pub fn set_attrs(&mut self, attrs: &QpAttrs, path: Path) {
        let QpAttrs { timeout, retry_cnt, rnr_retry, max_rd_atomic, .. } = *attrs;
        self.attrs = QpAttrs { timeout, retry_cnt, rnr_retry, max_rd_atomic, ..self.attrs };
        self.path = path;
        self.path.turn(self.multipath.entropy());
        self.omits_icrc &= path.may_omit_icrc();
        self.recovery.retries = self.recovery.retries.min(retry_cnt);
        self.recovery.rnr_retries = self.recovery.rnr_retries.min(rnr_retry);
    }

    /// Returns `true` if another request can be posted.
    pub fn has_room(&self) -> bool {
        !self.ended && self.requests.len() < self.tuning.requests && !self.has_most_page_lists()
    }

    /// Returns `true` if another fast registration must start before the next request can be posted.
    pub const fn has_most_page_lists(&self) -> bool {
        self.page_lists >= self.tuning.page_lists
    }

    /// Bytes of memory of a posted request with this number of SGEs.
    pub fn bytes_of_request(sges: usize) -> usize {
        size_of::<Request>().saturating_add(sges.next_power_of_two().saturating_mul(size_of::<Sge>()))
    }

    /// Changes the maximum numbers of posted requests, and of posted fast registrations that were not started. If more
    /// are posted already, nothing can be posted until there is room. Excess memory is released.
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

    /// PSNs in flight: sent, and neither acknowledged nor responded to. PSNs that a loss made the requester go back
    /// over do not count, nor do PSNs after a gap that are known to have arrived: responses received, and packets that
    /// the responder reports.
    pub fn in_flight(&self) -> u64 {
        self.snd.span().saturating_sub(self.scoreboard.received()).saturating_sub(self.responses.early())
    }

    /// Sets the length of READ requests to fit the congestion window.
    fn set_read_length(&mut self) {
        let at_a_time = u32::from(self.attrs.max_rd_atomic).clamp(1, READS_AT_A_TIME);
        let length = (self.recovery.congestion_window() / at_a_time).max(1);
        // The length is a power of two, so that it does not change all the time. If the peer does not allow more than
        // four requests, the steps are smaller, so that the requests fill the window.
        let digits = if u32::from(self.attrs.max_rd_atomic) > READS_AT_A_TIME { 0 } else { 2 };
        let step = 1 << length.ilog2().saturating_sub(digits);
        let length = (length / step * step).min(self.tuning.read_chunk).min(self.tuning.window / 2).max(1);
        self.reads.set(length, self.snd.una, self.snd.max);
    }

    /// Returns `true` if the responder has agreed to selective acknowledgements.
    #[inline]
    fn has_agreed(&self) -> bool {
        self.sack == Sack::On
    }

    /// PSNs in flight that are not known to be lost.
    fn pipe(&self) -> u64 {
        self.in_flight().saturating_sub(self.scoreboard.to_retransmit())
    }

    /// Time after which an ACK is late: smoothed RTT plus four times its variation. `None`: nothing was measured.
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

    /// Returns `true` if the next packet is a retransmission.
    pub fn next_is_retransmission(&self) -> bool {
        self.snd.nxt < self.snd.max
            || matches!(self.recovery.probe, Probe::Due(_))
            || self.recovery.retransmit.is_some()
            || self.scoreboard.has_lost()
            || self.responses.has_lost()
    }

    /// Returns a request whose buffers can be reused for the next [`Self::post`].
    pub fn spare(&mut self) -> SendWr {
        self.spare.pop().unwrap_or_default()
    }

    /// Posts a request. After an error it is flushed at once.
    pub fn post(&mut self, wr: SendWr, ops: &mut impl RequesterOps) {
        if self.ended {
            ops.finish(&wr, WcStatus::Flushed, 0);
            return;
        }
        self.page_lists += usize::from(matches!(wr.op, SendOp::FastRegister(_)));
        let request = Request::new(wr, self.snd.posted, self.attrs.path_mtu);
        self.snd.posted = request.end();
        self.requests.push_back(request);
    }

    /// Sets if the QP is in SQD, where started requests are finished and no new one is started.
    pub const fn set_draining(&mut self, draining: bool) {
        self.draining = draining;
    }

    /// Returns `true` if no request is started and unfinished.
    pub fn is_idle(&self) -> bool {
        self.requests.front().is_none_or(|request| request.stage == Stage::Posted)
    }

    /// Flushes all requests because the QP moved to its error state for another reason.
    pub fn flush(&mut self, ops: &mut impl RequesterOps) {
        self.ended = true;
        self.timers.stop_all();
        self.page_lists = 0;
        for request in self.requests.drain(..) {
            ops.finish(&request.wr, WcStatus::Flushed, 0);
        }
    }

    /// Time at which [`Self::handle_timeout`] is due.
    pub fn poll_timeout(&self) -> Option<Duration> {
        self.timers.next_timeout()
    }

    /// Moves `snd.nxt` within the started requests.
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

    /// Fails the request that contains `seq`: it completes with an error, and the QP ends. The first error that the
    /// consumer sees must be the cause. So earlier requests whose responses are late or lost complete first, with the
    /// retries that are left.
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
