//! Limits on the memory and the mappings of this process that the guest memory of one device may use.

/// Maximum number of ranges of a space. It is large because a vIOMMU maps single pages.
pub const MAX_RANGES: usize = 65_536;

/// Limits of a [`DmaSpace`](crate::DmaSpace). A request that exceeds one is refused and changes nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct MemoryLimits {
    /// Maximum number of mapped ranges.
    pub ranges: usize,
    /// Maximum number of bytes of locked mappings. Checked before anything is populated.
    pub locked_bytes: u64,
    /// Maximum number of locked runs, separated by gaps, with [`PinPolicy::Registered`](crate::PinPolicy). Each run
    /// costs the process two of its kernel mappings (`vm.max_map_count`). Above this limit a mapping is locked
    /// including its gaps.
    pub lock_runs: usize,
    /// Maximum number of registered pieces of memory that are tracked. Their bookkeeping is also charged to the device
    /// ([`Kept::Pins`](crate::Kept)).
    pub pinned_parts: usize,
}

impl Default for MemoryLimits {
    fn default() -> Self {
        Self { ranges: MAX_RANGES, locked_bytes: u64::MAX, lock_runs: 1024, pinned_parts: 1 << 19 }
    }
}
