//! Doorbell pages that a VMM may put memory in the place of.

use std::io;
use std::ops::Range;

/// Bytes of a doorbell page.
pub const DOORBELL_PAGE_SIZE: u64 = 4096;

/// Pages of a BAR that hold nothing but doorbells, and that may be memory at times.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DoorbellPages {
    /// BAR of the pages, 0 to 5.
    pub bar: usize,
    /// Which pages of the BAR, each of [`DOORBELL_PAGE_SIZE`].
    pub pages: Range<u32>,
}

/// What a VMM brings so that doorbells of a function do not stop the guest's processor: memory of its own, which it
/// puts in the place of doorbell pages and takes away.
pub trait DoorbellWindow: Send + Sync {
    /// The page is memory from now on, all zeros at first, wherever the guest has put the BAR. One that is memory stays
    /// as it is.
    ///
    /// # Errors
    /// The system refuses, or the BAR answers nowhere. The page traps as before.
    fn map(&self, page: u32) -> io::Result<()>;

    /// The page traps again: when this returns, whatever the guest stores comes to the function, and what it had stored
    /// is gone.
    ///
    /// # Errors
    /// The system refuses. The page is still memory.
    fn unmap(&self, page: u32) -> io::Result<()>;
}
