//! DMA address space of one device.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use pvrdma_base::locks::{Mutex, RwLock, RwLockReadGuard};
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use super::dirty::{DirtyLog, DirtyLogError};
use super::map::Map;
use super::pin::PinTable;
use super::stall::{Hold, Stall, StallMeter, Stalls};
use super::view::Guarded;
use super::{
    Backing, DmaRange, DmaView, MapError, MemoryBudget, MemoryLimits, MemoryWatcher, PinError, PinPolicy, SpaceId,
};

/// Bytes that are locked in one step, which bounds how long a thread that removes memory may have to wait.
const PIN_STEP: u64 = 32 << 20;

/// The bus address space of one device.
pub struct DmaSpace {
    id: SpaceId,
    map: RwLock<Map>,
    /// Changed only with `map` locked for writing, so a view sees one value for its whole life.
    enabled: AtomicBool,
    /// `true` if the VMM has removed memory without announcing it: every access is refused.
    revoked: Arc<AtomicBool>,
    policy: PinPolicy,
    limits: MemoryLimits,
    pub(super) pins: Mutex<PinTable>,
    /// Bytes of mapped memory. Atomic, so that a status query need not wait for a lock.
    mapped: AtomicU64,
    pinned: AtomicU64,
    pin_error: Mutex<Option<PinError>>,
    watchers: Mutex<Vec<Weak<dyn MemoryWatcher>>>,
    stalls: Stalls,
}

impl fmt::Debug for DmaSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DmaSpace").field("id", &self.id).field("policy", &self.policy).finish_non_exhaustive()
    }
}

impl DmaSpace {
    /// Creates an empty space with the default limits.
    pub fn new(policy: PinPolicy) -> Arc<Self> {
        Self::with_limits(policy, MemoryLimits::default())
    }

    /// Creates an empty space.
    pub fn with_limits(policy: PinPolicy, limits: MemoryLimits) -> Arc<Self> {
        Self::build(policy, limits, None)
    }

    /// Creates an empty space that measures stalls with `meter`, for tests.
    pub fn with_meter(policy: PinPolicy, limits: MemoryLimits, meter: Box<dyn StallMeter>) -> Arc<Self> {
        Self::build(policy, limits, Some(meter))
    }

    fn build(policy: PinPolicy, limits: MemoryLimits, meter: Option<Box<dyn StallMeter>>) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let revoked = Arc::<AtomicBool>::default();
        Arc::new(Self {
            stalls: Stalls::new(Arc::clone(&revoked), meter),
            id: SpaceId(NEXT.fetch_add(1, Ordering::Relaxed)),
            map: RwLock::default(),
            enabled: AtomicBool::new(true),
            revoked,
            policy,
            limits,
            pins: Mutex::new(PinTable::new(limits)),
            mapped: AtomicU64::new(0),
            pinned: AtomicU64::new(0),
            pin_error: Mutex::default(),
            watchers: Mutex::default(),
        })
    }

    /// Makes the space notify `watcher` of all memory that is removed from now on, for as long as the watcher exists.
    pub fn watch(&self, watcher: Weak<dyn MemoryWatcher>) {
        let mut watchers = self.watchers.lock();
        watchers.retain(|known| known.strong_count() > 0);
        watchers.push(watcher);
    }

    /// Calls every watcher. The caller must hold neither a view nor a lock.
    fn tell(&self, call: impl Fn(&dyn MemoryWatcher)) {
        let watchers: Vec<_> = self.watchers.lock().iter().filter_map(Weak::upgrade).collect();
        watchers.iter().for_each(|watcher| call(&**watcher));
    }

    /// Creates a space with all regions of a VMM's guest memory, each at its guest-physical address. For VMMs in the
    /// same process.
    ///
    /// # Errors
    /// The regions cannot be mapped one to one.
    pub fn from_guest_memory(memory: &GuestMemoryMmap, policy: PinPolicy) -> Result<Arc<Self>, MapError> {
        let space = Self::new(policy);
        for region in memory.iter() {
            space.map(DmaRange {
                iova: region.start_addr().0,
                len: region.len(),
                writable: true,
                backing: Some(Backing { mapping: region.get_mmap(), offset: 0 }),
            })?;
        }
        Ok(space)
    }

    /// Returns the identifier of the space.
    pub const fn id(&self) -> SpaceId {
        self.id
    }

    /// Returns the pin policy.
    pub const fn policy(&self) -> PinPolicy {
        self.policy
    }

    /// Adds a range. With [`PinPolicy::All`], its memory must then be populated and locked. As that may take a second
    /// per gigabyte, it is left to [`Self::pin_step`].
    ///
    /// # Errors
    /// The range is invalid, overlaps another, or exceeds the limit of ranges.
    pub fn map(&self, range: DmaRange) -> Result<(), MapError> {
        let invalid = MapError::Invalid { iova: range.iova, len: range.len };
        if range.len == 0 || range.iova.checked_add(range.len).is_none() {
            return Err(invalid);
        }
        if let Some(backing) = &range.backing {
            let len = usize::try_from(range.len).map_err(|_| MapError::Invalid { iova: range.iova, len: range.len })?;
            if backing.offset.checked_add(len).is_none_or(|end| end > backing.mapping.size()) {
                return Err(invalid);
            }
        }
        let pinned = range.clone();
        {
            let ranges = &mut self.map.write().ranges;
            if ranges.len() >= self.limits.ranges {
                return Err(MapError::TooMany);
            }
            let at = ranges.partition_point(|r| r.iova < range.iova);
            let overlaps_next = ranges.get(at).is_some_and(|next| next.iova < range.end());
            let overlaps_previous = at.checked_sub(1).and_then(|i| ranges.get(i)).is_some_and(|p| p.end() > range.iova);
            if overlaps_next || overlaps_previous {
                return Err(MapError::Overlap { iova: range.iova, len: range.len });
            }
            if range.backing.is_some() {
                self.mapped.fetch_add(range.len, Ordering::Relaxed);
            }
            ranges.insert(at, range);
        }
        if self.policy == PinPolicy::All {
            self.with_pins(|pins| pins.queue_range(pinned));
        }
        Ok(())
    }

    /// Removes every range inside `iova..iova+len`. When this returns, nothing accesses that memory any more.
    ///
    /// # Errors
    /// There is no such range, or one extends beyond the bounds; nothing was removed then.
    pub fn unmap(&self, iova: u64, len: u64) -> Result<(), MapError> {
        let end = iova.checked_add(len).ok_or(MapError::Invalid { iova, len })?;
        let removed: Vec<DmaRange> = {
            let ranges = &mut self.map.write().ranges;
            let first = ranges.partition_point(|r| r.end() <= iova);
            let last = ranges.partition_point(|r| r.iova < end);
            let inside = first < last
                && ranges.get(first).is_some_and(|r| r.iova >= iova)
                && ranges.get(last.wrapping_sub(1)).is_some_and(|r| r.end() <= end);
            if !inside {
                return Err(MapError::NoMatch { iova, len });
            }
            ranges.drain(first..last).collect()
        };
        self.release(&removed);
        Ok(())
    }

    /// Removes all ranges, for example after the VMM has disconnected.
    pub fn unmap_all(&self) {
        let removed = std::mem::take(&mut self.map.write().ranges);
        self.release(&removed);
    }

    /// Returns the flag that revokes all access, starting with the next view. A signal handler may set it on a thread
    /// that holds a view. It is to be cleared after the VMM has disconnected.
    pub fn revocation(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.revoked)
    }

    /// Returns `true` if all access was revoked, by [`Self::revocation`] or because of stalls.
    pub fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire)
    }

    /// Returns `true` if an access to this memory stalled in the last minutes ([`Stall`]), or may have stalled in the
    /// last minute. Callers should then hold no memory and no lock of other devices while they use it.
    #[inline]
    pub fn is_slow(&self) -> bool {
        self.stalls.is_slow()
    }

    /// Records a stall as if an access had just found it.
    pub fn note_stall(&self, duration: Duration) {
        self.stalls.note_now(duration);
    }

    /// Sets the function that is called for each stall of this memory (see [`Stall`]), replacing the previous one. It
    /// runs on the thread that waited, which holds views and perhaps other locks, so it must neither wait nor use guest
    /// memory.
    ///
    /// Stalls are detected only from this call on. Memory that another process provides needs an observer, because that
    /// process can make page faults wait; memory of this process does not.
    pub fn observe_stalls(&self, observer: impl Fn(Stall) + Send + Sync + 'static) {
        self.stalls.observe(Arc::new(observer));
    }

    /// Returns `true` if the memory was revoked because it stalled other users too often. Clears that state.
    pub fn take_stalled(&self) -> bool {
        self.stalls.take_exceeded()
    }

    fn release(&self, removed: &[DmaRange]) {
        let bytes: u64 = removed.iter().filter(|range| range.backing.is_some()).map(|range| range.len).sum();
        self.mapped.fetch_sub(bytes, Ordering::Relaxed);
        let ranges: Vec<_> = removed.iter().map(|range| (range.iova, range.len)).collect();
        self.tell(|watcher| watcher.unmapped(&ranges));
        if self.policy == PinPolicy::All {
            self.with_pins(|pins| removed.iter().for_each(|range| pins.unpin_range(range)));
        }
    }

    /// Locks the map for reading and returns a view of it. The calling thread must not already hold a view of this
    /// space: a thread that waits to change the map, and thus for the first view, would block the second.
    #[inline]
    pub fn view(&self) -> DmaView<'_> {
        let map = self.map.read();
        self.view_of(map, self.stalls.hold())
    }

    /// As [`Self::view`]. Returns `None` if a thread removes memory or waits to do so.
    pub fn try_view(&self) -> Option<DmaView<'_>> {
        let map = self.map.try_read()?;
        Some(self.view_of(map, self.stalls.hold()))
    }

    /// Returns views of two different spaces. Locks their maps in the order of the spaces' identifiers, so that threads
    /// with the same pair never wait for each other. The calling thread must hold a view of neither.
    #[inline]
    pub fn view_pair<'a>(first: &'a Self, second: &'a Self) -> (DmaView<'a>, DmaView<'a>) {
        let (first_map, second_map) = if first.id < second.id {
            let map = first.map.read();
            (map, second.map.read())
        } else {
            let map = second.map.read();
            (first.map.read(), map)
        };
        let (first_hold, second_hold) = first.stalls.hold_pair(&second.stalls);
        (first.view_of(first_map, first_hold), second.view_of(second_map, second_hold))
    }

    #[inline]
    fn view_of<'a>(&'a self, map: RwLockReadGuard<'a, Map>, hold: Hold<'a>) -> DmaView<'a> {
        let enabled = self.enabled.load(Ordering::Relaxed) && !self.revoked.load(Ordering::Relaxed);
        let reads = !enabled || hold.is_watched();
        let guarded = Guarded { reads, writes: reads || map.log.is_some() };
        DmaView { id: self.id, enabled, guarded, map, hold }
    }

    /// Starts a log of the pages in these ranges (first address, bytes) that the device may write, from this call on,
    /// at 4 KiB a bit. Addresses need not be mapped. The bitmap is charged to `budget`. The caller must not hold a
    /// view.
    ///
    /// # Errors
    /// A log exists, a range is malformed or overlaps another, the memory map is that of a virtual IOMMU, or the budget
    /// is exceeded.
    pub fn start_dirty_log(&self, ranges: &[(u64, u64)], budget: &Arc<MemoryBudget>) -> Result<(), DirtyLogError> {
        let log = DirtyLog::new(ranges, budget)?;
        let mut map = self.map.write();
        DirtyLog::check(&map.ranges)?;
        if map.log.is_some() {
            return Err(DirtyLogError::On);
        }
        map.log = Some(log);
        Ok(())
    }

    /// Takes the pages of `iova..iova+len` from the log. Bit n of the result (lowest bit first) is set if the device
    /// may have written the `page_size` bytes at `iova` + n · `page_size` since the log started, or since the last
    /// report that included them. Reported writes are complete when this returns. The caller must hold neither a view
    /// nor a lock that a holder of a view may wait for.
    ///
    /// # Errors
    /// There is no log, `page_size` is no power of two from 4096 on, or the log does not include all of the addresses.
    pub fn report_dirty(&self, iova: u64, len: u64, page_size: u64) -> Result<Vec<u64>, DirtyLogError> {
        let bits = self.map.read().log.as_ref().ok_or(DirtyLogError::Off)?.take(iova, len, page_size)?;
        // A thread may have marked its page before the bits were taken, and write to it only now.
        self.barrier();
        Ok(bits)
    }

    /// Ends the log, if there is one. The caller must not hold a view.
    pub fn stop_dirty_log(&self) {
        // Freed after the map is unlocked.
        let _log = self.map.write().log.take();
    }

    /// Returns `true` if there is a log of written pages.
    pub fn has_dirty_log(&self) -> bool {
        self.map.read().log.is_some()
    }

    /// Enables or disables all access: a function without bus mastering reaches no memory, even if it is mapped. When
    /// this returns, every view of the old setting is gone. The caller must hold neither a view nor a lock that a
    /// holder of a view may wait for.
    pub fn set_enabled(&self, enabled: bool) {
        let map = self.map.write();
        self.enabled.store(enabled, Ordering::Relaxed);
        drop(map);
        if !enabled {
            self.tell(|watcher| watcher.disabled());
        }
    }

    /// Returns `true` if access is enabled.
    pub fn is_enabled(&self) -> bool {
        self.enabled.load(Ordering::Relaxed)
    }

    /// Waits until every view taken before this call is gone. The caller must hold neither a view nor a lock that a
    /// holder of a view may wait for.
    pub fn barrier(&self) {
        drop(self.map.write());
    }

    /// Populates and locks a bounded part of the memory that [`Self::map`] queued. Returns `true` if more is left. Call
    /// it from a thread for which no other thread waits.
    pub fn pin_step(&self) -> bool {
        self.with_pins(|pins| pins.pin_step(PIN_STEP))
    }

    /// Locks all guest memory, as [`PinPolicy::All`] requires: resident pages stay resident, and others stay from the
    /// moment they are faulted in, which [`Self::pin_step`] continues to do. Checks all limits. The duration does not
    /// depend on the amount of memory. Never fails with the other policies.
    ///
    /// # Errors
    /// The amount that could not be locked or populated, and the limit that was reached.
    pub fn lock_all(&self) -> Result<(), PinError> {
        self.with_pins(PinTable::lock_pending);
        self.pin_error()
    }

    /// Checks that all guest memory is locked and populated, and completes that first, which takes long if much memory
    /// is left. Never fails with policies other than [`PinPolicy::All`].
    ///
    /// # Errors
    /// The amount that could not be locked, and the limit that was reached.
    pub fn finish_pinning(&self) -> Result<(), PinError> {
        while self.pin_step() {}
        self.pin_error()
    }

    /// Returns the failures of the memory processed so far, without waiting.
    ///
    /// # Errors
    /// As for [`Self::finish_pinning`].
    pub fn pin_error(&self) -> Result<(), PinError> {
        self.pin_error.lock().clone().map_or(Ok(()), Err)
    }

    /// Changes the table of locked memory, then publishes its new size and failures.
    pub(super) fn with_pins<R>(&self, change: impl FnOnce(&mut PinTable) -> R) -> R {
        let mut pins = self.pins.lock();
        let result = change(&mut pins);
        self.pinned.store(pins.pinned_bytes(), Ordering::Relaxed);
        if self.policy == PinPolicy::All {
            *self.pin_error.lock() = pins.status().err();
        }
        result
    }

    /// Returns the bytes of locked memory, without waiting.
    pub fn pinned_bytes(&self) -> u64 {
        self.pinned.load(Ordering::Relaxed)
    }

    /// Returns the bytes of mapped, accessible memory, without waiting.
    pub fn mapped_bytes(&self) -> u64 {
        self.mapped.load(Ordering::Relaxed)
    }
}
