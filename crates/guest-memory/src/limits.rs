//! How much of the process's memory and mappings the guest memory of one device may cost.

/// Most ranges a space may have. A vIOMMU maps single pages, so there can be many.
pub const MAX_RANGES: usize = 65_536;

/// Limits of a [`DmaSpace`](crate::DmaSpace). What exceeds one is refused, and nothing has changed then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryLimits {
    /// Ranges mapped at a time.
    pub ranges: usize,
    /// Bytes of mappings that may be locked at a time. Asked before anything is populated.
    pub locked_bytes: u64,
    /// Locked pieces with gaps between them, with [`PinPolicy::Registered`](crate::PinPolicy). Each costs the process
    /// two of the mappings that the kernel gives it (`vm.max_map_count`). What is more scattered is locked with the
    /// gaps.
    pub lock_runs: usize,
    /// Pieces of registered memory that are remembered. What that takes is charged to the device as well
    /// ([`Kept::Pins`](crate::Kept)).
    pub pinned_parts: usize,
}

impl Default for MemoryLimits {
    fn default() -> Self {
        Self { ranges: MAX_RANGES, locked_bytes: u64::MAX, lock_runs: 1024, pinned_parts: 1 << 19 }
    }
}
