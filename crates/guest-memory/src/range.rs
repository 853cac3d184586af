//! One range of bus addresses, and what is behind it.

use std::sync::Arc;

use vm_memory::mmap::MmapRegion;

/// Names a space for the life of the process. Two spaces are locked in ascending order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SpaceId(pub(super) u64);

/// Memory behind a range.
#[derive(Clone, Debug)]
pub struct Backing {
    /// The shared mapping.
    pub mapping: Arc<MmapRegion>,
    /// Where in it the range starts, in bytes.
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
    /// `None`: known, but not accessible (for example a ROM).
    pub backing: Option<Backing>,
}

impl DmaRange {
    pub(super) const fn end(&self) -> u64 {
        // Checked when the range was added.
        self.iova.wrapping_add(self.len)
    }
}

/// Which way the device accesses memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// The device reads.
    Read,
    /// The device writes.
    Write,
}
