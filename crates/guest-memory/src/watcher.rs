//! Who wants to know of memory that is taken away.

/// Hears of memory that a device must not reach any more. For adapters that hand memory to hardware: copies under a
/// [`DmaView`](crate::DmaView) need none of this.
pub trait MemoryWatcher: Send + Sync {
    /// These ranges (first address, bytes) are gone from the map. When this returns nothing reaches them. The caller
    /// holds no view and no lock.
    fn unmapped(&self, ranges: &[(u64, u64)]);

    /// All access was switched off; likewise for all memory. What was registered stays dead when it is switched on
    /// again.
    fn disabled(&self);
}
