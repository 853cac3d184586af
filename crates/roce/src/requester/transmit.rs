//! Sending: what the next packet is, and its frame.

use std::time::Duration;

use pvrdma_verbs::{SendFlags, SendOp, WcStatus};

use super::Requester;
use super::loss_recovery::Probe;
use super::packet_plan::{PacketPlan, SizedWr};
use super::request::Stage;
use super::send_state::{Seq, wire_psn};
use super::timers::Timer;
use crate::ops::{RequesterOps, is_local};
use crate::wire::Bth;

/// What there is at `snd.nxt`.
enum Next {
    /// This packet.
    Packet(PacketPlan),
    /// Look again: `snd.nxt` has moved.
    Moved,
    /// Nothing can be sent now.
    Blocked,
}

impl Requester {
    /// Writes the next frame into `out`, which should hold [`crate::wire::MAX_FRAME`] bytes. Returns its length in
    /// bytes; `None`: there is nothing to send now.
    pub fn poll_transmit(&mut self, now: Duration, ops: &mut impl RequesterOps, out: &mut [u8]) -> Option<usize> {
        if self.timers.is_running(Timer::RnrBackoff) && !self.timers.has_expired(Timer::RnrBackoff, now) {
            return None;
        }
        self.timers.stop(Timer::RnrBackoff);
        if let Probe::Due(attempt) = self.recovery.probe {
            self.recovery.probe = Probe::Sent(self.snd.una, attempt);
            if let Some(len) = self.retransmit_one(now, self.snd.una, ops, out) {
                return Some(len);
            }
        }
        // From `nxt` on everything is sent in any case.
        if let Some(seq) = self.recovery.retransmit.take().filter(|&seq| seq < self.snd.nxt)
            && let Some(len) = self.retransmit_one(now, seq, ops, out)
        {
            return Some(len);
        }
        loop {
            match self.next_packet(ops) {
                Next::Packet(plan) => return self.transmit(now, &plan, ops, out),
                Next::Moved => {}
                Next::Blocked => return None,
            }
        }
    }

    /// Retransmits one unacked packet; `snd.nxt` stays.
    fn retransmit_one(
        &mut self,
        now: Duration,
        seq: Seq,
        ops: &mut impl RequesterOps,
        out: &mut [u8],
    ) -> Option<usize> {
        let nxt = self.snd.nxt;
        self.set_nxt(seq);
        self.ack_policy.force();
        let sent = match self.next_packet(ops) {
            Next::Packet(plan) => self.transmit(now, &plan, ops, out),
            Next::Moved | Next::Blocked => None,
        };
        if !self.ended {
            self.set_nxt(nxt);
        }
        sent
    }

    fn next_packet(&mut self, ops: &mut impl RequesterOps) -> Next {
        let nxt = self.snd.nxt;
        let waits_for_data = !self.outstanding_rd_atomic.is_empty();
        let Some(request) = self.requests.get_mut(self.nxt_request) else { return Next::Blocked };
        if request.stage == Stage::Posted {
            let fenced = request.wr.flags.contains(SendFlags::FENCE) && waits_for_data;
            // What is invalidated may still be needed to retransmit an earlier request.
            let must_be_first = matches!(request.wr.op, SendOp::LocalInvalidate(_)) && self.nxt_request > 0;
            if self.draining || fenced || must_be_first {
                return Next::Blocked;
            }
            request.stage = match ops.begin(&mut request.wr) {
                Ok(()) => Stage::Started,
                Err(status) => Stage::Failed(status),
            };
        }
        if let Stage::Failed(_) = request.stage {
            // It ends when everything before it has.
            self.complete_done(ops);
            return Next::Blocked;
        }
        if is_local(&request.wr.op) {
            self.nxt_request += 1;
            self.complete_done(ops);
            return Next::Moved;
        }
        if nxt >= request.end() {
            self.nxt_request += 1;
            return Next::Moved;
        }
        if !request.wants_data() && nxt < self.snd.executed {
            // The responder has these already.
            self.snd.nxt = self.snd.executed.min(request.end());
            return Next::Moved;
        }
        if request.wants_data() && self.outstanding_rd_atomic.len() >= self.attrs.max_rd_atomic.into() {
            return Next::Blocked;
        }
        let read_chunk = self.tuning.read_chunk.min(self.tuning.window / 2).max(1);
        let index = nxt.checked_sub(request.first).and_then(|index| u32::try_from(index).ok());
        let sized = SizedWr { wr: &request.wr, length: request.length, count: request.count };
        let plan = index.and_then(|index| PacketPlan::new(&sized, index, self.attrs.path_mtu.bytes(), read_chunk));
        let Some(plan) = plan else { return Next::Blocked };
        let in_flight = self.snd.in_flight();
        if in_flight > 0 && in_flight + Seq::from(plan.span) > self.recovery.window().into() {
            return Next::Blocked;
        }
        Next::Packet(plan)
    }

    fn transmit(
        &mut self,
        now: Duration,
        plan: &PacketPlan,
        ops: &mut impl RequesterOps,
        out: &mut [u8],
    ) -> Option<usize> {
        let request = self.requests.get_mut(self.nxt_request)?;
        let after = self.snd.nxt + Seq::from(plan.span);
        let in_flight = after.saturating_sub(self.snd.una);
        let mut bth = Bth::new(plan.opcode, self.remote, wire_psn(self.snd.nxt));
        bth.solicited = plan.solicited;
        bth.ack_request = plan.ends_message
            || plan.wants_data
            || self.ack_policy.is_due(self.recovery.window())
            || in_flight >= self.recovery.window().into();
        let len = plan.len as usize;
        let mut frame = self.path.frame(&mut self.ident, bth, plan.extension, len, out).ok()?;
        if len > 0 && ops.gather(&request.wr.sges, plan.offset, frame.payload()).is_err() {
            request.stage = Stage::Failed(WcStatus::LocalProtection);
            self.complete_done(ops);
            return None;
        }
        let frame_len = frame.finish();

        self.stats.packets += 1;
        if self.snd.nxt < self.snd.max {
            self.stats.retransmitted += 1;
        }
        self.ack_policy.on_sent(bth.ack_request);
        if plan.wants_data {
            self.outstanding_rd_atomic.push_back(after);
        }
        if bth.ack_request && after > self.snd.max {
            self.recovery.on_sent(now, after);
        }
        self.snd.nxt = after;
        self.snd.max = self.snd.max.max(after);
        if !self.timers.is_running(Timer::Ack) {
            self.restart_timers(now);
        }
        Some(frame_len)
    }
}
