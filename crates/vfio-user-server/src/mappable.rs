//! Part of a region that a client maps from a file.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Part of a region that a client may map.
#[derive(Clone, Debug)]
pub struct Mappable {
    /// Number of the region.
    pub region: u32,
    /// First byte of the part.
    pub offset: u64,
    /// Bytes of the part.
    pub size: u64,
    /// File to map, at the same offset.
    pub file: Arc<OwnedFd>,
}

impl AsFd for Mappable {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
