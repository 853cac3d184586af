//! Network cards beside two tenants' devices, and frames between them, of which every byte is compared.

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

/// Who has a card: a tenant of the daemon, and the host beyond its uplink.
const OWNERS: [u8; 2] = [3, BEYOND];
/// EtherType for experiments (IEEE 802, clause 9.2.4), which no attacker uses: these frames have no checksum.
pub(crate) const KIND: u16 = 0x88b5;
/// EtherType of LLDP, which nobody has but the hostile card.
const LLDP: u16 = 0x88cc;
/// Bytes of a frame between the header and the end.
const SHORTEST: usize = 46;
const LONGEST: usize = 1500;
/// Memory of a guest, for its card.
const MEMORY: usize = 4 << 20;
/// After which a frame is taken for lost.
const RESEND: Duration = Duration::from_millis(50);
/// Counts that stay at zero with a driver that does nothing wrong.
const NEVER_HERE: [&str; 3] = ["vmxnet3_send_errors", "vmxnet3_queue_errors", "vmxnet3_command_errors"];

/// A card, before there is a network.
pub(crate) struct Card {
    pub(crate) owner: u8,
    pub(crate) link: Arc<NicLink>,
    pub(crate) guest: Guest,
}

/// All cards with a driver of this test.
pub(crate) struct Cards {
    /// Those of the tenants that compare frames.
    pub(crate) tenants: [Card; 2],
    /// That of a kernel that forges.
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

/// The frames: one at a time, each way in turn. The wire may lose it, so it is sent until it is there.
pub(crate) struct FrameFlow<'a> {
    cards: &'a [Card; 2],
    drivers: [Driver<'a>; 2],
    /// The number of the frame that is under way, or was last.
    number: u64,
    /// When that began to be sent, while it is under way, and when it was sent last.
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

    /// Sends a frame, or sees how the one does that is under way.
    pub(crate) fn step(&mut self, now: Duration) {
        if self.is_idle() {
            self.number += 1;
            self.since = Some(now);
            self.send(now);
        }
        self.look(now);
    }

    /// Sees how the frame does that is under way, if any.
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

    /// All that is under way has ended, and nothing was wrong with it.
    pub(crate) fn end(&self) {
        self.cards.iter().for_each(Card::check_counters);
    }

    fn send(&mut self, now: Duration) {
        self.sent = now;
        let (sender, frame) = frame(self.number);
        self.drivers[sender].send(0, &TxPacket::plain(&frame));
    }

    /// Anybody may send anything; what says to be one of these frames has to be it.
    fn take(&mut self, receiver: usize, packet: &RxPacket) {
        let as_sent = packet.tag.map_or_else(|| packet.bytes.clone(), |tag| tagged(&packet.bytes, tag));
        if is_marked(&as_sent) {
            return inspect(&as_sent, &[]);
        }
        let (header, body) = packet.bytes.split_at(14);
        assert!(header[0] & 1 != 0 || header[..6] == mac(OWNERS[receiver]).0, "somebody else's: {header:x?}");
        match header[12..].try_into().map(u16::from_be_bytes).unwrap() {
            KIND => {}
            LLDP => return assert_eq!(header[6..12], mac(VMM).0, "the hostile card says to be somebody else"),
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

/// The frame of a number, and which end sends it.
fn frame(number: u64) -> (usize, Vec<u8>) {
    let sender = usize::from(number % 2 == 1);
    let mut dice = Dice::new(number, 12);
    let length = SHORTEST + dice.below(LONGEST - SHORTEST + 1);
    let body = [&number.to_le_bytes()[..], &dice.bytes(length - 8)].concat();
    (sender, ethernet(mac(OWNERS[1 - sender]).0, mac(OWNERS[sender]).0, KIND, &body))
}
