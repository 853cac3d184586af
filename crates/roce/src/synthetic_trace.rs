//! What a local delivery would have been on the wire: its packets, for those who watch.
//!
//! Local delivery has no packets, so a transcript invents what the wire would have shown of a connection: one packet after
//! the other as data is moved, an acknowledgement for each message, a NAK for each refusal. PSNs begin where the connection
//! does, but count only what was written down. What is left out: READs are not split, acknowledgements are not coalesced, and
//! a refused message stops at the packet that was refused.

use pvrdma_verbs::{Mtu, Psn, Qpn, SendOp, SendWr};

use crate::path::{Path, mtu_bytes, packets};
use crate::requester::{Message, plan};
use crate::wire::{Aeth, AtomicAckEth, Bth, Extension, MAX_FRAME, Opcode, Position, Syndrome};

/// Both ends of a connection, seen from the requester.
#[derive(Clone, Copy, Debug)]
pub struct PathPair {
    /// From requester to responder.
    pub there: Path,
    /// From responder to requester.
    pub back: Path,
    /// The requester's QP.
    pub local: Qpn,
    /// The responder's QP.
    pub remote: Qpn,
    /// Path MTU of the connection.
    pub mtu: Mtu,
}

/// What became of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// A part was moved.
    Moved,
    /// The request ended with success.
    Done,
    /// The responder said no.
    Refused(Syndrome),
    /// Nobody answered.
    Silence,
}

/// A step of a request.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// The request.
    pub work: &'a SendWr,
    /// Bytes of the message.
    pub length: u32,
    /// Bytes that were moved before the step.
    pub before: u64,
    /// Bytes that were moved after it.
    pub done: u64,
    /// What became of it.
    pub outcome: Outcome,
}

/// Which way a packet goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// From requester to responder.
    There,
    /// From responder to requester.
    Back,
}

/// The requests of one QP, written down.
#[derive(Clone, Copy, Debug)]
pub struct SyntheticTrace {
    /// First PSN of the request under way.
    psn: Psn,
    /// Messages completed, 24 bits.
    msn: u32,
    /// Packets of the request under way that carry data and were written down.
    written: u32,
    idents: [u16; 2],
}

impl SyntheticTrace {
    /// A transcript that begins with the PSN of the connection.
    pub const fn new(psn: Psn) -> Self {
        Self { psn, msn: 0, written: 0, idents: [0; 2] }
    }

    /// Writes a step down. `gather` copies from the requester's own memory, from an offset in the message on; `emit` takes the
    /// frames.
    pub fn write(
        &mut self,
        ends: &PathPair,
        step: &Step<'_>,
        mut gather: impl FnMut(u64, &mut [u8]) -> bool,
        mut emit: impl FnMut(Way, &[u8]),
    ) {
        let count = packets(step.length, ends.mtu);
        let whole = |bytes: u64| u32::try_from(bytes / u64::from(ends.mtu.bytes())).unwrap_or(u32::MAX);
        // At its beginning a request may have been tried before; in its middle we may not have seen the beginning.
        self.written = if step.before == 0 { 0 } else { self.written.max(whole(step.before).min(count - 1)) };
        let message = Message { work: step.work, length: step.length, count };
        let wants_data =
            matches!(step.work.op, SendOp::Read { .. } | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. });
        if wants_data && step.before == 0 {
            self.request(ends, &message, 0, &mut gather, &mut emit);
        }
        // The last packet says that the message is whole.
        let reached = if step.outcome == Outcome::Done { count } else { whole(step.done).min(count - 1) };
        while self.written < reached {
            if wants_data {
                self.answer(ends, &message, &mut gather, &mut emit);
            } else {
                self.request(ends, &message, self.written, &mut gather, &mut emit);
            }
            self.written += 1;
        }
        let psn = self.psn.plus(self.written);
        match step.outcome {
            Outcome::Moved => {}
            Outcome::Done => {
                self.msn = self.next_msn();
                if !wants_data {
                    let aeth = Aeth { syndrome: Syndrome::ACK, msn: self.msn };
                    let ack = Bth::new(Opcode::ACKNOWLEDGE, ends.local, psn.plus(u32::MAX));
                    self.frame(ends, Way::Back, ack, Extension::Aeth(aeth), 0, |_| true, &mut emit);
                }
                self.psn = psn;
                self.written = 0;
            }
            Outcome::Refused(_) | Outcome::Silence => {
                if !wants_data {
                    self.request(ends, &message, self.written, &mut gather, &mut emit);
                }
                if let Outcome::Refused(syndrome) = step.outcome {
                    let nak = Bth::new(Opcode::ACKNOWLEDGE, ends.local, psn);
                    let extension = Extension::Aeth(Aeth { syndrome, msn: self.msn });
                    self.frame(ends, Way::Back, nak, extension, 0, |_| true, &mut emit);
                }
            }
        }
    }

    /// The count with the message under way, which answers to READs and atomics carry already.
    const fn next_msn(&self) -> u32 {
        self.msn.wrapping_add(1) & 0x00ff_ffff
    }

    /// A packet of the request.
    fn request(
        &mut self,
        ends: &PathPair,
        message: &Message<'_>,
        index: u32,
        gather: &mut impl FnMut(u64, &mut [u8]) -> bool,
        emit: &mut impl FnMut(Way, &[u8]),
    ) {
        let Some(plan) = plan(message, index, ends.mtu.bytes(), u32::MAX) else { return };
        let mut bth = Bth::new(plan.opcode, ends.remote, self.psn.plus(index));
        bth.solicited = plan.solicited;
        bth.ack_request = plan.ends_message || plan.wants_data;
        let fill = |payload: &mut [u8]| gather(plan.offset, payload);
        self.frame(ends, Way::There, bth, plan.extension, plan.len as usize, fill, emit);
    }

    /// The next packet of the answer to a READ or atomic, whose data has arrived in the requester's memory.
    fn answer(
        &mut self,
        ends: &PathPair,
        message: &Message<'_>,
        gather: &mut impl FnMut(u64, &mut [u8]) -> bool,
        emit: &mut impl FnMut(Way, &[u8]),
    ) {
        let aeth = Aeth { syndrome: Syndrome::ACK, msn: self.next_msn() };
        let psn = self.psn.plus(self.written);
        if !matches!(message.work.op, SendOp::Read { .. }) {
            let mut original = [0; 8];
            if gather(0, &mut original) {
                let bth = Bth::new(Opcode::ATOMIC_ACKNOWLEDGE, ends.local, psn);
                let extension = Extension::AtomicAckEth(aeth, AtomicAckEth { original: u64::from_le_bytes(original) });
                self.frame(ends, Way::Back, bth, extension, 0, |_| true, emit);
            }
            return;
        }
        let position = Position::of(self.written == 0, self.written + 1 == message.count);
        let extension = match position {
            Position::Middle => Extension::None,
            _ => Extension::Aeth(aeth),
        };
        let bth = Bth::new(Opcode::read_response(position), ends.local, psn);
        let offset = u64::from(self.written) * u64::from(ends.mtu.bytes());
        let left = usize::try_from(u64::from(message.length).saturating_sub(offset)).unwrap_or(usize::MAX);
        let fill = |payload: &mut [u8]| gather(offset, payload);
        self.frame(ends, Way::Back, bth, extension, left.min(mtu_bytes(ends.mtu)), fill, emit);
    }

    /// One frame, unless its data cannot be had any more.
    #[expect(clippy::too_many_arguments, reason = "the parts of a frame")]
    fn frame(
        &mut self,
        ends: &PathPair,
        way: Way,
        bth: Bth,
        extension: Extension,
        len: usize,
        mut fill: impl FnMut(&mut [u8]) -> bool,
        emit: &mut impl FnMut(Way, &[u8]),
    ) {
        let [there, back] = &mut self.idents;
        let (path, ident) = match way {
            Way::There => (&ends.there, there),
            Way::Back => (&ends.back, back),
        };
        let mut out = [0; MAX_FRAME];
        let Ok(mut frame) = path.frame(ident, bth, extension, len, &mut out) else { return };
        if len == 0 || fill(frame.payload()) {
            let length = frame.finish();
            emit(way, out.get(..length).unwrap_or_default());
        }
    }
}
