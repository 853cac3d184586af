//! Ends of a connection: errors of either side, the end of the TCP connection, and ends that the owner requests.

use pvrdma_verbs_types::{NakReason, RequesterOps, ResponderOps, SendOp, WcStatus};

use super::Stream;
use super::outcome::{Close, End, Finished, Notify};
use super::request::Request;
use crate::wire::{Cause, Opcode, Placement, RawHeader, ReadRequest, RefusedSegment, SegmentHeader, Terminate};

impl Stream {
    /// End of the connection. `None`: it has not ended.
    pub const fn end(&self) -> Option<End> {
        self.end
    }

    /// Returns how to close the connection at this moment: by a reset if a message is unfinished, a READ of the peer is
    /// not answered, or TCP has not accepted all bytes. A Terminate ends unfinished messages.
    pub fn close(&self) -> Close {
        let whole = self.terminate_sent || self.sending.is_none() && self.responses.is_empty();
        if whole && self.taken == self.built { Close::Finish } else { Close::Reset }
    }

    /// Returns how to close the connection that has ended. `None`: it has not, or bytes are to be sent first.
    pub(crate) fn closing(&self) -> Option<Close> {
        match self.end {
            None | Some(End::PeerClosed) => None,
            Some(End::Lost) => Some(Close::Reset),
            Some(_) if self.terminate.is_some() => None,
            // The rest of a message is never sent.
            Some(_) if !self.terminate_sent && self.sending.is_some() => Some(Close::Reset),
            Some(_) => (self.taken == self.built).then_some(Close::Finish),
        }
    }

    /// Flushes all requests because the QP has entered its error state for another reason, and sends nothing more.
    pub fn flush(&mut self, ops: &mut impl RequesterOps) {
        if matches!(self.end, None | Some(End::PeerClosed)) {
            self.set_end(End::Flushed, ops);
        }
        self.requests.end_all(None, WcStatus::Flushed, ops);
    }

    /// Processes the end of the byte stream. If the rest of the received bytes waits for a receive, call this once the
    /// receive is posted.
    pub fn finished(&mut self, how: Finished, ops: &mut impl RequesterOps) {
        if self.end.is_some() {
            return;
        }
        let between_messages =
            self.untagged.is_none() && self.tagged.is_none() && self.reads.front().is_none_or(|read| read.placed == 0);
        if how == Finished::Closed(0) && between_messages {
            self.set_end(End::PeerClosed, ops);
            return;
        }
        self.lose(End::Lost, ops);
    }

    /// Ends the connection because its byte stream has ended or is damaged. The oldest request fails.
    pub(super) fn lose(&mut self, end: End, ops: &mut impl RequesterOps) {
        self.set_end(end, ops);
        self.requests.end_all(Some(self.requests.first()), WcStatus::RetryExceeded, ops);
        ops.failed();
    }

    /// Ends the connection because a request failed at this end.
    pub(super) fn fail(&mut self, number: u64, status: WcStatus, ops: &mut impl RequesterOps) {
        self.set_end(End::Local, ops);
        // In the middle of a message, the peer understands only a reset.
        if self.sending.is_none() {
            self.terminate = Some(Terminate { cause: Cause::CATASTROPHIC, segment: None, read: None });
        }
        self.requests.end_all(Some(number), status, ops);
        ops.failed();
    }

    /// Refuses a message of the peer. `notify` is `None` if the consumer has been notified already.
    pub(super) fn refuse(
        &mut self,
        cause: Cause,
        segment: Option<RefusedSegment>,
        read: Option<ReadRequest>,
        notify: Option<Notify>,
        ops: &mut (impl RequesterOps + ResponderOps),
    ) {
        self.set_end(End::Refused(cause), ops);
        self.terminate = Some(Terminate { cause, segment, read });
        match notify {
            Some(Notify::Access) => ops.refuse(NakReason::RemoteAccess),
            Some(Notify::InvalidRequest) => ops.refuse(NakReason::InvalidRequest),
            None => {}
        }
        self.requests.end_all(None, WcStatus::Flushed, ops);
    }

    /// Refuses a READ response. The oldest READ fails; if there is none, the consumer gets an event.
    pub(super) fn refuse_response(
        &mut self,
        cause: Cause,
        segment: RefusedSegment,
        ops: &mut (impl RequesterOps + ResponderOps),
    ) {
        let Some(number) = self.reads.front().and_then(|read| read.request) else {
            return self.refuse(cause, Some(segment), None, Some(Notify::Access), ops);
        };
        self.set_end(End::Refused(cause), ops);
        self.terminate = Some(Terminate { cause, segment: Some(segment), read: None });
        self.requests.end_all(Some(number), WcStatus::BadResponse, ops);
        ops.failed();
    }

    /// Processes a Terminate of the peer.
    pub(super) fn terminated(&mut self, terminate: &Terminate, ops: &mut impl RequesterOps) {
        // The header only helps to find the request, because some peers fill it in incorrectly.
        let named = self.blamed(terminate);
        self.set_end(End::Terminated { cause: terminate.cause, unreported: false }, ops);
        if self.requests.len() == 0 {
            self.end = Some(End::Terminated { cause: terminate.cause, unreported: true });
        }
        let blamed = named.unwrap_or_else(|| self.requests.first());
        self.requests.end_all(Some(blamed), status(terminate.cause), ops);
        ops.failed();
    }

    /// Returns the number of the request that a Terminate names, if it is open.
    fn blamed(&self, terminate: &Terminate) -> Option<u64> {
        if let Some(read) = terminate.read {
            return self.reads.iter().find(|open| open.sink == read.sink_stag)?.request;
        }
        let raw: RawHeader = terminate.segment?.header;
        let header = SegmentHeader::parse(&raw).ok()?;
        let (Opcode::Write, Placement::Tagged { stag, offset }) = (header.opcode, header.placement) else {
            return None;
        };
        self.requests.find_started(|request: &Request| match request.wr.op {
            SendOp::Write { remote, .. } => {
                let at = offset.checked_sub(remote.addr);
                remote.rkey == stag && at.is_some_and(|at| at == 0 || at < u64::from(request.length))
            }
            _ => false,
        })
    }

    fn set_end(&mut self, end: End, ops: &mut impl RequesterOps) {
        // Requests that completed before are not affected by the end, whichever of the others is blamed.
        let _ = self.requests.complete_done(self.taken, ops);
        self.end = Some(end);
        self.waiting = None;
        if end != End::PeerClosed {
            self.reads.clear();
            self.responses.clear();
        }
    }
}

/// Returns the status of the request that a Terminate ends.
const fn status(cause: Cause) -> WcStatus {
    match cause {
        cause if cause.is_protection() => WcStatus::RemoteAccess,
        Cause::NO_BUFFER => WcStatus::RnrRetryExceeded,
        Cause { layer: 1, error_type: 2, .. } | Cause::UNEXPECTED_OPCODE => WcStatus::RemoteInvalidRequest,
        _ => WcStatus::RemoteOperation,
    }
}
