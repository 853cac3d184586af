//! Memory map of a space, with the log of written pages.

use super::DmaRange;
use super::dirty::DirtyLog;

/// The state of a space that views read.
#[derive(Default)]
pub(super) struct Map {
    /// Mapped ranges, in the order of their addresses.
    pub(super) ranges: Vec<DmaRange>,
    /// Log of the pages that are lent for writing, while the VMM wants it.
    pub(super) log: Option<DirtyLog>,
}
