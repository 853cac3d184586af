//! Doorbell pages that a VMM may replace with memory.

use std::io;
use std::ops::Range;

/// Bytes of a doorbell page.
pub const DOORBELL_PAGE_SIZE: u64 = 4096;

/// Pages of a BAR that contain only doorbells, and that may temporarily be memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DoorbellPages {
    /// BAR of the pages, 0 to 5.
    pub bar: usize,
    /// Page numbers in the BAR, in units of [`DOORBELL_PAGE_SIZE`].
    pub pages: Range<u32>,
}

/// Memory of a VMM that temporarily replaces doorbell pages of a function, so that doorbell writes do not trap and do
/// not stop the guest's processor.
pub trait DoorbellWindow: Send + Sync {
    /// Makes the page memory, initially all zeros, wherever the guest has placed the BAR. A page that already is memory
    /// stays as it is.
    ///
    /// # Errors
    /// The system refuses, or the BAR is not decoded. The page traps as before.
    fn map(&self, page: u32) -> io::Result<()>;

    /// Makes the page trap again. When this returns, every store of the guest reaches the function, and the stored
    /// contents are gone.
    ///
    /// # Errors
    /// The system refuses. The page is still memory.
    fn unmap(&self, page: u32) -> io::Result<()>;
}
