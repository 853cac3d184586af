//! Guest memory as a device sees it: bus addresses that resolve to shared mappings.
//!
//! A [`DmaSpace`] holds the map of one device. Code that touches guest memory takes a [`DmaView`], does a bounded piece of
//! work through it and drops it. Taking a memory range away ([`DmaSpace::unmap`]) and [`DmaSpace::barrier`] wait for every
//! view, so when they return nothing uses the old map or anything that was looked up under it.
//!
//! Pointers never leave this module: a view lends [`vm_memory::VolatileSlice`]s that live no longer than the view.

mod pages;
mod pin;
mod space;
#[cfg(test)]
mod tests;
mod view;

use std::sync::Arc;

use thiserror::Error;
use vm_memory::mmap::MmapRegion;

pub use pages::{Extent, PAGE_SIZE, PageList, PageListBuilder};
pub use pin::{PinError, PinGuard, PinPolicy};
pub use space::DmaSpace;
pub use view::{DmaView, HostPiece};

/// Most ranges a space may have. A vIOMMU maps single pages, so there can be many.
pub const MAX_RANGES: usize = 65_536;
/// Names a space for the life of the process. Two spaces are locked in ascending order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SpaceId(u64);

/// Why guest memory cannot be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum DmaError {
    /// No range covers these bytes.
    #[error("bus address {addr:#x}+{len:#x} is not mapped")]
    Unmapped {
        /// First address.
        addr: u64,
        /// Bytes.
        len: u64,
    },
    /// The range is read-only, has no accessible memory behind it, or the space is switched off.
    #[error("bus address {addr:#x} does not allow this access")]
    Denied {
        /// First address.
        addr: u64,
    },
    /// The address is not aligned as the access needs.
    #[error("bus address {addr:#x} is not aligned")]
    Misaligned {
        /// The address.
        addr: u64,
    },
}

/// Why a range cannot be added or removed.
#[derive(Debug, Error)]
pub enum MapError {
    /// Length zero, or past the end of the address space, or beyond its backing.
    #[error("invalid range {iova:#x}+{len:#x}")]
    Invalid {
        /// First address.
        iova: u64,
        /// Bytes.
        len: u64,
    },
    /// Another range is already there.
    #[error("range {iova:#x}+{len:#x} overlaps a mapped one")]
    Overlap {
        /// First address.
        iova: u64,
        /// Bytes.
        len: u64,
    },
    /// The range to remove cuts through a mapped one, or nothing is mapped there.
    #[error("range {iova:#x}+{len:#x} does not match a mapped one")]
    NoMatch {
        /// First address.
        iova: u64,
        /// Bytes.
        len: u64,
    },
    /// [`MAX_RANGES`] are mapped.
    #[error("too many ranges")]
    TooMany,
}

/// Memory behind a range.
#[derive(Clone, Debug)]
pub struct Backing {
    /// The shared mapping.
    pub mapping: Arc<MmapRegion>,
    /// Where in it the range starts.
    pub offset: usize,
}

/// One range of bus addresses.
#[derive(Clone, Debug)]
pub struct DmaRange {
    /// First bus address.
    pub iova: u64,
    /// Bytes.
    pub len: u64,
    /// Whether the device may write.
    pub writable: bool,
    /// `None`: known, but not accessible (for example a ROM).
    pub backing: Option<Backing>,
}

impl DmaRange {
    const fn end(&self) -> u64 {
        // Checked when the range was added.
        self.iova.wrapping_add(self.len)
    }
}

/// Hears of memory that a device must not reach any more. For adapters that hand memory to hardware: copies under a
/// [`DmaView`] need none of this.
pub trait MemoryWatcher: Send + Sync {
    /// These ranges (first address, bytes) are gone from the map. When this returns nothing reaches them. The caller holds no
    /// view and no lock.
    fn unmapped(&self, ranges: &[(u64, u64)]);

    /// All access was switched off; likewise for all memory. What was registered stays dead when it is switched on again.
    fn disabled(&self);
}

/// Which way the device accesses memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// The device reads.
    Read,
    /// The device writes.
    Write,
}
