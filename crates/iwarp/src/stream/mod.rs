//! DDP and RDMAP of one connection, both directions.
//!
//! * `request`: the send queue, with requests in posting order and the READs that wait for data;
//! * `transmit`: chooses and builds the next FPDU;
//! * `receive`: parses bytes and hands segments to `untagged` and `tagged`;
//! * `end`: all ways in which a connection ends; `outcome`: their results;
//! * `inspect`: exports the state.

mod end;
pub(crate) mod inspect;
mod outcome;
mod receive;
mod request;
mod tagged;
mod transmit;
mod untagged;

use std::collections::VecDeque;
use std::time::Duration;

use pvrdma_verbs_types::{MAX_MESSAGE, RequesterOps, ResponderOps, SendOp, SendWr, Sge, WcStatus};
use serde::Serialize;

use crate::startup::{Negotiated, Role};
use crate::wire::{Cause, Opcode, ReadRequest, RefusedSegment, Terminate, fpdu};
use outcome::Notify;
pub use outcome::{Close, End, Finished};
use request::{OpenRead, Requests, Stage};

/// Parameters of a stream that concern this end only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Tuning {
    /// Maximum length of an FPDU to send: the effective MSS of the connection. Values below [`fpdu::MIN_FPDU`] are
    /// raised to it.
    pub mss: usize,
    /// Requests that may be posted and not done.
    pub requests: usize,
    /// Maximum number of fast registrations that are posted and not started. Each holds a page list.
    pub page_lists: usize,
    /// Time for which a SEND of the peer may wait for a receive.
    pub receive_wait: Duration,
    /// Random number, from which the STags of READs are counted.
    pub seed: u32,
}

impl Default for Tuning {
    fn default() -> Self {
        Self { mss: 1448, requests: 128, page_lists: 8, receive_wait: Duration::from_secs(5), seed: 0 }
    }
}

impl Tuning {
    /// Returns the tuning with another value of `mss`.
    #[must_use]
    pub const fn with_mss(mut self, mss: usize) -> Self {
        self.mss = mss;
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

    /// Returns the tuning with another value of `receive_wait`.
    #[must_use]
    pub const fn with_receive_wait(mut self, receive_wait: Duration) -> Self {
        self.receive_wait = receive_wait;
        self
    }

    /// Returns the tuning with another value of `seed`.
    #[must_use]
    pub const fn with_seed(mut self, seed: u32) -> Self {
        self.seed = seed;
        self
    }
}

/// Counters of a stream. They start at 0 when it is created, and only grow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct StreamStats {
    /// FPDUs built.
    pub fpdus_sent: u64,
    /// FPDUs processed.
    pub fpdus_received: u64,
    /// SENDs that had to wait for a receive.
    pub waited_for_receive: u64,
    /// Requests that iWARP does not have.
    pub unsupported: u64,
}

/// A READ of the peer that is to be answered.
#[derive(Clone, Copy, Debug)]
struct Response {
    request: ReadRequest,
    /// The header of the request, for a Terminate.
    header: RefusedSegment,
    /// Bytes that were sent.
    sent: u32,
    /// The ready-to-receive message, which takes no READ resource.
    rtr: bool,
}

/// Message of which some, but not all segments were built.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Sending {
    Request,
    Response,
}

/// A message of the peer of which some but not all segments have arrived. Only its position is kept.
#[derive(Clone, Copy, Debug)]
struct Unfinished {
    opcode: Opcode,
    /// STag of a tagged message.
    stag: u32,
    /// Offset of the next segment.
    next: u64,
    /// Length so far.
    length: u32,
}

/// A SEND of the peer that waits for a receive.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    until: Duration,
    header: RefusedSegment,
}

/// MPA, DDP and RDMAP of one connection after the startup.
#[derive(Debug)]
pub struct Stream {
    negotiated: Negotiated,
    tuning: Tuning,
    requests: Requests,
    /// READs that were sent, in order. The response to the first one is next.
    reads: VecDeque<OpenRead>,
    next_sink: u32,
    /// Next MSN of SENDs and READ requests of this end.
    send_msn: u32,
    read_msn: u32,
    /// The ready-to-receive message is to be sent before anything else.
    rtr_due: bool,
    /// Number of bytes that were built, and of those that TCP has accepted.
    built: u64,
    taken: u64,
    sending: Option<Sending>,
    /// The last message was a response: it is the requests' turn.
    requests_turn: bool,
    /// The QP is in SQD ([`Self::set_draining`]).
    draining: bool,
    /// This end may send: it is the initiator, or the peer has sent an FPDU.
    open: bool,
    /// Next MSN of SENDs and READ requests of the peer.
    peer_send_msn: u32,
    peer_read_msn: u32,
    /// Unfinished messages of the peer. Messages of one kind do not interleave; a tagged one and an untagged one may.
    untagged: Option<Unfinished>,
    tagged: Option<Unfinished>,
    responses: VecDeque<Response>,
    waiting: Option<Waiting>,
    terminate: Option<Terminate>,
    /// A Terminate was built, possibly in the middle of a message. The peer then waits for no more of that message, so
    /// the connection need not be reset.
    terminate_sent: bool,
    end: Option<End>,
    stats: StreamStats,
}

impl Stream {
    /// Creates a stream in the state behind the startup.
    pub fn new(negotiated: Negotiated, tuning: Tuning) -> Self {
        let initiator = negotiated.role == Role::Initiator;
        Self {
            negotiated,
            tuning,
            requests: Requests::default(),
            reads: VecDeque::new(),
            next_sink: tuning.seed,
            send_msn: 1,
            read_msn: 1,
            rtr_due: initiator && negotiated.rtr.is_some(),
            built: 0,
            taken: 0,
            sending: None,
            requests_turn: false,
            draining: false,
            open: initiator,
            peer_send_msn: 1,
            peer_read_msn: 1,
            untagged: None,
            tagged: None,
            responses: VecDeque::new(),
            waiting: None,
            terminate: None,
            terminate_sent: false,
            end: None,
            stats: StreamStats::default(),
        }
    }

    /// Properties of the connection.
    pub const fn negotiated(&self) -> &Negotiated {
        &self.negotiated
    }

    /// Counters.
    pub const fn stats(&self) -> StreamStats {
        self.stats
    }

    /// Changes the maximum length of an FPDU to send, to the effective MSS of the connection.
    pub const fn set_mss(&mut self, mss: usize) {
        self.tuning.mss = mss;
    }

    /// Returns `true` if another request can be posted.
    pub fn has_room(&self) -> bool {
        let ended = !matches!(self.end, None | Some(End::PeerClosed));
        !ended && self.requests.len() < self.tuning.requests && !self.has_most_page_lists()
    }

    /// Returns `true` if another fast registration must start before the next request can be posted.
    pub const fn has_most_page_lists(&self) -> bool {
        self.requests.page_lists() >= self.tuning.page_lists
    }

    /// Bytes of memory of a posted request with this number of SGEs.
    pub const fn bytes_of_request(sges: usize) -> usize {
        Requests::bytes_of_request(sges)
    }

    /// Changes the maximum numbers of posted requests, and of posted fast registrations that were not started. If more
    /// are posted already, nothing can be posted until there is room.
    pub fn set_room(&mut self, requests: usize, page_lists: usize) {
        if requests < self.tuning.requests {
            self.requests.shrink_to(requests);
        }
        (self.tuning.requests, self.tuning.page_lists) = (requests, page_lists);
    }

    /// Returns `true` if no request is posted.
    pub fn is_empty(&self) -> bool {
        self.requests.len() == 0
    }

    /// Enters or leaves the state SQD, in which started requests are finished and no new one is started.
    pub const fn set_draining(&mut self, draining: bool) {
        self.draining = draining;
    }

    /// Returns `true` if no request is started and unfinished.
    pub fn is_idle(&self) -> bool {
        self.requests.front_stage().is_none_or(|stage| stage == Stage::Posted)
    }

    /// Returns a request whose buffers can be reused for the next [`Self::post`].
    pub fn spare(&mut self) -> SendWr {
        self.requests.spare()
    }

    /// Posts a request. After an error it is flushed at once.
    pub fn post(&mut self, wr: SendWr, ops: &mut impl RequesterOps) {
        if !matches!(self.end, None | Some(End::PeerClosed)) {
            ops.finish(&wr, WcStatus::Flushed, 0);
            return;
        }
        let length = u32::try_from(Sge::total_length(&wr.sges)).ok().filter(|&length| length <= MAX_MESSAGE);
        let stage = match refusal(&wr.op, length) {
            Some(status) => Stage::Failed(status),
            None => Stage::Posted,
        };
        self.stats.unsupported += u64::from(!is_known(&wr.op));
        self.requests.push(wr, length.unwrap_or(0), stage);
    }

    /// Reports that TCP has accepted `bytes` more of the bytes that [`Self::poll_transmit`] returned. SENDs and WRITEs
    /// that it has accepted as a whole complete.
    pub fn taken(&mut self, bytes: usize, ops: &mut impl RequesterOps) {
        self.taken = self.taken.saturating_add(bytes as u64).min(self.built);
        self.complete_done(ops);
    }

    /// Returns `true` if the rest of the received bytes begins with a SEND for which no receive is posted. When one is
    /// posted, pass the rest to [`Self::receive`] again.
    pub const fn waits_for_receive(&self) -> bool {
        self.waiting.is_some()
    }

    /// Time at which [`Self::handle_timeout`] is due.
    pub fn poll_timeout(&self) -> Option<Duration> {
        self.waiting.map(|waiting| waiting.until)
    }

    /// Ends the connection if a SEND has waited too long for a receive.
    pub fn handle_timeout(&mut self, now: Duration, ops: &mut (impl RequesterOps + ResponderOps)) {
        if let Some(waiting) = self.waiting.filter(|waiting| now >= waiting.until && self.end.is_none()) {
            self.refuse(Cause::NO_BUFFER, Some(waiting.header), None, Some(Notify::InvalidRequest), ops);
        }
    }

    /// Completes the requests that are done, in order.
    fn complete_done(&mut self, ops: &mut impl RequesterOps) {
        if let Err(status) = self.requests.complete_done(self.taken, ops) {
            self.fail(self.requests.first(), status, ops);
        }
    }

    /// READs of this end that take a resource of the peer.
    fn outstanding_reads(&self) -> usize {
        self.reads.iter().filter(|read| read.request.is_some()).count()
    }

    /// Length of the longest FPDU to send.
    fn longest_fpdu(&self) -> usize {
        self.tuning.mss.clamp(fpdu::MIN_FPDU, fpdu::MAX_FPDU)
    }
}

/// Returns `true` if iWARP has the operation, or if it is a local one.
const fn is_known(op: &SendOp) -> bool {
    use pvrdma_verbs_types::SendData::Immediate;
    !matches!(
        op,
        SendOp::Send { data: Immediate(_), .. }
            | SendOp::Write { immediate: Some(_), .. }
            | SendOp::CompareSwap { .. }
            | SendOp::FetchAdd { .. }
    )
}

/// Returns the status with which a request fails when its turn comes, if that is already certain when it is posted.
fn refusal(op: &SendOp, length: Option<u32>) -> Option<WcStatus> {
    use pvrdma_verbs_types::SendData::Invalidate;
    if !is_known(op) {
        return Some(WcStatus::LocalQpOperation);
    }
    if op.is_local() {
        return None;
    }
    let Some(length) = length else { return Some(WcStatus::LocalLength) };
    // STag 0 must not be sent. No peer has memory under it, so the status is that of the peer's refusal.
    match op {
        SendOp::Write { remote, .. } | SendOp::Read { remote } if remote.rkey == 0 && length > 0 => {
            Some(WcStatus::RemoteAccess)
        }
        SendOp::Send { data: Invalidate(0), .. } => Some(WcStatus::RemoteOperation),
        _ => None,
    }
}
