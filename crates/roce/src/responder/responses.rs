//! Responses to be sent, in the order in which they must leave (IBA 9.7.5.1).
//!
//! Their number is bounded whatever the peer sends: responses to new READs and atomics by the responder resources,
//! repeated ones by one for each resource, and there is at most one ACK or NAK between two of them.

use pvrdma_saved_state::roce as saved;
use pvrdma_verbs_types::{Mtu, Psn};

use crate::path::packets;
use crate::saved::{RestoreError, invalid, message_length, msn, narrow, psn};
use crate::wire::{NakCode, Reth, Syndrome};

/// Response of a READ, with the packets from `psn` on still to be sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ReadResponse {
    /// First PSN of the request, which identifies it.
    pub(super) request: Psn,
    /// PSN of the next packet.
    pub(super) psn: Psn,
    /// Remaining memory range.
    pub(super) reth: Reth,
    /// The next packet is the first of this transmission.
    pub(super) starts: bool,
    /// The response is a repetition.
    pub(super) duplicate: bool,
    /// Number of messages that were complete with the request.
    pub(super) msn: u32,
}

impl ReadResponse {
    /// PSN after the last packet of the response.
    pub(super) fn end(&self, mtu: Mtu) -> Psn {
        self.psn.plus(packets(self.reth.length, mtu))
    }

    /// Returns `true` if everything that `other` still has to send is also to be sent here.
    pub(super) fn covers(&self, other: &Self, mtu: Mtu) -> bool {
        !other.psn.precedes(self.psn) && !self.end(mtu).precedes(other.end(mtu))
    }

    /// Extends the remaining part by that of `other`, a response to the same READ.
    pub(super) fn join(&mut self, other: &Self, mtu: Mtu) {
        let (first, last) = if other.psn.precedes(self.psn) { (*other, *self) } else { (*self, *other) };
        let mut reth = first.reth;
        if first.end(mtu).precedes(last.end(mtu)) {
            let before = u32::try_from(last.reth.address.wrapping_sub(reth.address)).unwrap_or(0);
            reth.length = before.saturating_add(last.reth.length);
        }
        *self = Self { reth, ..first };
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Response {
    /// ACK for the newest SEND or WRITE packet.
    Ack {
        psn: Psn,
        msn: u32,
    },
    /// ACK packet with another syndrome.
    Nak {
        psn: Psn,
        syndrome: Syndrome,
        msn: u32,
    },
    Read(ReadResponse),
    /// `duplicate`: the response is a repetition.
    Atomic {
        psn: Psn,
        original: u64,
        duplicate: bool,
        msn: u32,
    },
}

impl Response {
    pub(super) fn save(&self) -> saved::Response {
        let (psn, msn, kind) = match *self {
            Self::Ack { psn, msn } => (psn, msn, saved::ResponseKind::Ack(true)),
            Self::Nak { psn, syndrome, msn } => (psn, msn, saved::ResponseKind::Nak(syndrome.byte().into())),
            Self::Read(ReadResponse { request, psn, reth, starts, duplicate, msn }) => {
                let Reth { address: addr, rkey, length } = reth;
                let request = request.get();
                let read = saved::ReadResponse { request, addr, rkey, length, starts, duplicate };
                (psn, msn, saved::ResponseKind::Read(read))
            }
            Self::Atomic { psn, original, duplicate, msn } => {
                (psn, msn, saved::ResponseKind::Atomic(saved::AtomicResponse { original, duplicate }))
            }
        };
        saved::Response { psn: psn.get(), msn, kind: Some(kind) }
    }

    pub(super) fn restore(response: saved::Response) -> Result<Self, RestoreError> {
        let saved::Response { psn: number, msn: messages, kind } = response;
        let (at, msn) = (psn("PSN of a response", number)?, msn(messages)?);
        Ok(match kind.ok_or(RestoreError::Missing { field: "kind of a response" })? {
            saved::ResponseKind::Ack(_) => Self::Ack { psn: at, msn },
            saved::ResponseKind::Nak(byte) => Self::Nak { psn: at, syndrome: restore_syndrome(byte)?, msn },
            saved::ResponseKind::Read(read) => {
                let saved::ReadResponse { request, addr: address, rkey, length, starts, duplicate } = read;
                let request = psn("PSN of a READ", request)?;
                let reth = Reth { address, rkey, length: message_length(length)? };
                Self::Read(ReadResponse { request, psn: at, reth, starts, duplicate, msn })
            }
            saved::ResponseKind::Atomic(saved::AtomicResponse { original, duplicate }) => {
                Self::Atomic { psn: at, original, duplicate, msn }
            }
        })
    }

    /// Returns `true` if later requests must not change memory before this response is sent.
    pub(super) const fn reads_memory(&self) -> bool {
        matches!(self, Self::Read(read) if !read.duplicate)
    }

    /// Returns `true` if this is the first response of a READ or atomic.
    pub(super) const fn is_new(&self) -> bool {
        match self {
            Self::Read(read) => !read.duplicate,
            Self::Atomic { duplicate, .. } => !*duplicate,
            Self::Ack { .. } | Self::Nak { .. } => false,
        }
    }
}

/// Restores a syndrome that this responder sends.
fn restore_syndrome(byte: u32) -> Result<Syndrome, RestoreError> {
    match Syndrome::from_byte(narrow("syndrome of a NAK", byte)?) {
        Syndrome::Nak(NakCode::InvalidRdRequest | NakCode::Reserved(_)) => Err(invalid("syndrome of a NAK", byte)),
        syndrome @ (Syndrome::RnrNak { .. } | Syndrome::Nak(_)) => Ok(syndrome),
        Syndrome::Ack { .. } | Syndrome::Reserved(_) => Err(invalid("syndrome of a NAK", byte)),
    }
}
