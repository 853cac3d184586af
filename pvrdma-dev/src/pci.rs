//! Configuration space (section 1): identity, BARs that can be sized, MSI-X.
//!
//! There is no power management capability, so a guest never puts the function into D3 and its state survives suspend.
//! There is no expansion ROM and no PCI Express capability.

use pvrdma_guest_memory::PAGE_SIZE;

use crate::abi::layout::write_field;
use crate::abi::regs::{CLASS, DEVICE_ID, VENDOR_ID};
use crate::intr::VECTORS;
use crate::pci_function::Bar;
use crate::regs;

/// Bytes of configuration space.
pub(crate) const CONFIG_SIZE: usize = 256;

/// Bytes of BAR 0: MSI-X table and pending bits, which the VMM keeps.
const MSIX_BAR_SIZE: u64 = 0x4000;
/// Where the pending bits are.
const MSIX_PBA: u32 = 0x2000;

const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const CACHE_LINE_SIZE: usize = 0x0c;
const LATENCY_TIMER: usize = 0x0d;
const BAR0: usize = 0x10;
const SUBSYSTEM: usize = 0x2c;
const CAPABILITIES: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;
const INTERRUPT_PIN: usize = 0x3d;
const MSIX: usize = 0x40;
const MSIX_CONTROL: usize = MSIX + 2;

const COMMAND_BUS_MASTER: u16 = 1 << 2;
const COMMAND_INTX_DISABLE: u16 = 1 << 10;
/// Memory, bus master, parity response, SERR, interrupt disable.
const COMMAND_WRITABLE: u16 = 0x0546;
const STATUS_INTERRUPT: u8 = 1 << 3;
const STATUS_CAPABILITIES: u16 = 1 << 4;
const MSIX_ID: u8 = 0x11;
const MSIX_ENABLE: u16 = 1 << 15;
const MSIX_WRITABLE: u16 = MSIX_ENABLE | 1 << 14;
const BAR_64BIT: u32 = 0x4;

/// What the guest has switched on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Switches {
    /// Bus Master Enable.
    pub(crate) bus_master: bool,
    /// MSI-X Enable.
    pub(crate) msix: bool,
    /// Interrupt Disable.
    pub(crate) intx_disabled: bool,
}

/// The registers of configuration space.
#[derive(Debug)]
pub(crate) struct ConfigSpace {
    bytes: [u8; CONFIG_SIZE],
    /// Bits the guest can change.
    writable: [u8; CONFIG_SIZE],
    power_on: [u8; CONFIG_SIZE],
    bars: [Option<Bar>; 6],
}

impl ConfigSpace {
    /// As after power-on. `intx` tells whether the function has an interrupt pin.
    pub(crate) fn new(max_uar: u32, intx: bool) -> Self {
        let bars = [
            Some(Bar { size: MSIX_BAR_SIZE, is_64bit: false }),
            Some(Bar { size: regs::BAR_SIZE, is_64bit: false }),
            Some(Bar { size: u64::from(max_uar).next_power_of_two() * PAGE_SIZE, is_64bit: true }),
            None,
            None,
            None,
        ];
        let mut bytes = [0; CONFIG_SIZE];
        let mut writable = [0; CONFIG_SIZE];
        write_field(&mut bytes, 0, &VENDOR_ID);
        write_field(&mut bytes, 2, &DEVICE_ID);
        write_field(&mut writable, COMMAND, &COMMAND_WRITABLE);
        write_field(&mut bytes, STATUS, &STATUS_CAPABILITIES);
        write_field(&mut bytes, 9, &CLASS);
        write_field(&mut writable, CACHE_LINE_SIZE, &0xff_u8);
        write_field(&mut writable, LATENCY_TIMER, &0xff_u8);
        for (index, bar) in bars.iter().enumerate() {
            let Some(bar) = bar else { continue };
            let at = BAR0 + index * 4;
            let mask = !(bar.size - 1);
            write_field(&mut bytes, at, &if bar.is_64bit { BAR_64BIT } else { 0 });
            if bar.is_64bit {
                write_field(&mut writable, at, &mask);
            } else {
                // The low half: a 32-bit BAR is smaller than 4 GiB.
                #[expect(clippy::cast_possible_truncation, reason = "the low half is meant")]
                write_field(&mut writable, at, &(mask as u32));
            }
        }
        write_field(&mut bytes, SUBSYSTEM, &VENDOR_ID);
        write_field(&mut bytes, SUBSYSTEM + 2, &DEVICE_ID);
        #[expect(clippy::cast_possible_truncation, reason = "a constant below 256")]
        write_field(&mut bytes, CAPABILITIES, &(MSIX as u8));
        write_field(&mut writable, INTERRUPT_LINE, &0xff_u8);
        write_field(&mut bytes, INTERRUPT_PIN, &u8::from(intx));
        // The next pointer stays 0: the list ends here.
        write_field(&mut bytes, MSIX, &MSIX_ID);
        write_field(&mut bytes, MSIX_CONTROL, &(VECTORS - 1));
        write_field(&mut writable, MSIX_CONTROL, &MSIX_WRITABLE);
        write_field(&mut bytes, MSIX + 8, &MSIX_PBA);
        Self { power_on: bytes, bytes, writable, bars }
    }

    /// The base address registers.
    pub(crate) const fn bars(&self) -> [Option<Bar>; 6] {
        self.bars
    }

    /// Reads. Beyond the end there is nothing but zeros.
    pub(crate) fn read(&self, offset: usize, data: &mut [u8], interrupt_pending: bool) {
        for (index, byte) in data.iter_mut().enumerate() {
            let at = offset.saturating_add(index);
            *byte = self.bytes.get(at).copied().unwrap_or(0);
            if at == STATUS && interrupt_pending {
                *byte |= STATUS_INTERRUPT;
            }
        }
    }

    /// Changes the bits that can be changed.
    pub(crate) fn write(&mut self, offset: usize, data: &[u8]) {
        for (index, new) in data.iter().enumerate() {
            let at = offset.saturating_add(index);
            if let (Some(byte), Some(mask)) = (self.bytes.get_mut(at), self.writable.get(at)) {
                *byte = (*byte & !mask) | (new & mask);
            }
        }
    }

    /// Back to power-on.
    pub(crate) const fn reset(&mut self) {
        self.bytes = self.power_on;
    }

    /// What the guest has switched on.
    pub(crate) fn switches(&self) -> Switches {
        let command: u16 = crate::abi::layout::read_field(&self.bytes, COMMAND);
        let msix: u16 = crate::abi::layout::read_field(&self.bytes, MSIX_CONTROL);
        Switches {
            bus_master: command & COMMAND_BUS_MASTER != 0,
            msix: msix & MSIX_ENABLE != 0,
            intx_disabled: command & COMMAND_INTX_DISABLE != 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(config: &ConfigSpace, at: usize) -> u32 {
        let mut data = [0; 4];
        config.read(at, &mut data, false);
        u32::from_le_bytes(data)
    }

    /// Conformance 1, 2: the part that this function can answer for.
    #[test]
    fn identity_and_capabilities() {
        let config = ConfigSpace::new(1024, false);
        assert_eq!(read(&config, 0), 0x0820_15ad);
        assert_eq!(read(&config, 8) >> 8, 0x02_8000);
        assert_eq!(read(&config, 0x0c) >> 16, 0, "single header, set to multi-function by the VMM");
        assert_eq!(read(&config, 0x3c) >> 8, 0, "no pin");
        assert_eq!(read(&ConfigSpace::new(1024, true), 0x3c), 0x100);
        let mut at = usize::try_from(read(&config, 0x34)).unwrap();
        let mut found = Vec::new();
        while at != 0 {
            assert!(found.len() < 48, "the list must end");
            let header = read(&config, at);
            found.push(header & 0xff);
            at = usize::try_from((header >> 8) & 0xfc).unwrap();
        }
        assert_eq!(found, [0x11]);
        assert_eq!(read(&config, 0x40) >> 16, 2, "three vectors");
        assert_eq!((read(&config, 0x44), read(&config, 0x48)), (0, 0x2000));
    }

    #[test]
    fn bars_are_sized_by_writing_ones() {
        let mut config = ConfigSpace::new(1024, false);
        let sizes: Vec<u32> = (0..6)
            .map(|bar| {
                config.write(0x10 + bar * 4, &[0xff; 4]);
                read(&config, 0x10 + bar * 4)
            })
            .collect();
        assert_eq!(sizes, [0xffff_c000, 0xffff_f000, 0xffc0_0004, 0xffff_ffff, 0, 0]);
        config.write(0x30, &[0xff; 4]);
        assert_eq!(read(&config, 0x30), 0, "no ROM");
        config.write(0x14, &0xfebd_1234_u32.to_le_bytes());
        assert_eq!(read(&config, 0x14), 0xfebd_1000);
        config.reset();
        assert_eq!(read(&config, 0x14), 0);
    }

    #[test]
    fn writes_change_only_what_they_may() {
        let mut config = ConfigSpace::new(1024, false);
        config.write(0, &[0xff; CONFIG_SIZE + 8]);
        assert_eq!(read(&config, 0), 0x0820_15ad);
        assert_eq!(read(&config, 4), 0x0010_0546);
        assert_eq!(config.switches(), Switches { bus_master: true, msix: true, intx_disabled: true });
        assert_eq!(read(&config, 0x40), 0xc002_0011);
        config.write(usize::MAX, &[1, 2]);
        let mut beyond = [7; 4];
        config.read(254, &mut beyond, false);
        assert_eq!(beyond, [0; 4]);
        config.reset();
        assert_eq!(config.switches(), Switches::default());
        let mut status = [0; 4];
        config.read(4, &mut status, true);
        assert_eq!(status[2], 0x18);
    }
}
