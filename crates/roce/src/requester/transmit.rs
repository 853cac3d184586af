//! Cutting requests into packets.

use std::time::Duration;

use pvrdma_verbs::{RemoteAddress, SendData, SendFlags, SendOp, SendWr, WcStatus};

use super::recovery::Probe;
use super::{Requester, Seq, Stage, wire_psn};
use crate::ops::{RequesterOps, is_local};
use crate::wire::{AtomicEth, Bth, Extension, Ieth, ImmDt, Opcode, Position, Reth};

/// Packets without an ACK request in a row, at most.
const ASK_EVERY: u32 = 32;

/// What the cursor finds.
enum Next {
    /// This packet.
    Packet(Plan),
    /// Look again: the cursor has moved.
    Moved,
    /// Nothing can be sent now.
    Blocked,
}

/// One packet.
pub(crate) struct Plan {
    pub(crate) opcode: Opcode,
    pub(crate) extension: Extension,
    /// PSNs that it takes.
    span: u32,
    /// Payload: where in the message, and how much.
    pub(crate) offset: u64,
    pub(crate) len: u32,
    /// The answer is one message of its own, of which resources are limited.
    pub(crate) wants_data: bool,
    pub(crate) solicited: bool,
    pub(crate) ends_message: bool,
}

impl Requester {
    /// Writes the next frame into `out`, which should hold [`crate::wire::MAX_FRAME`] bytes. Gives its length.
    pub fn poll_transmit(&mut self, now: Duration, host: &mut impl RequesterOps, out: &mut [u8]) -> Option<usize> {
        if self.rnr_deadline.is_some_and(|deadline| now < deadline) {
            return None;
        }
        self.rnr_deadline = None;
        if let Probe::Due(attempt) = self.probe {
            self.probe = Probe::Sent(self.unconfirmed, attempt);
            if let Some(len) = self.transmit_alone(now, self.unconfirmed, host, out) {
                return Some(len);
            }
        }
        while let Some(seq) = self.repairs.take() {
            // From the cursor on everything is sent in any case.
            if seq < self.cursor
                && let Some(len) = self.transmit_alone(now, seq, host, out)
            {
                return Some(len);
            }
        }
        loop {
            match self.next_packet(host) {
                Next::Packet(plan) => return self.transmit(now, &plan, host, out),
                Next::Moved => {}
                Next::Blocked => return None,
            }
        }
    }

    /// Sends an unconfirmed packet again and stays where we are.
    fn transmit_alone(
        &mut self,
        now: Duration,
        seq: Seq,
        host: &mut impl RequesterOps,
        out: &mut [u8],
    ) -> Option<usize> {
        let cursor = self.cursor;
        self.seek(seq);
        self.unasked = u32::MAX;
        let sent = match self.next_packet(host) {
            Next::Packet(plan) => self.transmit(now, &plan, host, out),
            Next::Moved | Next::Blocked => None,
        };
        if !self.ended {
            self.seek(cursor);
        }
        sent
    }

    fn next_packet(&mut self, host: &mut impl RequesterOps) -> Next {
        let cursor = self.cursor;
        let waits_for_data = !self.data_requests.is_empty();
        let Some(request) = self.requests.get_mut(self.at) else { return Next::Blocked };
        if request.stage == Stage::Posted {
            let fenced = request.work.flags.contains(SendFlags::FENCE) && waits_for_data;
            // What is invalidated may still be needed to send an earlier request again.
            let must_be_first = matches!(request.work.op, SendOp::LocalInvalidate(_)) && self.at > 0;
            if self.draining || fenced || must_be_first {
                return Next::Blocked;
            }
            request.stage = match host.begin(&mut request.work) {
                Ok(()) => Stage::Begun,
                Err(status) => Stage::Failed(status),
            };
        }
        if let Stage::Failed(_) = request.stage {
            // It ends when everything before it has.
            self.retire(host);
            return Next::Blocked;
        }
        if is_local(&request.work.op) {
            self.at += 1;
            self.retire(host);
            return Next::Moved;
        }
        if cursor >= request.end() {
            self.at += 1;
            return Next::Moved;
        }
        if !request.wants_data() && cursor < self.executed {
            // The responder has these already.
            self.cursor = self.executed.min(request.end());
            return Next::Moved;
        }
        if request.wants_data() && self.data_requests.len() >= self.attrs.max_rd_atomic.into() {
            return Next::Blocked;
        }
        let chunk = self.tuning.read_chunk.min(self.tuning.window / 2).max(1);
        let index = cursor.checked_sub(request.first).and_then(|index| u32::try_from(index).ok());
        let message = Message { work: &request.work, length: request.length, count: request.count };
        let plan = index.and_then(|index| plan(&message, index, self.attrs.path_mtu.bytes(), chunk));
        let Some(plan) = plan else { return Next::Blocked };
        let outstanding = cursor.saturating_sub(self.unconfirmed);
        if outstanding > 0 && outstanding + Seq::from(plan.span) > self.recovery.window().into() {
            return Next::Blocked;
        }
        Next::Packet(plan)
    }

    fn transmit(&mut self, now: Duration, plan: &Plan, host: &mut impl RequesterOps, out: &mut [u8]) -> Option<usize> {
        let request = self.requests.get_mut(self.at)?;
        let after = self.cursor + Seq::from(plan.span);
        let outstanding = after.saturating_sub(self.unconfirmed);
        let mut bth = Bth::new(plan.opcode, self.remote, wire_psn(self.cursor));
        bth.solicited = plan.solicited;
        bth.ack_request = plan.ends_message
            || plan.wants_data
            || self.unasked >= ASK_EVERY.min(self.recovery.window() / 4)
            || outstanding >= self.recovery.window().into();
        let len = plan.len as usize;
        let mut frame = self.path.frame(&mut self.ident, bth, plan.extension, len, out).ok()?;
        if len > 0 && host.gather(&request.work.sges, plan.offset, frame.payload()).is_err() {
            request.stage = Stage::Failed(WcStatus::LocalProtection);
            self.retire(host);
            return None;
        }
        let total = frame.finish();

        self.stats.packets += 1;
        if self.cursor < self.newest {
            self.stats.resent += 1;
        }
        self.unasked = if bth.ack_request { 0 } else { self.unasked.saturating_add(1) };
        if plan.wants_data {
            self.data_requests.push_back(after);
        }
        if bth.ack_request && after > self.newest {
            self.recovery.sent(now, after);
        }
        self.cursor = after;
        self.newest = self.newest.max(after);
        if self.ack_deadline.is_none() {
            self.restart_timer(now);
        }
        Some(total)
    }
}

/// A request and its size in bytes and PSNs.
pub(crate) struct Message<'a> {
    pub(crate) work: &'a SendWr,
    pub(crate) length: u32,
    pub(crate) count: u32,
}

/// The packet of a request at its PSN of this index.
pub(crate) fn plan(request: &Message<'_>, index: u32, mtu: u32, chunk: u32) -> Option<Plan> {
    let offset = u64::from(index) * u64::from(mtu);
    let left = u32::try_from(u64::from(request.length).checked_sub(offset)?).ok()?;
    let len = left.min(mtu);
    let (first, last) = (index == 0, index + 1 == request.count);
    let position = Position::of(first, last);
    let only = position == Position::Only;
    let mut plan = Plan {
        opcode: Opcode::send(position),
        extension: Extension::None,
        span: 1,
        offset,
        len,
        wants_data: false,
        solicited: false,
        ends_message: last,
    };
    let solicited = last && request.work.flags.contains(SendFlags::SOLICITED);
    match request.work.op {
        SendOp::Send { data, .. } => {
            plan.solicited = solicited;
            match data {
                SendData::Immediate(bytes) if last => {
                    plan.opcode = Opcode::send_immediate(only);
                    plan.extension = Extension::ImmDt(ImmDt(bytes));
                }
                SendData::Invalidate(rkey) if last => {
                    plan.opcode = Opcode::send_invalidate(only);
                    plan.extension = Extension::Ieth(Ieth { rkey });
                }
                _ => {}
            }
        }
        SendOp::Write { remote, immediate } => {
            let reth = Reth { address: remote.addr, rkey: remote.rkey, length: request.length };
            plan.opcode = Opcode::write(position);
            match immediate.filter(|_| last) {
                Some(bytes) => {
                    plan.solicited = solicited;
                    plan.opcode = Opcode::write_immediate(only);
                    plan.extension =
                        if only { Extension::RethImmDt(reth, ImmDt(bytes)) } else { Extension::ImmDt(ImmDt(bytes)) };
                }
                None if first => plan.extension = Extension::Reth(reth),
                None => {}
            }
        }
        SendOp::Read { remote } => {
            // Chunks end where they ended when they were first sent, because the responder remembers them.
            plan.span = (chunk - index % chunk).min(request.count - index);
            let length = left.min(plan.span.saturating_mul(mtu));
            let address = remote.addr.wrapping_add(offset);
            plan.opcode = Opcode::READ_REQUEST;
            plan.extension = Extension::Reth(Reth { address, rkey: remote.rkey, length });
            (plan.len, plan.wants_data) = (0, true);
        }
        SendOp::CompareSwap { remote, compare, swap } => {
            (plan.opcode, plan.extension) = (Opcode::COMPARE_SWAP, atomic(remote, swap, compare));
            (plan.len, plan.wants_data) = (0, true);
        }
        SendOp::FetchAdd { remote, add } => {
            (plan.opcode, plan.extension) = (Opcode::FETCH_ADD, atomic(remote, add, 0));
            (plan.len, plan.wants_data) = (0, true);
        }
        SendOp::LocalInvalidate(_) | SendOp::FastRegister(_) | SendOp::Unsupported { .. } | SendOp::Malformed => {
            return None;
        }
    }
    Some(plan)
}

const fn atomic(remote: RemoteAddress, swap_or_add: u64, compare: u64) -> Extension {
    Extension::AtomicEth(AtomicEth { address: remote.addr, rkey: remote.rkey, swap_or_add, compare })
}
