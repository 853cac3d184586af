//! The requester of a reliable connection: cuts requests into packets, takes the answers, resends what was lost
//! (IBA 9.7.2, 9.7.6, 9.7.7).
//!
//! Requests get their PSNs when they are posted. Three marks move through them:
//!
//! ```text
//!        unconfirmed        executed             cursor            newest
//!  done  ──┤  answers missing  ├── not confirmed ──┤ to be resent ───┤ not sent
//! ```
//!
//! * everything before `unconfirmed` is done: it was executed and every answer with data has arrived;
//! * everything before `executed` is known to have been executed; behind `unconfirmed` there can be READs and atomics whose
//!   answers were lost. A resend leaves the SENDs and WRITEs in between out;
//! * `cursor` is the next PSN to send, `newest` the first that was never sent. Going back means moving the cursor.
//!
//! Inside, PSNs are extended to 64 bits ([`Seq`]), so that they compare as numbers however much is posted.

mod answers;
mod losses;
mod recovery;
mod repairs;
mod transmit;

pub(super) use transmit::{Message, plan};

use std::collections::VecDeque;
use std::time::Duration;

use pvrdma_verbs::{Psn, QpAttrs, Qpn, SendOp, SendWr, WcStatus};

use super::MAX_MESSAGE;
use super::path::{Path, packets};
use crate::ops::{RequesterOps, is_local, total};
use recovery::{Probe, Recovery};
use repairs::Repairs;

/// How a requester uses the network. Nothing of it needs the peer's consent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tuning {
    /// PSNs that may be unconfirmed at a time. Against a software responder keep it below what its socket buffer holds.
    pub window: u32,
    /// Longest RDMA READ request in packets; longer reads become several requests. At most half of `window` is used.
    pub read_chunk: u32,
    /// Requests that may be posted and not done.
    pub requests: usize,
}

impl Default for Tuning {
    fn default() -> Self {
        Self { window: 256, read_chunk: 64, requests: 128 }
    }
}

/// Figures of a requester.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RequesterStats {
    /// Packets sent.
    pub packets: u64,
    /// Of these, packets that had been sent before.
    pub resent: u64,
    /// Times that the oldest packet was sent again because nothing was confirmed for a few round trips.
    pub probes: u64,
    /// ACK timeouts.
    pub timeouts: u64,
    /// Sequence NAKs acted on.
    pub sequence_naks: u64,
    /// Times that the answer to a READ or atomic was seen to be lost.
    pub lost_answers: u64,
    /// RNR NAKs acted on.
    pub rnr_naks: u64,
    /// Answers that belonged to nothing outstanding.
    pub stale: u64,
}

/// A PSN that does not wrap. Its low 24 bits are on the wire.
type Seq = u64;

/// PSNs in one turn.
const TURN: Seq = 1 << 24;

/// The PSN on the wire.
fn wire_psn(seq: Seq) -> Psn {
    Psn::new(u32::try_from(seq % TURN).unwrap_or(0))
}

/// How far a request has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// Nothing was checked yet.
    Posted,
    /// It may be sent; a local one is done.
    Begun,
    /// It ends with this status when its turn comes.
    Failed(WcStatus),
}

/// A posted request.
#[derive(Debug)]
struct Request {
    work: SendWr,
    first: Seq,
    /// PSNs it takes; none if it never leaves this side.
    count: u32,
    length: u32,
    stage: Stage,
}

impl Request {
    const fn end(&self) -> Seq {
        self.first + self.count as Seq
    }

    /// Whether the answer carries data, so that being executed is not being done.
    const fn wants_data(&self) -> bool {
        matches!(self.work.op, SendOp::Read { .. } | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. })
    }

    fn contains(&self, seq: Seq) -> bool {
        (self.first..self.end()).contains(&seq)
    }
}

/// The requester half of a connected QP.
#[derive(Debug)]
pub struct Requester {
    path: Path,
    remote: Qpn,
    attrs: QpAttrs,
    tuning: Tuning,
    requests: VecDeque<Request>,
    /// Finished requests, whose buffers are used again.
    spare: Vec<SendWr>,
    /// First PSN of the next request that is posted.
    next: Seq,
    unconfirmed: Seq,
    executed: Seq,
    /// Position of the cursor in `requests`, and its PSN.
    at: usize,
    cursor: Seq,
    newest: Seq,
    /// Where each outstanding READ and atomic ends: those sent between `unconfirmed` and `cursor`.
    data_requests: VecDeque<Seq>,
    /// Packets sent since the last that asked for an ACK.
    unasked: u32,
    retries: u8,
    rnr_retries: u8,
    /// Timeouts in a row.
    backoff: u32,
    /// The last thing that happened was an ACK timeout.
    timed_out: bool,
    recovery: Recovery,
    probe: Probe,
    repairs: Repairs,
    /// The responder was seen to keep what comes behind a gap: only what is missing need be sent again.
    peer_keeps: bool,
    ack_deadline: Option<Duration>,
    rnr_deadline: Option<Duration>,
    /// `unconfirmed` when a sequence NAK made us go back; a responder sends one for each missing packet.
    nak_at: Option<Seq>,
    /// How many of them in a row named the packet after the one that was sent again.
    neighbours: u32,
    /// `unconfirmed` when a lost answer made us go back. What was under way then tells us the same again.
    loss_at: Option<Seq>,
    draining: bool,
    ended: bool,
    ident: u16,
    stats: RequesterStats,
}

impl Requester {
    /// A requester in RTS, with the peer, limits and numbers of `attrs`.
    pub fn new(attrs: &QpAttrs, path: Path, tuning: Tuning) -> Self {
        // Not in the first turn, so that older PSNs are numbers, too.
        let first = TURN + Seq::from(attrs.sq_psn.get());
        Self {
            path,
            remote: attrs.dest_qpn,
            attrs: *attrs,
            tuning,
            requests: VecDeque::new(),
            spare: Vec::new(),
            next: first,
            unconfirmed: first,
            executed: first,
            at: 0,
            cursor: first,
            newest: first,
            data_requests: VecDeque::new(),
            unasked: 0,
            retries: attrs.retry_cnt,
            rnr_retries: attrs.rnr_retry,
            backoff: 0,
            timed_out: false,
            recovery: Recovery::new(tuning.window),
            probe: Probe::No,
            repairs: Repairs::default(),
            peer_keeps: false,
            ack_deadline: None,
            rnr_deadline: None,
            nak_at: None,
            neighbours: 0,
            loss_at: None,
            draining: false,
            ended: false,
            ident: 0,
            stats: RequesterStats::default(),
        }
    }

    /// What happened so far.
    pub const fn stats(&self) -> RequesterStats {
        self.stats
    }

    /// Has the next packet ask for an ACK: it is the last for a while, or the timer would not wait for the next one that asks by
    /// itself.
    pub const fn ask(&mut self) {
        self.unasked = u32::MAX;
    }

    /// Takes over what a modify request may change in RTS and SQD: path, timeout, retries, number of reads. PSNs, path MTU
    /// and peer stay.
    pub fn set_attrs(&mut self, attrs: &QpAttrs, path: Path) {
        let QpAttrs { timeout, retry_cnt, rnr_retry, max_rd_atomic, .. } = *attrs;
        self.attrs = QpAttrs { timeout, retry_cnt, rnr_retry, max_rd_atomic, ..self.attrs };
        self.path = path;
        self.retries = self.retries.min(retry_cnt);
        self.rnr_retries = self.rnr_retries.min(rnr_retry);
    }

    /// Whether another request can be posted.
    pub fn has_room(&self) -> bool {
        !self.ended && self.requests.len() < self.tuning.requests
    }

    /// PSNs that are on their way or being answered. What a loss made us go back over is not among them.
    pub const fn under_way(&self) -> u64 {
        self.cursor.saturating_sub(self.unconfirmed)
    }

    /// Whether the next packet was sent before.
    pub fn resends(&self) -> bool {
        self.cursor < self.newest || matches!(self.probe, Probe::Due(_)) || self.repairs.due().is_some()
    }

    /// A request whose buffers can be used for the next [`Self::post`].
    pub fn spare(&mut self) -> SendWr {
        self.spare.pop().unwrap_or_default()
    }

    /// Takes a request. After an error it is flushed at once.
    pub fn post(&mut self, work: SendWr, host: &mut impl RequesterOps) {
        if self.ended {
            host.finish(&work, WcStatus::Flushed, 0);
            return;
        }
        let length = match work.op {
            SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => Some(8),
            _ => u32::try_from(total(&work.sges)).ok().filter(|&length| length <= MAX_MESSAGE),
        };
        let (count, stage) = match (&work.op, length) {
            (op, _) if is_local(op) => (0, Stage::Posted),
            (_, None) => (0, Stage::Failed(WcStatus::LocalLength)),
            (SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }, _) => (1, Stage::Posted),
            (_, Some(length)) => (packets(length, self.attrs.path_mtu), Stage::Posted),
        };
        let first = self.next;
        self.next += Seq::from(count);
        self.requests.push_back(Request { work, first, count, length: length.unwrap_or(0), stage });
    }

    /// In SQD nothing new is started; what was started is finished.
    pub const fn set_draining(&mut self, draining: bool) {
        self.draining = draining;
    }

    /// Whether nothing is started and not finished.
    pub fn is_idle(&self) -> bool {
        self.requests.front().is_none_or(|request| request.stage == Stage::Posted)
    }

    /// The QP went to its error state for another reason: flushes everything.
    pub fn flush(&mut self, host: &mut impl RequesterOps) {
        self.ended = true;
        self.ack_deadline = None;
        self.rnr_deadline = None;
        self.recovery.restart(Duration::ZERO, false);
        for request in self.requests.drain(..) {
            host.finish(&request.work, WcStatus::Flushed, 0);
        }
    }

    /// When [`Self::handle_timeout`] is due.
    pub fn poll_timeout(&self) -> Option<Duration> {
        [self.ack_deadline, self.rnr_deadline, self.recovery.deadline()].into_iter().flatten().min()
    }

    /// Moves the cursor among the requests that were begun.
    fn seek(&mut self, to: Seq) {
        self.cursor = to;
        let found = self.requests.iter().position(|request| request.stage != Stage::Begun || to < request.end());
        self.at = found.unwrap_or(self.requests.len());
    }

    /// Ends the requests that are done, in order.
    fn retire(&mut self, host: &mut impl RequesterOps) {
        while let Some(front) = self.requests.front() {
            match front.stage {
                Stage::Failed(status) => return self.fail_front(status, host),
                Stage::Begun if self.unconfirmed >= front.end() => {}
                Stage::Begun | Stage::Posted => return,
            }
            let Some(request) = self.requests.pop_front() else { return };
            self.at = self.at.saturating_sub(1);
            host.finish(&request.work, WcStatus::Success, request.byte_len());
            if self.spare.len() < 8 {
                self.spare.push(request.work);
            }
        }
    }

    /// Ends the request that holds `seq` with an error, flushes the others, and the QP ends.
    fn fail_at(&mut self, seq: Seq, status: WcStatus, host: &mut impl RequesterOps) {
        while let Some(front) = self.requests.front()
            && !front.contains(seq)
        {
            host.finish(&front.work, WcStatus::Flushed, 0);
            self.requests.pop_front();
        }
        self.fail_front(status, host);
    }

    fn fail_front(&mut self, status: WcStatus, host: &mut impl RequesterOps) {
        if let Some(request) = self.requests.pop_front() {
            host.finish(&request.work, status, 0);
        }
        self.flush(host);
        host.failed();
    }
}

impl Request {
    /// What the completion says.
    const fn byte_len(&self) -> u32 {
        if self.wants_data() { self.length } else { 0 }
    }
}
