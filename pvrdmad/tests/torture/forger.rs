//! A guest whose kernel sends frames that offloads turn into something else on their way out, and the check of the
//! frames that arrive.

use std::net::{IpAddr, Ipv4Addr};

use pvrdma_link::testing::{Attack, Rules, Tags, attacks, forge, store_anywhere};
use pvrdma_packet::MacAddr;
use pvrdma_verbs::testing::mac;
use pvrdma_vmxnet3::testing::{
    Driver, DriverConfig, TxOffload, TxPacket,
    frames::{Flow, pattern},
};
use pvrdmad::testing::Dice;

use crate::frames::Card;
use crate::network::{BEYOND, KERNEL, ON_THE_WIRE};

/// Part of each of the forger's frames, and of no others.
const MARK: &[u8] = b"a frame of the forger's.";
/// Maximum number of descriptors of a frame.
const DESCRIPTORS: u32 = 24;
/// Number of kinds of frames. A run has sent each kind.
const KINDS: usize = 5;

pub(crate) struct Forger<'a> {
    driver: Driver<'a>,
    dice: Dice,
    /// Frames sent of each kind.
    sent: [u64; KINDS],
}

const fn address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 0, number)
}

/// Returns `true` if a frame is from the forger.
pub(crate) fn is_marked(frame: &[u8]) -> bool {
    frame.windows(MARK.len()).any(|part| part == MARK)
}

/// Asserts that a frame from a device follows the rules of its network. `stations`: MAC addresses that it may come
/// from; any if empty.
pub(crate) fn inspect(frame: &[u8], stations: &[MacAddr]) {
    let is_marked = is_marked(frame);
    let sources: Vec<_> = if is_marked { vec![mac(KERNEL).0] } else { stations.iter().map(|mac| mac.0).collect() };
    // The forger must not use addresses of others. The others have queue pairs and addresses that they bind.
    let may_have =
        |address: IpAddr, _| !is_marked || ![1, 2, 3, BEYOND].map(self::address).iter().any(|&it| address == it);
    let rules = Rules { sources: &sources, tags: Tags::Untagged, roce: !is_marked, may_have: &may_have };
    assert_eq!(rules.check(frame), Ok(()), "{frame:x?} has left");
}

impl<'a> Forger<'a> {
    pub(crate) fn new(card: &'a Card, seed: u64) -> Self {
        let driver = Driver::up(&card.guest, DriverConfig::default());
        Self { driver, dice: Dice::new(seed, 14), sent: [0; KINDS] }
    }

    /// Sends a frame.
    pub(crate) fn step(&mut self) {
        self.driver.reap(0);
        self.driver.poll(0);
        if self.driver.tx[0].free() < DESCRIPTORS {
            return;
        }
        let kind = self.dice.below(KINDS);
        self.sent[kind] += 1;
        let packet = self.packet(kind);
        self.driver.send(0, &packet);
    }

    fn packet(&mut self, kind: usize) -> TxPacket {
        let dice = &mut self.dice;
        let to = dice.pick(&[mac(ON_THE_WIRE[0]).0, mac(BEYOND).0, [0xff; 6]]);
        let all = attacks(to, mac(KERNEL).0, MARK, [address(KERNEL), address(ON_THE_WIRE[0])]);
        let Attack { mut frame, mut start, mut at, .. } = all[dice.below(all.len())].clone();
        let any = |dice: &mut Dice| u16::try_from(dice.below(90)).unwrap();
        let offload = match kind {
            // The frame becomes an attack when the device stores the checksum, or is one already, or is none.
            0 => TxOffload::Checksum { start, at },
            1 => {
                frame = store_anywhere(&frame, start.into(), at.into());
                TxOffload::None
            }
            2 => {
                (start, at) = (any(dice), any(dice));
                forge(&mut frame, start.into(), at.into(), dice.pick(&[666, 0x8100, 0x8915, 0x0806, 4791, 3]));
                TxOffload::Checksum { start, at }
            }
            3 => {
                let at = 12 + dice.below(40);
                frame[at] = dice.byte();
                TxOffload::Segment { header: any(dice), mss: any(dice) }
            }
            // Traffic as a kernel sends it, sometimes with a wrong byte.
            _ => {
                let flow = Flow { ipv6: dice.one_in(2), ports: [0xc000, 53], to, from: mac(KERNEL).0 };
                let data = [MARK, &pattern(dice.below(4000))].concat();
                let tcp = dice.one_in(2);
                frame = if tcp { flow.tcp(1, 0x18, 0, &data) } else { flow.udp(&data[..data.len().min(1400)]) };
                frame = flow.left_open(frame, if tcp { 16 } else { 6 }, tcp);
                let transport = u16::try_from(flow.transport_at()).unwrap();
                if dice.one_in(3) {
                    let at = 12 + dice.below(60);
                    frame[at] = dice.byte();
                }
                if tcp {
                    TxOffload::Segment { header: transport + 20, mss: 500 }
                } else {
                    TxOffload::Checksum { start: transport, at: transport + 6 }
                }
            }
        };
        let tag = dice.one_in(8).then(|| dice.pick(&[0, 0x2000, 5, 666]));
        TxPacket { tag, ..TxPacket::in_parts(&frame, 4096, offload) }
    }

    /// Every kind was sent.
    pub(crate) fn end(&self) {
        assert!(self.sent.iter().all(|&count| count > 0), "{:?}", self.sent);
    }
}
