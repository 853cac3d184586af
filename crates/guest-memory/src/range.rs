//! A range of bus addresses and the memory behind it.

use std::sync::Arc;

use vm_memory::mmap::MmapRegion;

/// Identifier of a space, unique in the life of the process. Two spaces are locked in ascending order of their
/// identifiers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SpaceId(pub(super) u64);

/// Memory behind a range.
#[derive(Clone, Debug)]
pub struct Backing {
    /// Shared mapping.
    pub mapping: Arc<MmapRegion>,
    /// Offset in bytes of the range in the mapping.
    pub offset: usize,
}

/// One range of bus addresses.
#[derive(Clone, Debug)]
pub struct DmaRange {
    /// First bus address.
    pub iova: u64,
    /// Length in bytes.
    pub len: u64,
    /// `true` if the device may write.
    pub writable: bool,
    /// Memory behind the range. `None`: the range is known, but not accessible (for example a ROM).
    pub backing: Option<Backing>,
}

impl DmaRange {
    pub(super) const fn end(&self) -> u64 {
        // The sum cannot wrap: it was checked when the range was added.
        self.iova.wrapping_add(self.len)
    }
}

/// Direction of an access by the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// The device reads.
    Read,
    /// The device writes.
    Write,
}
