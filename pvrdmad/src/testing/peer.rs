//! A hostile peer: frames of any kind on the wire of guests that do nothing wrong.
//!
//! It knows everything but one thing: it cannot send as somebody else and be right. Who can, is that peer.
#![expect(clippy::cast_possible_truncation, reason = "for tests: lengths are those of frames")]

use pvrdma_roce::wire::{
    Aeth, Bth, Deth, Ethernet, Extension, Header, Ipv4, Network, Opcode, Position, Reth, Syndrome, Udp, Vlan, build,
};
use pvrdma_verbs::{MacAddr, Psn, Qpn};

use super::{Dice, Target};

/// Its address, and the ends of those that it sends from, in the networks of its victims.
const MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 99]);
const HOSTS: [u8; 3] = [9, 77, 200];

/// A peer, with frames for stations that it knows.
#[derive(Debug)]
pub struct HostilePeer {
    /// Queue pairs, and the stations that they are at.
    victims: Vec<(Target, MacAddr)>,
    dice: Dice,
}

impl HostilePeer {
    /// A peer of these, of which there is one at least.
    pub const fn new(victims: Vec<(Target, MacAddr)>, dice: Dice) -> Self {
        Self { victims, dice }
    }

    /// How many frames it wants to send at once.
    pub fn burst(&mut self) -> usize {
        1 + self.dice.below(8)
    }

    /// Its next frame, of one that was on the wire of late, if it wants one. `None`: it has nothing to say.
    pub fn frame(&mut self, recent: impl FnOnce() -> Option<Vec<u8>>) -> Option<Vec<u8>> {
        match self.dice.below(8) {
            // What somebody sent, once more, whole or damaged.
            0 => recent(),
            1 => recent().map(|frame| self.damaged(frame)),
            2 => Some(self.raw()),
            _ => self.stranger(),
        }
    }

    /// A frame of which the ICRC is wrong: behind the Ethernet header, or cut short.
    fn damaged(&mut self, mut frame: Vec<u8>) -> Vec<u8> {
        if self.dice.one_in(4) {
            frame.truncate(14 + self.dice.below(frame.len().saturating_sub(18).max(1)));
        } else if frame.len() > 60 {
            // In the BTH's invariant part or behind it.
            let at = 46 + self.dice.below(frame.len() - 46);
            frame[at] ^= 1 << self.dice.below(8);
        }
        frame
    }

    /// Anything behind an Ethernet header.
    fn raw(&mut self) -> Vec<u8> {
        let kind = self.dice.pick(&[[0x89, 0x15], [0x08, 0x00], [0x86, 0xdd], [0x81, 0x00], [0x08, 0x06]]);
        let (_, station) = self.dice.pick(&self.victims);
        let to = self.dice.pick(&[station.0, [0xff; 6], [1, 0, 0x5e, 0, 0, 1]]);
        let len = self.dice.below(1600);
        [&to[..], &MAC.0, &kind, &self.dice.bytes(len)].concat()
    }

    /// A packet that is right in everything but where it comes from.
    fn stranger(&mut self) -> Option<Vec<u8>> {
        let (target, station) = self.dice.pick(&self.victims);
        let dice = &mut self.dice;
        let [.., a, b, c, d] = target.gid.0;
        let network = Ipv4 {
            traffic_class: dice.byte(),
            identification: 7,
            dont_fragment: true,
            hop_limit: 64,
            source: [a, b, c, dice.pick(&HOSTS)],
            destination: [a, b, c, d],
        };
        let opcode = dice.pick(&[
            Opcode::send(Position::Only),
            Opcode::send(Position::First),
            Opcode::write(Position::Only),
            Opcode::write(Position::Middle),
            Opcode::READ_REQUEST,
            Opcode::ACKNOWLEDGE,
            Opcode::CNP,
            Opcode::UD_SEND,
        ]);
        let length = dice.below(1025);
        let reth = Reth { address: target.addr, rkey: target.rkey, length: length as u32 };
        let aeth = Aeth { syndrome: Syndrome::from_byte(dice.byte()), msn: dice.word() & 0xff_ffff };
        let extension = match opcode {
            Opcode::ACKNOWLEDGE => Extension::Aeth(aeth),
            Opcode::READ_REQUEST => Extension::Reth(reth),
            Opcode::UD_SEND => {
                // Its key is a secret.
                Extension::Deth(Deth { qkey: dice.number(), source: Qpn::new(dice.word() & 0xff_ffff) })
            }
            _ if opcode == Opcode::write(Position::Only) => Extension::Reth(reth),
            _ => Extension::None,
        };
        let any = dice.word() & 0xff_ffff;
        let qpn = dice.pick(&[target.qpn, target.qpn, target.datagram_qpn, 1, any]);
        let psn = target.psn.wrapping_add(dice.number()) & 0xff_ffff;
        let mut bth = Bth::new(opcode, Qpn::new(qpn), Psn::new(psn));
        bth.becn = opcode == Opcode::CNP;
        bth.ack_request = dice.one_in(2);
        let vlan = dice.one_in(16).then_some(Vlan { pcp: 1, dei: false, vid: 5 });
        // Its Ethernet address says nothing.
        let (_, other) = dice.pick(&self.victims);
        let source = dice.pick(&[MAC, other]);
        let header = Header {
            ethernet: Ethernet { destination: station, source, vlan },
            network: Network::V2Ipv4(network, Udp { source_port: 0xc001, checksum: 0 }),
            bth,
            extension,
        };
        let payload = match opcode {
            Opcode::READ_REQUEST | Opcode::ACKNOWLEDGE => 0,
            Opcode::CNP => 16,
            _ => length,
        };
        build(&header, &dice.bytes(payload)).ok()
    }
}
