//! Executing the expected packet. The order of the checks is that of IBA 9.7.4.1 and 9.7.5: sequence, what the QP allows,
//! whether there is a receive, length, key and range. The first failure decides.

use pvrdma_verbs::{Access, RemoteAddress, WcOpcode};

use super::answers::{Answer, ReadAnswer};
use super::{Message, Replay, Responder};
use crate::MAX_MESSAGE;
use crate::ops::{AtomicChange, NakReason, Received, ResponderOps};
use crate::path::packets;
use crate::wire::{AtomicEth, Extension, OpcodeInfo, Operation, Packet, Reth};

impl Responder {
    pub(super) fn execute(
        &mut self,
        packet: &Packet<'_>,
        info: &OpcodeInfo,
        host: &mut impl ResponderOps,
    ) -> Result<(), NakReason> {
        let continues = match (self.message, info.operation) {
            (Some(Message::Send { .. }), Operation::Send) | (Some(Message::Write { .. }), Operation::Write) => {
                !info.position.starts()
            }
            (None, _) => info.position.starts(),
            (Some(_), _) => false,
        };
        if !continues {
            return Err(invalid(host));
        }
        match (info.operation, packet.header.extension) {
            (Operation::Send, _) => self.send(packet, info, host),
            (Operation::Write, _) => self.write(packet, info, host),
            (Operation::ReadRequest, Extension::Reth(reth)) => self.read(packet, reth, host),
            (Operation::CompareSwap, Extension::AtomicEth(atomic)) => {
                let change = AtomicChange::CompareSwap { compare: atomic.compare, swap: atomic.swap_or_add };
                self.atomic(packet, atomic, change, host)
            }
            (Operation::FetchAdd, Extension::AtomicEth(atomic)) => {
                self.atomic(packet, atomic, AtomicChange::FetchAdd { add: atomic.swap_or_add }, host)
            }
            _ => Err(invalid(host)),
        }
    }

    fn send(&mut self, packet: &Packet<'_>, info: &OpcodeInfo, host: &mut impl ResponderOps) -> Result<(), NakReason> {
        let done = match self.message {
            Some(Message::Send { done }) => done,
            _ => {
                host.take_receive()?;
                0
            }
        };
        if !self.payload_is_legal(packet) {
            return Err(invalid(host));
        }
        let length = grown(done, packet, host)?;
        host.fill_receive(done.into(), packet.payload)?;
        if !info.position.ends() {
            self.message = Some(Message::Send { done: length });
            self.advance_acknowledged(packet);
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
            host.invalidate(ieth.rkey)?;
            received.invalidated = Some(ieth.rkey);
        }
        host.complete_receive(received)?;
        self.message_done();
        self.advance_acknowledged(packet);
        Ok(())
    }

    fn write(&mut self, packet: &Packet<'_>, info: &OpcodeInfo, host: &mut impl ResponderOps) -> Result<(), NakReason> {
        if info.position.starts() {
            host.check_enabled(Access::REMOTE_WRITE)?;
        }
        let immediate = packet.header.extension.immediate();
        if immediate.is_some() {
            host.take_receive()?;
        }
        let (next, left, length) = match (self.message, packet.header.extension.reth()) {
            (Some(Message::Write { next, left, length }), _) => (next, left, length),
            (_, Some(reth)) => (remote(reth), reth.length, reth.length),
            (_, None) => return Err(invalid(host)),
        };
        let after = u32::try_from(packet.payload.len()).ok().and_then(|len| left.checked_sub(len));
        let Some(after) = after.filter(|&after| (after == 0) == info.position.ends()) else {
            return Err(invalid(host));
        };
        if length > MAX_MESSAGE || !self.payload_is_legal(packet) {
            return Err(invalid(host));
        }
        if info.position.starts() && length > 0 {
            host.check_remote(next, length.into(), Access::REMOTE_WRITE)?;
        }
        if host.write(next, packet.payload).is_err() {
            return Err(refuse(host, NakReason::RemoteAccess));
        }
        if !info.position.ends() {
            let next = RemoteAddress { addr: next.addr.wrapping_add(packet.payload.len() as u64), ..next };
            self.message = Some(Message::Write { next, left: after, length });
            self.advance_acknowledged(packet);
            return Ok(());
        }
        if immediate.is_some() {
            host.complete_receive(Received {
                opcode: WcOpcode::RecvRdmaWithImmediate,
                length,
                immediate,
                invalidated: None,
                solicited: packet.header.bth.solicited,
            })?;
        }
        self.message_done();
        self.advance_acknowledged(packet);
        Ok(())
    }

    fn read(&mut self, packet: &Packet<'_>, reth: Reth, host: &mut impl ResponderOps) -> Result<(), NakReason> {
        host.check_enabled(Access::REMOTE_READ)?;
        if !self.has_resources() || reth.length > MAX_MESSAGE || !self.payload_is_legal(packet) {
            return Err(invalid(host));
        }
        if reth.length > 0 {
            host.check_remote(remote(reth), reth.length.into(), Access::REMOTE_READ)?;
        }
        let first = self.expected;
        let count = packets(reth.length, self.attrs.path_mtu);
        self.expected = first.plus(count);
        self.message_done();
        self.remember(Replay::Read { first, count, reth });
        self.answers.push_back(Answer::Read(ReadAnswer {
            request: first,
            psn: first,
            reth,
            starts: true,
            again: false,
        }));
        Ok(())
    }

    fn atomic(
        &mut self,
        packet: &Packet<'_>,
        atomic: AtomicEth,
        change: AtomicChange,
        host: &mut impl ResponderOps,
    ) -> Result<(), NakReason> {
        host.check_enabled(Access::REMOTE_ATOMIC)?;
        if !self.has_resources() || !self.payload_is_legal(packet) || !atomic.address.is_multiple_of(8) {
            return Err(invalid(host));
        }
        let remote = RemoteAddress { addr: atomic.address, rkey: atomic.rkey };
        host.check_remote(remote, 8, Access::REMOTE_ATOMIC)?;
        let Ok(original) = host.update(remote, change) else { return Err(refuse(host, NakReason::RemoteAccess)) };
        let psn = self.expected;
        self.expected = psn.plus(1);
        self.message_done();
        self.remember(Replay::Atomic { psn, original });
        self.answers.push_back(Answer::Atomic { psn, original, again: false });
        Ok(())
    }

    /// Whether the peer may have another READ or atomic outstanding. One whose answer has not left is surely outstanding.
    fn has_resources(&self) -> bool {
        let owed = self.answers.iter().filter(|answer| answer.is_new()).count();
        owed < usize::from(self.attrs.max_dest_rd_atomic)
    }

    fn message_done(&mut self) {
        self.message = None;
        self.msn = self.msn.wrapping_add(1) & 0x00ff_ffff;
    }

    /// A packet of a SEND or WRITE is done.
    fn advance_acknowledged(&mut self, packet: &Packet<'_>) {
        self.acknowledged = self.expected;
        self.expected = self.expected.plus(1);
        if packet.header.bth.ack_request {
            self.push_ack();
        }
    }
}

const fn remote(reth: Reth) -> RemoteAddress {
    RemoteAddress { addr: reth.address, rkey: reth.rkey }
}

/// The length of a SEND with this packet.
fn grown(done: u32, packet: &Packet<'_>, host: &mut impl ResponderOps) -> Result<u32, NakReason> {
    let length = u32::try_from(packet.payload.len()).ok().and_then(|len| done.checked_add(len));
    length.filter(|&length| length <= MAX_MESSAGE).ok_or(NakReason::InvalidRequest).map_err(|_| invalid(host))
}

fn invalid(host: &mut impl ResponderOps) -> NakReason {
    refuse(host, NakReason::InvalidRequest)
}

fn refuse(host: &mut impl ResponderOps, refusal: NakReason) -> NakReason {
    host.refuse(refusal);
    refusal
}
