//! Network functions beside two tenants' devices. They exchange frames, of which every byte is compared.

use std::sync::Arc;
use std::time::Duration;

use pvrdma_verbs::testing::mac;
use pvrdma_vmxnet3::testing::frames::{ethernet, tagged};
use pvrdma_vmxnet3::testing::{Driver, DriverConfig, Guest, Irqs, Memory, RxPacket, TxPacket};
use pvrdma_vmxnet3::{NicLink, Vmxnet3Config};
use pvrdmad::testing::Dice;

use crate::forger::{inspect, is_marked};
use crate::network::{BEYOND, KERNEL, VMM};
use crate::tenant::PATIENCE;

/// The guests with a network function: a tenant of the daemon, and the host beyond its uplink.
const OWNERS: [u8; 2] = [3, BEYOND];
/// EtherType for experiments (IEEE 802, clause 9.2.4), which no attacker uses, because these frames have no checksum.
pub(crate) const KIND: u16 = 0x88b5;
/// EtherType of LLDP. Only the hostile VMM's network function sends it.
const LLDP: u16 = 0x88cc;
/// Shortest and longest payload of a frame in bytes.
const SHORTEST: usize = 46;
const LONGEST: usize = 1500;
/// Memory of a guest in bytes.
const MEMORY: usize = 4 << 20;
/// Time after which a frame counts as lost.
const RESEND: Duration = Duration::from_millis(50);
/// Counters that stay at zero while the driver makes no errors.
const NEVER_HERE: [&str; 3] = ["vmxnet3_send_errors", "vmxnet3_queue_errors", "vmxnet3_command_errors"];

/// A network function and its guest, before the network exists.
pub(crate) struct Card {
    pub(crate) owner: u8,
    pub(crate) link: Arc<NicLink>,
    pub(crate) guest: Guest,
}

/// All network functions that this test drives.
pub(crate) struct Cards {
    /// Network functions of the tenants that compare frames.
    pub(crate) tenants: [Card; 2],
    /// Network function of the forging kernel.
    pub(crate) forger: Card,
}

impl Cards {
    pub(crate) fn new() -> Self {
        Self { tenants: OWNERS.map(Card::new), forger: Card::new(KERNEL) }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Card> {
        self.tenants.iter().chain([&self.forger])
    }
}

impl Card {
    fn new(owner: u8) -> Self {
        let (memory, irqs) = (Memory::new(MEMORY), Arc::new(Irqs::default()));
        let config = Vmxnet3Config::new(format!("card {owner}"), mac(owner));
        let link = NicLink::with_device(config, Arc::clone(memory.space()), Arc::clone(&irqs) as _).unwrap();
        let device = Arc::clone(link.device());
        Self { owner, link: Arc::new(link), guest: Guest { memory, irqs, device } }
    }

    fn check_counters(&self) {
        let counters = self.guest.device.status().counters;
        for name in NEVER_HERE {
            let count = counters.iter().find(|count| count.name == name).unwrap_or_else(|| panic!("no counter {name}"));
            assert_eq!(count.value, 0, "{name} of guest {}", self.owner);
        }
    }
}

/// Frames, sent one at a time in alternating directions. The wire may lose a frame, so it is sent until it arrives.
pub(crate) struct FrameFlow<'a> {
    cards: &'a [Card; 2],
    drivers: [Driver<'a>; 2],
    /// Number of the frame in flight, or of the last one.
    number: u64,
    /// Time at which the frame in flight was first sent, and time of its last transmission.
    since: Option<Duration>,
    sent: Duration,
}

impl<'a> FrameFlow<'a> {
    pub(crate) fn new(cards: &'a [Card; 2]) -> Self {
        let drivers = cards.each_ref().map(|card| Driver::up(&card.guest, DriverConfig::default()));
        Self { cards, drivers, number: 0, since: None, sent: Duration::ZERO }
    }

    pub(crate) const fn is_idle(&self) -> bool {
        self.since.is_none()
    }

    /// Sends the next frame, or checks the one in flight.
    pub(crate) fn step(&mut self, now: Duration) {
        if self.is_idle() {
            self.number += 1;
            self.since = Some(now);
            self.send(now);
        }
        self.look(now);
    }

    /// Receives frames, and retransmits the one in flight if it is overdue.
    pub(crate) fn look(&mut self, now: Duration) {
        for receiver in 0..2 {
            self.drivers[receiver].reap(0);
            for packet in self.drivers[receiver].poll(0) {
                self.take(receiver, &packet);
            }
        }
        let Some(since) = self.since else { return };
        assert!(now < since + PATIENCE, "frame {} does not arrive", self.number);
        if now >= self.sent + RESEND {
            self.send(now);
        }
    }

    /// Checks the error counters at the end of a run.
    pub(crate) fn end(&self) {
        self.cards.iter().for_each(Card::check_counters);
    }

    fn send(&mut self, now: Duration) {
        self.sent = now;
        let (sender, frame) = frame(self.number);
        self.drivers[sender].send(0, &TxPacket::plain(&frame));
    }

    /// Checks a received frame. Attackers may send anything, but a frame with this EtherType must be one that the other
    /// end sent.
    fn take(&mut self, receiver: usize, packet: &RxPacket) {
        let as_sent = packet.tag.map_or_else(|| packet.bytes.clone(), |tag| tagged(&packet.bytes, tag));
        if is_marked(&as_sent) {
            return inspect(&as_sent, &[]);
        }
        let (header, body) = packet.bytes.split_at(14);
        assert!(header[0] & 1 != 0 || header[..6] == mac(OWNERS[receiver]).0, "for another device: {header:x?}");
        match header[12..].try_into().map(u16::from_be_bytes).unwrap() {
            KIND => {}
            LLDP => return assert_eq!(header[6..12], mac(VMM).0, "the hostile card uses another sender address"),
            _ => return,
        }
        let number = u64::from_le_bytes(body[..8].try_into().unwrap());
        let (sender, expected) = frame(number);
        assert!((1..=self.number).contains(&number) && sender != receiver, "frame {number} was not sent here");
        assert!(packet.bytes == expected, "bytes of frame {number} are wrong");
        if number == self.number {
            self.since = None;
        }
    }
}

/// Returns the sending end and the content of the frame with this number.
fn frame(number: u64) -> (usize, Vec<u8>) {
    let sender = usize::from(number % 2 == 1);
    let mut dice = Dice::new(number, 12);
    let length = SHORTEST + dice.below(LONGEST - SHORTEST + 1);
    let body = [&number.to_le_bytes()[..], &dice.bytes(length - 8)].concat();
    (sender, ethernet(mac(OWNERS[1 - sender]).0, mac(OWNERS[sender]).0, KIND, &body))
}
