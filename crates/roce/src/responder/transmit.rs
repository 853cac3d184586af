//! Sending of the responses of a responder.

use pvrdma_verbs::{NakReason, ResponderOps};
use pvrdma_verbs_types::{Psn, RemoteAddress};

use super::responses::{ReadResponse, Response};
use super::{NakSent, Responder, SEQUENCE_ERROR, Sack};
use crate::path::Path;
use crate::wire::{
    ACCEPT, ACCEPT_WITHOUT_ICRC, Aeth, AtomicAckEth, Bth, Extension, FrameWriter, NakCode, Opcode, Packet, Position,
    Reth, SackMap, Service, Syndrome,
};

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

    /// Writes an RNR NAK for the expected request into `out`, which should hold [`crate::wire::MAX_FRAME`] bytes.
    /// Returns its length in bytes. Returns `None` for any other packet, and while responses with data are owed,
    /// because the peer would take the NAK for the loss of those.
    ///
    /// The state does not change: the request is executed when the peer repeats it, after the time of `timer` (IBA
    /// 9.7.5.2.8). The wait spends no retry for lost packets, so a peer can be held off for as long as the memory of
    /// the queue pair must not be accessed.
    pub fn hold_off(&self, packet: &Packet<'_>, timer: u8, out: &mut [u8]) -> Option<usize> {
        let bth = &packet.header.bth;
        let is_request =
            bth.opcode.info().is_some_and(|info| info.service == Service::Rc && !info.operation.is_response());
        let owes_data = self.responses.iter().any(|owed| matches!(owed, Response::Read(_) | Response::Atomic { .. }));
        if !is_request || self.ended || owes_data || bth.psn != self.expected {
            return None;
        }
        self.nak_expected_on(&self.path_of(packet), Syndrome::RnrNak { timer }, out)
    }

    /// Writes a sequence NAK for the expected request into `out`, which should hold [`crate::wire::MAX_FRAME`] bytes,
    /// and returns its length in bytes. The state does not change. A peer that has sent the request sends it again, as
    /// it does after a loss, without waiting for its timer. Any other ignores the NAK.
    pub fn prompt(&self, out: &mut [u8]) -> Option<usize> {
        self.nak_expected_on(&self.path, SEQUENCE_ERROR, out)
    }

    /// Writes a NAK for the expected request without a change of state.
    fn nak_expected_on(&self, path: &Path, syndrome: Syndrome, out: &mut [u8]) -> Option<usize> {
        let aeth = Aeth { syndrome, msn: self.msn };
        let nak = self.bth(Opcode::ACKNOWLEDGE, self.expected);
        // Identifiers matter only to fragments, and these packets are never fragmented.
        Some(path.frame(&mut 0, nak, Extension::Aeth(aeth), 0, out).ok()?.finish())
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
        Some(finish(frame, self.icrc.omits(), &mut self.stats.without_icrc))
    }

    fn bth(&self, opcode: Opcode, psn: Psn) -> Bth {
        let reserved7 = match self.sack {
            Sack::On if self.icrc.omits() => ACCEPT_WITHOUT_ICRC,
            Sack::On => ACCEPT,
            Sack::Off | Sack::Ready => 0,
        };
        Bth { reserved7, ..Bth::new(opcode, self.remote, psn) }
    }

    /// Writes a packet without payload.
    fn small(&mut self, opcode: Opcode, psn: Psn, extension: Extension, out: &mut [u8]) -> Option<usize> {
        let bth = self.bth(opcode, psn);
        let frame = self.path.frame(&mut self.ident, bth, extension, 0, out).ok()?;
        Some(finish(frame, self.icrc.omits(), &mut self.stats.without_icrc))
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
        let frame_len = finish(frame, self.icrc.omits(), &mut self.stats.without_icrc);
        Some((frame_len, (left > 0).then_some(rest)))
    }
}

/// Finishes a response, with an ICRC unless both ends agreed to leave it out. Counts those without. Returns the length
/// of the frame in bytes.
fn finish(frame: FrameWriter<'_>, omits_icrc: bool, count: &mut u64) -> usize {
    if !omits_icrc {
        return frame.finish();
    }
    *count += 1;
    frame.finish_without_icrc()
}
