//! Packets of a local delivery, for captures.
//!
//! A delivery between two QPs of this process moves data without packets. A [`SyntheticTrace`] generates the packets
//! that the wire would have carried: one packet after another as data moves, an ACK for each message, a NAK for each
//! refusal. PSNs begin with those of the connection, but only traced packets advance them. Simplifications: READs are
//! not split, ACKs are not coalesced, and a refused message ends with the refused packet.

use pvrdma_roce::{
    PacketPlan, Path, SizedWr,
    wire::{Aeth, AtomicAckEth, Bth, Extension, MAX_FRAME, Opcode, Position, Syndrome},
};
use pvrdma_verbs_types::{Mtu, Psn, Qpn, SendOp, SendWr};

/// A connection with its paths in both directions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PathPair {
    /// From requester to responder.
    pub(crate) to_responder: Path,
    /// From responder to requester.
    pub(crate) to_requester: Path,
    /// The requester's QP.
    pub(crate) requester: Qpn,
    /// The responder's QP.
    pub(crate) responder: Qpn,
    /// Path MTU of the connection.
    pub(crate) mtu: Mtu,
}

/// Outcome of a step of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StepOutcome {
    /// A part was moved.
    Moved,
    /// The request completed with success.
    Completed,
    /// The responder refused the request with this syndrome: a NAK or RNR NAK.
    Refused(Syndrome),
    /// There is no responder.
    NoResponse,
}

/// A step of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TraceStep<'a> {
    /// The request.
    pub(crate) wr: &'a SendWr,
    /// Length of the message in bytes.
    pub(crate) length: u32,
    /// Number of bytes that were moved before the step.
    pub(crate) before: u64,
    /// Number of bytes that were moved after it.
    pub(crate) done: u64,
    /// Outcome of the step.
    pub(crate) outcome: StepOutcome,
}

/// The direction of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Toward {
    /// A request.
    Responder,
    /// A response.
    Requester,
}

/// Traces the requests of one QP.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SyntheticTrace {
    /// First PSN of the current request.
    psn: Psn,
    /// Number of completed messages, 24 bits.
    msn: u32,
    /// Number of packets of the current request that carry data and were traced.
    traced: u32,
    /// Last IPv4 identification of requests and of responses.
    idents: [u16; 2],
}

impl SyntheticTrace {
    /// Creates a trace that begins with the first PSN of a connection.
    pub(crate) const fn new(psn: Psn) -> Self {
        Self { psn, msn: 0, traced: 0, idents: [0; 2] }
    }

    /// Traces a step. `gather` copies from the requester's own memory, from an offset in the message on, and returns
    /// `true` on success; `emit` receives the frames.
    pub(crate) fn record(
        &mut self,
        paths: &PathPair,
        step: &TraceStep<'_>,
        mut gather: impl FnMut(u64, &mut [u8]) -> bool,
        mut emit: impl FnMut(Toward, &[u8]),
    ) {
        let sized = SizedWr::new(step.wr, step.length, paths.mtu);
        let count = sized.count;
        let whole = |bytes: u64| u32::try_from(bytes / u64::from(paths.mtu.bytes())).unwrap_or(u32::MAX);
        // At the start of a request, this may be a retry. In the middle of one, the capture may have been started after
        // it.
        self.traced = if step.before == 0 { 0 } else { self.traced.max(whole(step.before).min(count - 1)) };
        let wants_data =
            matches!(step.wr.op, SendOp::Read { .. } | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. });
        if wants_data && step.before == 0 {
            self.request(paths, &sized, 0, &mut gather, &mut emit);
        }
        // The last packet is emitted only when the message is complete.
        let reached = if step.outcome == StepOutcome::Completed { count } else { whole(step.done).min(count - 1) };
        while self.traced < reached {
            if wants_data {
                self.response(paths, &sized, &mut gather, &mut emit);
            } else {
                self.request(paths, &sized, self.traced, &mut gather, &mut emit);
            }
            self.traced += 1;
        }
        let psn = self.psn.plus(self.traced);
        match step.outcome {
            StepOutcome::Moved => {}
            StepOutcome::Completed => {
                self.msn = self.next_msn();
                if !wants_data {
                    self.acknowledge(paths, psn.plus(u32::MAX), Syndrome::ACK, &mut emit);
                }
                self.psn = psn;
                self.traced = 0;
            }
            StepOutcome::Refused(_) | StepOutcome::NoResponse => {
                if !wants_data {
                    self.request(paths, &sized, self.traced, &mut gather, &mut emit);
                }
                if let StepOutcome::Refused(syndrome) = step.outcome {
                    self.acknowledge(paths, psn, syndrome, &mut emit);
                }
            }
        }
    }

    /// Returns the MSN including the current message, which responses to READs and atomics already carry.
    const fn next_msn(&self) -> u32 {
        self.msn.wrapping_add(1) & 0x00ff_ffff
    }

    /// Emits an ACK or NAK.
    fn acknowledge(&mut self, paths: &PathPair, psn: Psn, syndrome: Syndrome, emit: &mut impl FnMut(Toward, &[u8])) {
        let bth = Bth::new(Opcode::ACKNOWLEDGE, paths.requester, psn);
        let extension = Extension::Aeth(Aeth { syndrome, msn: self.msn });
        self.frame(paths, Toward::Requester, bth, extension, 0, |_| true, emit);
    }

    /// Emits a packet of the request.
    fn request(
        &mut self,
        paths: &PathPair,
        sized: &SizedWr<'_>,
        index: u32,
        gather: &mut impl FnMut(u64, &mut [u8]) -> bool,
        emit: &mut impl FnMut(Toward, &[u8]),
    ) {
        let Some(plan) = PacketPlan::new(sized, index, paths.mtu.bytes(), u32::MAX) else { return };
        let mut bth = Bth::new(plan.opcode, paths.responder, self.psn.plus(index));
        bth.solicited = plan.solicited;
        bth.ack_request = plan.ends_message || plan.wants_data;
        let fill = |payload: &mut [u8]| gather(plan.offset, payload);
        self.frame(paths, Toward::Responder, bth, plan.extension, plan.len as usize, fill, emit);
    }

    /// Emits the next packet of the response to a READ or atomic, whose data has arrived in the requester's memory.
    fn response(
        &mut self,
        paths: &PathPair,
        sized: &SizedWr<'_>,
        gather: &mut impl FnMut(u64, &mut [u8]) -> bool,
        emit: &mut impl FnMut(Toward, &[u8]),
    ) {
        let aeth = Aeth { syndrome: Syndrome::ACK, msn: self.next_msn() };
        let psn = self.psn.plus(self.traced);
        if !matches!(sized.wr.op, SendOp::Read { .. }) {
            let mut original = [0; 8];
            if gather(0, &mut original) {
                let bth = Bth::new(Opcode::ATOMIC_ACKNOWLEDGE, paths.requester, psn);
                let ack = AtomicAckEth { original: u64::from_le_bytes(original) };
                self.frame(paths, Toward::Requester, bth, Extension::AtomicAckEth(aeth, ack), 0, |_| true, emit);
            }
            return;
        }
        let position = Position::of(self.traced == 0, self.traced + 1 == sized.count);
        let extension = match position {
            Position::Middle => Extension::None,
            _ => Extension::Aeth(aeth),
        };
        let bth = Bth::new(Opcode::read_response(position), paths.requester, psn);
        let offset = u64::from(self.traced) * u64::from(paths.mtu.bytes());
        let left = usize::try_from(u64::from(sized.length).saturating_sub(offset)).unwrap_or(usize::MAX);
        let fill = |payload: &mut [u8]| gather(offset, payload);
        self.frame(paths, Toward::Requester, bth, extension, left.min(paths.mtu.bytes() as usize), fill, emit);
    }

    /// Emits a frame, unless its data can no longer be read.
    #[expect(clippy::too_many_arguments, reason = "the parts of a frame")]
    fn frame(
        &mut self,
        paths: &PathPair,
        toward: Toward,
        bth: Bth,
        extension: Extension,
        len: usize,
        mut fill: impl FnMut(&mut [u8]) -> bool,
        emit: &mut impl FnMut(Toward, &[u8]),
    ) {
        let [of_requests, of_responses] = &mut self.idents;
        let (path, ident) = match toward {
            Toward::Responder => (&paths.to_responder, of_requests),
            Toward::Requester => (&paths.to_requester, of_responses),
        };
        let mut out = [0; MAX_FRAME];
        let Ok(mut frame) = path.frame(ident, bth, extension, len, &mut out) else { return };
        if len == 0 || fill(frame.payload()) {
            let length = frame.finish();
            emit(toward, out.get(..length).unwrap_or_default());
        }
    }
}
