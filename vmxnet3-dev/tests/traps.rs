//! Rules whose violation makes a guest's kernel panic, warn or stall. Each has a test that fails when the rule is
//! violated. The driver of these tests has the kernel's assertions; it checks some rules for every packet of every
//! test.

#![allow(missing_docs, clippy::unwrap_used)]

use pvrdma_packet::MacAddr;
use pvrdma_pci_function::PciFunction;
use pvrdma_vmxnet3::testing::frames::{Flow, GUEST_MAC, PEER_MAC, ethernet, pattern, tagged};
use pvrdma_vmxnet3::testing::{
    Driver, DriverConfig, DriverTxQueue, Guest, MEMORY_BASE, RxLayout, TxOffload, TxPacket, command, feature, rx_mode,
};
use pvrdma_vmxnet3::{Frame, Received, Vmxnet3Config};

const ERR_NOEOP: u32 = 0x8000_0000;
const ERR_BIG_PKT: u32 = 0x8000_0002;
const ERR_NOT_SUPPORTED: u32 = 0x8000_0003;
const ERR_SMALL_BUF: u32 = 0x8000_0004;
const ERR_INVALID: u32 = 0x8000_0007;
const EVENT_RX: u32 = 1;
const EVENT_TX: u32 = 2;
const EVENT_LINK: u32 = 4;

fn frame_of(len: usize) -> Vec<u8> {
    ethernet(GUEST_MAC, PEER_MAC, 0x88b5, &pattern(len - 14))
}

fn deliver(guest: &Guest, bytes: &[u8]) -> Received {
    let received = guest.device.receive(&Frame::new(bytes, false).unwrap());
    guest.device.flush();
    received
}

/// Trap 1: completions name the last descriptor, one for each packet, in order (asserted in the driver). Only the
/// generation bit of the first descriptor announces a packet; the producer register is a hint.
#[test]
fn trap_1_completions_and_generations() {
    let (guest, port) = Guest::recording();
    let mut driver = Driver::up(&guest, DriverConfig { tx_ring: 32, ..DriverConfig::default() });
    for round in 0..100 {
        let bytes = frame_of(200 + round);
        let packet = TxPacket::in_parts(&bytes, 40 + round, TxOffload::None);
        driver.send_all(0, &[packet.clone(), packet]);
        assert_eq!(port.take().iter().map(|frame| &frame.bytes[..]).collect::<Vec<_>>(), [&bytes[..], &bytes]);
        assert_eq!(driver.reap(0), 2);
    }
    // All descriptors but the first are valid: nothing may be sent, whatever the register says.
    let packet = TxPacket::in_parts(&frame_of(300), 100, TxOffload::None);
    let first = driver.tx[0].next_fill();
    driver.tx[0].post(&guest.memory, &packet);
    let at = driver.tx[0].desc(first) + 8;
    let word = guest.memory.load(at);
    guest.memory.store(at, word ^ 1 << 14);
    driver.ring(0);
    assert!(port.take().is_empty());
    guest.memory.store(at, word);
    // Any value rings.
    guest.write(0, 0x600, 0xffff_ffff);
    assert_eq!((port.take().len(), driver.reap(0)), (1, 1));
}

/// Trap 2: a length of 0 means 16 KiB.
#[test]
fn trap_2_no_length_is_16_kib() {
    let (guest, port) = Guest::recording();
    port.set_offloads(true, true);
    let mut driver = Driver::up(&guest, DriverConfig::default());
    let bytes = Flow::TO_PEER.tcp(1, 0x10, 0, &pattern(16_384 * 2 - 54));
    let packet = TxPacket::in_parts(&bytes, 16_384, TxOffload::Segment { header: 54, mss: 1460 });
    assert_eq!(packet.parts.len(), 2);
    driver.send(0, &packet);
    let sent = port.take();
    assert_eq!((sent[0].bytes.len(), driver.reap(0)), (32_768, 1));
    assert_eq!(sent[0].bytes[54..], bytes[54..]);
}

/// Returns the queue's error and the event for packets with these numbers of descriptors, in a ring of 32.
fn errors_of(counts: &[(usize, TxOffload)], spoil: impl Fn(&Guest, &DriverTxQueue)) -> (u32, u32) {
    let (guest, _port) = Guest::recording();
    let mut driver = Driver::up(&guest, DriverConfig { tx_ring: 32, ..DriverConfig::default() });
    for &(count, offload) in counts {
        let bytes = Flow::TO_PEER.tcp(1, 0x10, 0, &pattern(100 * count - 54));
        driver.tx[0].post(&guest.memory, &TxPacket::in_parts(&bytes, 100, offload));
    }
    spoil(&guest, &driver.tx[0]);
    guest.irqs.take(driver.event_vector());
    driver.ring(0);
    let (error, events) = (driver.queue_error(0), driver.events());
    assert_eq!(guest.irqs.take(driver.event_vector()), u64::from(error != 0), "the driver is told once");
    if error != 0 {
        // Stopped means stopped.
        driver.ring(0);
        assert_eq!((driver.reap(0), driver.queue_error(0)), (0, error));
    }
    (error, events)
}

/// Trap 2: at most 16 descriptors for a packet, 24 for one to be segmented; a packet without an end stops the queue.
#[test]
fn trap_2_packets_without_end_or_measure() {
    let plain = |count| [(count, TxOffload::None)];
    let segment = |count| [(count, TxOffload::Segment { header: 54, mss: 100 })];
    let nothing = |_: &Guest, _: &DriverTxQueue| {};
    assert_eq!(errors_of(&plain(16), nothing), (0, 0));
    assert_eq!(errors_of(&plain(17), nothing), (ERR_BIG_PKT, EVENT_TX));
    assert_eq!(errors_of(&segment(24), nothing), (0, 0));
    assert_eq!(errors_of(&segment(25), nothing), (ERR_BIG_PKT, EVENT_TX));
    let without_end = |index: u32| {
        move |guest: &Guest, queue: &DriverTxQueue| {
            let at = queue.desc(index) + 12;
            guest.memory.store(at, guest.memory.load(at) & !(1 << 12));
        }
    };
    assert_eq!(
        errors_of(&plain(3), without_end(2)),
        (ERR_NOEOP, EVENT_TX),
        "descriptors behind the error are not owned by the device"
    );
    let endless = |guest: &Guest, queue: &DriverTxQueue| {
        for index in 0..32 {
            guest.memory.store(queue.desc(index) + 12, 0);
            guest.memory.store(queue.desc(index) + 8, 1 << 14 | 10);
        }
        // The generation of the second round, so that the walk does not stop at the end of the ring.
        guest.memory.store(queue.desc(0) + 8, 1 << 14 | 10);
    };
    assert_eq!(errors_of(&plain(3), endless), (ERR_NOEOP, EVENT_TX));
    let encapsulated = |guest: &Guest, queue: &DriverTxQueue| guest.memory.store(queue.desc(0) + 12, 1 << 10 | 3 << 12);
    assert_eq!(errors_of(&plain(1), encapsulated), (ERR_NOT_SUPPORTED, EVENT_TX));
    let nowhere = |guest: &Guest, queue: &DriverTxQueue| guest.memory.store_u64(queue.desc(0), 0x10);
    assert_eq!(errors_of(&plain(1), nowhere), (ERR_INVALID, EVENT_TX));
}

/// Trap 3: a packet starts in a HEAD buffer of ring 1 and continues in BODY buffers only, with the right ring numbers
/// (asserted in the driver), in all queues.
#[test]
fn trap_3_heads_bodies_and_ring_numbers() {
    // The continuation is in ring 1, or in ring 2.
    for rx in [RxLayout::JUMBO, RxLayout::SMALL] {
        let (guest, _port) = Guest::recording();
        let config = DriverConfig {
            tx_queues: 4,
            rx_queues: 4,
            rx: RxLayout { data_slot: 128, ..rx },
            mtu: 9000,
            features: feature::RSS,
            ..DriverConfig::default()
        };
        let mut driver = Driver::prepare(&guest, config);
        driver.write_rss(&[0x6d; 40], &[0, 1, 2, 3]);
        assert_eq!(driver.activate(), 0);
        driver.finish();
        let mut seen = [0; 4];
        for port in 0..400_u16 {
            let flow = Flow { ports: [port, 5000], ..Flow::TO_GUEST };
            let bytes = flow.tcp(1, 0x10, 0, &pattern([1, 70, 2000, 4000, 8960][usize::from(port % 5)]));
            assert_eq!(deliver(&guest, &bytes), Received::Delivered);
            let packets: Vec<_> =
                (0..4).flat_map(|queue| driver.poll(queue).into_iter().map(move |it| (queue, it))).collect();
            let [(queue, packet)] = &packets[..] else { panic!("{} packets", packets.len()) };
            assert_eq!((packet.bytes == bytes, packet.in_data_ring), (true, bytes.len() <= 128));
            seen[*queue] += 1;
        }
        assert!(seen.iter().all(|&count| count > 20), "{seen:?}");
    }
}

/// Trap 4: the device does not write receive descriptors (asserted in the driver at each poll), and may skip some.
#[test]
fn trap_4_descriptors_stay_and_bodies_are_skipped() {
    let (guest, _port) = Guest::recording();
    let mut driver = Driver::up(&guest, DriverConfig { rx: RxLayout::JUMBO, mtu: 9000, ..DriverConfig::default() });
    for round in 0..500 {
        let bytes = frame_of(if round % 3 == 0 { 5000 } else { 60 });
        assert_eq!(deliver(&guest, &bytes), Received::Delivered, "round {round}");
        let packets = driver.poll(0);
        assert_eq!(packets.len(), 1);
        assert_eq!((&packets[0].bytes, packets[0].buffers), (&bytes, if round % 3 == 0 { 2 } else { 1 }));
    }
}

/// Trap 5: no empty packets, and none longer than a slot in the data ring (asserted in the driver).
#[test]
fn trap_5_sizes_around_the_slot() {
    let (guest, _port) = Guest::recording();
    let mut driver = Driver::up(
        &guest,
        DriverConfig { rx: RxLayout { data_slot: 128, ..RxLayout::SMALL }, ..DriverConfig::default() },
    );
    for len in (14..260).chain([1513, 1514]) {
        let bytes = frame_of(len);
        assert_eq!(deliver(&guest, &bytes), Received::Delivered);
        let packets = driver.poll(0);
        assert_eq!((&packets[0].bytes, packets[0].in_data_ring), (&bytes, len <= 128), "{len}");
    }
    // A tag that is stripped does not count.
    let bytes = tagged(&frame_of(128), 0);
    assert_eq!(deliver(&guest, &bytes), Received::Delivered);
    assert!(driver.poll(0)[0].in_data_ring);
}

/// Trap 6: completion rings of any size wrap and change their generation, which is all that the driver checks.
#[test]
fn trap_6_completion_rings_wrap() {
    let (guest, port) = Guest::recording();
    let rx = RxLayout { first: 32, second: 32, ..RxLayout::SMALL };
    let mut driver = Driver::up(&guest, DriverConfig { tx_ring: 32, rx, ..DriverConfig::default() });
    for round in 0..300 {
        driver.send_all(0, &vec![TxPacket::plain(&frame_of(60)); round % 31]);
        assert_eq!((port.take().len(), driver.reap(0)), (round % 31, round % 31));
        let count = round % 29;
        for _ in 0..count {
            assert_eq!(deliver(&guest, &frame_of(60)), Received::Delivered);
        }
        assert_eq!(driver.poll(0).len(), count);
    }
    // The largest.
    let rx = RxLayout { first: 4096, second: 4096, head: 128, body: 16, bodies: 0, data_slot: 0 };
    let guest = Guest::new(Vmxnet3Config::new("large", MacAddr(GUEST_MAC)), 64 << 20, port);
    let mut driver = Driver::up(&guest, DriverConfig { tx_ring: 32, rx, ..DriverConfig::default() });
    for _ in 0..9 {
        for _ in 0..1000 {
            assert_eq!(deliver(&guest, &frame_of(60)), Received::Delivered);
        }
        assert_eq!(driver.poll(0).len(), 1000);
    }
}

/// Trap 7: vectors are unmasked while memory still says that all are disabled; events in that time cause an interrupt.
#[test]
fn trap_7_intr_ctrl_is_no_mask() {
    let (guest, _port) = Guest::recording();
    let mut driver = Driver::prepare(&guest, DriverConfig::default());
    assert_eq!(driver.activate(), 0);
    driver.set_mode(rx_mode::UCAST);
    driver.unmask(0);
    assert_eq!(guest.memory.load(driver.shared + 108), 1, "disabled in memory");
    assert_eq!(deliver(&guest, &frame_of(60)), Received::Delivered);
    assert_eq!(guest.irqs.take(0), 1);
}

/// Trap 8: raising a vector masks it, and an event while it is masked is not lost.
#[test]
fn trap_8_auto_mask() {
    let (guest, _port) = Guest::recording();
    let mut driver = Driver::up(&guest, DriverConfig { auto_mask: true, ..DriverConfig::default() });
    for _ in 0..3 {
        deliver(&guest, &frame_of(60));
    }
    assert_eq!(guest.irqs.take(0), 1);
    assert_eq!(driver.poll(0).len(), 3);
    driver.unmask(0);
    assert_eq!(guest.irqs.take(0), 1, "one interrupt for the packets that arrived while it was masked");
    driver.unmask(0);
    assert_eq!(guest.irqs.take(0), 0);
    deliver(&guest, &frame_of(60));
    assert_eq!(guest.irqs.take(0), 1);
}

/// Trap 9: tables are copied during the command, because the driver overwrites them directly afterwards.
#[test]
fn trap_9_tables_are_freed_after_the_command() {
    let (guest, _port) = Guest::recording();
    let config = DriverConfig { tx_queues: 2, rx_queues: 2, features: feature::RSS, ..DriverConfig::default() };
    let mut driver = Driver::prepare(&guest, config);
    let rss = driver.write_rss(&[0; 40], &[1]);
    assert_eq!(driver.activate(), 0);
    driver.finish();
    guest.memory.fill(rss, 176, 0xee);
    let group = [1, 0, 0x5e, 0, 0, 7];
    assert_eq!(driver.set_multicast(&[[1, 0, 0x5e, 0, 0, 1], group]), 0);
    let bytes = Flow { to: group, ..Flow::TO_GUEST }.udp(b"group");
    assert_eq!(deliver(&guest, &bytes), Received::Delivered);
    assert_eq!((driver.poll(0).len(), driver.poll(1).len()), (0, 1), "the table of that time leads to queue 1");
    let scheme = guest.memory.alloc(16);
    guest.memory.write(scheme, &[2, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0]);
    guest.memory.store(driver.shared + 708, 16);
    guest.memory.store_u64(driver.shared + 712, scheme);
    assert_eq!(guest.command(command::SET_COALESCE), 0);
    guest.memory.fill(scheme, 16, 0xee);
    assert_eq!(guest.command(command::GET_COALESCE), 0);
    assert_eq!(guest.memory.read(scheme, 16), [2, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0]);
}

/// Trap 10: the device lowers the driver's transmit threshold so that each packet rings a doorbell, and it finds
/// receive buffers without any doorbell.
#[test]
fn trap_10_thresholds_and_receive_doorbells() {
    let (guest, _port) = Guest::recording();
    let mut driver = Driver::prepare(&guest, DriverConfig::default());
    guest.memory.store(driver.queue_desc + 4, 64);
    guest.memory.write(driver.rx_desc(0), &[1]);
    assert_eq!(driver.activate(), 0);
    driver.set_mode(rx_mode::UCAST);
    assert!(guest.memory.load(driver.queue_desc + 4) <= 1, "a driver would wait for more packets, forever");
    for _ in 0..1000 {
        assert_eq!(deliver(&guest, &frame_of(60)), Received::Delivered);
        assert!(!driver.rx[0].doorbell_wanted(&guest.memory));
        assert_eq!(driver.poll(0).len(), 1);
    }
}

/// Trap 11: a checksum counts as right only if it is, for whole TCP and UDP packets (warnings asserted in the driver).
#[test]
fn trap_11_verified_checksums() {
    let (guest, _port) = Guest::recording();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    let mut verified = |bytes: &[u8]| {
        assert_eq!(deliver(&guest, bytes), Received::Delivered);
        driver.poll(0)[0].checksum_verified
    };
    for ipv6 in [false, true] {
        let flow = Flow { ipv6, ..Flow::TO_GUEST };
        for bytes in [flow.tcp(1, 0x10, 12, b"data"), flow.udp(b"odd")] {
            assert!(verified(&bytes) && verified(&tagged(&bytes, 0)));
            for spoil in [14 + 8, flow.transport_at() + 3, bytes.len() - 1] {
                let mut bad = bytes.clone();
                bad[spoil] ^= 0x40;
                assert!(!verified(&bad) || (ipv6 && spoil == 22), "byte {spoil}");
            }
        }
    }
    let mut fragment = Flow::TO_GUEST.udp(b"part");
    fragment[20] = 0x20;
    assert!(!verified(&fragment));
    let mut no_checksum = Flow::TO_GUEST.udp(b"none");
    no_checksum[40..42].fill(0);
    assert!(!verified(&no_checksum));
    let mut icmp = Flow::TO_GUEST.udp(b"ping");
    icmp[23] = 1;
    assert!(!verified(&icmp) && !verified(&frame_of(60)));
}

/// Trap 11: a checksum that a local peer left open is filled in, whether or not the guest verifies it.
#[test]
fn trap_11_open_checksums() {
    let (guest, _port) = Guest::recording();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    let whole = Flow::TO_GUEST.udp(b"payload");
    let open = Flow::TO_GUEST.left_open(whole.clone(), 6, false);
    let frame = Frame::with_partial_checksum(&open, 34, 40).unwrap();
    assert_eq!(guest.device.receive(&frame), Received::Delivered);
    let packet = &driver.poll(0)[0];
    assert_eq!((&packet.bytes, packet.checksum_verified), (&whole, true));
    driver.set_features(0);
    assert_eq!(guest.device.receive(&frame), Received::Delivered);
    let packet = &driver.poll(0)[0];
    assert_eq!((&packet.bytes, packet.checksum_verified), (&whole, false));
}

/// Trap 12: events are added to guest memory, and only an acknowledgement removes them.
#[test]
fn trap_12_events() {
    let (guest, _port) = Guest::recording();
    let driver = Driver::up(&guest, DriverConfig::default());
    assert_eq!(guest.command(command::GET_LINK), 10_000 << 16 | 1);
    guest.memory.store(driver.shared + 700, 0x5a5a_5a5a);
    guest.device.set_link(false);
    guest.device.set_link(false);
    assert_eq!((driver.events(), guest.irqs.take(driver.event_vector())), (EVENT_LINK, 1));
    assert_eq!(guest.command(command::GET_LINK), 0);
    driver.acknowledge(EVENT_RX);
    assert_eq!(driver.events(), EVENT_LINK);
    driver.acknowledge(EVENT_LINK);
    assert_eq!(driver.events(), 0);
    guest.device.set_link(true);
    assert_eq!((driver.events(), guest.irqs.take(driver.event_vector())), (EVENT_LINK, 1));
    assert_eq!(guest.memory.load(driver.shared + 700), 0x5a5a_5a5a, "the word beside");
}

/// Trap 13: one to eight queues, with one vector for each pair.
#[test]
fn trap_13_queue_pairs_share_a_vector() {
    for queues in 1..=8_u8 {
        let (guest, port) = Guest::recording();
        let config =
            DriverConfig { tx_queues: queues, rx_queues: queues, features: feature::RSS, ..DriverConfig::default() };
        let mut driver = Driver::prepare(&guest, config);
        driver.write_rss(&[0x6d; 40], &(0..32).map(|i| i % queues).collect::<Vec<_>>());
        assert_eq!(driver.activate(), 0);
        driver.finish();
        for queue in 0..usize::from(queues) {
            driver.send(queue, &TxPacket::plain(&frame_of(60)));
            assert_eq!((port.take().len(), driver.reap(queue)), (1, 1));
            assert_eq!(guest.irqs.take(driver.vector(queue)), 1, "queue {queue} of {queues}");
        }
        for from in 0..64 {
            deliver(&guest, &Flow { ports: [from, 9], ..Flow::TO_GUEST }.tcp(1, 0, 0, b"x"));
        }
        for queue in 0..usize::from(queues) {
            let count = driver.poll(queue).len() as u64;
            assert_eq!(guest.irqs.take(driver.vector(queue)), count, "queue {queue} of {queues}");
        }
    }
}

/// Trap 14: frames without tag and with VLAN 0 always pass; a promiscuous driver's table is empty; tags are stripped.
#[test]
fn trap_14_vlans() {
    let (guest, _port) = Guest::recording();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    let bytes = frame_of(100);
    let send = |tag| deliver(&guest, &tagged(&bytes, tag));
    assert_eq!(deliver(&guest, &bytes), Received::Delivered);
    assert_eq!((send(0), send(0xe000), send(7)), (Received::Delivered, Received::Delivered, Received::Filtered));
    driver.set_vlan(7, true);
    assert_eq!((send(0x6007), send(8)), (Received::Delivered, Received::Filtered));
    let packets = driver.poll(0);
    assert!(packets.iter().all(|packet| packet.bytes == bytes));
    assert_eq!(
        packets.iter().map(|packet| packet.tag).collect::<Vec<_>>(),
        [None, Some(0), Some(0xe000), Some(0x6007)]
    );
    driver.set_vlan(7, false);
    driver.set_mode(rx_mode::UCAST | rx_mode::PROMISC);
    assert_eq!(send(9), Received::Delivered);
    driver.set_features(0);
    assert_eq!(send(9), Received::Delivered);
    let packets = driver.poll(0);
    assert_eq!((packets[0].tag, &packets[0].bytes), (Some(9), &bytes));
    assert_eq!((packets[1].tag, &packets[1].bytes), (None, &tagged(&bytes, 9)));
}

/// Trap 15: ACTIVATE refuses hostile numbers.
#[test]
fn trap_15_hostile_numbers_are_refused() {
    type Change = (&'static str, u64, Vec<u8>);
    let (guest, _port) = Guest::recording();
    let word = |value: u32| value.to_le_bytes().to_vec();
    let address = |value: u64| value.to_le_bytes().to_vec();
    let changes: Vec<Change> = vec![
        ("magic", 0, word(0xbabe_fee0)),
        ("descriptors outside", 40, address(1 << 40)),
        ("descriptors misaligned", 40, address(MEMORY_BASE + 64)),
        ("descriptors at the end of all", 40, address(u64::MAX - 127)),
        ("descriptors too short", 52, word(511)),
        ("MTU", 56, word(9001)),
        ("MTU", 56, word(59)),
        ("transmit queues", 62, vec![9, 1]),
        ("transmit queues", 62, vec![0, 1]),
        ("receive queues", 62, vec![1, 255]),
        ("receive queues", 62, vec![1, 0]),
        ("more queues than descriptors", 62, vec![8, 8]),
        ("vector of events", 82, vec![16]),
    ];
    let queue: Vec<Change> = vec![
        ("transmit ring outside", 16, address(8 << 30)),
        ("transmit ring half outside", 16, address(guest.memory.end() - 512)),
        ("transmit ring of 48", 56, word(48)),
        ("transmit ring of 8192", 56, word(8192)),
        ("transmit completions outside", 32, address(0)),
        ("vector of a transmit queue", 72, vec![16]),
        ("receive ring outside", 256 + 16, address(0)),
        ("receive ring of 0", 256 + 56, word(0)),
        ("ring 2 outside", 256 + 24, address(1 << 50)),
        ("receive completions misaligned", 256 + 32, address(MEMORY_BASE + 8)),
        ("data ring outside", 256 + 48, address(1 << 50)),
        ("slots of 100 bytes", 256 + 74, vec![100, 0]),
        ("vector of a receive queue", 256 + 72, vec![255]),
    ];
    let mark = guest.memory.mark();
    let mut failed = 0;
    for (in_queue, (what, at, bytes)) in
        changes.into_iter().map(|it| (false, it)).chain(queue.into_iter().map(|it| (true, it)))
    {
        guest.memory.rewind(mark);
        let rx = RxLayout { data_slot: 128, ..RxLayout::SMALL };
        let mut driver = Driver::prepare(&guest, DriverConfig { rx, ..DriverConfig::default() });
        let base = if in_queue { driver.queue_desc } else { driver.shared };
        let before = guest.memory.read(base + at, bytes.len());
        guest.memory.write(base + at, &bytes);
        assert_ne!(driver.activate(), 0, "{what}");
        assert!(!guest.device.status().active);
        failed += 1;
        guest.memory.write(base + at, &before);
        assert_eq!(driver.activate(), 0, "{what} was the only fault");
    }
    let status = guest.device.status();
    let errors = status.counters.iter().find(|counter| counter.name == "vmxnet3_command_errors").unwrap();
    assert_eq!(errors.value, failed);
}

/// Trap 15: an invalid RSS configuration is refused by ACTIVATE and later; in the latter case the previous one stays.
#[test]
fn trap_15_hostile_rss() {
    let (guest, _port) = Guest::recording();
    let config = DriverConfig { tx_queues: 2, rx_queues: 2, features: feature::RSS, ..DriverConfig::default() };
    let mut driver = Driver::prepare(&guest, config);
    driver.write_rss(&[0; 40], &[0, 2]);
    assert_ne!(driver.activate(), 0, "there is no queue 2");
    driver.write_rss(&[0; 40], &[1]);
    guest.memory.store_u64(driver.shared + 656, 1 << 40);
    assert_ne!(driver.activate(), 0, "nowhere");
    driver.write_rss(&[0; 40], &[1]);
    assert_eq!(driver.activate(), 0);
    driver.finish();
    driver.write_rss(&[0; 40], &[7]);
    assert_ne!(guest.command(command::UPDATE_RSS), 0);
    assert_eq!(deliver(&guest, &Flow::TO_GUEST.udp(b"x")), Received::Delivered);
    assert_eq!(driver.poll(1).len(), 1);
    driver.write_rss(&[0; 40], &[0]);
    assert_eq!(guest.command(command::UPDATE_RSS), 0);
    assert_eq!(deliver(&guest, &Flow::TO_GUEST.udp(b"x")), Received::Delivered);
    assert_eq!((driver.poll(0).len(), driver.poll(1).len()), (1, 0));
}

/// Trap 15: overlapping rings, and descriptors that point to rings, affect only their guest, and the device's work
/// ends.
#[test]
fn trap_15_rings_that_overlap() {
    let (guest, port) = Guest::recording();
    let mut driver = Driver::prepare(&guest, DriverConfig::default());
    let ring = driver.tx[0].ring;
    guest.memory.store_u64(driver.queue_desc + 32, ring);
    guest.memory.store_u64(driver.rx_desc(0) + 32, ring);
    assert_eq!(driver.activate(), 0);
    driver.set_mode(rx_mode::PROMISC);
    for index in 0..64 {
        guest.memory.store_u64(driver.tx[0].desc(index), ring);
        guest.memory.store(driver.tx[0].desc(index) + 12, 3 << 12);
        guest.memory.store(driver.tx[0].desc(index) + 8, 1 << 14 | 64);
    }
    for _ in 0..100 {
        driver.ring(0);
        deliver(&guest, &frame_of(1000));
        assert!(port.take().len() <= 64, "more than a ring in one go");
    }
}

/// Trap 15: a receive buffer that is too small, or at an invalid address, stops the queue, and the driver is told.
#[test]
fn trap_15_hostile_buffers() {
    for (words, error) in [([MEMORY_BASE, 127 | 1 << 31], ERR_SMALL_BUF), ([1 << 45, 1536 | 1 << 31], ERR_INVALID)] {
        let (guest, _port) = Guest::recording();
        let driver = Driver::up(&guest, DriverConfig::default());
        let [ring, ..] = driver.rx[0].bases();
        guest.memory.store_u64(ring, words[0]);
        guest.memory.store_u64(ring + 8, words[1]);
        assert_eq!(deliver(&guest, &frame_of(60)), Received::Inactive);
        assert_eq!((driver.queue_error(1), driver.events()), (error, EVENT_RX));
        assert_eq!(guest.irqs.take(driver.event_vector()), 1);
        assert_eq!(deliver(&guest, &frame_of(60)), Received::Inactive);
        guest.command(command::RESET);
        let mut driver = Driver::up(&guest, DriverConfig::default());
        assert_eq!((deliver(&guest, &frame_of(60)), driver.poll(0).len()), (Received::Delivered, 1));
    }
}

/// Trap 9 and 15: nothing is written after RESET, QUIESCE, clearing Bus Master Enable, or a function reset.
#[test]
fn trap_9_all_dma_ends() {
    let ends: [fn(&Guest); 4] = [
        |guest| assert_eq!(guest.command(command::QUIESCE), 0),
        |guest| assert_eq!(guest.command(command::RESET), 0),
        |guest| guest.set_switches(false, true),
        |guest| guest.device.reset(),
    ];
    for end in ends {
        let (guest, port) = Guest::recording();
        let mut driver = Driver::up(&guest, DriverConfig::default());
        port.set_room(Some(0));
        driver.send(0, &TxPacket::plain(&frame_of(60)));
        end(&guest);
        let interrupts = guest.irqs.total();
        let before = guest.memory.read(MEMORY_BASE, 16 << 20);
        port.set_room(None);
        guest.device.resume_transmit();
        driver.ring(0);
        guest.device.set_link(false);
        guest.device.set_link(true);
        guest.write(1, 0x40, 0xff);
        assert_eq!(deliver(&guest, &frame_of(60)), Received::Inactive);
        guest.command(command::GET_STATS);
        guest.command(command::GET_QUEUE_STATUS);
        assert!(guest.memory.read(MEMORY_BASE, 16 << 20) == before, "memory was written");
        assert_eq!((guest.irqs.total(), port.take()), (interrupts, vec![]));
    }
}
