//! A device and its environment.

use std::sync::Arc;

use pvrdma_packet::MacAddr;
use pvrdma_pci_function::PciFunction;

use super::frames::GUEST_MAC;
use super::{Irqs, Memory, RecordingPort};
use crate::{FramePort, Vmxnet3Config, Vmxnet3Device};

/// A device with its guest's memory and interrupt sink. No driver has accessed it yet.
#[derive(Debug)]
pub struct Guest {
    /// Memory of the guest.
    pub memory: Arc<Memory>,
    /// Interrupts of the guest.
    pub irqs: Arc<Irqs>,
    /// The device.
    pub device: Arc<Vmxnet3Device>,
}

impl Guest {
    /// Creates a device with this configuration and port, whose guest has `bytes` bytes of memory.
    pub fn new(config: Vmxnet3Config, bytes: usize, port: Arc<dyn FramePort>) -> Self {
        Self::with_memory(config, Memory::new(bytes), Arc::default(), port)
    }

    /// Creates a device for a guest that exists already.
    pub fn with_memory(config: Vmxnet3Config, memory: Arc<Memory>, irqs: Arc<Irqs>, port: Arc<dyn FramePort>) -> Self {
        let device = Vmxnet3Device::new(config, Arc::clone(memory.space()), Arc::clone(&irqs) as _, port).unwrap();
        Self { memory, irqs, device }
    }

    /// Creates a device with [`GUEST_MAC`] and 16 MiB of memory, and its port.
    pub fn recording() -> (Self, Arc<RecordingPort>) {
        let port = Arc::new(RecordingPort::default());
        let config = Vmxnet3Config::new("vm1", MacAddr(GUEST_MAC));
        (Self::new(config, 16 << 20, Arc::clone(&port) as _), port)
    }

    /// Reads a register.
    pub fn read(&self, bar: usize, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.device.bar_read(bar, offset, &mut data);
        u32::from_le_bytes(data)
    }

    /// Writes a register, and runs the deferred work.
    pub fn write(&self, bar: usize, offset: u64, value: u32) {
        self.device.bar_write(bar, offset, &value.to_le_bytes()).run(&*self.device);
    }

    /// Writes a command and reads its result.
    pub fn command(&self, command: u32) -> u32 {
        self.write(1, 0x20, command);
        self.read(1, 0x20)
    }

    /// Sets bus mastering, and MSI-X or the legacy line.
    pub fn set_switches(&self, bus_master: bool, msix: bool) {
        self.device.config_write(0x42, &[0, if msix { 0x80 } else { 0 }]);
        self.device.config_write(4, &[2 | if bus_master { 4 } else { 0 }, 0]);
    }
}
