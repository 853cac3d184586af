//! The responder of a reliable connection: executes requests in PSN order, each once (IBA 9.7.5).

mod answers;
mod execute;
mod reorder;
pub(crate) mod selective_nak;

use std::collections::VecDeque;

use pvrdma_verbs::{Psn, QpAttrs, Qpn, RemoteAddress};

use super::path::{Path, mtu_bytes, packets};
use crate::ops::{NakReason, ResponderOps};
use crate::wire::{NakCode, Operation, Packet, Reth, Service, Syndrome};
use answers::{Answer, ReadAnswer};

pub use reorder::{BufferedBytes, ReorderBuffer};

/// Missing packets that wait for the peer to be told, at most.
const MOST_NAMED: usize = 32;

/// What became of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Handled {
    /// It was executed, answered or recognised.
    Done,
    /// It was dropped.
    Dropped,
    /// One in front of it is missing. It may be dropped, or handed in again when its PSN is [`Responder::expected_psn`].
    Ahead,
    /// Answers that it must not overtake are still owed: call [`Responder::poll_transmit`] until it returns `None`, then
    /// hand it in again before any later packet of this QP.
    Deferred,
}

/// Figures of a responder.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ResponderStats {
    /// Packets executed.
    pub executed: u64,
    /// Packets that came again.
    pub duplicates: u64,
    /// Packets ahead of the expected one.
    pub out_of_sequence: u64,
    /// RNR NAKs sent.
    pub not_ready: u64,
    /// Requests refused.
    pub refused: u64,
    /// Acknowledgements and responses sent.
    pub answers: u64,
}

/// A message of which packets are missing.
#[derive(Clone, Copy, Debug)]
enum Message {
    Send { done: u32 },
    Write { next: RemoteAddress, left: u32, length: u32 },
}

/// What was answered to an RDMA READ or atomic, for answering again.
#[derive(Clone, Copy, Debug)]
enum Replay {
    Read { first: Psn, count: u32, reth: Reth },
    Atomic { psn: Psn, original: u64 },
}

/// Whether the peer knows that the expected packet is missing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Missing {
    No,
    /// A sequence NAK was sent for it: later packets are not worth a word.
    Told,
    /// It came and found no receive: later packets are dropped without a word.
    NotReady,
}

/// The responder half of a connected QP.
#[derive(Debug)]
pub struct Responder {
    path: Path,
    remote: Qpn,
    attrs: QpAttrs,
    /// The PSN that is executed next.
    expected: Psn,
    /// Messages completed, 24 bits.
    msn: u32,
    message: Option<Message>,
    missing: Missing,
    /// PSN of the newest SEND or WRITE packet executed. Only such a PSN may stand in a plain ACK: some requesters take an
    /// ACK with the PSN of a READ or atomic for its completion.
    acknowledged: Psn,
    answers: VecDeque<Answer>,
    /// Packets that are missing beside the expected one, of which the peer is to be told.
    named: VecDeque<Psn>,
    replays: VecDeque<Replay>,
    /// Nothing is executed any more.
    ended: bool,
    ident: u16,
    stats: ResponderStats,
}

impl Responder {
    /// A responder in RTR, with the peer, keys and numbers of `attrs`.
    pub fn new(attrs: &QpAttrs, path: Path) -> Self {
        Self {
            path,
            remote: attrs.dest_qpn,
            attrs: *attrs,
            expected: attrs.rq_psn,
            msn: 0,
            message: None,
            missing: Missing::No,
            acknowledged: attrs.rq_psn.plus(u32::MAX),
            answers: VecDeque::new(),
            named: VecDeque::new(),
            replays: VecDeque::new(),
            ended: false,
            ident: 0,
            stats: ResponderStats::default(),
        }
    }

    /// What happened so far.
    pub const fn stats(&self) -> ResponderStats {
        self.stats
    }

    /// The PSN that is executed next.
    pub const fn expected_psn(&self) -> Psn {
        self.expected
    }

    /// Takes over what a modify request may change in RTS and SQD: path and responder resources. PSNs, path MTU and peer
    /// stay.
    pub const fn set_attrs(&mut self, attrs: &QpAttrs, path: Path) {
        self.attrs.max_dest_rd_atomic = attrs.max_dest_rd_atomic;
        self.path = path;
    }

    /// The QP went to its error state for another reason: nothing more is executed or answered.
    pub fn end(&mut self) {
        self.ended = true;
        self.answers.clear();
        self.named.clear();
        self.message = None;
    }

    /// Takes a request that [`crate::admit_connected`] let through.
    pub fn handle_packet(&mut self, packet: &Packet<'_>, host: &mut impl ResponderOps) -> Handled {
        let bth = &packet.header.bth;
        let Some(info) = bth.opcode.info().filter(|info| info.service == Service::Rc) else { return Handled::Dropped };
        if self.ended || info.operation.is_response() {
            return Handled::Dropped;
        }
        match bth.psn.since(self.expected) {
            0 => {}
            ahead if ahead > 0 => return self.gap(),
            _ => return self.duplicate(packet, info.operation),
        }
        // READ data is read when it is sent: what changes memory must wait until then (IBA 9.4.4, 9.7.5.1.2).
        if info.operation != Operation::ReadRequest && self.answers.iter().any(Answer::reads_memory) {
            return Handled::Deferred;
        }
        host.request_arrived();
        match self.execute(packet, info, host) {
            Ok(()) => {
                self.missing = Missing::No;
                self.stats.executed += 1;
                Handled::Done
            }
            Err(refusal) => self.refuse(bth.psn, refusal),
        }
    }

    /// A packet is missing: tells the peer once.
    fn gap(&mut self) -> Handled {
        self.stats.out_of_sequence += 1;
        self.report_missing();
        if self.missing == Missing::Told { Handled::Ahead } else { Handled::Dropped }
    }

    /// A later packet than the expected one is here.
    pub fn report_missing(&mut self) {
        if self.missing == Missing::No {
            self.missing = Missing::Told;
            self.renew_ack();
            self.push_nak(self.expected, Syndrome::Nak(NakCode::SequenceError));
        }
    }

    /// The `count` packets before `psn` are missing, and the peer sends missing packets alone: it should know of these before
    /// it has sent the expected one again.
    pub fn name_missing(&mut self, psn: Psn, count: u32) {
        for back in (1..=count).rev() {
            if self.missing == Missing::Told && self.named.len() < MOST_NAMED {
                self.named.push_back(psn.plus(back.wrapping_neg()));
            }
        }
    }

    /// Answers what the host refused. It has already done the rest.
    fn refuse(&mut self, psn: Psn, refusal: NakReason) -> Handled {
        let code = match refusal {
            NakReason::Silence => return Handled::Dropped,
            NakReason::NotReady(timer) => {
                self.stats.not_ready += 1;
                self.missing = Missing::NotReady;
                self.push_nak(psn, Syndrome::RnrNak { timer });
                return Handled::Done;
            }
            NakReason::InvalidRequest => NakCode::InvalidRequest,
            NakReason::RemoteAccess => NakCode::RemoteAccess,
            NakReason::RemoteOperation => NakCode::RemoteOperation,
        };
        self.stats.refused += 1;
        self.ended = true;
        self.message = None;
        self.push_nak(psn, Syndrome::Nak(code));
        Handled::Done
    }

    /// A packet that was executed before: nothing is executed twice, nothing is refused (IBA 9.7.5.1.4).
    fn duplicate(&mut self, packet: &Packet<'_>, operation: Operation) -> Handled {
        self.stats.duplicates += 1;
        let psn = packet.header.bth.psn;
        match operation {
            Operation::Send | Operation::Write => {
                if packet.header.bth.ack_request {
                    self.push_ack();
                }
                Handled::Done
            }
            Operation::ReadRequest => {
                let Some(again) = packet.header.extension.reth().and_then(|reth| self.find_read(psn, reth)) else {
                    return Handled::Dropped;
                };
                self.read_again(again);
                Handled::Done
            }
            Operation::CompareSwap | Operation::FetchAdd => {
                let original = self.replays.iter().find_map(|replay| match *replay {
                    Replay::Atomic { psn: at, original } if at == psn => Some(original),
                    _ => None,
                });
                let Some(original) = original else { return Handled::Dropped };
                let owed = |answer: &Answer| matches!(answer, Answer::Atomic { psn: owed, .. } if *owed == psn);
                if !self.answers.iter().any(owed) {
                    self.answers.push_back(Answer::Atomic { psn, original, again: true });
                }
                Handled::Done
            }
            _ => Handled::Dropped,
        }
    }

    /// The remembered READ that `reth` at `psn` is a part of.
    fn find_read(&self, psn: Psn, reth: Reth) -> Option<ReadAnswer> {
        self.replays.iter().find_map(|replay| {
            let Replay::Read { first, count, reth: whole } = *replay else { return None };
            let index = u32::try_from(psn.since(first)).ok().filter(|&index| index < count)?;
            let skipped = u64::from(index) * u64::from(self.attrs.path_mtu.bytes());
            let left = u64::from(whole.length).checked_sub(skipped)?;
            let inside = reth.rkey == whole.rkey
                && (reth.address == whole.address.wrapping_add(skipped) || left == 0)
                && u64::from(reth.length) <= left
                && packets(reth.length, self.attrs.path_mtu) <= count - index;
            inside.then_some(ReadAnswer { request: first, psn, reth, starts: true, again: true })
        })
    }

    /// Owes the responses of a remembered READ again, at most once at a time.
    fn read_again(&mut self, again: ReadAnswer) {
        let owed = self.answers.iter_mut().find_map(|answer| match answer {
            Answer::Read(read) if read.request == again.request => Some(read),
            _ => None,
        });
        match owed {
            // What it asks for is still to come.
            Some(read) if !again.psn.precedes(read.psn) => {}
            // We are past it: go back.
            Some(read) => *read = ReadAnswer { again: read.again, ..again },
            None => self.answers.push_back(Answer::Read(again)),
        }
    }

    /// Remembers an answer, as long as there are resources for it.
    fn remember(&mut self, replay: Replay) {
        while self.replays.len() >= usize::from(self.attrs.max_dest_rd_atomic).max(1) {
            self.replays.pop_front();
        }
        self.replays.push_back(replay);
    }

    fn payload_is_legal(&self, packet: &Packet<'_>) -> bool {
        let rule = packet.header.bth.opcode.info().map(|info| info.payload);
        packet.pad_is_right()
            && rule.is_some_and(|rule| rule.allows(packet.payload.len(), mtu_bytes(self.attrs.path_mtu)))
    }
}
