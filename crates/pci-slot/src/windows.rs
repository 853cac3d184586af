//! Addresses at which the BARs of a function are decoded.

use pvrdma_pci_function::{Bar, PciFunction};

const COMMAND: usize = 0x04;
const COMMAND_MEMORY: u16 = 1 << 1;
/// Offsets of the base address registers in configuration space.
pub(crate) const BARS: std::ops::Range<usize> = 0x10..0x28;

/// A BAR that is decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Window {
    pub(crate) bar: usize,
    pub(crate) base: u64,
    pub(crate) size: u64,
}

impl Window {
    /// Returns the offset of an access in the BAR, if the BAR contains all of it.
    pub(crate) fn offset(&self, address: u64, len: usize) -> Option<u64> {
        let offset = address.checked_sub(self.base)?;
        (offset.checked_add(len as u64)? <= self.size).then_some(offset)
    }
}

/// Offset of the register of a BAR.
pub(crate) const fn register(bar: usize) -> usize {
    BARS.start + bar * 4
}

/// Returns `true` if a write to configuration space may move BARs.
pub(crate) fn may_move(offset: usize, len: usize) -> bool {
    let end = offset.saturating_add(len);
    let overlaps = |start: usize, stop: usize| offset < stop && end > start;
    overlaps(COMMAND, COMMAND + 2) || overlaps(BARS.start, BARS.end)
}

fn read_u32(function: &dyn PciFunction, offset: usize) -> u32 {
    let mut data = [0; 4];
    function.config_read(offset, &mut data);
    u32::from_le_bytes(data)
}

/// Returns the windows that the registers of a function define now: none without Memory Space Enable.
pub(crate) fn windows(function: &dyn PciFunction, bars: &[Option<Bar>; 6]) -> Vec<Window> {
    let mut command = [0; 2];
    function.config_read(COMMAND, &mut command);
    if u16::from_le_bytes(command) & COMMAND_MEMORY == 0 {
        return Vec::new();
    }
    let placed = bars.iter().enumerate().filter_map(|(index, bar)| Some((index, bar.as_ref()?)));
    let window = |(index, bar): (usize, &Bar)| {
        let low = read_u32(function, register(index)) & !0xf;
        let high = if bar.is_64bit { read_u32(function, register(index + 1)) } else { 0 };
        Window { bar: index, base: u64::from(high) << 32 | u64::from(low), size: bar.size }
    };
    // A BAR without an assigned address is at 0, where guest memory is.
    placed.map(window).filter(|window| window.base != 0).collect()
}
