//! Tagged messages of the peer: WRITEs, and responses to READs.

use pvrdma_verbs_types::{Access, MAX_MESSAGE, RemoteAddress, RequesterOps, ResponderOps, WcStatus};

use super::outcome::Notify;
use super::receive::{Segment, Stop, invalid};
use super::request::Stage;
use super::{Stream, Unfinished};
use crate::wire::{Cause, Placement};

/// A WRITE to memory that cannot be accessed.
const fn denied(cause: Cause) -> Stop {
    Stop::Refuse(cause, Some(Notify::Access))
}

impl Stream {
    pub(super) fn handle_write(&mut self, segment: &Segment<'_>, ops: &mut impl ResponderOps) -> Result<(), Stop> {
        let Placement::Tagged { stag, offset } = segment.header.placement else {
            return Err(invalid(Cause::UNEXPECTED_OPCODE));
        };
        match self.tagged {
            Some(message) if message.stag != stag => return Err(denied(Cause::TAGGED_STAG)),
            Some(message) if message.next != offset => return Err(denied(Cause::TAGGED_BOUNDS)),
            Some(_) => {}
            None => {
                ops.request_arrived();
                let rtr = segment.first && segment.payload.is_empty() && segment.header.last;
                if !rtr {
                    ops.check_enabled(Access::REMOTE_WRITE).map_err(|_| Stop::Refuse(Cause::ACCESS_RIGHTS, None))?;
                }
            }
        }
        let done = self.tagged.map_or(0, |message| message.length);
        let length = done.checked_add(segment.payload_len()).filter(|&length| length <= MAX_MESSAGE);
        let length = length.ok_or(denied(Cause::TAGGED_BOUNDS))?;
        if let Some(last) = segment.payload_len().checked_sub(1) {
            offset.checked_add(last.into()).ok_or(denied(Cause::TAGGED_WRAP))?;
            let remote = RemoteAddress { addr: offset, rkey: stag };
            let allowed = stag != 0
                && ops.check_remote(remote, segment.payload.len() as u64, Access::REMOTE_WRITE).is_ok()
                && ops.write(remote, segment.payload).is_ok();
            if !allowed {
                return Err(denied(Cause::TAGGED_STAG));
            }
        }
        let next = offset.wrapping_add(segment.payload.len() as u64);
        let unfinished = Unfinished { opcode: segment.header.opcode, stag, next, length };
        self.tagged = (!segment.header.last).then_some(unfinished);
        Ok(())
    }

    /// Stores a segment of the response to the oldest READ.
    pub(super) fn handle_read_response(
        &mut self,
        segment: &Segment<'_>,
        ops: &mut impl RequesterOps,
    ) -> Result<(), Stop> {
        let Placement::Tagged { stag, offset } = segment.header.placement else {
            return Err(invalid(Cause::UNEXPECTED_OPCODE));
        };
        let Some(read) = self.reads.front_mut().filter(|read| read.sink == stag) else {
            return Err(Stop::RefuseResponse(Cause::TAGGED_STAG));
        };
        let after = read.placed.checked_add(segment.payload_len()).filter(|&after| after <= read.length);
        let Some(after) = after.filter(|_| offset == read.placed.into()) else {
            return Err(Stop::RefuseResponse(Cause::TAGGED_BOUNDS));
        };
        if segment.header.last != (after == read.length) {
            return Err(Stop::RefuseResponse(Cause::TAGGED_BOUNDS));
        }
        let request = read.request.and_then(|number| self.requests.get_mut(number));
        if let Some(request) = request {
            if !segment.payload.is_empty() {
                let stored = ops.scatter(&request.wr.sges, read.placed.into(), segment.payload);
                stored.map_err(|_| Stop::Local(WcStatus::LocalProtection))?;
            }
            if segment.header.last {
                request.stage = Stage::Done;
            }
        }
        read.placed = after;
        let unfinished = Unfinished { opcode: segment.header.opcode, stag, next: after.into(), length: after };
        self.tagged = (!segment.header.last).then_some(unfinished);
        if segment.header.last {
            self.reads.pop_front();
        }
        Ok(())
    }
}
