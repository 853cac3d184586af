//! Random scripts of traffic, commands and faults on two guests. The device of one of them is replaced after every step
//! by another one that continues its state. Both guests see the same.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use pvrdma_base::Random;

use super::dump::dump;
use super::{another, records, save, saved};
use crate::testing::frames::{Flow, GUEST_MAC, PEER_MAC, ethernet, pattern, tagged};
use crate::testing::{
    DetachedDriver, Driver, DriverConfig, Guest, RecordingPort, RxLayout, RxPacket, TxOffload, TxPacket, command,
};
use crate::{Frame, Received};

/// Number of scripts, and of the steps of each.
const SCRIPTS: u64 = 60;
const STEPS: u32 = 100;

const GROUPS: [[u8; 6]; 3] = [[1, 0, 0x5e, 0, 0, 1], [1, 0, 0x5e, 0, 0, 2], [0x33, 0x33, 0, 0, 0, 3]];
const VLANS: [u16; 3] = [5, 100, 4000];
/// Small buffers, so that a frame takes several of both rings.
const LAYOUT: RxLayout = RxLayout { first: 32, second: 32, head: 256, body: 512, bodies: 0, data_slot: 128 };

/// Random numbers of a script.
struct Dice(Random);

impl Dice {
    fn below(&mut self, limit: u32) -> u32 {
        self.0.draw().unwrap() % limit
    }

    fn flip(&mut self) -> bool {
        self.below(2) == 1
    }
}

/// A guest, and the expected fate of its frames.
struct World {
    guest: Guest,
    driver: Option<DetachedDriver>,
    port: Arc<RecordingPort>,
    mark: u64,
    /// For each transmit queue, the data of packets that have not left.
    posted: [VecDeque<Vec<u8>>; 2],
    /// Data of frames that were delivered and not polled, by their numbers.
    delivered: BTreeMap<u32, Vec<u8>>,
    /// Number of the frame that was polled last, for each receive queue.
    polled: [Option<u32>; 2],
    next: u32,
    /// Transmit queues that were given an invalid packet.
    broken: [bool; 2],
    skipped: u64,
    /// Record of the guest's and the port's observations.
    seen: String,
    classes: Classes,
}

/// Number of saved states with a property.
#[derive(Default)]
struct Classes([(&'static str, u32); 12]);

impl Classes {
    fn count(&mut self, function: &saved::Function, multicast: &[saved::MulticastAddresses]) {
        let vectors = &function.interrupts.as_ref().unwrap().vectors;
        let session = function.session.clone().unwrap_or_default();
        let second_round = |ring: &Option<saved::Ring>| ring.as_ref().is_some_and(|ring| !ring.generation);
        let properties = [
            ("no bus mastering", function.config_space[4] & 4 == 0),
            ("masked and pending", vectors.iter().any(|vector| vector.masked && vector.pending)),
            ("in a round", vectors.iter().any(|vector| vector.in_round)),
            ("refused command", function.result != 0),
            ("transmit ring in a later round", session.transmit.iter().any(|queue| second_round(&queue.ring))),
            ("receive ring in a later round", session.receive.iter().any(|queue| second_round(&queue.second))),
            ("queue stopped", session.transmit.iter().any(|queue| queue.error != 0)),
            ("doorbell wanted", session.receive.iter().any(|queue| queue.doorbell_wanted)),
            ("data ring", session.receive.iter().any(|queue| queue.data.is_some())),
            ("RSS", session.rss.is_some()),
            ("link down", !session.link_reported),
            ("multicast addresses", !multicast.is_empty()),
        ];
        for ((name, count), (property, has)) in self.0.iter_mut().zip(properties) {
            (*name, *count) = (property, *count + u32::from(has));
        }
    }
}

/// Data that begins with a number and differs from all other data.
fn data(number: u32, len: usize) -> Vec<u8> {
    [&number.to_be_bytes()[..], &pattern(len)].concat()
}

fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

impl World {
    fn new() -> Self {
        let (guest, port) = Guest::recording();
        port.set_offloads(true, true);
        let mark = guest.memory.mark();
        Self {
            guest,
            driver: None,
            port,
            mark,
            posted: Default::default(),
            delivered: BTreeMap::new(),
            polled: [None; 2],
            next: 0,
            broken: [false; 2],
            skipped: 0,
            seen: String::new(),
            classes: Classes::default(),
        }
    }

    /// Takes one step of a script.
    fn step(&mut self, dice: &mut Dice) {
        let Some(detached) = self.driver.take() else { return self.restart(dice) };
        // The device may be replaced, so the driver lives for one step.
        let guest = Guest {
            memory: Arc::clone(&self.guest.memory),
            irqs: Arc::clone(&self.guest.irqs),
            device: Arc::clone(&self.guest.device),
        };
        let mut driver = detached.attach(&guest);
        match dice.below(23) {
            0..=4 => self.send(&mut driver, dice),
            5..=10 => self.receive(&driver, dice),
            11..=13 => self.poll(&mut driver, dice),
            14 | 15 => self.service(&mut driver, dice),
            16 | 17 => self.set(&driver, dice),
            // Without bus mastering there is no event of the link. After a pause there may be one.
            18 if guest.memory.space().is_enabled() => guest.device.set_link(dice.flip()),
            19 => self.limit_port(dice),
            20 => self.look(&driver, dice),
            21 => guest.set_switches(dice.below(3) > 0, true),
            _ => {
                match dice.below(3) {
                    0 => self.break_queue(&mut driver, dice),
                    1 => self.restart(dice),
                    _ => guest.device.flush(),
                }
                if self.driver.is_some() {
                    return;
                }
            }
        }
        self.driver = Some(driver.detach());
        self.take_sent();
    }

    fn restart(&mut self, dice: &mut Dice) {
        self.take_sent();
        self.guest.command(command::RESET);
        self.guest.memory.rewind(self.mark);
        (self.posted, self.delivered, self.polled, self.broken) =
            (Default::default(), BTreeMap::new(), [None; 2], [false; 2]);
        (0..32).for_each(|vector| _ = self.guest.irqs.take(vector));
        let revision = dice.below(3) as u8 + 1;
        let config = DriverConfig {
            tx_queues: dice.below(2) as u8 + 1,
            rx_queues: dice.below(2) as u8 + 1,
            tx_ring: 32,
            rx: RxLayout { data_slot: if revision == 3 { LAYOUT.data_slot } else { 0 }, ..LAYOUT },
            features: dice.below(16).into(),
            auto_mask: dice.flip(),
            revision,
            ..DriverConfig::default()
        };
        self.driver = Some(Driver::up(&self.guest, config).detach());
    }

    fn send(&mut self, driver: &mut Driver<'_>, dice: &mut Dice) {
        let queue = dice.below(driver.config.tx_queues.into()) as usize;
        for _ in 0..dice.below(4) {
            if driver.tx[queue].free() < 8 || self.broken[queue] {
                break;
            }
            self.next += 1;
            let data = data(self.next, dice.below(1400) as usize + 40);
            let packet = match dice.below(4) {
                0 => TxPacket::plain(&ethernet(PEER_MAC, GUEST_MAC, 0x88b5, &data)),
                1 => TxPacket { tag: Some(7), ..TxPacket::plain(&ethernet(PEER_MAC, GUEST_MAC, 0x88b5, &data)) },
                2 => {
                    let bytes = Flow::TO_PEER.left_open(Flow::TO_PEER.udp(&data), 6, false);
                    TxPacket::in_parts(&bytes, 400, TxOffload::Checksum { start: 34, at: 40 })
                }
                _ => {
                    let bytes = Flow::TO_PEER.left_open(Flow::TO_PEER.tcp(1, 0x18, 0, &data), 16, true);
                    TxPacket::in_parts(&bytes, 300, TxOffload::Segment { header: 54, mss: 500 })
                }
            };
            driver.tx[queue].post(&driver.guest.memory, &packet);
            self.posted[queue].push_back(data);
        }
        if dice.below(4) > 0 {
            driver.ring(queue);
        }
    }

    /// Takes the frames that have left: each is a packet that was posted and has not left, behind those that have.
    fn take_sent(&mut self) {
        for frame in self.port.take() {
            let place = |posted: &VecDeque<Vec<u8>>| posted.iter().position(|data| frame.bytes.ends_with(data));
            let (queue, at) = self
                .posted
                .iter()
                .enumerate()
                .find_map(|(queue, posted)| Some((queue, place(posted)?)))
                .expect("a frame that was not posted, or has left before, or was overtaken");
            self.posted[queue].drain(..=at);
            self.skipped += at as u64;
            writeln!(self.seen, "sent {:?} {:?} {:x}", frame.checksum, frame.mss, digest(&frame.bytes)).unwrap();
        }
    }

    fn receive(&mut self, driver: &Driver<'_>, dice: &mut Dice) {
        for _ in 0..dice.below(32) {
            self.next += 1;
            let to = match dice.below(8) {
                0 => [0xff; 6],
                1 => PEER_MAC,
                2 => GROUPS[dice.below(3) as usize],
                _ => GUEST_MAC,
            };
            let data = data(self.next, [40, 90, 600, 1440, 1600][dice.below(5) as usize]);
            let ports = [dice.below(1000) as u16, 80];
            let flow = Flow { to, ports, ipv6: dice.flip(), ..Flow::TO_GUEST };
            let bytes = if dice.flip() { flow.udp(&data) } else { flow.tcp(7, 0x10, 0, &data) };
            let tag = (dice.below(4) == 0).then(|| VLANS[dice.below(3) as usize]);
            let bytes = tag.map_or_else(|| bytes.clone(), |tag| tagged(&bytes, tag));
            let received = driver.guest.device.receive(&Frame::new(&bytes, false).unwrap());
            if received == Received::Delivered {
                self.delivered.insert(self.next, data);
            }
            writeln!(self.seen, "{received:?}").unwrap();
        }
        if dice.flip() {
            driver.guest.device.flush();
        }
    }

    fn poll(&mut self, driver: &mut Driver<'_>, dice: &mut Dice) {
        let queue = dice.below(driver.config.rx_queues.into()) as usize;
        let packets = driver.poll_some(queue, dice.below(20) as usize);
        self.take_polled(queue, &packets);
        writeln!(self.seen, "{} completions", driver.reap(0)).unwrap();
    }

    /// Checks that each packet was delivered and has not been polled, and follows those of its queue.
    fn take_polled(&mut self, queue: usize, packets: &[RxPacket]) {
        for packet in packets {
            let found = self.delivered.iter().find(|(_, data)| packet.bytes.ends_with(data));
            let number = *found.expect("a packet that was not delivered, or was polled before").0;
            assert!(self.polled[queue] < Some(number), "packets in another order");
            self.polled[queue] = Some(number);
            self.delivered.remove(&number);
            let digest = digest(&packet.bytes);
            writeln!(self.seen, "{:?} {digest:x}", RxPacket { bytes: Vec::new(), ..packet.clone() }).unwrap();
        }
    }

    /// Services the device like an interrupt handler.
    fn service(&mut self, driver: &mut Driver<'_>, dice: &mut Dice) {
        if !driver.guest.memory.space().is_enabled() {
            // The device would not take the acknowledgement of events.
            return;
        }
        let vectors = u32::from(driver.event_vector()) + 1;
        let vector = dice.below(vectors) as u8;
        driver.guest.irqs.take(vector);
        for queue in 0..usize::from(driver.config.rx_queues) {
            if driver.vector(queue) == vector {
                let packets = driver.poll(queue);
                self.take_polled(queue, &packets);
            }
        }
        for queue in 0..usize::from(driver.config.tx_queues) {
            if driver.vector(queue) == vector {
                writeln!(self.seen, "{} completions", driver.reap(queue)).unwrap();
            }
        }
        if vector == driver.event_vector() {
            driver.acknowledge(driver.events());
        }
        driver.unmask(vector);
    }

    fn set(&mut self, driver: &Driver<'_>, dice: &mut Dice) {
        let result = match dice.below(7) {
            0 => {
                driver.set_features(dice.below(16).into());
                0
            }
            1 => driver.set_multicast(&GROUPS[..dice.below(4) as usize]),
            2 => {
                driver.set_vlan(VLANS[dice.below(3) as usize], dice.flip());
                0
            }
            3 => {
                driver.set_mode(dice.below(32));
                0
            }
            4 => {
                let key = std::array::from_fn(|_| dice.below(256) as u8);
                let table: Vec<u8> = (0..8).map(|_| dice.below(2) as u8).collect();
                driver.write_rss(&key, &table);
                driver.guest.command(command::UPDATE_RSS)
            }
            5 => driver.set_coalesce([dice.below(5), dice.below(140), dice.below(140), dice.below(140)]),
            _ => {
                driver.guest.write(1, 0x28, u32::from_le_bytes([0x52, 0x54, 0, 0]));
                driver.guest.write(1, 0x30, 0xab00 + dice.below(4) * 0x55);
                0
            }
        };
        writeln!(self.seen, "result {result}").unwrap();
    }

    fn limit_port(&mut self, dice: &mut Dice) {
        self.port.set_room(dice.flip().then(|| dice.below(4) as usize));
        self.guest.device.resume_transmit();
    }

    /// Looks at registers, events, errors and statistics.
    fn look(&mut self, driver: &Driver<'_>, dice: &mut Dice) {
        let guest = driver.guest;
        let registers = [0x00, 0x10, 0x18, 0x20, 0x28, 0x30].map(|at| guest.read(1, at));
        let mut config = [0; 256];
        pvrdma_pci_function::PciFunction::config_read(&*guest.device, 0, &mut config);
        let queues = usize::from(driver.config.tx_queues) + usize::from(driver.config.rx_queues);
        let errors: Vec<_> = (0..queues).map(|queue| driver.queue_error(queue)).collect();
        let stats: Vec<_> = (0..queues).map(|queue| driver.stats(queue)).collect();
        let link = guest.command(command::GET_LINK);
        let refused = guest.command(dice.below(2) + 0xcafe_0100);
        writeln!(self.seen, "{registers:x?} {config:x?} {errors:x?} {stats:?} {link} {refused}").unwrap();
        writeln!(self.seen, "{:?} {}", guest.device.status().counters, driver.events()).unwrap();
    }

    /// Gives a packet without an end to a transmit queue, which stops.
    fn break_queue(&mut self, driver: &mut Driver<'_>, dice: &mut Dice) {
        let queue = dice.below(driver.config.tx_queues.into()) as usize;
        if self.broken[queue] || driver.tx[queue].free() < 8 {
            return;
        }
        let at = driver.tx[queue].desc(driver.tx[queue].next_fill()) + 12;
        driver.tx[queue].post(&driver.guest.memory, &TxPacket::plain(&Flow::TO_PEER.udp(b"endless")));
        driver.guest.memory.store(at, driver.guest.memory.load(at) & !(1 << 12));
        self.broken[queue] = true;
        driver.ring(queue);
    }

    /// Pauses the device, and continues with it or with another one.
    fn replace(&mut self, dice: &mut Dice) {
        let state = save(&self.guest.device);
        let (function, multicast) = records(&state);
        self.classes.count(&function, &multicast);
        let frame = ethernet(GUEST_MAC, PEER_MAC, 0x88b5, &pattern(60));
        assert_eq!(self.guest.device.receive(&Frame::new(&frame, false).unwrap()), Received::Inactive);
        if dice.below(4) == 0 {
            self.guest.device.resume_state().unwrap();
            return;
        }
        let link_up = self.guest.device.status().link_up;
        let next = another(&self.guest, self.guest.memory.of_another_device(), &self.port);
        next.device.set_link(link_up);
        next.device.restore_state(&mut &state[..]).unwrap();
        if dice.below(8) == 0 {
            assert_eq!(dump(&next.device), dump(&self.guest.device));
        }
        assert!(records(&save(&next.device)) == (function, multicast), "another state after a restore");
        self.guest = next;
        self.guest.device.resume_state().unwrap();
    }

    /// Completes all pending work: no frame and no completion stays without an interrupt.
    fn finish(&mut self) {
        let Some(detached) = self.driver.take() else { return };
        self.guest.set_switches(true, true);
        self.guest.device.set_link(true);
        self.port.set_room(None);
        self.guest.device.resume_transmit();
        self.take_sent();
        self.guest.device.flush();
        let mut driver = detached.attach(&self.guest);
        (0..=driver.event_vector()).for_each(|vector| driver.unmask(vector));
        let memory = &self.guest.memory;
        for vector in 0..=driver.event_vector() {
            let rx = driver
                .rx
                .iter()
                .enumerate()
                .any(|(queue, rx)| driver.vector(queue) == vector && rx.has_completions(memory));
            let tx = driver
                .tx
                .iter()
                .enumerate()
                .any(|(queue, tx)| driver.vector(queue) == vector && tx.has_completions(memory));
            let event = vector == driver.event_vector() && driver.events() != 0;
            assert!(self.guest.irqs.take(vector) > 0 || !(rx || tx || event), "vector {vector}: {rx} {tx} {event}");
        }
        for queue in 0..driver.rx.len() {
            let packets = driver.poll(queue);
            let found = |packet: &RxPacket| self.delivered.values().any(|data| packet.bytes.ends_with(data));
            assert!(packets.iter().all(found));
            self.delivered.retain(|_, data| !packets.iter().any(|packet| packet.bytes.ends_with(data)));
        }
        assert!(self.delivered.is_empty(), "frames are lost: {:?}", self.delivered.keys());
        for queue in 0..driver.tx.len() {
            driver.reap(queue);
            let free = driver.tx[queue].free();
            assert!(free == 31 || self.broken[queue], "packets stay: {free}");
        }
        let counters = self.guest.device.status().counters;
        let discards = counters.iter().find(|it| it.name == "vmxnet3_send_discards").unwrap().value;
        assert!(self.skipped <= discards, "{} packets are lost, {discards} discarded", self.skipped);
    }
}

/// Compares the observations of two guests, and shows the first difference.
fn assert_same(plain: &str, replaced: &str, seed: u64, step: u32) {
    let same = plain.bytes().zip(replaced.bytes()).take_while(|(a, b)| a == b).count();
    let from = |text: &str| text.chars().skip(same.saturating_sub(40)).take(400).collect::<String>();
    assert!(plain == replaced, "seed {seed:#x}, step {step}: {:?} and {:?}", from(plain), from(replaced));
}

#[test]
fn devices_that_follow_each_other_are_like_one() {
    let mut classes = Classes::default();
    for seed in 1..=SCRIPTS {
        let seed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let script = || Dice(Random::Seed(seed));
        let (mut plain, mut replaced, mut pauses) = (World::new(), World::new(), script());
        let (mut first, mut second) = (script(), script());
        replaced.classes = classes;
        for step in 0..STEPS {
            plain.step(&mut first);
            replaced.step(&mut second);
            replaced.replace(&mut pauses);
            replaced.take_sent();
            // The end of a pause looks at all queues without a doorbell.
            plain.guest.device.resume_transmit();
            plain.take_sent();
            assert_same(&plain.seen, &replaced.seen, seed, step);
            plain.seen.clear();
            replaced.seen.clear();
        }
        plain.finish();
        replaced.finish();
        classes = replaced.classes;
    }
    println!("{:?}", classes.0);
    assert!(classes.0.iter().all(|(_, count)| *count >= 100), "{:?}", classes.0);
}
