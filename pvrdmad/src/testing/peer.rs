//! A hostile peer: frames of any kind on the wire of well-behaved guests.
//!
//! It knows everything about its victims, but cannot send packets with another host's address and correct PSNs: such
//! packets would be indistinguishable from that host's.
#![expect(clippy::cast_possible_truncation, reason = "for tests: lengths are those of frames")]

use pvrdma_packet::{Ethernet, MacAddr, Vlan};
use pvrdma_roce::wire::{
    Aeth, Bth, Deth, Extension, Header, Ipv4, Network, Opcode, Position, Reth, Syndrome, Udp, build,
};
use pvrdma_verbs_types::{Psn, Qpn};

use super::{Dice, Target};

/// The peer's MAC address, and the last bytes of the addresses that it sends from, in the networks of its victims.
const MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 99]);
const HOSTS: [u8; 3] = [9, 77, 200];

/// A peer that sends frames to hosts that it knows.
#[derive(Debug)]
pub struct HostilePeer {
    /// Queue pairs with the MAC addresses of their hosts.
    victims: Vec<(Target, MacAddr)>,
    dice: Dice,
}

impl HostilePeer {
    /// Creates a peer that attacks these victims. There must be at least one.
    pub const fn new(victims: Vec<(Target, MacAddr)>, dice: Dice) -> Self {
        Self { victims, dice }
    }

    /// Returns the number of frames to send at once.
    pub fn burst(&mut self) -> usize {
        1 + self.dice.below(8)
    }

    /// Returns the next frame, if there is one. `recent` returns a frame that was on the wire recently.
    pub fn frame(&mut self, recent: impl FnOnce() -> Option<Vec<u8>>) -> Option<Vec<u8>> {
        match self.dice.below(8) {
            // Repeats a frame of another host, unchanged or damaged.
            0 => recent(),
            1 => recent().map(|frame| self.damaged(frame)),
            2 => Some(self.raw()),
            _ => self.stranger(),
        }
    }

    /// Returns the frame with a wrong ICRC: a bit behind the Ethernet header is changed, or the frame is truncated.
    fn damaged(&mut self, mut frame: Vec<u8>) -> Vec<u8> {
        if self.dice.one_in(4) {
            frame.truncate(14 + self.dice.below(frame.len().saturating_sub(18).max(1)));
        } else if frame.len() > 60 {
            // In the part of the BTH that the ICRC covers, or behind it.
            let at = 46 + self.dice.below(frame.len() - 46);
            frame[at] ^= 1 << self.dice.below(8);
        }
        frame
    }

    /// Returns random bytes behind an Ethernet header.
    fn raw(&mut self) -> Vec<u8> {
        let kind = self.dice.pick(&[[0x89, 0x15], [0x08, 0x00], [0x86, 0xdd], [0x81, 0x00], [0x08, 0x06]]);
        let (_, station) = self.dice.pick(&self.victims);
        let to = self.dice.pick(&[station.0, [0xff; 6], [1, 0, 0x5e, 0, 0, 1]]);
        let len = self.dice.below(1600);
        [&to[..], &MAC.0, &kind, &self.dice.bytes(len)].concat()
    }

    /// Returns a packet that is correct except for its source address.
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
                // The peer does not know the Q_Key.
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
        // The source MAC address proves nothing, so it may be any.
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
