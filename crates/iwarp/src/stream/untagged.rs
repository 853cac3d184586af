//! Untagged messages of the peer: SENDs and READ requests.

use pvrdma_verbs_types::{Access, MAX_MESSAGE, NakReason, Received, ResponderOps, WcOpcode};

use super::outcome::Notify;
use super::receive::{Segment, Stop, invalid};
use super::{Response, Stream, Unfinished};
use crate::wire::{Cause, Placement, ReadRequest};

/// Checks queue and position of an untagged segment.
fn check_position(segment: &Segment<'_>, expected_msn: u32, expected_offset: u64) -> Result<(), Stop> {
    let Placement::Untagged { queue, msn, offset, .. } = segment.header.placement else {
        return Err(invalid(Cause::UNEXPECTED_OPCODE));
    };
    if Some(queue) != segment.header.opcode.queue() {
        return Err(invalid(Cause::QUEUE));
    }
    if msn != expected_msn {
        return Err(invalid(Cause::MSN_RANGE));
    }
    if u64::from(offset) != expected_offset {
        return Err(invalid(Cause::MESSAGE_OFFSET));
    }
    Ok(())
}

impl Stream {
    pub(super) fn handle_send(&mut self, segment: &Segment<'_>, ops: &mut impl ResponderOps) -> Result<(), Stop> {
        let opcode = segment.header.opcode;
        let done = self.untagged.map_or(0, |message| message.length);
        check_position(segment, self.peer_send_msn, done.into())?;
        let length = done.checked_add(segment.payload_len()).filter(|&length| length <= MAX_MESSAGE);
        let length = length.ok_or(invalid(Cause::TOO_LONG))?;
        if self.untagged.is_none() {
            ops.request_arrived();
            ops.take_receive().map_err(|reason| match reason {
                NakReason::NotReady(_) | NakReason::Silence => Stop::Wait,
                _ => Stop::Refuse(Cause::DDP_CATASTROPHIC, None),
            })?;
            self.waiting = None;
        }
        ops.fill_receive(done.into(), segment.payload).map_err(|reason| match reason {
            NakReason::InvalidRequest => Stop::Refuse(Cause::TOO_LONG, None),
            _ => Stop::Refuse(Cause::DDP_CATASTROPHIC, None),
        })?;
        if !segment.header.last {
            self.untagged = Some(Unfinished { opcode, stag: 0, next: length.into(), length });
            return Ok(());
        }
        let mut received = Received {
            opcode: WcOpcode::Recv,
            length,
            immediate: None,
            invalidated: None,
            solicited: opcode.is_solicited(),
        };
        if let Placement::Untagged { stag, .. } = segment.header.placement
            && opcode.invalidates()
        {
            ops.invalidate(stag).map_err(|_| Stop::Refuse(Cause::NOT_INVALIDATED, None))?;
            received.invalidated = Some(stag);
        }
        ops.complete_receive(received).map_err(|_| Stop::Refuse(Cause::CATASTROPHIC, None))?;
        self.untagged = None;
        self.peer_send_msn = self.peer_send_msn.wrapping_add(1);
        Ok(())
    }

    pub(super) fn handle_read_request(
        &mut self,
        segment: &Segment<'_>,
        ops: &mut impl ResponderOps,
    ) -> Result<(), Stop> {
        check_position(segment, self.peer_read_msn, 0)?;
        let body = segment.payload.first_chunk().ok_or(invalid(Cause::OPERATION))?;
        if segment.payload.len() > ReadRequest::LEN || !segment.header.last {
            return Err(invalid(Cause::TOO_LONG));
        }
        let request = ReadRequest::from_bytes(body);
        let rtr = segment.first && request.length == 0;
        ops.request_arrived();
        if !rtr {
            self.check_read(&request, ops)?;
        }
        self.peer_read_msn = self.peer_read_msn.wrapping_add(1);
        self.responses.push_back(Response { request, header: segment.refused, sent: 0, rtr });
        Ok(())
    }

    fn check_read(&self, request: &ReadRequest, ops: &mut impl ResponderOps) -> Result<(), Stop> {
        let refuse = |cause, notify| Stop::RefuseRead(cause, *request, notify);
        ops.check_enabled(Access::REMOTE_READ).map_err(|_| refuse(Cause::ACCESS_RIGHTS, None))?;
        let outstanding = self.responses.iter().filter(|response| !response.rtr).count();
        if outstanding >= self.negotiated.ird.into() {
            return Err(refuse(Cause::STREAM, Some(Notify::InvalidRequest)));
        }
        let Some(last) = request.length.checked_sub(1) else { return Ok(()) };
        let wraps = |offset: u64| offset.checked_add(last.into()).is_none();
        if wraps(request.source_offset) || wraps(request.sink_offset) {
            return Err(refuse(Cause::READ_WRAP, Some(Notify::Access)));
        }
        if request.source_stag == 0 {
            return Err(refuse(Cause::READ_STAG, Some(Notify::Access)));
        }
        ops.check_remote(request.source(), request.length.into(), Access::REMOTE_READ)
            .map_err(|_| refuse(Cause::READ_STAG, Some(Notify::Access)))
    }
}
