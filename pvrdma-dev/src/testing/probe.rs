//! Probe of the driver, up to the active device.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use parking_lot::Mutex;
use pvrdma_pci_function::PciFunction;
use thiserror::Error;

use super::driver::{EventRing, Shared};
use super::{Driver, GuestMemory, Irqs, PciAccess, register};

/// Reason why a probe failed (spec §2.2, in the driver's order).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ProbeError {
    /// The driver does not support this version.
    #[error("device version {0}")]
    Version(u32),
    /// The mode is not RoCE.
    #[error("device mode {0}")]
    Mode(u8),
    /// The GID types are neither exactly RoCE v1 nor exactly v2.
    #[error("GID types {0:#x}")]
    GidTypes(u8),
    /// The number is not a power of two.
    #[error("{0} UAR pages")]
    Uars(u32),
    /// ERR is set after ACTIVATE.
    #[error("activation failed, ERR is {0:#x}")]
    Activate(u32),
}

/// Options of a probe.
#[derive(Clone, Copy, Debug)]
pub struct ProbeOptions {
    /// Version that the driver claims.
    pub driver_version: u32,
    /// Use MSI-X; otherwise the legacy line.
    pub msix: bool,
    /// Pages of each event ring, ring state included.
    pub event_ring_pages: usize,
}

impl Default for ProbeOptions {
    fn default() -> Self {
        Self { driver_version: 20, msix: true, event_ring_pages: 4 }
    }
}

impl Driver {
    /// Probes the device as the kernel driver does.
    ///
    /// # Errors
    /// The errors with which the kernel driver's probe fails.
    pub fn probe(
        function: Arc<dyn PciFunction>,
        memory: &Arc<GuestMemory>,
        irqs: &Arc<Irqs>,
    ) -> Result<Self, ProbeError> {
        Self::probe_with(function, memory, irqs, ProbeOptions::default())
    }

    /// Probes the device with options.
    ///
    /// # Errors
    /// As for [`Self::probe`].
    pub fn probe_with(
        function: Arc<dyn PciFunction>,
        memory: &Arc<GuestMemory>,
        irqs: &Arc<Irqs>,
        options: ProbeOptions,
    ) -> Result<Self, ProbeError> {
        let pci = PciAccess(function);
        let uar_base = pci.enable();
        let version = pci.register(register::VERSION);
        if version < 17 {
            return Err(ProbeError::Version(version));
        }
        let dsr = memory.alloc_page();
        let slots = [memory.alloc_page(), memory.alloc_page()];
        let asynchronous = EventRing::new(memory, options.event_ring_pages, 8);
        let notifications = EventRing::new(memory, options.event_ring_pages, 4);
        let shared = Shared {
            pci,
            memory: Arc::clone(memory),
            irqs: Arc::clone(irqs),
            options,
            version,
            uar_base,
            dsr,
            slots,
            asynchronous,
            notifications,
            command: Mutex::new(()),
            uars: Mutex::new(vec![true]),
            next_va: AtomicU64::new(0x7f00_0000_0000),
        };
        let driver = Self(Arc::new(shared));
        driver.handshake();
        if let Err(error) = driver.check_caps() {
            driver.forget();
            return Err(error);
        }
        driver.pci().set_msix(options.msix);
        driver.pci().set_register(register::IMR, 0);
        driver.pci().set_register(register::CTL, 0);
        match driver.pci().register(register::ERR) {
            0 => Ok(driver),
            error => {
                driver.pci().set_register(register::IMR, u32::MAX);
                driver.forget();
                Err(ProbeError::Activate(error))
            }
        }
    }

    fn handshake(&self) {
        let Shared { memory, dsr, slots, asynchronous, notifications, options, .. } = &*self.0;
        let mut bytes = [0; 72];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &options.driver_version.to_le_bytes());
        put(8, &0x46_u32.to_le_bytes());
        put(16, &slots[0].to_le_bytes());
        put(24, &slots[1].to_le_bytes());
        for (at, ring) in [(32, asynchronous), (48, notifications)] {
            put(at, &(options.event_ring_pages as u32).to_le_bytes());
            put(at + 8, &ring.directory.addr.to_le_bytes());
        }
        let pfn = self.0.uar_base >> 12;
        put(64, &if self.0.version < 19 { u64::from(pfn as u32) } else { pfn }.to_le_bytes());
        memory.write(*dsr, &bytes);
        self.write_dsr_address();
    }

    /// Writes DSRLOW and DSRHIGH, which starts the handshake.
    pub fn write_dsr_address(&self) {
        self.pci().set_register(register::DSRLOW, self.0.dsr as u32);
        self.pci().set_register(register::DSRHIGH, (self.0.dsr >> 32) as u32);
    }

    fn check_caps(&self) -> Result<(), ProbeError> {
        let (mode, gid_types, uars) = (self.cap_u8(200), self.cap_u8(203), self.cap_u32(188));
        if mode != 0 {
            return Err(ProbeError::Mode(mode));
        }
        let supported = match self.0.version {
            17 => gid_types == 1,
            _ => gid_types == 1 || gid_types == 2,
        };
        if !supported {
            return Err(ProbeError::GidTypes(gid_types));
        }
        if !uars.is_power_of_two() {
            return Err(ProbeError::Uars(uars));
        }
        self.0.uars.lock().resize(uars as usize, false);
        Ok(())
    }
}
