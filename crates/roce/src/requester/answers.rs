//! Taking the answers (IBA 9.7.5.2, 9.7.7.2).

use std::time::Duration;

use pvrdma_verbs::{SendOp, WcStatus};

use super::recovery::{Probe, Try};
use super::{Request, Requester, Seq, Stage, wire_psn};
use crate::ops::RequesterOps;
use crate::responder::selective_nak::STALE_PSN_OFFSET;
use crate::wire::{Aeth, Extension, NakCode, Operation, Packet, Syndrome, rnr_delay};

/// Sequence NAKs for one packet after the other that are believed to be losses. After these the responder has stopped to keep
/// what comes behind a gap.
const MOST_NEIGHBOURS: u32 = 2;

impl Requester {
    /// Takes an answer that [`crate::admit_connected`] let through.
    pub fn handle_packet(&mut self, now: Duration, packet: &Packet<'_>, host: &mut impl RequesterOps) {
        let operation = packet.header.bth.opcode.info().map(|info| info.operation);
        let distance = packet.header.bth.psn.since(wire_psn(self.unconfirmed));
        let seq = self.unconfirmed.saturating_add_signed(distance.into());
        // Old answers, and those to what was never sent, mean nothing.
        if self.ended || !(self.unconfirmed..self.newest).contains(&seq) {
            return self.old_answer(seq, operation, packet.header.extension);
        }
        match (operation, packet.header.extension) {
            (Some(Operation::ReadResponse), _) => self.read_response(now, seq, packet, host),
            (Some(Operation::AtomicAcknowledge), Extension::AtomicAckEth(_, ack)) => {
                self.atomic_response(now, seq, ack.original, host);
            }
            (Some(Operation::Acknowledge), Extension::Aeth(aeth)) => match aeth.syndrome {
                Syndrome::Ack { .. } => {
                    self.rnr_retries = self.attrs.rnr_retry;
                    self.confirm(now, seq + 1, host);
                    self.check_lost_answer(now, host);
                }
                Syndrome::RnrNak { timer } => self.rnr_nak(now, seq, timer, host),
                Syndrome::Nak(NakCode::SequenceError) => self.sequence_nak(now, seq, host),
                Syndrome::Nak(code) => {
                    let status = match code {
                        NakCode::InvalidRequest => WcStatus::RemoteInvalidRequest,
                        NakCode::RemoteAccess => WcStatus::RemoteAccess,
                        NakCode::RemoteOperation => WcStatus::RemoteOperation,
                        NakCode::SequenceError | NakCode::InvalidRdRequest | NakCode::Reserved(_) => {
                            WcStatus::BadResponse
                        }
                    };
                    self.confirm(now, seq, host);
                    if !self.ended {
                        self.fail_at(seq, status, host);
                    }
                }
                Syndrome::Reserved(_) => self.stats.stale += 1,
            },
            _ => self.stats.stale += 1,
        }
    }

    /// Everything before `seq` was executed.
    fn confirm(&mut self, now: Duration, seq: Seq, host: &mut impl RequesterOps) {
        self.executed = self.executed.max(seq);
        self.advance(now, host);
    }

    /// Moves `unconfirmed` over SENDs and WRITEs that were executed, up to the first missing answer.
    fn advance(&mut self, now: Duration, host: &mut impl RequesterOps) {
        let before = self.unconfirmed;
        for request in &self.requests {
            if self.unconfirmed >= request.end() {
                continue;
            }
            if request.wants_data() || self.unconfirmed >= self.executed {
                break;
            }
            self.unconfirmed = self.executed.min(request.end());
        }
        if self.unconfirmed != before {
            self.progress(now, before, host);
        }
    }

    /// `unconfirmed` has moved.
    fn progress(&mut self, now: Duration, before: Seq, host: &mut impl RequesterOps) {
        self.recovery.progress(now, self.unconfirmed, self.unconfirmed.saturating_sub(before));
        self.executed = self.executed.max(self.unconfirmed);
        self.repairs.confirm(self.unconfirmed);
        if self.cursor < self.unconfirmed {
            self.skip();
        }
        self.timed_out = false;
        while self.data_requests.front().is_some_and(|&end| end <= self.unconfirmed) {
            self.data_requests.pop_front();
        }
        let probed = std::mem::replace(&mut self.probe, Probe::No);
        self.retries = self.attrs.retry_cnt;
        self.backoff = 0;
        self.restart_timer(now);
        self.retire(host);
        let more = self.unconfirmed < self.newest && !self.ended;
        match probed {
            Probe::Sent(seq, attempt) if more && seq == before && self.unconfirmed == before + 1 => match attempt {
                // The following may be lost as well. Or nothing is, and answers are late that come one by one.
                Try::First => self.probe_oldest(Try::Second),
                Try::Second => {
                    self.peer_keeps = false;
                    self.go_back();
                }
            },
            _ => {}
        }
    }

    /// Something behind a missing answer was answered: the missing one is lost. Goes back, but once for each loss.
    fn check_lost_answer(&mut self, now: Duration, host: &mut impl RequesterOps) {
        let missing = self.unconfirmed < self.executed && !self.ended;
        if missing && self.rnr_deadline.is_none() && self.loss_at != Some(self.unconfirmed) {
            self.loss_at = Some(self.unconfirmed);
            self.stats.lost_answers += 1;
            self.retry(now, host);
        }
    }

    fn read_response(&mut self, now: Duration, seq: Seq, packet: &Packet<'_>, host: &mut impl RequesterOps) {
        let Some(request) = self.requests.iter().find(|request| request.contains(seq)) else { return };
        let SendOp::Read { .. } = request.work.op else {
            return self.fail_at(seq, WcStatus::BadResponse, host);
        };
        if request.stage != Stage::Begun {
            self.stats.stale += 1;
            return;
        }
        let mtu = u64::from(self.attrs.path_mtu.bytes());
        let offset = seq.saturating_sub(request.first).saturating_mul(mtu);
        let expected = u64::from(request.length).saturating_sub(offset).min(mtu);
        self.rnr_retries = self.attrs.rnr_retry;
        self.confirm(now, seq, host);
        if seq != self.unconfirmed {
            return self.check_lost_answer(now, host);
        }
        // The answer that is missing. Which of FIRST, MIDDLE, LAST and ONLY it is depends on the attempt it belongs to, and
        // on the responder; its place and length do not.
        if packet.payload.len() as u64 != expected || !packet.pad_is_right() {
            return self.fail_at(seq, WcStatus::BadResponse, host);
        }
        self.place(now, seq, offset, packet.payload, host);
    }

    fn atomic_response(&mut self, now: Duration, seq: Seq, original: u64, host: &mut impl RequesterOps) {
        let Some(request) = self.requests.iter().find(|request| request.contains(seq)) else { return };
        if !matches!(request.work.op, SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }) {
            return self.fail_at(seq, WcStatus::BadResponse, host);
        }
        self.rnr_retries = self.attrs.rnr_retry;
        self.confirm(now, seq, host);
        if seq != self.unconfirmed {
            return self.check_lost_answer(now, host);
        }
        // A number on the wire, the guest's byte order in memory.
        self.place(now, seq, 0, &original.to_le_bytes(), host);
    }

    /// Takes the data of the oldest missing answer.
    fn place(&mut self, now: Duration, seq: Seq, offset: u64, data: &[u8], host: &mut impl RequesterOps) {
        let Some(request) = self.requests.iter().find(|request| request.contains(seq)) else { return };
        if !data.is_empty() && host.scatter(&request.work.sges, offset, data).is_err() {
            return self.fail_at(seq, WcStatus::LocalProtection, host);
        }
        self.unconfirmed = seq + 1;
        self.progress(now, seq, host);
        if !self.ended {
            self.advance(now, host);
        }
    }

    /// A packet was lost on its way to the responder, which says so once.
    fn sequence_nak(&mut self, now: Duration, seq: Seq, host: &mut impl RequesterOps) {
        if seq < self.executed {
            self.stats.stale += 1;
            return;
        }
        self.confirm(now, seq, host);
        // During an RNR wait this is only an echo of what was under way.
        if self.ended || self.rnr_deadline.is_some() || self.nak_at == Some(seq) {
            return;
        }
        let neighbour = self.nak_at.replace(seq).is_some_and(|before| before + 1 == seq);
        let unexpected = neighbour && !self.repairs.contains(seq);
        self.neighbours = if unexpected { self.neighbours.saturating_add(1) } else { 0 };
        if self.neighbours >= MOST_NEIGHBOURS {
            self.peer_keeps = false;
        }
        self.stats.sequence_naks += 1;
        self.resend_missing(now, seq, host);
    }

    /// An answer to something that is done, or a word about what is missing.
    fn old_answer(&mut self, seq: Seq, operation: Option<Operation>, extension: Extension) {
        let ack = matches!(extension, Extension::Aeth(Aeth { syndrome: Syndrome::Ack { .. }, .. }));
        if !ack || operation != Some(Operation::Acknowledge) || !self.is_missing(seq + Seq::from(STALE_PSN_OFFSET)) {
            self.stats.stale += 1;
        }
    }

    /// The responder may have said that this packet is missing, too. Whether it has.
    fn is_missing(&mut self, seq: Seq) -> bool {
        let sent = (self.unconfirmed.max(self.executed)..self.cursor).contains(&seq);
        let alone = |request: &Request| request.stage == Stage::Begun && !request.wants_data();
        if self.ended || !sent || !self.requests.iter().any(|request| request.contains(seq) && alone(request)) {
            return false;
        }
        // Nobody else speaks like that, and nobody would without keeping the rest.
        self.peer_keeps = true;
        self.repairs.add(seq);
        self.recovery.resent();
        true
    }

    /// The responder has no receive: waits and goes back.
    fn rnr_nak(&mut self, now: Duration, seq: Seq, timer: u8, host: &mut impl RequesterOps) {
        if seq < self.executed || self.rnr_deadline.is_some() {
            self.stats.stale += 1;
            return;
        }
        if self.executed < seq {
            self.rnr_retries = self.attrs.rnr_retry;
        }
        self.confirm(now, seq, host);
        if self.ended {
            return;
        }
        self.stats.rnr_naks += 1;
        if self.attrs.rnr_retry < 7 {
            match self.rnr_retries.checked_sub(1) {
                Some(left) => self.rnr_retries = left,
                None => return self.fail_at(seq, WcStatus::RnrRetryExceeded, host),
            }
        }
        self.go_back();
        self.rnr_deadline = Some(now.saturating_add(rnr_delay(timer)));
        self.restart_timer(now);
    }
}
