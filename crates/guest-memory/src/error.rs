//! Errors of accesses to guest memory and of changes to its map.

use pvrdma_pages::{PAGE_SIZE, PageError};
use thiserror::Error;

/// Reason why an access to guest memory failed.
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
    /// The range is read-only, has no accessible memory behind it, or all access is disabled.
    #[error("bus address {addr:#x} does not allow this access")]
    Denied {
        /// First address.
        addr: u64,
    },
    /// The address does not have the alignment that the access requires.
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

/// Reason why a range cannot be added or removed.
#[derive(Debug, Error)]
pub enum MapError {
    /// The length is zero, or the range extends past the end of the address space or of its backing.
    #[error("invalid range {iova:#x}+{len:#x}")]
    Invalid {
        /// First address.
        iova: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The range overlaps a mapped one.
    #[error("range {iova:#x}+{len:#x} overlaps a mapped one")]
    Overlap {
        /// First address.
        iova: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The range to remove covers a mapped one only in part, or nothing is mapped there.
    #[error("range {iova:#x}+{len:#x} does not match a mapped one")]
    NoMatch {
        /// First address.
        iova: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The number of mapped ranges has reached the limit in [`crate::MemoryLimits`].
    #[error("the device's limit of ranges is used up")]
    TooMany,
}
