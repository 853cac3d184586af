//! Chooses and builds the next FPDU.
//!
//! A message is sent as a whole, because messages of one kind must not interleave (RFC 5041 4.3); between messages,
//! requests and responses take turns.

use pvrdma_verbs_types::{
    AccessError, RemoteAddress, RequesterOps, ResponderOps, SendData, SendFlags, SendOp, WcStatus,
};

use super::outcome::Notify;
use super::request::{OpenRead, Stage};
use super::{Sending, Stream};
use crate::wire::{Cause, Opcode, Placement, ReadRequest, SegmentHeader, fpdu};

/// STag of messages without data. They refer to no memory, but must not name STag 0.
const NO_STAG: u32 = 1;

impl Stream {
    /// Writes the next FPDU into `out` and returns its length, or `None` if there is nothing to send now. `out` must
    /// have room for the maximum FPDU ([`Tuning::mss`](super::Tuning::mss)), or at least for [`fpdu::MIN_FPDU`] bytes.
    /// Nothing is written into a shorter one.
    pub fn poll_transmit(&mut self, out: &mut [u8], ops: &mut (impl RequesterOps + ResponderOps)) -> Option<usize> {
        if out.len() < fpdu::MIN_FPDU {
            return None;
        }
        let longest = self.longest_fpdu().min(out.len());
        let out = out.get_mut(..longest)?;
        if self.end.is_none() {
            let sent = if self.rtr_due { self.send_rtr(out) } else { self.send_message(out, ops) };
            if sent.is_some() {
                return sent;
            }
        }
        // Building may have ended the connection.
        let terminate = self.terminate.take()?;
        self.terminate_sent = true;
        let placement = Placement::Untagged { stag: 0, queue: 2, msn: 1, offset: 0 };
        let header = SegmentHeader { last: true, opcode: Opcode::Terminate, placement };
        let body = terminate.to_bytes();
        self.build(header, body.len(), out, |payload| {
            payload.copy_from_slice(&body);
            Ok(())
        })
        .ok()
    }

    fn send_message(&mut self, out: &mut [u8], ops: &mut (impl RequesterOps + ResponderOps)) -> Option<usize> {
        let sent = match self.sending {
            Some(Sending::Request) => self.send_request(out, ops),
            Some(Sending::Response) => self.send_response(out, ops),
            None if self.requests_turn => self.send_request(out, ops).or_else(|| self.send_response(out, ops)),
            None => self.send_response(out, ops).or_else(|| self.send_request(out, ops)),
        };
        self.complete_done(ops);
        sent
    }

    /// Sends the ready-to-receive message: a READ without data.
    fn send_rtr(&mut self, out: &mut [u8]) -> Option<usize> {
        self.rtr_due = false;
        self.send_read(None, 0, RemoteAddress { addr: 0, rkey: NO_STAG }, out)
    }

    /// Sends the next segment of the oldest READ response.
    fn send_response(&mut self, out: &mut [u8], ops: &mut (impl RequesterOps + ResponderOps)) -> Option<usize> {
        let response = *self.responses.front()?;
        let request = &response.request;
        let room = payload_room(out.len(), true);
        let length = room.min(request.length.saturating_sub(response.sent));
        let last = response.sent.saturating_add(length) == request.length;
        let placement = Placement::Tagged {
            stag: request.sink_stag,
            offset: request.sink_offset.wrapping_add(response.sent.into()),
        };
        let header = SegmentHeader { last, opcode: Opcode::ReadResponse, placement };
        let mut source = request.source();
        source.addr = source.addr.wrapping_add(response.sent.into());
        let built = self.build(header, length as usize, out, |payload| match payload.is_empty() {
            true => Ok(()),
            false => ops.read(source, payload),
        });
        let Ok(len) = built else {
            self.refuse(Cause::READ_STAG, Some(response.header), Some(response.request), Some(Notify::Access), ops);
            return None;
        };
        self.sending = (!last).then_some(Sending::Response);
        self.requests_turn = last;
        if last {
            self.responses.pop_front();
        } else if let Some(front) = self.responses.front_mut() {
            front.sent = front.sent.saturating_add(length);
        }
        Some(len)
    }

    /// Sends the next segment of the next request. Local requests in front of it are executed.
    fn send_request(&mut self, out: &mut [u8], ops: &mut impl RequesterOps) -> Option<usize> {
        loop {
            let reads = self.outstanding_reads();
            let (number, request) = self.requests.next()?;
            match request.stage {
                Stage::Posted => {
                    // The consumer of a responder may need its local requests before the peer sends anything, so these
                    // are not too early.
                    let too_early = !self.open && !request.wr.op.is_local();
                    let too_many = matches!(request.wr.op, SendOp::Read { .. }) && reads >= self.negotiated.ord.into();
                    if too_early || too_many || self.draining || !self.requests.next_may_start() {
                        return None;
                    }
                    self.requests.start_next(ops);
                }
                Stage::Building(sent) => {
                    return match request.wr.op {
                        SendOp::Read { remote } => {
                            let length = request.length;
                            request.stage = Stage::Reading;
                            self.requests.advance();
                            self.send_read(Some(number), length, remote, out)
                        }
                        _ => self.send_data(sent, out, ops),
                    };
                }
                Stage::Done => self.requests.advance(),
                // Nothing that was posted behind a failed request leaves.
                Stage::Failed(_) | Stage::Built(_) | Stage::Reading => return None,
            }
        }
    }

    fn send_read(&mut self, request: Option<u64>, length: u32, remote: RemoteAddress, out: &mut [u8]) -> Option<usize> {
        let sink = self.next_sink.max(1);
        self.next_sink = sink.wrapping_add(1);
        self.reads.push_back(OpenRead { sink, length, placed: 0, request });
        let source_stag = if remote.rkey == 0 { NO_STAG } else { remote.rkey };
        let body =
            ReadRequest { sink_stag: sink, sink_offset: 0, length, source_stag, source_offset: remote.addr }.to_bytes();
        let placement = Placement::Untagged { stag: 0, queue: 1, msn: self.read_msn, offset: 0 };
        self.read_msn = self.read_msn.wrapping_add(1);
        self.requests_turn = false;
        let header = SegmentHeader { last: true, opcode: Opcode::ReadRequest, placement };
        self.build(header, body.len(), out, |payload| {
            payload.copy_from_slice(&body);
            Ok(())
        })
        .ok()
    }

    /// Sends the next segment of a SEND or WRITE, of which `sent` bytes were built.
    fn send_data(&mut self, sent: u32, out: &mut [u8], ops: &mut impl RequesterOps) -> Option<usize> {
        let msn = self.send_msn;
        let (_, request) = self.requests.next()?;
        let (opcode, placement) = match request.wr.op {
            SendOp::Write { remote, .. } => {
                let stag = if remote.rkey == 0 { NO_STAG } else { remote.rkey };
                (Opcode::Write, Placement::Tagged { stag, offset: remote.addr.wrapping_add(sent.into()) })
            }
            SendOp::Send { data, .. } => {
                let stag = if let SendData::Invalidate(key) = data { key } else { 0 };
                let invalidates = matches!(data, SendData::Invalidate(_));
                let opcode = Opcode::send(request.wr.flags.contains(SendFlags::SOLICITED), invalidates);
                (opcode, Placement::Untagged { stag, queue: 0, msn, offset: sent })
            }
            _ => return None,
        };
        let room = payload_room(out.len(), opcode == Opcode::Write);
        let length = room.min(request.length.saturating_sub(sent));
        let after = sent.saturating_add(length);
        let last = after == request.length;
        let header = SegmentHeader { last, opcode, placement };
        let sges = std::mem::take(&mut request.wr.sges);
        let built = self.build(header, length as usize, out, |payload| match payload.is_empty() {
            true => Ok(()),
            false => ops.gather(&sges, sent.into(), payload),
        });
        let end = self.built;
        let (_, request) = self.requests.next()?;
        request.wr.sges = sges;
        request.stage = match built {
            Err(AccessError) => Stage::Failed(WcStatus::LocalProtection),
            Ok(_) if last => Stage::Built(end),
            Ok(_) => Stage::Building(after),
        };
        let len = built.ok()?;
        self.sending = (!last).then_some(Sending::Request);
        if last {
            self.requests.advance();
            self.requests_turn = false;
            self.send_msn = self.send_msn.wrapping_add(u32::from(opcode != Opcode::Write));
        }
        Some(len)
    }

    /// Builds an FPDU in `out`, whose payload `fill` writes.
    fn build(
        &mut self,
        header: SegmentHeader,
        length: usize,
        out: &mut [u8],
        fill: impl FnOnce(&mut [u8]) -> Result<(), AccessError>,
    ) -> Result<usize, AccessError> {
        let raw = header.to_raw();
        let header = raw.bytes();
        let start = fpdu::LENGTH_LEN + header.len();
        let segment = header.len() + length;
        let out = out.get_mut(..fpdu::fpdu_len(segment)).ok_or(AccessError)?;
        let head = out.get_mut(fpdu::LENGTH_LEN..start).ok_or(AccessError)?;
        head.copy_from_slice(header);
        fill(out.get_mut(start..start + length).ok_or(AccessError)?)?;
        let len = fpdu::seal(out, segment, self.negotiated.crc).ok_or(AccessError)?;
        self.built = self.built.saturating_add(len as u64);
        self.stats.fpdus_sent += 1;
        Ok(len)
    }
}

/// Returns the number of payload bytes that fit into an FPDU of at most `room` bytes.
fn payload_room(room: usize, tagged: bool) -> u32 {
    let header = if tagged { 14 } else { 18 };
    u32::try_from(fpdu::max_segment(room).saturating_sub(header)).unwrap_or(u32::MAX)
}
