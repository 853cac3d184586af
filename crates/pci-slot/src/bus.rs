//! The bus: its slots, and the three ways to access them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use vm_device::bus::{MmioAddress, MmioAddressOffset, PioAddress, PioAddressOffset, PioRange};
use vm_device::{DeviceMmio, DevicePio};

use crate::slot::{Slot, SlotError};

/// First configuration port: the address register, with the data register at offset [`DATA`].
const PORTS: PioAddressOffset = 0xcf8;
const DATA: PioAddressOffset = 4;
const ENABLE: u32 = 1 << 31;

/// A PCI bus: number 0, without bridges to others.
#[derive(Debug)]
pub struct PciBus {
    slots: BTreeMap<u8, Arc<Slot>>,
    /// Last value written to port 0xcf8.
    address: AtomicU32,
}

impl PciBus {
    /// Creates a bus with these slots.
    ///
    /// # Errors
    /// Two slots have the same number.
    pub fn new(slots: impl IntoIterator<Item = Arc<Slot>>) -> Result<Arc<Self>, SlotError> {
        let mut map = BTreeMap::new();
        for slot in slots {
            if let Some(other) = map.insert(slot.number(), slot) {
                return Err(SlotError::Taken(other.number()));
            }
        }
        Ok(Arc::new(Self { slots: map, address: AtomicU32::new(0) }))
    }

    /// Assigns addresses to all BARs, as firmware does. `allocate` returns an address for the given number of bytes,
    /// aligned to that number. The guest may move the BARs, and enables their decoding.
    ///
    /// # Errors
    /// There is no room for a BAR.
    pub fn place_bars(&self, mut allocate: impl FnMut(u64) -> Option<u64>) -> Result<(), SlotError> {
        self.slots.values().try_for_each(|slot| slot.place_bars(&mut allocate))
    }

    /// Resets every function to its power-on state: after this returns, there is no DMA and no interrupt, and no BAR is
    /// decoded.
    pub fn reset(&self) {
        self.address.store(0, Ordering::Relaxed);
        self.slots.values().for_each(|slot| slot.reset());
    }

    /// Returns slot, function and register of an address in the format of [`Ecam`]: 12 bits of register, 3 of function,
    /// 5 of slot, 8 of bus.
    fn find(&self, address: u32) -> Option<(&Slot, usize, usize)> {
        let (slot, bus) = (u8::try_from(address >> 15 & 0x1f).ok()?, address >> 20);
        let slot = self.slots.get(&slot).filter(|_| bus == 0)?;
        Some((slot, (address >> 12 & 7) as usize, (address & 0xfff) as usize))
    }

    fn config_read(&self, address: u32, data: &mut [u8]) {
        match self.find(address) {
            Some((slot, function, register)) => slot.config_read(function, register, data),
            None => data.fill(0xff),
        }
    }

    fn config_write(&self, address: u32, data: &[u8]) {
        if let Some((slot, function, register)) = self.find(address) {
            slot.config_write(function, register, data);
        }
    }
}

/// Configuration space through the ports 0xcf8 and 0xcfc.
#[derive(Clone, Debug)]
pub struct ConfigPorts(Arc<PciBus>);

impl ConfigPorts {
    /// Creates the ports of a bus.
    pub const fn new(bus: Arc<PciBus>) -> Self {
        Self(bus)
    }

    /// Range of the ports.
    ///
    /// # Panics
    /// Never.
    #[expect(clippy::expect_used, reason = "a constant range")]
    pub fn range() -> PioRange {
        PioRange::new(PioAddress(PORTS), 8).expect("eight ports")
    }

    /// Translates an access to the data port into an address in the format of [`Ecam`].
    fn target(&self, offset: PioAddressOffset, len: usize) -> Option<u32> {
        let address = self.0.address.load(Ordering::Relaxed);
        let byte = offset.checked_sub(DATA)?;
        if address & ENABLE == 0 || usize::from(byte) + len > 4 {
            return None;
        }
        // Bus, slot and function move up by four bits, because the register has 12 bits instead of 8.
        Some((address & 0x00ff_ff00) << 4 | address & 0xfc | u32::from(byte))
    }
}

impl DevicePio for ConfigPorts {
    fn pio_read(&self, _base: PioAddress, offset: PioAddressOffset, data: &mut [u8]) {
        let address = self.0.address.load(Ordering::Relaxed).to_le_bytes();
        match self.target(offset, data.len()) {
            _ if offset == 0 && data.len() == 4 => data.copy_from_slice(&address),
            Some(target) => self.0.config_read(target, data),
            None => data.fill(0xff),
        }
    }

    fn pio_write(&self, _base: PioAddress, offset: PioAddressOffset, data: &[u8]) {
        if offset == 0 {
            // Only writes of four bytes access this register. Guests rely on that when they probe for the mechanism.
            if let Ok(address) = data.try_into() {
                self.0.address.store(u32::from_le_bytes(address), Ordering::Relaxed);
            }
        } else if let Some(target) = self.target(offset, data.len()) {
            self.0.config_write(target, data);
        }
    }
}

/// Memory-mapped configuration space (PCI Express's enhanced configuration access mechanism).
#[derive(Clone, Debug)]
pub struct Ecam(Arc<PciBus>);

impl Ecam {
    /// Size in memory space, in bytes.
    pub const SIZE: u64 = 1 << 20;

    /// Creates the window of a bus.
    pub const fn new(bus: Arc<PciBus>) -> Self {
        Self(bus)
    }

    fn target(offset: MmioAddressOffset, len: usize) -> Option<u32> {
        let inside = offset.checked_add(len as u64).is_some_and(|end| end <= Self::SIZE);
        // An access must not cross from one function to the next.
        let one = (offset & 0xfff) + len as u64 <= 0x1000;
        (inside && one).then(|| u32::try_from(offset).ok()).flatten()
    }
}

impl DeviceMmio for Ecam {
    fn mmio_read(&self, _base: MmioAddress, offset: MmioAddressOffset, data: &mut [u8]) {
        match Self::target(offset, data.len()) {
            Some(target) => self.0.config_read(target, data),
            None => data.fill(0xff),
        }
    }

    fn mmio_write(&self, _base: MmioAddress, offset: MmioAddressOffset, data: &[u8]) {
        if let Some(target) = Self::target(offset, data.len()) {
            self.0.config_write(target, data);
        }
    }
}

/// All BARs of a bus, wherever the guest has placed them in its range.
#[derive(Clone, Debug)]
pub struct BarMap(Arc<PciBus>);

impl BarMap {
    /// Creates the map of a bus.
    pub const fn new(bus: Arc<PciBus>) -> Self {
        Self(bus)
    }
}

impl DeviceMmio for BarMap {
    fn mmio_read(&self, base: MmioAddress, offset: MmioAddressOffset, data: &mut [u8]) {
        let address = base.0.saturating_add(offset);
        if !self.0.slots.values().any(|slot| slot.memory_read(address, data)) {
            data.fill(0xff);
        }
    }

    fn mmio_write(&self, base: MmioAddress, offset: MmioAddressOffset, data: &[u8]) {
        let address = base.0.saturating_add(offset);
        // No BAR decodes this address: the write is lost, as on a real bus.
        let _ = self.0.slots.values().any(|slot| slot.memory_write(address, data));
    }
}
