//! Identity, life cycle, interrupts without MSI-X, two guests on a cable.

#![allow(missing_docs, clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pvrdma_packet::MacAddr;
use pvrdma_pci_function::PciFunction;
use pvrdma_vmxnet3::testing::frames::{Flow, GUEST_MAC, PEER_MAC, pattern};
use pvrdma_vmxnet3::testing::{
    Cable, Driver, DriverConfig, Guest, MEMORY_BASE, RxLayout, TxOffload, TxPacket, command, feature,
};
use pvrdma_vmxnet3::{ConfigError, Frame, FramePort, Received, Vmxnet3Config, Vmxnet3Device};

fn config_word(device: &Vmxnet3Device, at: usize) -> u32 {
    let mut data = [0; 4];
    device.config_read(at, &mut data);
    u32::from_le_bytes(data)
}

#[test]
fn identity() {
    let (guest, port) = Guest::recording();
    let device = &guest.device;
    assert_eq!((config_word(device, 0), config_word(device, 8)), (0x07b0_15ad, 0x0200_0001));
    assert_eq!((config_word(device, 0x0c) >> 16, config_word(device, 0x40) >> 16), (0, 15));
    let sizes: Vec<_> = device.bars().iter().map(|bar| bar.map(|bar| bar.size)).collect();
    assert_eq!(sizes, [Some(0x1000), Some(0x1000), Some(0x2000), None, None, None]);
    let multifunction = Vmxnet3Config::new("x", MacAddr(GUEST_MAC)).with_multifunction(true).with_intx(true);
    let other = Guest::new(multifunction.clone(), 4096, Arc::clone(&port) as _);
    assert_eq!((config_word(&other.device, 0x0c) >> 16, config_word(&other.device, 0x3c) >> 8), (0x80, 1));
    for vectors in [2, 26] {
        let config = multifunction.clone().with_vectors(vectors);
        let made =
            Vmxnet3Device::new(config, Arc::clone(guest.memory.space()), guest.irqs.clone(), Arc::clone(&port) as _);
        assert_eq!(made.err(), Some(ConfigError::Vectors(vectors)));
    }
}

#[test]
fn registers_and_commands_before_a_driver() {
    let (guest, _port) = Guest::recording();
    assert_eq!((guest.read(1, 0), guest.read(1, 8)), (7, 1));
    assert_eq!((guest.read(1, 0x28), guest.read(1, 0x30)), (u32::from_le_bytes([0x52, 0x54, 0, 0]), 0x100));
    assert_eq!(guest.command(command::GET_CONF_INTR), 0);
    assert_ne!(guest.command(command::GET_TXDATA_DESC_SIZE), 128, "unknown before revision 3 is chosen");
    for revision in [8, 3, 0, 4] {
        guest.write(1, 0, revision);
    }
    assert_eq!(guest.command(command::GET_TXDATA_DESC_SIZE), 128);
    assert_eq!(guest.command(0xf00d_0003), guest.read(1, 0x28));
    assert_eq!(guest.command(0xf00d_0004), guest.read(1, 0x30));
    for refused in [command::ACTIVATE, 0xcafe_0010, 0xf00d_0014, 0] {
        assert_ne!(guest.command(refused), 0, "{refused:#x}");
    }
    guest.set_switches(true, true);
    assert_ne!(guest.command(command::ACTIVATE), 0, "no shared area");
    for harmless in [command::QUIESCE, command::RESET, command::UPDATE_RX_MODE, command::GET_STATS] {
        assert_eq!(guest.command(harmless), 0);
    }
    guest.device.reset();
    assert_ne!(guest.command(command::GET_TXDATA_DESC_SIZE), 128, "a reset discards the chosen size");
}

fn exchange(driver: &mut Driver<'_>, port: &pvrdma_vmxnet3::testing::RecordingPort) {
    driver.send(0, &TxPacket::plain(&Flow::TO_PEER.udp(b"out")));
    assert_eq!((port.take().len(), driver.reap(0)), (1, 1));
    let bytes = Flow::TO_GUEST.udp(b"in");
    assert_eq!(driver.guest.device.receive(&Frame::new(&bytes, false).unwrap()), Received::Delivered);
    assert_eq!(driver.poll(0).len(), 1);
}

/// A driver is started and ended repeatedly, each time with other queues.
#[test]
fn drivers_come_and_go() {
    let (guest, port) = Guest::recording();
    let mark = guest.memory.mark();
    for round in 0..20_u8 {
        guest.memory.rewind(mark);
        let queues = round % 8 + 1;
        let config =
            DriverConfig { tx_queues: queues, rx_queues: queues, revision: round % 3 + 1, ..Default::default() };
        let mut driver = Driver::up(&guest, config);
        exchange(&mut driver, &port);
        if round % 2 == 0 {
            assert_eq!((guest.command(command::QUIESCE), guest.command(command::RESET)), (0, 0));
        } else {
            guest.device.reset();
        }
        assert!(!guest.device.status().active);
    }
    // The driver restarts the device at the start of its rings, without a regular end.
    guest.memory.rewind(mark);
    let mut driver = Driver::up(&guest, DriverConfig::default());
    exchange(&mut driver, &port);
    let mut again = Driver::up(&guest, DriverConfig::default());
    exchange(&mut again, &port);
}

#[test]
fn the_legacy_line() {
    let port = Arc::new(pvrdma_vmxnet3::testing::RecordingPort::default());
    let config = Vmxnet3Config::new("vm1", MacAddr(GUEST_MAC)).with_intx(true);
    let guest = Guest::new(config, 16 << 20, port as _);
    let mut driver = Driver::up(&guest, DriverConfig { msix: false, auto_mask: true, ..DriverConfig::default() });
    let bytes = Flow::TO_GUEST.udp(b"in");
    for round in 1..4 {
        guest.device.receive(&Frame::new(&bytes, false).unwrap());
        guest.device.flush();
        assert_eq!(guest.irqs.line(), (true, round));
        assert_eq!(config_word(&guest.device, 4) >> 19 & 1, 1, "interrupt status");
        assert_eq!((guest.read(1, 0x38), guest.read(1, 0x38)), (1, 0));
        assert_eq!(guest.irqs.line(), (false, round));
        assert_eq!(driver.poll(0).len(), 1);
        driver.unmask(0);
    }
    assert_eq!(guest.irqs.total(), 0);
}

/// While bus mastering is off, nothing happens; waiting work continues when it is on again.
#[test]
fn bus_mastering_comes_back() {
    let (guest, port) = Guest::recording();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    guest.set_switches(false, true);
    driver.send(0, &TxPacket::plain(&Flow::TO_PEER.udp(b"out")));
    assert_eq!((port.take(), driver.reap(0)), (vec![], 0));
    guest.set_switches(true, true);
    guest.device.run_deferred();
    assert_eq!((port.take().len(), driver.reap(0), driver.queue_error(0)), (1, 1, 0));
}

struct Pair {
    guests: [Guest; 2],
    cables: [Arc<Cable>; 2],
}

fn pair() -> Pair {
    let cables = [Arc::new(Cable::default()), Arc::new(Cable::default())];
    let guest = |mac, cable: &Arc<Cable>| {
        let port: Arc<dyn FramePort> = Arc::clone(cable) as _;
        Guest::new(Vmxnet3Config::new("vm", MacAddr(mac)), 16 << 20, port)
    };
    let guests = [guest(GUEST_MAC, &cables[0]), guest(PEER_MAC, &cables[1])];
    cables[0].connect(&guests[1].device);
    cables[1].connect(&guests[0].device);
    Pair { guests, cables }
}

/// A stream of long frames between guests, to a slow receiver: no frame is lost, and all are in order.
#[test]
fn a_stream_between_guests_loses_nothing() {
    for (features, rx, mtu) in [
        (feature::LRO | feature::RXCSUM, RxLayout::SMALL, 1500),
        (feature::RXCSUM, RxLayout { data_slot: 256, ..RxLayout::JUMBO }, 9000),
    ] {
        let Pair { guests: [a, b], cables } = pair();
        let config = DriverConfig { features, rx, mtu, ..DriverConfig::default() };
        let (mut sender, mut receiver) = (Driver::up(&a, config), Driver::up(&b, config));
        let (mut sent, mut expected, mut got) = (0_u32, Vec::new(), Vec::new());
        while sent < 200 {
            while sent < 200 && sender.tx[0].free() >= 20 {
                let len = [1, 100, 1448, 7000][sent as usize % 4];
                let data: Vec<u8> = pattern(len).iter().map(|byte| byte ^ sent.to_le_bytes()[0]).collect();
                let open = Flow::TO_PEER.left_open(Flow::TO_PEER.tcp(sent, 0x18, 0, &data), 16, true);
                let offload = TxOffload::Segment { header: 54, mss: 1448 };
                sender.send(0, &TxPacket::in_parts(&open, 1000, offload));
                expected.extend(data);
                sent += 1;
            }
            let packets = receiver.poll_some(0, 5);
            assert!(packets.iter().all(|packet| packet.checksum_verified));
            got.extend(packets.iter().flat_map(|packet| packet.bytes[54..].to_vec()));
            sender.reap(0);
        }
        while got.len() < expected.len() {
            let packets = receiver.poll_some(0, 5);
            assert!(!packets.is_empty(), "stuck with {} of {} bytes", got.len(), expected.len());
            got.extend(packets.iter().flat_map(|packet| packet.bytes[54..].to_vec()));
        }
        assert!(got == expected);
        sender.reap(0);
        assert_eq!((sender.tx[0].free(), cables[0].is_waiting()), (63, false));
    }
}

/// Several threads deliver frames while the device is reset. After a reset nothing is written, and no thread waits for
/// ever.
#[test]
fn resets_end_delivery_of_other_threads() {
    let (guest, port) = Guest::recording();
    port.set_offloads(true, true);
    let mark = guest.memory.mark();
    let (stop, delivered) = (AtomicBool::new(false), AtomicU64::new(0));
    let bytes = Flow::TO_GUEST.udp(&pattern(1000));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Acquire) {
                    let received = guest.device.receive(&Frame::new(&bytes, false).unwrap());
                    guest.device.flush();
                    delivered.fetch_add(u64::from(received == Received::Delivered), Ordering::AcqRel);
                }
            });
        }
        // The other threads are also stopped if an assertion fails.
        let _end = EndOnDrop(&stop);
        for round in 0..50 {
            guest.memory.rewind(mark);
            let mut driver = Driver::up(&guest, DriverConfig::default());
            let before = delivered.load(Ordering::Acquire);
            while delivered.load(Ordering::Acquire) < before + 100 {
                driver.poll(0);
                driver.send(0, &TxPacket::plain(&bytes));
                driver.reap(0);
                port.take();
            }
            match round % 3 {
                0 => assert_eq!(guest.command(command::QUIESCE), 0),
                1 => assert_eq!(guest.command(command::RESET), 0),
                _ => guest.set_switches(false, true),
            }
            let interrupts = guest.irqs.total();
            let first = guest.memory.read(MEMORY_BASE, 2 << 20);
            for _ in 0..20 {
                assert_eq!(guest.device.receive(&Frame::new(&bytes, false).unwrap()), Received::Inactive);
            }
            assert!(guest.memory.read(MEMORY_BASE, 2 << 20) == first, "written after the end");
            assert_eq!(guest.irqs.total(), interrupts);
        }
    });
}

/// Tells other threads to end.
struct EndOnDrop<'a>(&'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Traffic in both directions, with resets and filter changes, on two threads: the order of locks prevents deadlocks.
#[test]
fn two_guests_do_not_wait_for_each_other() {
    let Pair { guests, .. } = pair();
    std::thread::scope(|scope| {
        for (guest, flow) in guests.iter().zip([Flow::TO_PEER, Flow::TO_GUEST]) {
            scope.spawn(move || {
                let mark = guest.memory.mark();
                for round in 0..60_u32 {
                    guest.memory.rewind(mark);
                    let mut driver = Driver::up(guest, DriverConfig::default());
                    for number in 0..200_u32 {
                        if driver.tx[0].free() > 0 {
                            driver.send(0, &TxPacket::plain(&flow.udp(&pattern(200))));
                        }
                        driver.reap(0);
                        driver.poll(0);
                        match number % 40 {
                            7 => driver.set_features(u64::from(round) & 7),
                            14 => driver.set_vlan(5, true),
                            21 => guest.device.set_link(number % 80 > 40),
                            28 => drop(driver.stats(0)),
                            _ => {}
                        }
                    }
                    guest.device.set_link(true);
                    if round % 2 == 0 {
                        guest.command(command::RESET);
                    } else {
                        guest.set_switches(false, true);
                    }
                }
            });
        }
    });
}
