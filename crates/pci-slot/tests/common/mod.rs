//! A slot as a guest sees it: accessible only through ports and memory.
#![allow(dead_code, unreachable_pub, clippy::allow_attributes, reason = "each test uses some of it")]

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_pci_function::{Bar, Deferred, InterruptSink, MsixPlace, PciFunction};
use pvrdma_pci_slot::{BarMap, ConfigPorts, InterruptLine, Message, PciBus};
use vm_device::bus::{MmioAddress, PioAddress};
use vm_device::{DeviceMmio, DevicePio};

/// Number of the tests' slot.
pub const SLOT: u8 = 0x10;

/// A machine with a bus.
#[derive(Clone, Debug)]
pub struct Machine {
    ports: ConfigPorts,
    bars: BarMap,
}

impl Machine {
    pub fn new(bus: &Arc<PciBus>) -> Self {
        Self { ports: ConfigPorts::new(Arc::clone(bus)), bars: BarMap::new(Arc::clone(bus)) }
    }

    pub fn port_write(&self, port: u16, data: &[u8]) {
        self.ports.pio_write(PioAddress(0xcf8), port - 0xcf8, data);
    }

    pub fn port_read(&self, port: u16, data: &mut [u8]) {
        self.ports.pio_read(PioAddress(0xcf8), port - 0xcf8, data);
    }

    fn select(&self, slot: u8, function: usize, register: usize) {
        let address = 1 << 31 | u32::from(slot) << 11 | u32::try_from(function << 8 | register & 0xfc).unwrap();
        self.port_write(0xcf8, &address.to_le_bytes());
    }

    /// Reads any part of configuration space, in accesses of the sizes that the ports support.
    pub fn config_read(&self, slot: u8, function: usize, offset: usize, data: &mut [u8]) {
        for (index, byte) in data.iter_mut().enumerate() {
            self.select(slot, function, offset + index);
            self.port_read(0xcfc + u16::try_from((offset + index) % 4).unwrap(), std::slice::from_mut(byte));
        }
    }

    pub fn config(&self, slot: u8, function: usize, offset: usize) -> u32 {
        self.select(slot, function, offset);
        let mut data = [0; 4];
        self.port_read(0xcfc, &mut data);
        u32::from_le_bytes(data)
    }

    pub fn config_write(&self, slot: u8, function: usize, offset: usize, data: &[u8]) {
        self.select(slot, function, offset);
        self.port_write(0xcfc + u16::try_from(offset % 4).unwrap(), data);
    }

    pub fn read(&self, address: u64) -> u32 {
        let mut data = [0; 4];
        self.bars.mmio_read(MmioAddress(0), address, &mut data);
        u32::from_le_bytes(data)
    }

    pub fn read_bytes(&self, address: u64, data: &mut [u8]) {
        self.bars.mmio_read(MmioAddress(0), address, data);
    }

    pub fn write(&self, address: u64, value: u32) {
        self.write_bytes(address, &value.to_le_bytes());
    }

    pub fn write_bytes(&self, address: u64, data: &[u8]) {
        self.bars.mmio_write(MmioAddress(0), address, data);
    }

    /// Address of a BAR.
    pub fn bar(&self, slot: u8, function: usize, bar: usize) -> u64 {
        let low = self.config(slot, function, 0x10 + bar * 4);
        let high = if low & 4 == 0 { 0 } else { self.config(slot, function, 0x14 + bar * 4) };
        u64::from(high) << 32 | u64::from(low & !0xf)
    }
}

/// A function behind a slot, for a driver that accesses single functions.
#[derive(Debug)]
pub struct BehindSlot {
    pub machine: Machine,
    pub function: usize,
}

impl PciFunction for BehindSlot {
    fn bars(&self) -> [Option<Bar>; 6] {
        [None; 6]
    }

    fn config_size(&self) -> usize {
        256
    }

    fn config_read(&self, offset: usize, data: &mut [u8]) {
        self.machine.config_read(SLOT, self.function, offset, data);
    }

    fn config_write(&self, offset: usize, data: &[u8]) {
        self.machine.config_write(SLOT, self.function, offset, data);
    }

    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]) {
        self.machine.read_bytes(self.machine.bar(SLOT, self.function, bar) + offset, data);
    }

    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]) -> Deferred {
        self.machine.write_bytes(self.machine.bar(SLOT, self.function, bar) + offset, data);
        Deferred::Nothing
    }

    /// The slot's affair.
    fn run_deferred(&self) {}

    fn msix(&self) -> Option<MsixPlace> {
        None
    }

    fn reset(&self) {}
}

/// An interrupt route to a sink. The vector is the data that the guest wrote.
pub struct Line {
    sink: Arc<dyn InterruptSink>,
    data: Mutex<u16>,
}

impl Line {
    pub fn to(sink: &Arc<impl InterruptSink + 'static>) -> Self {
        Self { sink: Arc::clone(sink) as _, data: Mutex::new(0) }
    }
}

impl InterruptLine for Line {
    fn route(&self, message: Message) -> io::Result<()> {
        *self.data.lock() = u16::try_from(message.data).unwrap();
        Ok(())
    }

    fn trigger(&self) {
        self.sink.msix(*self.data.lock());
    }
}
