//! Sending: choice of the next packet, and construction of its frame.

use std::time::Duration;

use pvrdma_verbs::RequesterOps;
use pvrdma_verbs_types::{SendFlags, SendOp, WcStatus};

use super::Requester;
use super::congestion_window::Loss;
use super::loss_recovery::Probe;
use super::packet_plan::{PacketPlan, SizedWr};
use super::request::{Request, Stage};
use super::sack::Sack;
use super::send_state::{MAX_SPAN, Seq, wire_psn};
use super::timers::Timer;
use crate::wire::{AGREED_RESOURCES, Bth};

/// Result of looking at `snd.nxt`.
enum Next {
    /// This packet can be sent.
    Packet(PacketPlan),
    /// `snd.nxt` has moved: look again.
    Moved,
    /// Nothing can be sent now.
    Blocked,
}

/// Kind of a transmission.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    InOrder,
    /// Out of turn: `snd.nxt` stays.
    Alone,
}

/// Plans the packet of a request at `seq`, which asks for at most `span` PSNs.
fn plan_at(request: &Request, seq: Seq, span: Seq, mtu: u32) -> Option<PacketPlan> {
    let index = u32::try_from(seq.checked_sub(request.first)?).ok()?;
    let sized = SizedWr { wr: &request.wr, length: request.length, count: request.count };
    PacketPlan::new(&sized, index, mtu, u32::try_from(span).unwrap_or(u32::MAX))
}

impl Requester {
    /// Writes the next frame into `out`, which should hold [`crate::wire::MAX_FRAME`] bytes. Returns its length in
    /// bytes; `None` if there is nothing to send now.
    pub fn poll_transmit(&mut self, now: Duration, ops: &mut impl RequesterOps, out: &mut [u8]) -> Option<usize> {
        self.end_rnr_backoff(now);
        if self.timers.is_running(Timer::RnrBackoff) {
            return None;
        }
        if let Some(len) = self.retransmit_alone(now, ops, out) {
            return Some(len);
        }
        loop {
            match self.next_packet(None, ops) {
                Next::Packet(plan) => return self.transmit(now, &plan, Turn::InOrder, ops, out),
                Next::Moved => {}
                Next::Blocked => return None,
            }
        }
    }

    /// Retransmits packets that are due out of turn.
    fn retransmit_alone(&mut self, now: Duration, ops: &mut impl RequesterOps, out: &mut [u8]) -> Option<usize> {
        match self.recovery.probe {
            Probe::Due(attempt) => {
                self.recovery.probe = Probe::Sent(self.snd.una, attempt);
                if let Some(len) = self.retransmit_one(now, self.snd.una, Seq::MAX, ops, out) {
                    return Some(len);
                }
            }
            Probe::ResponseDue => {
                self.recovery.probe = if self.take_copy() { Probe::ResponseDue } else { Probe::None };
                // The responder may have executed only this part of the READ, so from now on a request ends here.
                self.probed = Some(self.snd.una + 1);
                self.reads.split(self.snd.una + 1, self.snd.una);
                self.recovery.on_lost_response();
                if let Some(len) = self.retransmit_one(now, self.snd.una, 1, ops, out) {
                    return Some(len);
                }
            }
            Probe::None | Probe::Sent(..) => {}
        }
        while !self.requests.front().is_some_and(Request::wants_data) && self.take_copy() {
            if let Some(len) = self.retransmit_one(now, self.snd.una, Seq::MAX, ops, out) {
                return Some(len);
            }
        }
        // Packets from `nxt` on are sent in any case.
        let (reads, una) = (&self.reads, self.snd.una);
        let next = self.recovery.retransmit.take_if(|seq| !reads.waits(*seq, una));
        if let Some(seq) = next.filter(|&seq| seq < self.snd.nxt)
            && let Some(len) = self.retransmit_one(now, seq, Seq::MAX, ops, out)
        {
            return Some(len);
        }
        while self.scoreboard.has_lost() && self.may_retransmit() {
            let (reads, una) = (&self.reads, self.snd.una);
            let Some(seq) = self.scoreboard.take_lost(now, self.snd.max, |seq| reads.waits(seq, una)) else { break };
            self.recovery.on_retransmit_of(seq);
            if seq < self.snd.nxt
                && let Some(len) = self.retransmit_one(now, seq, Seq::MAX, ops, out)
            {
                return Some(len);
            }
        }
        while self.responses.has_lost()
            && let Some((seq, count)) = self.responses.take_lost(self.snd.max)
        {
            self.stats.lost_responses += 1;
            self.recovery.on_lost(now, Loss::of(seq, count), self.snd.max);
            self.recovery.on_lost_response();
            if let Some(len) = self.retransmit_one(now, seq, count, ops, out) {
                return Some(len);
            }
        }
        None
    }

    /// Returns `true` if there is room for lost packets beside those in flight. If all of them were retransmitted at
    /// once, they would be lost again.
    fn may_retransmit(&self) -> bool {
        let pipe = self.pipe();
        pipe == 0 || pipe < self.recovery.congestion_window().into()
    }

    /// Retransmits one unacked packet, which asks for at most `count` PSNs; `snd.nxt` stays.
    fn retransmit_one(
        &mut self,
        now: Duration,
        seq: Seq,
        count: Seq,
        ops: &mut impl RequesterOps,
        out: &mut [u8],
    ) -> Option<usize> {
        let nxt = self.snd.nxt;
        self.set_nxt(seq);
        self.ack_policy.force();
        let sent = match self.next_packet(Some(count), ops) {
            Next::Packet(plan) => self.transmit(now, &plan, Turn::Alone, ops, out),
            Next::Moved | Next::Blocked => None,
        };
        if !self.ended {
            self.set_nxt(nxt);
        }
        sent
    }

    /// Returns `true` if the request at `snd.nxt` invalidates a key that an earlier request still needs for its
    /// retransmission or its responses.
    fn is_key_needed(&self) -> bool {
        let Some(SendOp::LocalInvalidate(invalidate)) = self.requests.get(self.nxt_request).map(|next| &next.wr.op)
        else {
            return false;
        };
        self.requests.iter().take(self.nxt_request).any(|earlier| earlier.uses(invalidate.key))
    }

    /// Looks at the packet at `snd.nxt`. `alone`: out of turn, with at most this number of PSNs of a READ.
    fn next_packet(&mut self, alone: Option<Seq>, ops: &mut impl RequesterOps) -> Next {
        let nxt = self.snd.nxt;
        let outstanding = self.responses.outstanding();
        let may_start = self.may_start_response();
        let needed = self.is_key_needed();
        let (reads, una) = (&mut self.reads, self.snd.una);
        let last = self.failing.map_or(Seq::MAX, |(seq, _)| seq);
        let request = self.requests.get_mut(self.nxt_request);
        let Some(request) = request.filter(|request| request.end() <= last) else { return Next::Blocked };
        if request.stage == Stage::Posted {
            let fenced = request.wr.flags.contains(SendFlags::FENCE) && outstanding > 0;
            if self.draining || fenced || needed {
                return Next::Blocked;
            }
            request.begin(ops, &mut self.page_lists);
        }
        if let Stage::Failed(_) = request.stage {
            // The request ends when all earlier ones have.
            self.complete_done(ops);
            return Next::Blocked;
        }
        if request.wr.op.is_local() {
            self.nxt_request += 1;
            self.complete_done(ops);
            return Next::Moved;
        }
        if nxt >= request.end() {
            self.nxt_request += 1;
            return Next::Moved;
        }
        if !request.wants_data() && nxt < self.snd.executed {
            // The responder has these packets already.
            self.snd.nxt = self.snd.executed.min(request.end());
            return Next::Moved;
        }
        let starts = reads.starts_at(request, nxt);
        if request.wants_data() && alone.is_none() {
            if reads.waits(nxt, una) || starts && !may_start {
                return Next::Blocked;
            }
            if let Some(end) = self.responses.received_until(nxt) {
                // The request still takes a resource of the responder, although its responses have arrived: resources
                // are released in order.
                let end = end.min(reads.end_of(request, nxt));
                self.responses.on_sent(nxt, end, starts);
                self.snd.nxt = end;
                return Next::Moved;
            }
        }
        let window = self.recovery.congestion_window().into();
        let repeated = request.wants_data() && alone.is_none() && nxt < self.snd.max;
        let end = if repeated { reads.end_of_repeated(request, nxt, una, window) } else { reads.end_of(request, nxt) };
        let span = (end - nxt).min(alone.unwrap_or(Seq::MAX));
        let Some(plan) = plan_at(request, nxt, span, self.attrs.path_mtu.bytes()) else { return Next::Blocked };
        if alone.is_none() && self.is_too_much(plan.span.into()) { Next::Blocked } else { Next::Packet(plan) }
    }

    /// Returns `true` if another READ or atomic may be started. With a responder that agreed, a request that is
    /// complete except for lost responses only takes the resource to repeat them.
    fn may_start_response(&self) -> bool {
        let (outstanding, most) = (self.responses.outstanding(), usize::from(self.attrs.max_rd_atomic));
        outstanding < most
            || self.sack == Sack::On && outstanding < AGREED_RESOURCES && self.responses.unanswered() < most
    }

    /// Returns `true` if `more` additional PSNs are too many in flight, or reach too far beyond the oldest one.
    fn is_too_much(&self, more: Seq) -> bool {
        let (in_flight, span) = (self.in_flight(), self.snd.span());
        in_flight > 0 && in_flight + more > self.recovery.window().into() || span > in_flight && span + more > MAX_SPAN
    }

    fn transmit(
        &mut self,
        now: Duration,
        plan: &PacketPlan,
        turn: Turn,
        ops: &mut impl RequesterOps,
        out: &mut [u8],
    ) -> Option<usize> {
        let in_flight = self.in_flight() + Seq::from(plan.span);
        let after = self.snd.nxt + Seq::from(plan.span);
        let mut bth = Bth::new(plan.opcode, self.remote, wire_psn(self.snd.nxt));
        bth.reserved7 = self.sack.request_bits(self.path.may_omit_icrc());
        bth.solicited = plan.solicited;
        bth.ack_request = plan.ends_message
            || plan.wants_data
            || self.ack_policy.is_due(self.recovery.window())
            || in_flight >= self.recovery.window().into();
        let len = plan.len as usize;
        let repeated = turn == Turn::Alone || self.snd.nxt < self.snd.max;
        self.select_path(repeated);
        let request = self.requests.get_mut(self.nxt_request)?;
        let mut frame = self.path.frame(&mut self.ident, bth, plan.extension, len, out).ok()?;
        if len > 0 && ops.gather(&request.wr.sges, plan.offset, frame.payload()).is_err() {
            request.stage = Stage::Failed(WcStatus::LocalProtection);
            self.complete_done(ops);
            return None;
        }
        // A peer that has moved to a host with another rule accepts the retransmission, and its response says so.
        let omits_icrc = self.omits_icrc && !repeated;
        let frame_len = if omits_icrc { frame.finish_without_icrc() } else { frame.finish() };

        self.stats.without_icrc += u64::from(omits_icrc);
        self.stats.packets += 1;
        if self.snd.nxt < self.snd.max {
            self.stats.retransmitted += 1;
        }
        self.ack_policy.on_sent(bth.ack_request);
        if plan.wants_data && turn == Turn::InOrder {
            let starts = self.reads.starts_at(request, self.snd.nxt);
            self.responses.on_sent(self.snd.nxt, after, starts);
        }
        // An ACK of a retransmitted packet cannot be assigned to one of the transmissions. But without any measurement,
        // only the ACK timeout detects losses, so a rough one is taken.
        let measures = self.recovery.rtt_estimate().is_none();
        if plan.wants_data && (measures || self.snd.nxt >= self.snd.max) {
            self.recovery.on_request_sent(now, self.snd.nxt + 1);
        } else if bth.ack_request && (measures || after > self.snd.max) {
            self.recovery.on_sent(now, after);
        }
        if turn == Turn::Alone {
            self.recovery.on_retransmitted_alone(after);
        }
        self.snd.nxt = after;
        self.snd.max = self.snd.max.max(after);
        if !self.timers.is_running(Timer::Ack) {
            self.restart_timers(now);
        }
        Some(frame_len)
    }
}
