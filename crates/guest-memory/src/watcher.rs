//! Notification about memory that is removed.

/// Receives notifications about memory that a device must not reach any more. For adapters that register memory with
/// hardware; code that copies under a [`DmaView`](crate::DmaView) does not need it.
pub trait MemoryWatcher: Send + Sync {
    /// These ranges (first address, bytes) were removed from the map. The watcher ensures that when this returns
    /// nothing accesses them. The caller holds neither a view nor a lock.
    fn unmapped(&self, ranges: &[(u64, u64)]);

    /// All access was disabled; the same as [`Self::unmapped`] for all memory. Registrations stay invalid when access
    /// is enabled again.
    fn disabled(&self);
}
