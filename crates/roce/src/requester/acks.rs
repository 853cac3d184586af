//! Processing of responses: ACKs, NAKs, and data of READs and atomics (IBA 9.7.5.2, 9.7.7.2).

use std::time::Duration;

use pvrdma_verbs::RequesterOps;
use pvrdma_verbs_types::{SendOp, WcStatus};

use super::Requester;
use super::loss_recovery::{Attempt, Probe, Setback};
use super::request::Stage;
use super::response_tracker;
use super::sack::Sack;
use super::send_state::Seq;
use super::timers::Timer;
use crate::rnr_backoff::RnrBackoff;
use crate::wire::{Extension, NakCode, Operation, Packet, SackMap, Syndrome, rnr_delay};

impl Requester {
    /// Handles a response that [`crate::admit_connected`] accepted.
    pub fn handle_packet(&mut self, now: Duration, packet: &Packet<'_>, ops: &mut impl RequesterOps) {
        let operation = packet.header.bth.opcode.info().map(|info| info.operation);
        let seq = self.snd.extend(packet.header.bth.psn);
        // Old responses, and responses to PSNs that were never sent, are ignored.
        if self.ended || !self.snd.is_outstanding(seq) {
            self.stats.stale += 1;
            return;
        }
        self.omits_icrc = self.sack.on_response(packet.header.bth.reserved7) && self.path.may_omit_icrc();
        self.on_response_path(packet);
        match (operation, packet.header.extension) {
            (Some(Operation::ReadResponse), _) => self.read_response(now, seq, packet, ops),
            (Some(Operation::AtomicAcknowledge), Extension::AtomicAckEth(_, ack)) => {
                self.atomic_response(now, seq, ack.original, ops);
            }
            (Some(Operation::Acknowledge), Extension::Aeth(aeth)) => {
                self.acknowledge(now, seq, aeth.syndrome, packet.payload, ops);
            }
            _ => self.stats.stale += 1,
        }
    }

    /// `payload` is the map of packets that arrived after a missing one, from a responder that agreed to send it.
    fn acknowledge(
        &mut self,
        now: Duration,
        seq: Seq,
        syndrome: Syndrome,
        payload: &[u8],
        ops: &mut impl RequesterOps,
    ) {
        match syndrome {
            Syndrome::Ack { .. } => {
                self.recovery.refill_rnr_retries(self.attrs.rnr_retry);
                // An ACK with a PSN inside a READ acknowledges a duplicate: adapters send the newest PSN that they have
                // executed, and the responses of the READ are still to come.
                let read = self.requests.iter().find(|request| request.wants_data() && request.contains(seq));
                let newest = read.map_or(seq + 1, |read| read.first);
                self.ack_until(now, seq + 1, ops);
                self.notice_missing(now, newest);
            }
            Syndrome::RnrNak { timer } => self.rnr_nak(now, seq, timer, ops),
            Syndrome::Nak(NakCode::SequenceError) if self.sack == Sack::On => match SackMap::parse(payload) {
                Some(map) => self.selective_ack(now, seq, &map, ops),
                None => self.sequence_nak(now, seq, ops),
            },
            Syndrome::Nak(NakCode::SequenceError) => self.sequence_nak(now, seq, ops),
            Syndrome::Nak(code) => {
                let status = match code {
                    NakCode::InvalidRequest => WcStatus::RemoteInvalidRequest,
                    NakCode::RemoteAccess => WcStatus::RemoteAccess,
                    NakCode::RemoteOperation => WcStatus::RemoteOperation,
                    NakCode::SequenceError | NakCode::InvalidRdRequest | NakCode::Reserved(_) => WcStatus::BadResponse,
                };
                self.ack_until(now, seq, ops);
                if !self.ended {
                    // The responder has stopped and will send nothing more: responses that are not in transit yet are
                    // lost.
                    self.recovery.retries = 0;
                    self.fail_at(now, seq, status, ops);
                }
            }
            Syndrome::Reserved(_) => self.stats.stale += 1,
        }
    }

    /// Records that everything before `seq` was executed.
    pub(super) fn ack_until(&mut self, now: Duration, seq: Seq, ops: &mut impl RequesterOps) {
        self.snd.executed = self.snd.executed.max(seq);
        self.scoreboard.on_executed(self.snd.executed);
        self.advance_una(now, ops);
    }

    /// Moves `snd.una` over SENDs and WRITEs that were executed, up to the first missing response with data.
    fn advance_una(&mut self, now: Duration, ops: &mut impl RequesterOps) {
        let before = self.snd.una;
        for request in &self.requests {
            if self.snd.una >= request.end() {
                continue;
            }
            if request.wants_data() {
                let Some(end) = self.responses.received_until(self.snd.una) else { break };
                self.snd.una = end.min(request.end());
            } else if self.snd.una < self.snd.executed {
                self.snd.una = self.snd.executed.min(request.end());
            }
            if self.snd.una < request.end() {
                break;
            }
        }
        if self.snd.una != before {
            self.on_progress(now, before, ops);
        }
    }

    /// Handles progress: `snd.una` has moved on from `before`.
    fn on_progress(&mut self, now: Duration, before: Seq, ops: &mut impl RequesterOps) {
        let (una, max) = (self.snd.una, self.snd.max);
        self.recovery.on_acked(now, (una, max), una.saturating_sub(before), self.attrs.retry_cnt);
        self.set_read_length();
        self.snd.executed = self.snd.executed.max(self.snd.una);
        self.scoreboard.on_executed(self.snd.executed);
        if self.snd.nxt < self.snd.una {
            self.skip_acked();
        }
        self.recovery.timed_out = false;
        self.responses.on_acked(self.snd.una);
        self.watch_path(now);
        let probed = std::mem::replace(&mut self.recovery.probe, Probe::None);
        self.restart_timers(now);
        self.complete_done(ops);
        let more = self.snd.una < self.snd.max && !self.ended;
        match probed {
            // A responder that reports what has arrived needs no probes.
            Probe::Sent(..) if self.scoreboard.received() > 0 => {}
            Probe::Sent(seq, attempt) if more && seq == before && self.snd.una == before + 1 => match attempt {
                // The following packets may be lost as well. Or nothing is lost, and delayed ACKs arrive one by one.
                Attempt::First => self.probe_oldest(now, Attempt::Second),
                Attempt::Second => {
                    self.recovery.peer_reorders = false;
                    self.go_back(now, self.snd.una, Setback::Silence);
                }
            },
            _ => {}
        }
    }

    /// Handles the responder's response to `newest`. Responses to earlier packets that have not arrived are late or
    /// lost.
    pub(super) fn notice_missing(&mut self, now: Duration, newest: Seq) {
        if !self.ended {
            let Self { responses, recovery, .. } = self;
            responses
                .on_response(now, newest, self.snd.una, || recovery.reordering(now, response_tracker::MAX_REORDERING));
            self.restart_reordering_timer(now);
        }
    }

    fn read_response(&mut self, now: Duration, seq: Seq, packet: &Packet<'_>, ops: &mut impl RequesterOps) {
        let Some(request) = self.requests.iter().find(|request| request.contains(seq)) else { return };
        let SendOp::Read { .. } = request.wr.op else {
            return self.fail_at(now, seq, WcStatus::BadResponse, ops);
        };
        if request.stage != Stage::Started {
            self.stats.stale += 1;
            return;
        }
        let mtu = u64::from(self.attrs.path_mtu.bytes());
        let offset = seq.saturating_sub(request.first).saturating_mul(mtu);
        let expected = u64::from(request.length).saturating_sub(offset).min(mtu);
        self.recovery.refill_rnr_retries(self.attrs.rnr_retry);
        self.ack_until(now, seq, ops);
        // Its position (FIRST, MIDDLE, LAST or ONLY) depends on the responder and on the transmission that it belongs
        // to, but its place in memory and its length do not.
        let fits = packet.payload.len() as u64 == expected && packet.pad_is_right();
        if seq != self.snd.una {
            return self.take_early_data(now, seq, offset, packet.payload, fits, ops);
        }
        if !fits {
            return self.fail_at(now, seq, WcStatus::BadResponse, ops);
        }
        self.take_data(now, seq, offset, packet.payload, ops);
    }

    fn atomic_response(&mut self, now: Duration, seq: Seq, original: u64, ops: &mut impl RequesterOps) {
        let Some(request) = self.requests.iter().find(|request| request.contains(seq)) else { return };
        if !matches!(request.wr.op, SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }) {
            return self.fail_at(now, seq, WcStatus::BadResponse, ops);
        }
        self.recovery.refill_rnr_retries(self.attrs.rnr_retry);
        self.ack_until(now, seq, ops);
        // The value is a number on the wire, and has the guest's byte order in memory.
        let data = original.to_le_bytes();
        if seq != self.snd.una {
            return self.take_early_data(now, seq, 0, &data, true, ops);
        }
        self.take_data(now, seq, 0, &data, ops);
    }

    /// Takes the data of a response that arrived before the one at `snd.una`. If it does not fit or cannot be stored,
    /// it is ignored. It is then requested again, and fails when its turn comes.
    fn take_early_data(
        &mut self,
        now: Duration,
        seq: Seq,
        offset: u64,
        data: &[u8],
        fits: bool,
        ops: &mut impl RequesterOps,
    ) {
        if self.ended {
            return;
        }
        let request = self.requests.iter().find(|request| request.contains(seq) && request.stage == Stage::Started);
        let news = fits && self.responses.received_until(seq).is_none();
        match request.filter(|_| news) {
            Some(request) if data.is_empty() || ops.scatter(&request.wr.sges, offset, data).is_ok() => {
                self.responses.insert(seq);
                self.responses.on_data(seq);
                self.recovery.on_early_data(now, seq);
                self.snd.executed = self.snd.executed.max(seq + 1);
            }
            _ => self.stats.stale += 1,
        }
        self.notice_missing(now, seq);
    }

    /// Takes the data of the response at `snd.una`.
    fn take_data(&mut self, now: Duration, seq: Seq, offset: u64, data: &[u8], ops: &mut impl RequesterOps) {
        let Some(request) = self.requests.iter().find(|request| request.contains(seq)) else { return };
        if !data.is_empty() && ops.scatter(&request.wr.sges, offset, data).is_err() {
            return self.fail_at(now, seq, WcStatus::LocalProtection, ops);
        }
        self.snd.una = seq + 1;
        self.responses.on_data(seq);
        self.on_progress(now, seq, ops);
        if !self.ended {
            self.advance_una(now, ops);
            self.notice_missing(now, seq);
        }
    }

    /// Handles a sequence NAK: a packet to the responder was lost. The responder reports that once.
    fn sequence_nak(&mut self, now: Duration, seq: Seq, ops: &mut impl RequesterOps) {
        if seq < self.snd.executed {
            self.stats.stale += 1;
            return;
        }
        self.ack_until(now, seq, ops);
        // During an RNR wait, this NAK only reflects packets that were in flight when the wait began.
        if self.ended || self.timers.is_running(Timer::RnrBackoff) || !self.recovery.on_sequence_nak(seq) {
            return;
        }
        self.stats.sequence_naks += 1;
        self.retransmit_missing(now, seq, ops);
        self.notice_missing(now, seq);
    }

    /// Handles an RNR NAK: the responder has no receive. Waits and goes back.
    fn rnr_nak(&mut self, now: Duration, seq: Seq, timer: u8, ops: &mut impl RequesterOps) {
        if seq < self.snd.executed || self.timers.is_running(Timer::RnrBackoff) {
            self.stats.stale += 1;
            return;
        }
        if self.snd.executed < seq {
            self.recovery.refill_rnr_retries(self.attrs.rnr_retry);
        }
        self.ack_until(now, seq, ops);
        if self.ended {
            return;
        }
        self.stats.rnr_naks += 1;
        // A count of 7 means unlimited retries.
        if self.attrs.rnr_retry < 7 {
            match self.recovery.rnr_retries.checked_sub(1) {
                Some(left) => self.recovery.rnr_retries = left,
                None => return self.fail_at(now, seq, WcStatus::RnrRetryExceeded, ops),
            }
        }
        self.go_back(now, seq, Setback::NotReady);
        let wait = self.recovery.rnr_backoff.next_wait(rnr_delay(timer), RnrBackoff::UNTOLD);
        self.timers.set(Timer::RnrBackoff, Some(now.saturating_add(wait)));
        self.restart_timers(now);
    }
}
