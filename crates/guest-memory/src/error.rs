//! What can be wrong with an access or a map.

use pvrdma_pages::{PAGE_SIZE, PageError};
use thiserror::Error;

/// Why guest memory cannot be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum DmaError {
    /// No range covers these bytes.
    #[error("bus address {addr:#x}+{len:#x} is not mapped")]
    Unmapped {
        /// First address.
        addr: u64,
        /// Length in bytes.
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

impl From<PageError> for DmaError {
    fn from(error: PageError) -> Self {
        match error {
            PageError::Misaligned { addr } => Self::Misaligned { addr },
            PageError::OutOfRange { addr } => Self::Unmapped { addr, len: PAGE_SIZE },
        }
    }
}

/// Why a range cannot be added or removed.
#[derive(Debug, Error)]
pub enum MapError {
    /// Length zero, or past the end of the address space, or beyond its backing.
    #[error("invalid range {iova:#x}+{len:#x}")]
    Invalid {
        /// First address.
        iova: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Another range is already there.
    #[error("range {iova:#x}+{len:#x} overlaps a mapped one")]
    Overlap {
        /// First address.
        iova: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The range to remove cuts through a mapped one, or nothing is mapped there.
    #[error("range {iova:#x}+{len:#x} does not match a mapped one")]
    NoMatch {
        /// First address.
        iova: u64,
        /// Length in bytes.
        len: u64,
    },
    /// As many ranges are mapped as [`crate::MemoryLimits`] allow.
    #[error("the device's limit of ranges is used up")]
    TooMany,
}
