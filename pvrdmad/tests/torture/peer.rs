//! A hostile peer: frames of any kind on the wire of guests that do nothing wrong.
//!
//! It knows everything but one thing: it cannot send as somebody else and be right. Who can, is that peer.

use pvrdma_roce::wire::{
    Aeth, Bth, Ethernet, Extension, Header, Ipv4, Network as Ip, Opcode, Position, Reth, Syndrome, Udp, Vlan, build,
};
use pvrdma_verbs::testing::mac;
use pvrdma_verbs::{Psn, Qpn};

use crate::network::{BEYOND, Network, ON_THE_WIRE};
use pvrdmad::testing::{Dice, Target};

pub(crate) struct Peer {
    targets: Vec<Target>,
    dice: Dice,
}

impl Peer {
    pub(crate) fn new(targets: Vec<Target>, seed: u64) -> Self {
        let on_the_wire = |target: &Target| ON_THE_WIRE.contains(&target.number) || target.number == BEYOND;
        Self { targets: targets.into_iter().filter(on_the_wire).collect(), dice: Dice::new(seed, 3) }
    }

    pub(crate) fn step(&mut self, network: &Network) {
        let mut wire = network.wire.lock();
        if wire.is_crowded() {
            return;
        }
        for _ in 0..=self.dice.below(8) {
            let frame = match self.dice.below(8) {
                // What somebody sent, once more, whole or damaged.
                0 => wire.recent(),
                1 => wire.recent().map(|frame| self.damaged(frame)),
                2 => Some(self.raw()),
                _ => self.stranger(),
            };
            frame.iter().for_each(|frame| wire.give(frame));
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
        let to = self.dice.pick(&[mac(3).0, mac(BEYOND).0, [0xff; 6], [1, 0, 0x5e, 0, 0, 1]]);
        let len = self.dice.below(1600);
        [&to[..], &mac(99).0, &kind, &self.dice.bytes(len)].concat()
    }

    /// A packet that is right in everything but where it comes from.
    fn stranger(&mut self) -> Option<Vec<u8>> {
        let (target, dice) = (self.dice.pick(&self.targets), &mut self.dice);
        let own = [10, 0, 0, dice.pick(&[9, 77, 200])];
        let network = Ipv4 {
            traffic_class: dice.byte(),
            identification: 7,
            dont_fragment: true,
            hop_limit: 64,
            source: own,
            destination: [10, 0, 0, target.number],
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
                let deth = pvrdma_roce::wire::Deth { qkey: dice.number(), source: Qpn::new(dice.word() & 0xff_ffff) };
                Extension::Deth(deth)
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
        let source = dice.pick(&[mac(99), mac(BEYOND)]);
        let header = Header {
            ethernet: Ethernet { destination: mac(target.number), source, vlan },
            network: Ip::V2Ipv4(network, Udp { source_port: 0xc001, checksum: 0 }),
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
