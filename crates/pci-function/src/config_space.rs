//! Configuration space: identity, BARs that can be sized, MSI-X.
//!
//! There is no power management capability, so a guest never puts a function into D3 and its state survives suspend.
//! There is no expansion ROM and no PCI Express capability.

use crate::function::{Bar, MsixPlace};
use crate::outline::CONFIG_SIZE;

const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const REVISION: usize = 0x08;
const CLASS: usize = 0x09;
const CACHE_LINE_SIZE: usize = 0x0c;
const LATENCY_TIMER: usize = 0x0d;
const HEADER_TYPE: usize = 0x0e;
const BAR0: usize = 0x10;
const SUBSYSTEM: usize = 0x2c;
const CAPABILITIES: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;
const INTERRUPT_PIN: usize = 0x3d;
/// Offset of the first capability.
pub const FIRST_CAPABILITY: u8 = 0x40;

const COMMAND_BUS_MASTER: u16 = 1 << 2;
const COMMAND_INTX_DISABLE: u16 = 1 << 10;
/// Writable bits: memory, bus master, parity response, SERR, interrupt disable.
const COMMAND_WRITABLE: u16 = 0x0546;
const STATUS_INTERRUPT: u8 = 1 << 3;
const STATUS_CAPABILITIES: u16 = 1 << 4;
const HEADER_MULTIFUNCTION: u8 = 1 << 7;
const MSIX_ID: u8 = 0x11;
/// Bytes of the MSI-X capability.
const MSIX_SIZE: u8 = 12;
const MSIX_ENABLE: u16 = 1 << 15;
const MSIX_WRITABLE: u16 = MSIX_ENABLE | 1 << 14;
const BAR_64BIT: u8 = 0x4;

/// Identity of a function.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    /// Vendor ID, also that of the subsystem.
    pub vendor: u16,
    /// Device ID, also that of the subsystem.
    pub device: u16,
    /// Revision ID.
    pub revision: u8,
    /// Programming interface, subclass, base class.
    pub class: [u8; 3],
}

/// Contents of configuration space at power-on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConfigLayout {
    /// Identity of the function.
    pub identity: Identity,
    /// Base address registers by index.
    pub bars: [Option<Bar>; 6],
    /// MSI-X, if the function has it. The list of capabilities at power-on holds this one entry.
    pub msix: Option<MsixPlace>,
    /// The function has an interrupt pin.
    pub interrupt_pin: bool,
    /// The slot has more functions: bit 7 of the header type, which only matters in function 0.
    pub multifunction: bool,
}

/// Settings that the guest controls.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Switches {
    /// Bus Master Enable.
    pub bus_master: bool,
    /// MSI-X Enable.
    pub msix: bool,
    /// Interrupt Disable.
    pub intx_disabled: bool,
}

/// The registers of configuration space.
#[derive(Debug)]
pub struct ConfigSpace {
    bytes: [u8; CONFIG_SIZE],
    /// Bits that the guest can change.
    writable: [u8; CONFIG_SIZE],
    power_on: [u8; CONFIG_SIZE],
    bars: [Option<Bar>; 6],
    msix: Option<MsixPlace>,
    /// Offset of the byte that links to the next capability, and offset where that capability would be placed.
    last_link: usize,
    next: u8,
}

/// Stores the bytes that lie inside configuration space.
fn put(space: &mut [u8; CONFIG_SIZE], at: usize, bytes: &[u8]) {
    for (to, from) in space.iter_mut().skip(at).zip(bytes) {
        *to = *from;
    }
}

fn word(space: &[u8; CONFIG_SIZE], at: usize) -> u16 {
    space.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |bytes| u16::from_le_bytes(*bytes))
}

impl ConfigSpace {
    /// Creates configuration space in its power-on state.
    pub fn new(layout: &ConfigLayout) -> Self {
        let ConfigLayout { identity, bars, msix, .. } = layout;
        let mut bytes = [0; CONFIG_SIZE];
        let mut writable = [0; CONFIG_SIZE];
        put(&mut bytes, 0, &identity.vendor.to_le_bytes());
        put(&mut bytes, 2, &identity.device.to_le_bytes());
        put(&mut writable, COMMAND, &COMMAND_WRITABLE.to_le_bytes());
        put(&mut bytes, REVISION, &[identity.revision]);
        put(&mut bytes, CLASS, &identity.class);
        put(&mut writable, CACHE_LINE_SIZE, &[0xff]);
        put(&mut writable, LATENCY_TIMER, &[0xff]);
        put(&mut bytes, HEADER_TYPE, &[if layout.multifunction { HEADER_MULTIFUNCTION } else { 0 }]);
        for (index, bar) in bars.iter().enumerate() {
            let Some(bar) = bar else { continue };
            let at = BAR0 + index * 4;
            // A 32-bit BAR is smaller than 4 GiB, so the low half of the mask is the whole mask.
            let mask = (!bar.size.saturating_sub(1)).to_le_bytes();
            put(&mut bytes, at, &[if bar.is_64bit { BAR_64BIT } else { 0 }]);
            put(&mut writable, at, if bar.is_64bit { &mask } else { mask.get(..4).unwrap_or_default() });
        }
        put(&mut bytes, SUBSYSTEM, &identity.vendor.to_le_bytes());
        put(&mut bytes, SUBSYSTEM + 2, &identity.device.to_le_bytes());
        put(&mut writable, INTERRUPT_LINE, &[0xff]);
        put(&mut bytes, INTERRUPT_PIN, &[u8::from(layout.interrupt_pin)]);
        let (mut last_link, mut next) = (CAPABILITIES, FIRST_CAPABILITY);
        if let Some(msix) = msix {
            put(&mut bytes, STATUS, &STATUS_CAPABILITIES.to_le_bytes());
            put(&mut bytes, CAPABILITIES, &[msix.capability]);
            // The next pointer stays 0, which ends the list.
            let at = usize::from(msix.capability);
            (last_link, next) = (at + 1, msix.capability.saturating_add(MSIX_SIZE));
            put(&mut bytes, at, &[MSIX_ID]);
            put(&mut bytes, at + 2, &msix.vectors.saturating_sub(1).to_le_bytes());
            put(&mut writable, at + 2, &MSIX_WRITABLE.to_le_bytes());
            let bar = u32::from(msix.bar);
            put(&mut bytes, at + 4, &(msix.table | bar).to_le_bytes());
            put(&mut bytes, at + 8, &(msix.pending | bar).to_le_bytes());
        }
        Self { power_on: bytes, bytes, writable, bars: *bars, msix: *msix, last_link, next }
    }

    /// Appends a read-only capability: its ID, a byte that is ignored (the next pointer takes its place), and the rest.
    /// Must be called before a guest sees the function. Returns its offset, or `None` if there is no room.
    pub fn add_capability(&mut self, capability: &[u8]) -> Option<u8> {
        let at = self.next;
        let end = usize::from(at).checked_add(capability.len())?.next_multiple_of(4);
        let ([id, _, rest @ ..], true) = (capability, end <= CONFIG_SIZE) else { return None };
        for (offset, bytes) in [(at.into(), &[*id, 0][..]), (usize::from(at) + 2, rest), (self.last_link, &[at])] {
            put(&mut self.bytes, offset, bytes);
        }
        put(&mut self.bytes, STATUS, &STATUS_CAPABILITIES.to_le_bytes());
        self.power_on = self.bytes;
        (self.last_link, self.next) = (usize::from(at) + 1, u8::try_from(end).unwrap_or(u8::MAX));
        Some(at)
    }

    /// Location of MSI-X, if the function has it.
    pub const fn msix(&self) -> Option<MsixPlace> {
        self.msix
    }

    /// Base address registers by index.
    pub const fn bars(&self) -> [Option<Bar>; 6] {
        self.bars
    }

    /// Reads. Bytes beyond the end are zero. `interrupt_pending` sets Interrupt Status in the status register.
    pub fn read(&self, offset: usize, data: &mut [u8], interrupt_pending: bool) {
        for (index, byte) in data.iter_mut().enumerate() {
            let at = offset.saturating_add(index);
            *byte = self.bytes.get(at).copied().unwrap_or(0);
            if at == STATUS && interrupt_pending {
                *byte |= STATUS_INTERRUPT;
            }
        }
    }

    /// Writes the bits that the guest can change.
    pub fn write(&mut self, offset: usize, data: &[u8]) {
        for (index, new) in data.iter().enumerate() {
            let at = offset.saturating_add(index);
            if let (Some(byte), Some(mask)) = (self.bytes.get_mut(at), self.writable.get(at)) {
                *byte = (*byte & !mask) | (new & mask);
            }
        }
    }

    /// Returns to the power-on state.
    pub const fn reset(&mut self) {
        self.bytes = self.power_on;
    }

    /// Current settings of the guest.
    pub fn switches(&self) -> Switches {
        let command = word(&self.bytes, COMMAND);
        let msix = self.msix.map_or(0, |msix| word(&self.bytes, usize::from(msix.capability) + 2));
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

    #[test]
    fn a_guest_reads_the_layout() {
        let mut bars = [None; 6];
        bars[2] = Some(Bar { size: 0x2000, is_64bit: false });
        bars[4] = Some(Bar { size: 1 << 33, is_64bit: true });
        let mut config = ConfigSpace::new(&ConfigLayout {
            identity: Identity { vendor: 0x15ad, device: 0x07b0, revision: 1, class: [0, 0, 2] },
            bars,
            msix: Some(MsixPlace { capability: 0x40, vectors: 25, bar: 2, table: 0, pending: 0x1000 }),
            interrupt_pin: true,
            multifunction: true,
        });
        let read = |config: &ConfigSpace, at| {
            let mut data = [0; 4];
            config.read(at, &mut data, false);
            u32::from_le_bytes(data)
        };
        assert_eq!((read(&config, 0), read(&config, 8), read(&config, 0x2c)), (0x07b0_15ad, 0x0200_0001, 0x07b0_15ad));
        assert_eq!((read(&config, 0x0c) >> 16, read(&config, 0x3c)), (0x80, 0x100));
        assert_eq!((read(&config, 0x40), read(&config, 0x44), read(&config, 0x48)), (24 << 16 | 0x11, 2, 0x1002));
        config.write(0x10, &[0xff; 24]);
        let sized: Vec<_> = (0..6).map(|bar| read(&config, 0x10 + bar * 4)).collect();
        assert_eq!(sized, [0, 0, 0xffff_e000, 0, 4, 0xffff_fffe]);
        config.reset();
        assert_eq!(read(&config, 0x18), 0);
    }

    #[test]
    fn capabilities_form_a_list_that_ends() {
        let identity = Identity { vendor: 1, device: 2, revision: 0, class: [0; 3] };
        for msix in [None, Some(MsixPlace { capability: 0x40, vectors: 1, bar: 0, table: 0, pending: 0x800 })] {
            let layout = ConfigLayout { identity, bars: [None; 6], msix, interrupt_pin: false, multifunction: false };
            let mut config = ConfigSpace::new(&layout);
            let mut added = Vec::new();
            while let Some(at) = config.add_capability(&[9, 77, 30, 4, 5]) {
                added.push(at);
            }
            config.write(0, &[0xff; CONFIG_SIZE]);
            config.reset();
            let mut bytes = [0; CONFIG_SIZE];
            config.read(0, &mut bytes, false);
            let (mut at, mut found) = (bytes[0x34], Vec::new());
            while at != 0 {
                found.push(at);
                assert!(msix.is_some() && at == 0x40 || bytes[usize::from(at)] == 9);
                at = bytes[usize::from(at) + 1];
            }
            let first = msix.map(|msix| msix.capability);
            assert_eq!(found, first.into_iter().chain(added).collect::<Vec<_>>());
            assert_eq!((found.len(), bytes[STATUS] & 0x10), if msix.is_some() { (23, 0x10) } else { (24, 0x10) });
        }
        assert_eq!(CONFIG_SIZE - 0x40, 24 * 8);
    }
}
