//! Accesses of any size to configuration space and registers, and any frames, between and during changes of the memory
//! that the device reads: shared area, queue descriptors, rings, tables.
#![no_main]

use std::sync::Arc;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use pvrdma_fuzz::{
    input::{Many, Steps},
    vmxnet3::{Address, MeddlingPort, PAGE, PAGES, Word, attack, poke},
};
use pvrdma_link::testing::Attack;
use pvrdma_packet::MacAddr;
use pvrdma_pci_function::PciFunction;
use pvrdma_vmxnet3::testing::frames::{Flow, GUEST_MAC, pattern};
use pvrdma_vmxnet3::testing::{Driver, DriverConfig, Guest, MEMORY_BASE, RxLayout, TxPacket, command};
use pvrdma_vmxnet3::{Frame, Received, Vmxnet3Config};

#[derive(Arbitrary, Debug)]
enum Step {
    ConfigRead(u16, u8),
    ConfigWrite(u16, Many<u8>),
    BusMaster(bool),
    BarRead(u8, Word, u8),
    BarWrite(u8, Word, Many<u8>),
    /// A register of either BAR with its number.
    Register(bool, u8, Word),
    /// Producer indices and masks.
    Doorbell(u8, Word),
    Command(u8, bool),
    Shared(Address),
    Memory(Address, Many<u8>),
    Words(Address, Many<Word>),
    Pointer(Address, Address),
    /// A field of the shared area or of a queue descriptor of the driver.
    Field(bool, u16, Word),
    /// A descriptor: which ring, which one, and its words.
    Descriptor(u8, u8, Address, Word, Word),
    Receive(u8, u16, u16),
    Flush,
    Link(bool),
    Resume(u64),
    Probe(u8, u8, u8),
    Reset,
    /// A frame with a checksum to store: its number, a change of it, the ring, the descriptor and its generation.
    Attack(u8, u16, u8, u8, bool),
}

/// Small rings, so that they wrap.
fn config(queues: u8, features: u8, revision: u8) -> DriverConfig {
    let rx = RxLayout { first: 32, second: 32, head: 1536, body: 512, bodies: 0, data_slot: 128 };
    let queues = queues % 2 + 1;
    DriverConfig {
        tx_queues: queues,
        rx_queues: queues,
        tx_ring: 32,
        rx,
        features: u64::from(features) & 0xd,
        revision: revision % 3 + 1,
        auto_mask: features & 16 != 0,
        ..DriverConfig::default()
    }
}

/// Frames of all kinds.
fn receive(guest: &Guest, kind: u8, len: u16, mss: u16) {
    let flow = Flow { ipv6: kind & 1 != 0, ports: [len, mss], ..Flow::TO_GUEST };
    let data = pattern(usize::from(len) % 60_000);
    let bytes = if kind & 2 != 0 { flow.tcp(1, 0x18, 0, &data) } else { flow.udp(&data) };
    let frame = match kind >> 2 & 3 {
        0 => Frame::new(&bytes, kind & 16 != 0),
        1 => Frame::with_partial_checksum(&bytes, flow.transport_at() as u16, mss),
        _ => Frame::to_be_segmented(&bytes, mss),
    };
    if let Ok(frame) = frame {
        guest.device.receive(&frame);
    }
}

// Long: one arm for each step.
fuzz_target!(|steps: Steps<Step>| {
    let port = Arc::new(MeddlingPort::default());
    let settings = Vmxnet3Config::new("fuzz", MacAddr(GUEST_MAC)).with_intx(true);
    let guest = Guest::new(settings, (PAGES * PAGE) as usize, Arc::clone(&port) as _);
    port.meddle_with(&guest.memory);
    let device = &guest.device;
    let mut areas = [0; 2];
    let mut rings = Vec::new();
    for step in &steps.0 {
        match step {
            Step::ConfigRead(at, len) => {
                device.config_read(usize::from(*at) % 260, &mut vec![0xa5; usize::from(*len)]);
            }
            Step::ConfigWrite(at, data) => device.config_write(usize::from(*at) % 260, &data.0),
            Step::BusMaster(on) => guest.set_switches(*on, true),
            Step::BarRead(bar, at, len) => {
                device.bar_read(usize::from(*bar % 4), at.get().into(), &mut vec![0xa5; usize::from(*len)]);
            }
            Step::BarWrite(bar, at, data) => {
                let _ = device.bar_write(usize::from(*bar % 4), at.get().into(), &data.0);
            }
            Step::Register(bar, register, value) => {
                guest.write((*bar).into(), u64::from(*register) * 8, value.get());
                guest.read((*bar).into(), u64::from(*register) * 8);
            }
            Step::Doorbell(which, value) => {
                let base = [0x000, 0x600, 0x800, 0xa00][usize::from(which % 4)];
                guest.write(0, base + u64::from(which / 4 % 4) * 8, value.get());
            }
            Step::Command(number, get) => {
                let base = if *get { 0xf00d_0000 } else { 0xcafe_0000 };
                guest.command(base + u32::from(number % 18));
            }
            Step::Shared(address) => {
                guest.write(1, 0x10, address.get() as u32);
                guest.write(1, 0x18, (address.get() >> 32) as u32);
            }
            Step::Memory(address, data) => poke(&guest.memory, address.get(), &data.0),
            Step::Words(at, words) => {
                let bytes: Vec<u8> = words.0.iter().flat_map(|word| word.get().to_le_bytes()).collect();
                poke(&guest.memory, at.get() & !3, &bytes);
            }
            Step::Pointer(at, address) => poke(&guest.memory, at.get() & !7, &address.get().to_le_bytes()),
            Step::Field(queues, at, value) => {
                let at = areas[usize::from(*queues)] + u64::from(at % 1024) / 4 * 4;
                poke(&guest.memory, at, &value.get().to_le_bytes());
            }
            Step::Descriptor(ring, index, address, word2, word3) => {
                let ring: u64 = rings.get(usize::from(*ring) % rings.len().max(1)).copied().unwrap_or(0);
                let at = ring + u64::from(index % 32) * 16;
                poke(&guest.memory, at, &address.get().to_le_bytes());
                poke(&guest.memory, at + 8, &word2.get().to_le_bytes());
                poke(&guest.memory, at + 12, &word3.get().to_le_bytes());
            }
            Step::Receive(kind, len, mss) => receive(&guest, *kind, *len, *mss),
            Step::Flush => device.flush(),
            Step::Link(up) => device.set_link(*up),
            Step::Resume(mood) => {
                port.set_mood(*mood);
                device.resume_transmit();
            }
            Step::Probe(queues, features, revision) => {
                guest.memory.rewind(MEMORY_BASE);
                // Guest memory may have been overwritten, so only memory that the driver allocates from now on matters.
                guest.command(command::RESET);
                let mut driver = Driver::prepare(&guest, config(*queues, *features, *revision));
                if driver.activate() == 0 {
                    driver.finish();
                }
                areas = [driver.shared, driver.queue_desc];
                rings = driver.tx.iter().flat_map(|queue| [queue.ring, queue.completions]).collect();
                rings.extend(driver.rx.iter().flat_map(|queue| queue.bases()));
            }
            Step::Reset => device.reset(),
            Step::Attack(number, change, ring, index, generation) => {
                let Attack { frame, start, at, .. } = attack(*number, *change);
                let bytes = MEMORY_BASE + (PAGES - 1) * PAGE;
                poke(&guest.memory, bytes, &frame);
                let ring: u64 = rings.get(usize::from(*ring) % rings.len().max(1)).copied().unwrap_or(0);
                let desc = ring + u64::from(index % 32) * 16;
                let word2 = u32::from(at) << 18 | u32::from(*generation) << 14 | frame.len() as u32;
                // A checksum, the end of the packet, and a completion.
                let word3 = 2 << 10 | 1 << 12 | 1 << 13 | u32::from(start);
                poke(&guest.memory, desc, &bytes.to_le_bytes());
                poke(&guest.memory, desc + 12, &word3.to_le_bytes());
                poke(&guest.memory, desc + 8, &word2.to_le_bytes());
                guest.write(0, 0x600, u32::from(*index));
            }
        }
        device.run_deferred();
    }
    end(&guest, &port);
});

/// Ends the device: afterwards neither memory nor interrupts change, and the next driver finds a working device.
fn end(guest: &Guest, port: &MeddlingPort) {
    guest.device.reset();
    let (memory, interrupts) = (guest.memory.read(MEMORY_BASE, (PAGES * PAGE) as usize), guest.irqs.total());
    port.take();
    for queue in 0..8 {
        guest.write(0, 0x600 + queue * 8, 1);
    }
    guest.device.resume_transmit();
    guest.device.set_link(false);
    guest.device.set_link(true);
    let bytes = Flow::TO_GUEST.udp(b"late");
    assert_eq!(guest.device.receive(&Frame::new(&bytes, false).unwrap()), Received::Inactive);
    guest.device.flush();
    assert!(guest.memory.read(MEMORY_BASE, memory.len()) == memory, "memory was written after a reset");
    assert_eq!((guest.irqs.total(), port.take()), (interrupts, 0));
    guest.memory.rewind(MEMORY_BASE);
    // For the last driver, the port changes only memory far from its rings, and always has room.
    port.set_mood(0);
    let mut driver = Driver::up(guest, config(0, 5, 2));
    assert_eq!(guest.device.receive(&Frame::new(&bytes, false).unwrap()), Received::Delivered);
    assert_eq!(driver.poll(0).len(), 1);
    port.set_mood(0);
    driver.send(0, &TxPacket::plain(&Flow::TO_PEER.udp(b"out")));
    assert_eq!(port.take(), 1);
}
