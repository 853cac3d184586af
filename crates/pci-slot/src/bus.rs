//! The bus: the slots, and the three ways to them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use vm_device::bus::{MmioAddress, MmioAddressOffset, PioAddress, PioAddressOffset, PioRange};
use vm_device::{DeviceMmio, DevicePio};

use crate::slot::{Slot, SlotError};

/// The ports: an address, and the data there.
const PORTS: PioAddressOffset = 0xcf8;
const DATA: PioAddressOffset = 4;
const ENABLE: u32 = 1 << 31;

/// A bus, number 0 and the only one.
#[derive(Debug)]
pub struct PciBus {
    slots: BTreeMap<u8, Arc<Slot>>,
    /// What was written to port 0xcf8.
    address: AtomicU32,
}

impl PciBus {
    /// A bus with these slots.
    ///
    /// # Errors
    /// Two are at one place.
    pub fn new(slots: impl IntoIterator<Item = Arc<Slot>>) -> Result<Arc<Self>, SlotError> {
        let mut map = BTreeMap::new();
        for slot in slots {
            if let Some(other) = map.insert(slot.number(), slot) {
                return Err(SlotError::Taken(other.number()));
            }
        }
        Ok(Arc::new(Self { slots: map, address: AtomicU32::new(0) }))
    }

    /// Places all BARs, as firmware does. `allocate` gives the address of so many bytes, at a multiple of that. The
    /// guest may move them, and lets them answer.
    ///
    /// # Errors
    /// There is no room for one.
    pub fn place_bars(&self, mut allocate: impl FnMut(u64) -> Option<u64>) -> Result<(), SlotError> {
        self.slots.values().try_for_each(|slot| slot.place_bars(&mut allocate))
    }

    /// Every function is as after power-on: no DMA and no interrupt after this returns, and no BAR answers.
    pub fn reset(&self) {
        self.address.store(0, Ordering::Relaxed);
        self.slots.values().for_each(|slot| slot.reset());
    }

    /// The slot, function and register of an address as [`Ecam`] has it: 12 bits of register, 3 of function, 5 of slot,
    /// 8 of bus.
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

/// Configuration space by the ports 0xcf8 and 0xcfc.
#[derive(Clone, Debug)]
pub struct ConfigPorts(Arc<PciBus>);

impl ConfigPorts {
    /// Those of a bus.
    pub const fn new(bus: Arc<PciBus>) -> Self {
        Self(bus)
    }

    /// The ports.
    ///
    /// # Panics
    /// Never.
    #[expect(clippy::expect_used, reason = "a constant range")]
    pub fn range() -> PioRange {
        PioRange::new(PioAddress(PORTS), 8).expect("eight ports")
    }

    /// What an access to the data port means, in the form of [`Ecam`].
    fn target(&self, offset: PioAddressOffset, len: usize) -> Option<u32> {
        let address = self.0.address.load(Ordering::Relaxed);
        let byte = offset.checked_sub(DATA)?;
        if address & ENABLE == 0 || usize::from(byte) + len > 4 {
            return None;
        }
        // Bus, slot and function move up by four bits, for a register of 12 bits instead of 8.
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
            // Shorter writes are not to this register: guests probe that.
            if let Ok(address) = data.try_into() {
                self.0.address.store(u32::from_le_bytes(address), Ordering::Relaxed);
            }
        } else if let Some(target) = self.target(offset, data.len()) {
            self.0.config_write(target, data);
        }
    }
}

/// Configuration space in memory (PCI Express's enhanced configuration access mechanism).
#[derive(Clone, Debug)]
pub struct Ecam(Arc<PciBus>);

impl Ecam {
    /// Bytes of memory space that it takes.
    pub const SIZE: u64 = 1 << 20;

    /// That of a bus.
    pub const fn new(bus: Arc<PciBus>) -> Self {
        Self(bus)
    }

    fn target(offset: MmioAddressOffset, len: usize) -> Option<u32> {
        let inside = offset.checked_add(len as u64).is_some_and(|end| end <= Self::SIZE);
        // No access goes from one function to the next.
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

/// All BARs of a bus, wherever in its range the guest has put them.
#[derive(Clone, Debug)]
pub struct BarMap(Arc<PciBus>);

impl BarMap {
    /// Those of a bus.
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
        // Nobody there: lost, as on a bus.
        let _ = self.0.slots.values().any(|slot| slot.memory_write(address, data));
    }
}
