//! Accesses of the guest's PCI core and of the driver to the function.

use std::fmt;
use std::sync::Arc;

use pvrdma_pci_function::PciFunction;

/// Registers of BAR 1 (spec §2.1).
#[expect(missing_docs, reason = "the names of the specification")]
pub mod register {
    pub const VERSION: u64 = 0x00;
    pub const DSRLOW: u64 = 0x04;
    pub const DSRHIGH: u64 = 0x08;
    pub const CTL: u64 = 0x0c;
    pub const REQUEST: u64 = 0x10;
    pub const ERR: u64 = 0x14;
    pub const ICR: u64 = 0x18;
    pub const IMR: u64 = 0x1c;
}

const COMMAND: usize = 0x04;
const BAR_0: usize = 0x10;
const CAPABILITIES: usize = 0x34;
const MSIX: u8 = 0x11;

/// Addresses of the BARs, as assigned by a platform's firmware.
const BAR_ADDRESSES: [u64; 3] = [0xfebd_0000, 0xfebe_0000, 0x80_0000_0000];

/// Access to a function.
#[derive(Clone)]
pub struct PciAccess(pub Arc<dyn PciFunction>);

impl fmt::Debug for PciAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PciAccess")
    }
}

impl PciAccess {
    /// Reads a word of configuration space.
    pub fn config(&self, offset: usize) -> u32 {
        let mut data = [0; 4];
        self.0.config_read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    /// Writes a word of configuration space.
    pub fn set_config(&self, offset: usize, value: u32) {
        self.0.config_write(offset, &value.to_le_bytes());
    }

    /// Reads a register.
    pub fn register(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.0.bar_read(1, offset, &mut data);
        u32::from_le_bytes(data)
    }

    /// Writes a register.
    pub fn set_register(&self, offset: u64, value: u32) {
        // Only doorbells leave work behind that tests wait for.
        let _ = self.0.bar_write(1, offset, &value.to_le_bytes());
    }

    /// Rings a doorbell and then runs the device's deferred work.
    #[inline]
    pub fn doorbell(&self, page: u32, offset: u64, value: u32) {
        self.0.bar_write(2, u64::from(page) * 4096 + offset, &value.to_le_bytes()).run(&*self.0);
    }

    /// Sizes a BAR as the PCI core does, with decoding off. Leaves it at 0.
    pub fn bar_size(&self, bar: usize) -> u64 {
        let at = BAR_0 + bar * 4;
        self.set_config(at, u32::MAX);
        let low = self.config(at);
        let high = if low & 6 == 4 {
            self.set_config(at + 4, u32::MAX);
            self.config(at + 4)
        } else {
            u32::MAX
        };
        self.set_config(at, 0);
        if low & 6 == 4 {
            self.set_config(at + 4, 0);
        }
        let mask = u64::from(low & !0xf) | u64::from(high) << 32;
        if low == 0 { 0 } else { (!mask).wrapping_add(1) }
    }

    /// Assigns addresses to the BARs, and enables memory decoding and bus mastering. Returns the address of BAR 2.
    pub fn enable(&self) -> u64 {
        for (bar, address) in BAR_ADDRESSES.into_iter().enumerate() {
            let size = self.bar_size(bar);
            assert!(size.is_power_of_two() && address % size == 0, "BAR {bar} has size {size:#x}");
            let at = BAR_0 + bar * 4;
            self.set_config(at, address as u32);
            if bar == 2 {
                self.set_config(at + 4, (address >> 32) as u32);
            }
        }
        self.set_bus_master(true);
        BAR_ADDRESSES[2]
    }

    /// Sets Bus Master Enable, with memory decoding enabled.
    pub fn set_bus_master(&self, enabled: bool) {
        let command = self.config(COMMAND) as u16 & !4 | 2 | u16::from(enabled) << 2;
        self.0.config_write(COMMAND, &command.to_le_bytes());
    }

    /// Sets MSI-X Enable.
    pub fn set_msix(&self, enabled: bool) {
        let control = self.find_msix() + 2;
        let mut value = [0; 2];
        self.0.config_read(control, &mut value);
        let value = u16::from_le_bytes(value) & 0x7fff | u16::from(enabled) << 15;
        self.0.config_write(control, &value.to_le_bytes());
    }

    fn find_msix(&self) -> usize {
        let mut at = self.config(CAPABILITIES) as usize & 0xfc;
        for _ in 0..48 {
            assert!(at >= 0x40, "there is no MSI-X capability");
            let [id, next, ..] = self.config(at).to_le_bytes();
            if id == MSIX {
                return at;
            }
            at = usize::from(next & 0xfc);
        }
        panic!("the capability list has no end");
    }
}
