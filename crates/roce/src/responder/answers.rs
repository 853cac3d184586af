//! Answers owed, in the order in which they must leave.
//!
//! Their number is bounded whatever the peer sends: new READs and atomics by the responder resources, repeated ones to one
//! for each remembered request, and an ACK or NAK stands between two of them at most.

use pvrdma_verbs::{Psn, RemoteAddress};

use super::{Missing, Responder};
use crate::ops::{NakReason, ResponderOps};
use crate::responder::selective_nak::stale_psn;
use crate::wire::{Aeth, AtomicAckEth, Bth, Extension, NakCode, Opcode, Position, Reth, Syndrome};

/// Responses of a READ, sent from `psn` on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ReadAnswer {
    /// First PSN of the request, which names it.
    pub(super) request: Psn,
    /// PSN of the next response.
    pub(super) psn: Psn,
    /// What is left.
    pub(super) reth: Reth,
    /// The next response is the first of this answer.
    pub(super) starts: bool,
    /// The request was answered before.
    pub(super) again: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Answer {
    /// An ACK for the newest SEND or WRITE packet.
    Ack {
        psn: Psn,
    },
    /// An ACK packet with another syndrome.
    Nak {
        psn: Psn,
        syndrome: Syndrome,
    },
    Read(ReadAnswer),
    /// `again`: it was answered before.
    Atomic {
        psn: Psn,
        original: u64,
        again: bool,
    },
}

impl Answer {
    /// Whether later requests must not change memory before this has left.
    pub(super) const fn reads_memory(&self) -> bool {
        matches!(self, Self::Read(read) if !read.again)
    }

    /// Whether this answers a READ or atomic for the first time.
    pub(super) const fn is_new(&self) -> bool {
        match self {
            Self::Read(read) => !read.again,
            Self::Atomic { again, .. } => !*again,
            Self::Ack { .. } | Self::Nak { .. } => false,
        }
    }
}

impl Responder {
    /// Owes an ACK for everything executed. A later ACK confirms what an earlier one does, so neighbours become one.
    pub(super) fn push_ack(&mut self) {
        let psn = self.acknowledged;
        match self.answers.back_mut() {
            Some(Answer::Ack { psn: owed }) => *owed = psn,
            _ => self.answers.push_back(Answer::Ack { psn }),
        }
    }

    /// An ACK that is owed and has nothing behind it confirms what was executed meanwhile.
    pub(super) fn renew_ack(&mut self) {
        if let Some(Answer::Ack { psn: owed }) = self.answers.back_mut() {
            *owed = self.acknowledged;
        }
    }

    pub(super) fn push_nak(&mut self, psn: Psn, syndrome: Syndrome) {
        let nak = Answer::Nak { psn, syndrome };
        if self.answers.back() != Some(&nak) {
            self.answers.push_back(nak);
        }
    }

    /// Whether an answer is owed.
    pub fn has_answers(&self) -> bool {
        !self.answers.is_empty() || !self.named.is_empty()
    }

    /// Whether the next answer carries data of a READ.
    pub fn next_is_data(&self) -> bool {
        matches!(self.answers.front(), Some(Answer::Read(_)))
    }

    /// How many answers are owed; bounded, whatever the peer sends.
    pub fn answers_owed(&self) -> usize {
        self.answers.len()
    }

    /// Writes the next answer into `out`, which should hold [`crate::wire::MAX_FRAME`] bytes. Gives the length of the frame.
    pub fn poll_transmit(&mut self, host: &mut impl ResponderOps, out: &mut [u8]) -> Option<usize> {
        self.renew_ack();
        loop {
            let Some(&answer) = self.answers.front() else { return self.name_next(out) };
            let frame = match answer {
                Answer::Ack { psn } => self.acknowledge(psn, Syndrome::ACK, out),
                Answer::Nak { psn, syndrome } => self.acknowledge(psn, syndrome, out),
                Answer::Atomic { psn, original, .. } => {
                    let extension = Extension::AtomicAckEth(self.aeth(Syndrome::ACK), AtomicAckEth { original });
                    self.small(Opcode::ATOMIC_ACKNOWLEDGE, psn, extension, out)
                }
                Answer::Read(read) => match self.respond(read, host, out) {
                    Some((frame, rest)) => {
                        self.stats.answers += 1;
                        match (rest, self.answers.front_mut()) {
                            (Some(rest), Some(front)) => *front = Answer::Read(rest),
                            _ => drop(self.answers.pop_front()),
                        }
                        return Some(frame);
                    }
                    // Not an answer that can be given: something else is at the front now.
                    None => continue,
                },
            }?;
            self.answers.pop_front();
            self.stats.answers += 1;
            return Some(frame);
        }
    }

    /// Tells of a missing packet that the sequence NAK does not name.
    fn name_next(&mut self, out: &mut [u8]) -> Option<usize> {
        let missing = std::iter::from_fn(|| self.named.pop_front()).find(|psn| self.expected.precedes(*psn))?;
        self.stats.answers += 1;
        self.acknowledge(stale_psn(missing), Syndrome::ACK, out)
    }

    const fn aeth(&self, syndrome: Syndrome) -> Aeth {
        Aeth { syndrome, msn: self.msn }
    }

    fn acknowledge(&mut self, psn: Psn, syndrome: Syndrome, out: &mut [u8]) -> Option<usize> {
        self.small(Opcode::ACKNOWLEDGE, psn, Extension::Aeth(self.aeth(syndrome)), out)
    }

    /// A packet without payload.
    fn small(&mut self, opcode: Opcode, psn: Psn, extension: Extension, out: &mut [u8]) -> Option<usize> {
        let bth = Bth::new(opcode, self.remote, psn);
        Some(self.path.frame(&mut self.ident, bth, extension, 0, out).ok()?.finish())
    }

    /// The next response of a READ, and what is left of it then. `None`: its memory is gone, and the queue was changed
    /// accordingly.
    fn respond(
        &mut self,
        read: ReadAnswer,
        host: &mut impl ResponderOps,
        out: &mut [u8],
    ) -> Option<(usize, Option<ReadAnswer>)> {
        let mtu = self.attrs.path_mtu;
        let len = read.reth.length.min(mtu.bytes());
        let left = read.reth.length - len;
        let position = Position::of(read.starts, left == 0);
        let extension = match position {
            Position::Middle => Extension::None,
            _ => Extension::Aeth(self.aeth(Syndrome::ACK)),
        };
        let bth = Bth::new(Opcode::read_response(position), self.remote, read.psn);
        let payload_len = len as usize;
        let Ok(mut frame) = self.path.frame(&mut self.ident, bth, extension, payload_len, out) else {
            // No room. Dropping the answer ends the caller's loop; the peer will ask again.
            self.answers.pop_front();
            return None;
        };
        let remote = RemoteAddress { addr: read.reth.address, rkey: read.reth.rkey };
        if host.read(remote, frame.payload()).is_err() {
            if read.again {
                // Who still wants it gets no answer. It may as well be an old packet that went astray, and the
                // consumer was free to take the memory away.
                self.answers.pop_front();
            } else {
                host.refuse(NakReason::RemoteAccess);
                self.stats.refused += 1;
                self.ended = true;
                self.missing = Missing::No;
                self.answers.clear();
                self.push_nak(read.psn, Syndrome::Nak(NakCode::RemoteAccess));
            }
            return None;
        }
        let reth = Reth { address: read.reth.address.wrapping_add(len.into()), length: left, ..read.reth };
        let rest = ReadAnswer { psn: read.psn.plus(1), reth, starts: false, ..read };
        Some((frame.finish(), (left > 0).then_some(rest)))
    }
}
