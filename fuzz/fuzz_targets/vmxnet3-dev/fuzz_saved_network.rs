//! Saved states with changes, and any bytes, restored into a device whose guest has the memory of the saved one. The
//! device must then be usable, or as after a reset.
#![no_main]

use std::sync::{Arc, OnceLock};

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use pvrdma_packet::MacAddr;
use pvrdma_pci_function::{Migratable, PciFunction};
use pvrdma_saved_state::Header;
use pvrdma_saved_state::testing::{Change, Records, change, join, split};
use pvrdma_vmxnet3::testing::frames::{Flow, GUEST_MAC, pattern};
use pvrdma_vmxnet3::testing::{Driver, DriverConfig, Guest, MEMORY_BASE, Memory, RecordingPort, RxLayout, TxPacket};
use pvrdma_vmxnet3::{Frame, FramePort, Vmxnet3Config};

/// Numbers that stand for a [`Change`].
type Edit = (u8, u16, u16, u8);

#[derive(Arbitrary, Debug)]
enum State {
    /// The saved state, with changes.
    Changed(Vec<Edit>),
    /// Its beginning, with other bytes behind it.
    Cut(u16, Vec<u8>),
    Any(Vec<u8>),
}

/// A saved device: its state, and its guest's memory.
struct Saved {
    header: Header,
    records: Records,
    memory: Arc<Memory>,
}

fn config() -> Vmxnet3Config {
    Vmxnet3Config::new("vm1", MacAddr(GUEST_MAC))
}

fn saved() -> &'static Saved {
    static SAVED: OnceLock<Saved> = OnceLock::new();
    SAVED.get_or_init(|| {
        let port = Arc::new(RecordingPort::default());
        let guest = Guest::new(config(), 4 << 20, Arc::clone(&port) as Arc<dyn FramePort>);
        let rx = RxLayout { first: 32, second: 32, head: 1536, body: 512, bodies: 0, data_slot: 128 };
        let driver = DriverConfig { tx_queues: 2, rx_queues: 2, tx_ring: 32, rx, ..DriverConfig::default() };
        let mut driver = Driver::up(&guest, driver);
        port.set_room(Some(0));
        let packet = Flow::TO_GUEST.udp(&pattern(100));
        driver.tx[0].post(&guest.memory, &TxPacket::plain(&packet));
        guest.device.receive(&Frame::new(&packet, false).unwrap());
        guest.device.pause();
        let mut state = Vec::new();
        guest.device.save(&mut state).unwrap();
        let (header, records) = split(&state).unwrap();
        Saved { header, records, memory: Arc::clone(&guest.memory) }
    })
}

impl State {
    fn bytes(&self) -> Vec<u8> {
        let Saved { header, records, .. } = saved();
        match self {
            Self::Changed(edits) => {
                let mut records = records.clone();
                change(&mut records, edits.iter().copied().map(Change::from));
                join(header, &records).unwrap_or_default()
            }
            Self::Cut(at, rest) => {
                let state = join(header, records).unwrap();
                [&state[..usize::from(*at) % state.len()], rest].concat()
            }
            Self::Any(bytes) => bytes.clone(),
        }
    }
}

fuzz_target!(|state: State| {
    let port = Arc::new(RecordingPort::default());
    let memory = saved().memory.copied();
    let guest = Guest::with_memory(config(), memory, Arc::default(), port as Arc<dyn FramePort>);
    let bytes = state.bytes();
    if Migratable::restore(&*guest.device, &mut bytes.as_slice()).is_ok() {
        // The restored device can be saved, and continues.
        guest.device.save(&mut Vec::new()).unwrap();
        if guest.device.resume().is_ok() {
            for bytes in [Flow::TO_GUEST.udp(&pattern(100)), Flow::TO_GUEST.tcp(1, 0x18, 0, &pattern(1400))] {
                guest.device.receive(&Frame::new(&bytes, false).unwrap());
            }
            for queue in 0..8 {
                guest.write(0, 0x600 + queue * 0x100, 5);
                guest.write(0, 0x800 + queue * 0x200, 5);
            }
            guest.device.flush();
            guest.device.resume_transmit();
        }
        guest.device.reset();
    }
    // As after a reset.
    assert!(!guest.device.status().active);
    guest.memory.rewind(MEMORY_BASE);
    drop(Driver::up(&guest, DriverConfig::default()));
});
