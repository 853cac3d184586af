//! Execution of the expected packet. The checks follow the order of IBA 9.7.4.1 and 9.7.5: sequence, operations that
//! the QP allows, availability of a receive, length, key and range. The first failure decides.

use pvrdma_verbs::{AtomicChange, NakReason, Received, ResponderOps};
use pvrdma_verbs_types::{Access, MAX_MESSAGE, RemoteAddress, WcOpcode};

use super::responses::{ReadResponse, Response};
use super::{Message, Resource, Responder};
use crate::path::packets;
use crate::wire::{AtomicEth, Extension, OpcodeInfo, Operation, Packet, Reth};

impl Responder {
    pub(super) fn execute(
        &mut self,
        packet: &Packet<'_>,
        info: &OpcodeInfo,
        ops: &mut impl ResponderOps,
    ) -> Result<(), NakReason> {
        let continues = match (self.message, info.operation) {
            (Some(Message::Send { .. }), Operation::Send) | (Some(Message::Write { .. }), Operation::Write) => {
                !info.position.starts()
            }
            (None, _) => info.position.starts(),
            (Some(_), _) => false,
        };
        if !continues {
            return Err(invalid(ops));
        }
        match (info.operation, packet.header.extension) {
            (Operation::Send, _) => self.send(packet, info, ops),
            (Operation::Write, _) => self.write(packet, info, ops),
            (Operation::ReadRequest, Extension::Reth(reth)) => self.read(packet, reth, ops),
            (Operation::CompareSwap, Extension::AtomicEth(atomic)) => {
                let change = AtomicChange::CompareSwap { compare: atomic.compare, swap: atomic.swap_or_add };
                self.atomic(packet, atomic, change, ops)
            }
            (Operation::FetchAdd, Extension::AtomicEth(atomic)) => {
                self.atomic(packet, atomic, AtomicChange::FetchAdd { add: atomic.swap_or_add }, ops)
            }
            _ => Err(invalid(ops)),
        }
    }

    fn send(&mut self, packet: &Packet<'_>, info: &OpcodeInfo, ops: &mut impl ResponderOps) -> Result<(), NakReason> {
        let done = match self.message {
            Some(Message::Send { done }) => done,
            _ => {
                ops.take_receive()?;
                0
            }
        };
        if !self.payload_is_legal(packet) {
            return Err(invalid(ops));
        }
        let length = grown(done, packet, ops)?;
        ops.fill_receive(done.into(), packet.payload)?;
        if !info.position.ends() {
            self.message = Some(Message::Send { done: length });
            self.finish_packet(packet);
            return Ok(());
        }
        let mut received = Received {
            opcode: WcOpcode::Recv,
            length,
            immediate: packet.header.extension.immediate(),
            invalidated: None,
            solicited: packet.header.bth.solicited,
        };
        if let Extension::Ieth(ieth) = packet.header.extension {
            ops.invalidate(ieth.rkey)?;
            received.invalidated = Some(ieth.rkey);
        }
        ops.complete_receive(received)?;
        self.complete_message();
        self.finish_packet(packet);
        Ok(())
    }

    fn write(&mut self, packet: &Packet<'_>, info: &OpcodeInfo, ops: &mut impl ResponderOps) -> Result<(), NakReason> {
        if info.position.starts() {
            ops.check_enabled(Access::REMOTE_WRITE)?;
        }
        let immediate = packet.header.extension.immediate();
        if immediate.is_some() {
            ops.take_receive()?;
        }
        let (next, left, length) = match (self.message, packet.header.extension.reth()) {
            (Some(Message::Write { next, left, length }), _) => (next, left, length),
            (_, Some(reth)) => (remote(reth), reth.length, reth.length),
            (_, None) => return Err(invalid(ops)),
        };
        let after = u32::try_from(packet.payload.len()).ok().and_then(|len| left.checked_sub(len));
        let Some(after) = after.filter(|&after| (after == 0) == info.position.ends()) else {
            return Err(invalid(ops));
        };
        if length > MAX_MESSAGE || !self.payload_is_legal(packet) {
            return Err(invalid(ops));
        }
        let checked = if info.position.starts() && length > 0 {
            ops.check_remote(next, length.into(), Access::REMOTE_WRITE)
        } else {
            Ok(())
        };
        if checked.and_then(|()| ops.write(next, packet.payload)).is_err() {
            // A message of several packets is checked with its first packet, before it takes a receive. Only the
            // receive that this packet has taken can report the error.
            if immediate.is_some() {
                ops.refuse_immediate();
                return Err(NakReason::RemoteAccess);
            }
            return Err(denied(ops));
        }
        if !info.position.ends() {
            let next = RemoteAddress { addr: next.addr.wrapping_add(packet.payload.len() as u64), ..next };
            self.message = Some(Message::Write { next, left: after, length });
            self.finish_packet(packet);
            return Ok(());
        }
        if immediate.is_some() {
            ops.complete_receive(Received {
                opcode: WcOpcode::RecvRdmaWithImmediate,
                length,
                immediate,
                invalidated: None,
                solicited: packet.header.bth.solicited,
            })?;
        }
        self.complete_message();
        self.finish_packet(packet);
        Ok(())
    }

    fn read(&mut self, packet: &Packet<'_>, reth: Reth, ops: &mut impl ResponderOps) -> Result<(), NakReason> {
        ops.check_enabled(Access::REMOTE_READ)?;
        if !self.has_resources() || reth.length > MAX_MESSAGE || !self.payload_is_legal(packet) {
            return Err(invalid(ops));
        }
        if reth.length > 0 && ops.check_remote(remote(reth), reth.length.into(), Access::REMOTE_READ).is_err() {
            return Err(denied(ops));
        }
        let first = self.expected;
        let count = packets(reth.length, self.attrs.path_mtu);
        self.expected = first.plus(count);
        self.complete_message();
        self.save_resource(Resource::Read { first, count, reth });
        self.responses.push_back(Response::Read(ReadResponse {
            request: first,
            psn: first,
            reth,
            starts: true,
            duplicate: false,
            msn: self.msn,
        }));
        Ok(())
    }

    fn atomic(
        &mut self,
        packet: &Packet<'_>,
        atomic: AtomicEth,
        change: AtomicChange,
        ops: &mut impl ResponderOps,
    ) -> Result<(), NakReason> {
        ops.check_enabled(Access::REMOTE_ATOMIC)?;
        if !self.has_resources() || !self.payload_is_legal(packet) || !atomic.address.is_multiple_of(8) {
            return Err(invalid(ops));
        }
        let remote = RemoteAddress { addr: atomic.address, rkey: atomic.rkey };
        let checked = ops.check_remote(remote, 8, Access::REMOTE_ATOMIC);
        let Ok(original) = checked.and_then(|()| ops.update(remote, change)) else { return Err(denied(ops)) };
        let psn = self.expected;
        self.expected = psn.plus(1);
        self.complete_message();
        self.save_resource(Resource::Atomic { psn, original });
        self.responses.push_back(Response::Atomic { psn, original, duplicate: false, msn: self.msn });
        Ok(())
    }

    /// Returns `true` if the peer may have another READ or atomic outstanding. A request whose response has not been
    /// sent certainly is outstanding.
    fn has_resources(&self) -> bool {
        let outstanding = self.responses.iter().filter(|response| response.is_new()).count();
        outstanding < usize::from(self.attrs.max_dest_rd_atomic)
    }

    fn complete_message(&mut self) {
        self.message = None;
        self.msn = self.msn.wrapping_add(1) & 0x00ff_ffff;
    }

    /// Finishes a packet of a SEND or WRITE.
    fn finish_packet(&mut self, packet: &Packet<'_>) {
        (self.ack_psn, self.ack_msn) = (self.expected, self.msn);
        self.expected = self.expected.plus(1);
        if packet.header.bth.ack_request {
            self.push_ack(self.ack_msn);
        }
    }
}

const fn remote(reth: Reth) -> RemoteAddress {
    RemoteAddress { addr: reth.address, rkey: reth.rkey }
}

/// Returns the length of a SEND including this packet.
fn grown(done: u32, packet: &Packet<'_>, ops: &mut impl ResponderOps) -> Result<u32, NakReason> {
    let length = u32::try_from(packet.payload.len()).ok().and_then(|len| done.checked_add(len));
    length.filter(|&length| length <= MAX_MESSAGE).ok_or(NakReason::InvalidRequest).map_err(|_| invalid(ops))
}

fn invalid(ops: &mut impl ResponderOps) -> NakReason {
    refuse(ops, NakReason::InvalidRequest)
}

/// Refuses a request whose memory cannot be accessed.
fn denied(ops: &mut impl ResponderOps) -> NakReason {
    refuse(ops, NakReason::RemoteAccess)
}

fn refuse(ops: &mut impl ResponderOps, reason: NakReason) -> NakReason {
    ops.refuse(reason);
    reason
}
