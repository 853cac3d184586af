//! A device with its environment.

use std::sync::Arc;

use pvrdma_base::Random;
use pvrdma_guest_memory::DmaSpace;
use pvrdma_packet::MacAddr;
use pvrdma_pci_function::PciFunction;
use pvrdma_verbs::Backend;
use pvrdma_verbs_types::GidType;

use super::{Driver, GuestMemory, Irqs};
use crate::config::DeviceConfig;
use crate::device::PvrdmaDevice;

/// A device with its guest's memory and interrupts, in power-on state.
#[derive(Debug)]
pub struct TestDevice<B: Backend> {
    /// The guest's memory.
    pub memory: Arc<GuestMemory>,
    /// The guest's interrupts.
    pub irqs: Arc<Irqs>,
    /// The device.
    pub device: Arc<PvrdmaDevice<B::Hca>>,
}

impl<B: Backend<Hca: 'static>> TestDevice<B> {
    /// Creates the device of host 1 with this configuration and this memory. Its random numbers are the same each time.
    ///
    /// # Panics
    /// The device cannot be created.
    pub fn new(backend: &B, config: DeviceConfig, memory: Arc<GuestMemory>) -> Self {
        Self::of_host(1, backend, config, memory)
    }

    /// As [`Self::new`], for another host.
    ///
    /// # Panics
    /// The device cannot be created.
    pub fn of_host(host: u8, backend: &B, config: DeviceConfig, memory: Arc<GuestMemory>) -> Self {
        let (station, config) = (backend.station(Self::mac(host)).unwrap(), config.with_random(Random::Seed(0)));
        let irqs = Irqs::new();
        let device = PvrdmaDevice::new(config, Arc::clone(memory.space()), Arc::clone(&irqs) as _, &station).unwrap();
        Self { memory, irqs, device }
    }

    /// Creates another device for the same guest, with this space for its memory.
    ///
    /// # Panics
    /// The device cannot be created.
    pub fn successor<S: Backend<Hca: 'static>>(
        &self,
        backend: &S,
        config: DeviceConfig,
        space: Arc<DmaSpace>,
    ) -> TestDevice<S> {
        let (memory, irqs) = (Arc::clone(&self.memory), Arc::clone(&self.irqs));
        let (station, config) = (backend.station(self.device.mac()).unwrap(), config.with_random(Random::Seed(1)));
        let device = PvrdmaDevice::new(config, space, Arc::clone(&irqs) as _, &station).unwrap();
        TestDevice { memory, irqs, device }
    }

    /// Returns the MAC address of a host: 52:54:00:00:00:`host`.
    pub const fn mac(host: u8) -> MacAddr {
        MacAddr([0x52, 0x54, 0, 0, 0, host])
    }

    /// Returns the configuration of most tests: version 20, RoCE v2.
    pub fn config(host: u8) -> DeviceConfig {
        DeviceConfig::new(format!("vm{host}"))
    }

    /// Returns the configuration for a version of the interface, with an encapsulation that the version supports.
    pub fn config_of_version(version: u32) -> DeviceConfig {
        let roce = if version == 17 { GidType::RoceV1 } else { GidType::RoceV2 };
        DeviceConfig { version, roce, ..Self::config(1) }
    }

    /// Returns the device as used by a VMM.
    pub fn function(&self) -> Arc<dyn PciFunction> {
        Arc::clone(&self.device) as Arc<dyn PciFunction>
    }

    /// Probes the device as the kernel driver does.
    ///
    /// # Panics
    /// The probe fails.
    pub fn driver(&self) -> Driver {
        Driver::probe(self.function(), &self.memory, &self.irqs).unwrap()
    }
}
