//! Received bytes: FPDUs, and the segments in them.

use std::time::Duration;

use pvrdma_verbs_types::{RequesterOps, ResponderOps, WcStatus};

use super::outcome::{End, Notify};
use super::{Stream, Waiting};
use crate::wire::fpdu::{Fpdu, FpduError};
use crate::wire::{Cause, Opcode, RawHeader, ReadRequest, RefusedSegment, SegmentHeader, Terminate};

/// Reason for which a segment was not processed, or ends the connection.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stop {
    /// A SEND waits for a receive; it is passed again.
    Wait,
    /// The message is refused.
    Refuse(Cause, Option<Notify>),
    /// A READ request is refused.
    RefuseRead(Cause, ReadRequest, Option<Notify>),
    /// A READ response is refused.
    RefuseResponse(Cause),
    /// The data of the oldest READ cannot be stored.
    Local(WcStatus),
    /// The peer ends the connection.
    Terminated(Terminate),
}

/// A message that breaks a rule of the protocol.
pub(super) const fn invalid(cause: Cause) -> Stop {
    Stop::Refuse(cause, Some(Notify::InvalidRequest))
}

/// A received segment, with its description for a Terminate.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment<'a> {
    pub(super) header: SegmentHeader,
    pub(super) payload: &'a [u8],
    pub(super) refused: RefusedSegment,
    /// The segment may be the ready-to-receive message.
    pub(super) first: bool,
}

impl Segment<'_> {
    pub(super) fn payload_len(&self) -> u32 {
        u32::try_from(self.payload.len()).unwrap_or(u32::MAX)
    }
}

impl Stream {
    /// Processes received bytes, which begin with those that the last call left. Returns the number of processed bytes;
    /// the [crate's documentation](crate) describes the rest. After the end of the connection, all bytes are discarded.
    pub fn receive(&mut self, now: Duration, bytes: &[u8], ops: &mut (impl RequesterOps + ResponderOps)) -> usize {
        let mut used = 0;
        while self.end.is_none() {
            let rest = bytes.get(used..).unwrap_or_default();
            match Fpdu::parse(rest, self.negotiated.crc) {
                Ok(None) => break,
                Ok(Some(fpdu)) if self.handle_segment(now, fpdu.segment, ops) => used += fpdu.len,
                Ok(Some(_)) => break,
                Err(error) => self.lose_framing(error, ops),
            }
        }
        if self.end.is_none() {
            self.complete_done(ops);
        }
        // `complete_done` may also have ended the connection: a request that has failed waits for the READs in front of
        // it.
        if self.end.is_none() { used } else { bytes.len() }
    }

    /// Ends the connection, because the start of the next FPDU is unknown or its content is damaged.
    fn lose_framing(&mut self, error: FpduError, ops: &mut impl RequesterOps) {
        let cause = match error {
            FpduError::Length(_) => Cause::FPDU_START,
            FpduError::Crc => Cause::CRC,
        };
        self.lose(End::Refused(cause), ops);
        self.terminate = Some(Terminate { cause, segment: None, read: None });
    }

    /// Processes a segment. Returns `false` if it waits.
    fn handle_segment(&mut self, now: Duration, segment: &[u8], ops: &mut (impl RequesterOps + ResponderOps)) -> bool {
        let Some((raw, payload)) = RawHeader::split(segment) else {
            self.lose_framing(FpduError::Length(0), ops);
            return true;
        };
        let refused = RefusedSegment { length: u16::try_from(segment.len()).unwrap_or(u16::MAX), header: raw };
        let delivered = SegmentHeader::parse(&raw).map_err(invalid).and_then(|header| {
            let first = !std::mem::replace(&mut self.open, true) && self.negotiated.rtr.is_some();
            self.deliver(&Segment { header, payload, refused, first }, ops)
        });
        match delivered {
            Ok(()) => {
                self.stats.fpdus_received += 1;
                return true;
            }
            Err(Stop::Wait) => {
                if self.waiting.is_none() {
                    self.stats.waited_for_receive += 1;
                    let until = now.saturating_add(self.tuning.receive_wait);
                    self.waiting = Some(Waiting { until, header: refused });
                }
                return false;
            }
            Err(Stop::Refuse(cause, notify)) => self.refuse(cause, Some(refused), None, notify, ops),
            Err(Stop::RefuseRead(cause, read, notify)) => self.refuse(cause, Some(refused), Some(read), notify, ops),
            Err(Stop::RefuseResponse(cause)) => self.refuse_response(cause, refused, ops),
            Err(Stop::Local(status)) => self.fail_read(status, ops),
            Err(Stop::Terminated(terminate)) => self.terminated(&terminate, ops),
        }
        true
    }

    fn deliver(&mut self, segment: &Segment<'_>, ops: &mut (impl RequesterOps + ResponderOps)) -> Result<(), Stop> {
        let opcode = segment.header.opcode;
        let unfinished = if opcode.queue().is_some() { self.untagged } else { self.tagged };
        if opcode != Opcode::Terminate && unfinished.is_some_and(|message| message.opcode != opcode) {
            return Err(invalid(Cause::UNEXPECTED_OPCODE));
        }
        match opcode {
            Opcode::Write => self.handle_write(segment, ops),
            Opcode::ReadResponse => self.handle_read_response(segment, ops),
            Opcode::ReadRequest => self.handle_read_request(segment, ops),
            Opcode::Terminate => Err(Stop::Terminated(Terminate::parse(segment.payload))),
            Opcode::Send | Opcode::SendInvalidate | Opcode::SendSolicited | Opcode::SendSolicitedInvalidate => {
                self.handle_send(segment, ops)
            }
        }
    }

    /// Fails the oldest READ at this end.
    fn fail_read(&mut self, status: WcStatus, ops: &mut impl RequesterOps) {
        let number = self.reads.front().and_then(|read| read.request);
        self.fail(number.unwrap_or_else(|| self.requests.first()), status, ops);
    }
}
