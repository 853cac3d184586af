//! Files that a client maps in place of a part of a region.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// A part of a region that a client may map.
#[derive(Clone, Debug)]
pub struct Mappable {
    /// Number of the region.
    pub region: u32,
    /// First byte of the part.
    pub offset: u64,
    /// Bytes of the part.
    pub size: u64,
    /// What is mapped, at the same offset.
    pub file: Arc<OwnedFd>,
}

impl AsFd for Mappable {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
