//! Responses to be sent, in the order in which they must leave (IBA 9.7.5.1).
//!
//! Their number is bounded whatever the peer sends: responses to new READs and atomics by the responder resources,
//! repeated ones by one for each resource, and there is at most one ACK or NAK between two of them.

use pvrdma_saved_state::roce as saved;
use pvrdma_verbs::{NakReason, ResponderOps};
use pvrdma_verbs_types::{Mtu, Psn, RemoteAddress};

use super::{NakSent, Responder, SEQUENCE_ERROR, Sack};
use crate::path::packets;
use crate::saved::{RestoreError, invalid, message_length, msn, narrow, psn};
use crate::wire::{ACCEPT, Aeth, AtomicAckEth, Bth, Extension, NakCode, Opcode, Position, Reth, SackMap, Syndrome};

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

impl Responder {
    /// Queues an ACK for everything executed. A later ACK covers an earlier one, so adjacent ACKs are merged.
    pub(super) fn push_ack(&mut self, msn: u32) {
        let ack = Response::Ack { psn: self.ack_psn, msn };
        match self.responses.back_mut() {
            Some(queued @ Response::Ack { .. }) => *queued = ack,
            _ => self.responses.push_back(ack),
        }
    }

    /// Updates an ACK at the end of the queue to cover the packets executed meanwhile.
    pub(super) fn refresh_ack(&mut self) {
        if let Some(Response::Ack { psn, msn }) = self.responses.back_mut()
            && *psn != self.ack_psn
        {
            (*psn, *msn) = (self.ack_psn, self.ack_msn);
        }
    }

    /// Queues a NAK, unless the same NAK is queued. Its map is filled in when it is sent.
    pub(super) fn push_nak(&mut self, psn: Psn, syndrome: Syndrome) {
        self.drop_outdated_naks();
        let same = |response: &Response| matches!(response, Response::Nak { psn: its, syndrome: why, .. } if (*its, *why) == (psn, syndrome));
        if !self.responses.iter().any(same) {
            self.responses.push_back(Response::Nak { psn, syndrome, msn: self.msn });
        }
    }

    /// Drops NAKs for packets that were executed since, and ACKs that the next response then covers. Otherwise, while
    /// sending is blocked, a peer that fills some gaps and leaves others could make the queue grow without bound.
    fn drop_outdated_naks(&mut self) {
        let (expected, before) = (self.expected, self.responses.len());
        self.responses.retain(|response| !matches!(response, Response::Nak { psn, .. } if *psn != expected));
        if self.responses.len() == before {
            return;
        }
        let mut index = 1;
        while let (Some(one), Some(next)) = (self.responses.get(index - 1), self.responses.get(index)) {
            match (one, next) {
                (Response::Ack { .. }, Response::Ack { .. }) => drop(self.responses.remove(index - 1)),
                _ => index += 1,
            }
        }
    }

    /// Returns `true` if there are responses to send.
    pub fn has_responses(&self) -> bool {
        !self.responses.is_empty()
    }

    /// Returns `true` if the next response carries data of a READ.
    pub fn next_is_read_response(&self) -> bool {
        matches!(self.responses.front(), Some(Response::Read(_)))
    }

    /// Number of responses to be sent; bounded, whatever the peer sends.
    pub fn pending_responses(&self) -> usize {
        self.responses.len()
    }

    /// Writes the frame of the next response into `out`, which should hold [`crate::wire::MAX_FRAME`] bytes. Returns
    /// its length in bytes; `None` if there is no response to send.
    pub fn poll_transmit(&mut self, ops: &mut impl ResponderOps, out: &mut [u8]) -> Option<usize> {
        self.refresh_ack();
        loop {
            self.rename_forgetful_nak();
            let frame = match *self.responses.front()? {
                Response::Ack { psn, msn } => self.acknowledge(psn, Aeth { syndrome: Syndrome::ACK, msn }, out),
                Response::Nak { psn, syndrome: SEQUENCE_ERROR, .. } if psn != self.expected => {
                    // The packet was late and not lost. A NAK would make the peer go back without need.
                    self.responses.pop_front();
                    continue;
                }
                Response::Nak { psn, syndrome, msn } => self.nak(psn, Aeth { syndrome, msn }, out),
                Response::Atomic { psn, original, msn, .. } => {
                    let aeth = Aeth { syndrome: Syndrome::ACK, msn };
                    let extension = Extension::AtomicAckEth(aeth, AtomicAckEth { original });
                    self.small(Opcode::ATOMIC_ACKNOWLEDGE, psn, extension, out)
                }
                Response::Read(read) => match self.respond(read, ops, out) {
                    Some((frame, rest)) => {
                        self.stats.responses += 1;
                        match (rest, self.responses.front_mut()) {
                            (Some(rest), Some(front)) => *front = Response::Read(rest),
                            _ => drop(self.responses.pop_front()),
                        }
                        return Some(frame);
                    }
                    // The memory is gone, and another response is now at the front of the queue.
                    None => continue,
                },
            }?;
            self.responses.pop_front();
            self.stats.responses += 1;
            return Some(frame);
        }
    }

    /// Updates a NAK that reports lost packets and is next in the queue, if the packet that it names was executed
    /// meanwhile. The NAK names the expected packet instead, because the peer must still learn of the loss.
    fn rename_forgetful_nak(&mut self) {
        let (expected, msn) = (self.expected, self.msn);
        if self.has_forgotten
            && let Some(Response::Nak { psn, syndrome: SEQUENCE_ERROR, msn: its_msn }) = self.responses.front_mut()
            && *psn != expected
        {
            (*psn, *its_msn) = (expected, msn);
            self.nak_sent = NakSent::Sequence;
        }
    }

    fn acknowledge(&mut self, psn: Psn, aeth: Aeth, out: &mut [u8]) -> Option<usize> {
        self.small(Opcode::ACKNOWLEDGE, psn, Extension::Aeth(aeth), out)
    }

    /// Writes a NAK, with the map of packets after the missing one if the peer accepts maps.
    fn nak(&mut self, psn: Psn, aeth: Aeth, out: &mut [u8]) -> Option<usize> {
        let forgotten = aeth.syndrome == SEQUENCE_ERROR && std::mem::take(&mut self.has_forgotten);
        let map = match self.received.take().filter(|_| !forgotten) {
            Some((missing, map)) if missing == psn && aeth.syndrome == SEQUENCE_ERROR => map,
            _ => SackMap::default(),
        };
        let bth = self.bth(Opcode::ACKNOWLEDGE, psn);
        let mut frame = self.path.frame(&mut self.ident, bth, Extension::Aeth(aeth), map.wire_len(), out).ok()?;
        map.write(frame.payload());
        Some(frame.finish())
    }

    fn bth(&self, opcode: Opcode, psn: Psn) -> Bth {
        let reserved7 = if self.sack == Sack::On { ACCEPT } else { 0 };
        Bth { reserved7, ..Bth::new(opcode, self.remote, psn) }
    }

    /// Writes a packet without payload.
    fn small(&mut self, opcode: Opcode, psn: Psn, extension: Extension, out: &mut [u8]) -> Option<usize> {
        let bth = self.bth(opcode, psn);
        Some(self.path.frame(&mut self.ident, bth, extension, 0, out).ok()?.finish())
    }

    /// Writes the next response packet of a READ, and updates the remaining part. Returns `None` if the memory is gone;
    /// the queue was changed accordingly.
    fn respond(
        &mut self,
        read: ReadResponse,
        ops: &mut impl ResponderOps,
        out: &mut [u8],
    ) -> Option<(usize, Option<ReadResponse>)> {
        let mtu = self.attrs.path_mtu;
        let len = read.reth.length.min(mtu.bytes());
        let left = read.reth.length - len;
        let position = Position::of(read.starts, left == 0);
        let extension = match position {
            Position::Middle => Extension::None,
            _ => Extension::Aeth(Aeth { syndrome: Syndrome::ACK, msn: read.msn }),
        };
        let bth = self.bth(Opcode::read_response(position), read.psn);
        let payload_len = len as usize;
        let Ok(mut frame) = self.path.frame(&mut self.ident, bth, extension, payload_len, out) else {
            // There is no room. Dropping the response ends the caller's loop, and the peer requests it again.
            self.responses.pop_front();
            return None;
        };
        let remote = RemoteAddress { addr: read.reth.address, rkey: read.reth.rkey };
        if ops.read(remote, frame.payload()).is_err() {
            if read.duplicate {
                // A peer that still needs the data gets no response. The request may also be an old packet that was
                // delayed in the network, and the consumer was free to deregister the memory since then.
                self.responses.pop_front();
            } else {
                ops.refuse(NakReason::RemoteAccess);
                self.stats.refused += 1;
                self.ended = true;
                self.nak_sent = NakSent::None;
                self.responses.clear();
                self.push_nak(read.psn, Syndrome::Nak(NakCode::RemoteAccess));
            }
            return None;
        }
        let reth = Reth { address: read.reth.address.wrapping_add(len.into()), length: left, ..read.reth };
        let rest = ReadResponse { psn: read.psn.plus(1), reth, starts: false, ..read };
        Some((frame.finish(), (left > 0).then_some(rest)))
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
