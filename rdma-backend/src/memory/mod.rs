//! Guest memory as a device sees it: bus addresses that resolve to shared mappings.
//!
//! A [`DmaSpace`] holds the map of one device. Code that touches guest memory takes a [`DmaView`], does a bounded piece of
//! work through it and drops it. Taking a memory range away ([`DmaSpace::unmap`]) and [`DmaSpace::barrier`] wait for every
//! view, so when they return nothing uses the old map or anything that was looked up under it.
//!
//! Pointers never leave this module: a view lends [`VolatileSlice`]s that live no longer than the view.

mod pages;
mod pin;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use thiserror::Error;
use vm_memory::mmap::MmapRegion;
use vm_memory::{Bytes, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, VolatileMemory, VolatileSlice};

pub use pages::{Extent, PAGE_SIZE, PageList, PageListBuilder, Segments};
pub use pin::{PinError, PinGuard, PinPolicy};

use pin::PinTable;

/// Most ranges a space may have. A vIOMMU maps single pages, so there can be many.
pub const MAX_RANGES: usize = 65_536;

/// Octets that are locked in one go: whoever takes memory away may have to wait for that.
const PIN_STEP: u64 = 32 << 20;

/// Names a space for the life of the process. Two spaces are locked in ascending order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SpaceId(u64);

/// Why guest memory cannot be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum DmaError {
    /// No range covers these bytes.
    #[error("bus address {addr:#x}+{len:#x} is not mapped")]
    Unmapped {
        /// First address.
        addr: u64,
        /// Octets.
        len: u64,
    },
    /// The range is read-only, has no accessible memory behind it, or the space is switched off.
    #[error("bus address {addr:#x} does not allow this access")]
    Denied {
        /// First address.
        addr: u64,
    },
    /// The address is not aligned as the access needs.
    #[error("bus address {addr:#x} is not aligned")]
    Misaligned {
        /// The address.
        addr: u64,
    },
}

/// Why a range cannot be added or removed.
#[derive(Debug, Error)]
pub enum MapError {
    /// Length zero, or past the end of the address space, or beyond its backing.
    #[error("invalid range {iova:#x}+{len:#x}")]
    Invalid {
        /// First address.
        iova: u64,
        /// Octets.
        len: u64,
    },
    /// Another range is already there.
    #[error("range {iova:#x}+{len:#x} overlaps a mapped one")]
    Overlap {
        /// First address.
        iova: u64,
        /// Octets.
        len: u64,
    },
    /// The range to remove cuts through a mapped one, or nothing is mapped there.
    #[error("range {iova:#x}+{len:#x} does not match a mapped one")]
    NoMatch {
        /// First address.
        iova: u64,
        /// Octets.
        len: u64,
    },
    /// [`MAX_RANGES`] are mapped.
    #[error("too many ranges")]
    TooMany,
}

/// Memory behind a range.
#[derive(Clone, Debug)]
pub struct Backing {
    /// The shared mapping.
    pub mapping: Arc<MmapRegion>,
    /// Where in it the range starts.
    pub offset: usize,
}

/// One range of bus addresses.
#[derive(Clone, Debug)]
pub struct DmaRange {
    /// First bus address.
    pub iova: u64,
    /// Octets.
    pub len: u64,
    /// Whether the device may write.
    pub writable: bool,
    /// `None`: known, but not accessible (for example a ROM).
    pub backing: Option<Backing>,
}

impl DmaRange {
    const fn end(&self) -> u64 {
        // Checked when the range was added.
        self.iova.wrapping_add(self.len)
    }
}

/// The bus address space of one device.
pub struct DmaSpace {
    id: SpaceId,
    ranges: RwLock<Vec<DmaRange>>,
    /// Changed only with `ranges` locked for writing, so a view sees one value for its whole life.
    enabled: AtomicBool,
    policy: PinPolicy,
    pins: Mutex<PinTable>,
}

impl fmt::Debug for DmaSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DmaSpace").field("id", &self.id).field("policy", &self.policy).finish_non_exhaustive()
    }
}

impl DmaSpace {
    /// An empty space.
    pub fn new(policy: PinPolicy) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Arc::new(Self {
            id: SpaceId(NEXT.fetch_add(1, Ordering::Relaxed)),
            ranges: RwLock::new(Vec::new()),
            enabled: AtomicBool::new(true),
            policy,
            pins: Mutex::new(PinTable::default()),
        })
    }

    /// A space with all regions of a VMM's guest memory, each at its guest-physical address. For VMMs in the same process.
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

    /// Its name.
    pub const fn id(&self) -> SpaceId {
        self.id
    }

    /// How guest memory is kept resident.
    pub const fn policy(&self) -> PinPolicy {
        self.policy
    }

    /// Adds a range. With [`PinPolicy::All`] its memory is to be populated and locked, which takes long for much memory (a
    /// gigabyte may need a second) and is therefore left to [`Self::pin_some`] and [`Self::pin_status`].
    ///
    /// # Errors
    /// The range is invalid or overlaps another.
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
            let mut ranges = self.ranges.write();
            if ranges.len() >= MAX_RANGES {
                return Err(MapError::TooMany);
            }
            let at = ranges.partition_point(|r| r.iova < range.iova);
            let overlaps_next = ranges.get(at).is_some_and(|next| next.iova < range.end());
            let overlaps_previous = at.checked_sub(1).and_then(|i| ranges.get(i)).is_some_and(|p| p.end() > range.iova);
            if overlaps_next || overlaps_previous {
                return Err(MapError::Overlap { iova: range.iova, len: range.len });
            }
            ranges.insert(at, range);
        }
        if self.policy == PinPolicy::All {
            self.pins.lock().queue_range(pinned);
        }
        Ok(())
    }

    /// Removes every range inside `iova..iova+len`. When this returns, nothing accesses that memory any more.
    ///
    /// # Errors
    /// There is none, or one sticks out; nothing was removed then.
    pub fn unmap(&self, iova: u64, len: u64) -> Result<(), MapError> {
        let end = iova.checked_add(len).ok_or(MapError::Invalid { iova, len })?;
        let removed: Vec<DmaRange> = {
            let mut ranges = self.ranges.write();
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

    /// Removes everything, as when the VMM has gone.
    pub fn unmap_all(&self) {
        let removed = std::mem::take(&mut *self.ranges.write());
        self.release(&removed);
    }

    fn release(&self, removed: &[DmaRange]) {
        if self.policy == PinPolicy::All {
            let mut pins = self.pins.lock();
            for range in removed {
                pins.unpin_range(range);
            }
        }
    }

    /// Holds the map and lends it. The calling thread must not already hold a view of this space.
    pub fn view(&self) -> DmaView<'_> {
        let ranges = self.ranges.read();
        DmaView { id: self.id, enabled: self.enabled.load(Ordering::Relaxed), ranges }
    }

    /// Switches all access off or on: a function whose bus mastering is off reaches no memory, whatever the map says. When
    /// this returns, every view of the old setting is gone. The caller holds no view and no lock that a holder of a view may
    /// want.
    pub fn set_enabled(&self, enabled: bool) {
        let ranges = self.ranges.write();
        self.enabled.store(enabled, Ordering::Relaxed);
        drop(ranges);
    }

    /// Whether access is switched on.
    pub fn is_enabled(&self) -> bool {
        self.enabled.load(Ordering::Relaxed)
    }

    /// Waits until every view taken before this call is gone. The caller holds no view and no lock that a holder of a view
    /// may want.
    pub fn barrier(&self) {
        drop(self.ranges.write());
    }

    /// Does a bounded part of the locking that [`Self::map`] left. Returns whether there is more. Call it from a thread that
    /// nobody waits for, so that little is left for [`Self::pin_status`].
    pub fn pin_some(&self) -> bool {
        self.pins.lock().pin_some(PIN_STEP)
    }

    /// Whether all guest memory is resident as [`PinPolicy::All`] promises; finishes what is left of that first. Always good
    /// with the other policies.
    ///
    /// # Errors
    /// How much could not be locked and which limit stood in the way.
    pub fn pin_status(&self) -> Result<(), PinError> {
        while self.pin_some() {}
        self.pin_failure()
    }

    /// What [`Self::pin_status`] would say of the memory that was dealt with so far.
    ///
    /// # Errors
    /// As there.
    pub fn pin_failure(&self) -> Result<(), PinError> {
        self.pins.lock().status()
    }

    /// Octets locked in memory now.
    pub fn pinned_bytes(&self) -> u64 {
        self.pins.lock().pinned_bytes()
    }

    /// Octets mapped with accessible memory behind them.
    pub fn mapped_bytes(&self) -> u64 {
        self.ranges.read().iter().filter(|r| r.backing.is_some()).map(|r| r.len).sum()
    }

    /// With [`PinPolicy::Registered`], keeps these pages resident until the guard is dropped; does nothing otherwise.
    ///
    /// # Errors
    /// How much could not be locked and why.
    pub fn pin_pages(self: &Arc<Self>, pages: &PageList) -> Result<PinGuard, PinError> {
        if self.policy != PinPolicy::Registered {
            return Ok(PinGuard::none());
        }
        let mut parts = Vec::new();
        {
            let view = self.view();
            for extent in pages.extents() {
                view.backings(extent.iova, extent.bytes(), &mut parts);
            }
        }
        self.pins.lock().pin_parts(&parts)?;
        Ok(PinGuard::new(Arc::clone(self), parts))
    }
}

/// Which way the device accesses memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// The device reads.
    Read,
    /// The device writes.
    Write,
}

/// A held memory map.
pub struct DmaView<'a> {
    id: SpaceId,
    enabled: bool,
    ranges: RwLockReadGuard<'a, Vec<DmaRange>>,
}

impl fmt::Debug for DmaView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DmaView").field("id", &self.id).field("ranges", &self.ranges.len()).finish()
    }
}

impl DmaView<'_> {
    /// The space this is a view of.
    pub const fn id(&self) -> SpaceId {
        self.id
    }

    /// Lends the longest piece of `addr..addr+len` that is contiguous in our memory: at least one octet, at most `len`.
    ///
    /// # Errors
    /// The first octet cannot be accessed.
    #[inline]
    pub fn piece(&self, addr: u64, len: u64, direction: Direction) -> Result<VolatileSlice<'_>, DmaError> {
        let after = self.ranges.partition_point(|r| r.iova <= addr);
        let unmapped = DmaError::Unmapped { addr, len };
        let range = after.checked_sub(1).and_then(|i| self.ranges.get(i)).ok_or(unmapped)?;
        let into = addr - range.iova;
        if into >= range.len {
            return Err(unmapped);
        }
        let denied = DmaError::Denied { addr };
        if !self.enabled {
            return Err(denied);
        }
        let backing = range.backing.as_ref().ok_or(denied)?;
        if direction == Direction::Write && !range.writable {
            return Err(denied);
        }
        // Both fit: `map` checked that the backing, whose size is a usize, covers the range.
        #[expect(clippy::cast_possible_truncation, reason = "bounded by the backing's size")]
        let (offset, count) = (backing.offset + into as usize, len.min(range.len - into) as usize);
        backing.mapping.get_slice(offset, count).map_err(|_| unmapped)
    }

    /// Lends `addr..addr+len` if it lies in one piece.
    ///
    /// # Errors
    /// Some of it cannot be accessed, or it crosses from one range to the next.
    #[inline]
    pub fn slice(&self, addr: u64, len: usize, direction: Direction) -> Result<VolatileSlice<'_>, DmaError> {
        let piece = self.piece(addr, len as u64, direction)?;
        if piece.len() < len {
            return Err(DmaError::Unmapped { addr, len: len as u64 });
        }
        Ok(piece)
    }

    /// Copies from guest memory.
    ///
    /// # Errors
    /// Some of it cannot be read; `buf` may be partly filled.
    pub fn read(&self, addr: u64, buf: &mut [u8]) -> Result<(), DmaError> {
        let mut done = 0;
        while let Some(rest) = buf.get_mut(done..).filter(|r| !r.is_empty()) {
            let at = addr.checked_add(done as u64).ok_or(DmaError::Unmapped { addr, len: rest.len() as u64 })?;
            let piece = self.piece(at, rest.len() as u64, Direction::Read)?;
            done += piece.copy_to(rest);
        }
        Ok(())
    }

    /// Copies to guest memory.
    ///
    /// # Errors
    /// Some of it cannot be written; part of `buf` may have been.
    pub fn write(&self, addr: u64, buf: &[u8]) -> Result<(), DmaError> {
        let mut done = 0;
        while let Some(rest) = buf.get(done..).filter(|r| !r.is_empty()) {
            let at = addr.checked_add(done as u64).ok_or(DmaError::Unmapped { addr, len: rest.len() as u64 })?;
            let piece = self.piece(at, rest.len() as u64, Direction::Write)?;
            let count = piece.len();
            piece.copy_from(rest);
            done += count;
        }
        Ok(())
    }

    /// Reads a little-endian word in one access.
    ///
    /// # Errors
    /// It is misaligned or cannot be read.
    #[inline]
    pub fn load_u32(&self, addr: u64, order: Ordering) -> Result<u32, DmaError> {
        let slice = self.slice(addr, 4, Direction::Read)?;
        slice.load::<u32>(0, order).map(u32::from_le).map_err(|_| DmaError::Misaligned { addr })
    }

    /// Writes a little-endian word in one access.
    ///
    /// # Errors
    /// It is misaligned or cannot be written.
    #[inline]
    pub fn store_u32(&self, addr: u64, value: u32, order: Ordering) -> Result<(), DmaError> {
        let slice = self.slice(addr, 4, Direction::Write)?;
        slice.store(value.to_le(), 0, order).map_err(|_| DmaError::Misaligned { addr })
    }

    /// Exchanges or changes eight aligned octets atomically, also against the guest's processors. `change` maps the old
    /// value to the new one and may be called more than once. Returns the old value.
    ///
    /// # Errors
    /// They are misaligned or cannot be written.
    pub fn update_u64(&self, addr: u64, change: impl Fn(u64) -> Option<u64>) -> Result<u64, DmaError> {
        let slice = self.slice(addr, 8, Direction::Write)?;
        let word = slice.get_atomic_ref::<AtomicU64>(0).map_err(|_| DmaError::Misaligned { addr })?;
        let result =
            word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| change(u64::from_le(old)).map(u64::to_le));
        Ok(u64::from_le(result.unwrap_or_else(|unchanged| unchanged)))
    }

    /// Collects what is behind `addr..addr+len`, leaving out what is not accessible.
    fn backings(&self, addr: u64, len: u64, out: &mut Vec<(Arc<MmapRegion>, usize, usize)>) {
        let Some(end) = addr.checked_add(len) else { return };
        let first = self.ranges.partition_point(|r| r.end() <= addr);
        for range in self.ranges.iter().skip(first).take_while(|r| r.iova < end) {
            let Some(backing) = &range.backing else { continue };
            let (from, to) = (addr.max(range.iova), end.min(range.end()));
            // Inside the backing, whose size is a usize.
            #[expect(clippy::cast_possible_truncation, reason = "bounded by the backing's size")]
            let (offset, count) = (backing.offset + (from - range.iova) as usize, (to - from) as usize);
            out.push((Arc::clone(&backing.mapping), offset, count));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backing(size: usize) -> Backing {
        Backing { mapping: Arc::new(MmapRegion::new(size).unwrap()), offset: 0 }
    }

    fn range(iova: u64, len: u64) -> DmaRange {
        DmaRange { iova, len, writable: true, backing: Some(backing(usize::try_from(len).unwrap())) }
    }

    #[test]
    fn copies_cross_from_one_range_to_the_next_but_not_into_a_hole() {
        let space = DmaSpace::new(PinPolicy::Off);
        space.map(range(0x1000, 0x1000)).unwrap();
        space.map(range(0x2000, 0x1000)).unwrap();
        let data: Vec<u8> = (0..200).collect();
        let view = space.view();
        view.write(0x1fa0, &data).unwrap();
        let mut back = vec![0; 200];
        view.read(0x1fa0, &mut back).unwrap();
        assert_eq!(back, data);
        assert_eq!(view.write(0x2fff, &[1, 2]), Err(DmaError::Unmapped { addr: 0x3000, len: 1 }));
        assert!(view.slice(0x1fff, 2, Direction::Read).is_err());
        assert!(view.read(u64::MAX, &mut back).is_err());
    }

    #[test]
    fn overlaps_and_nonsense_are_refused() {
        let space = DmaSpace::new(PinPolicy::Off);
        space.map(range(0x1000, 0x2000)).unwrap();
        for (iova, len) in [(0x1000, 0x1000), (0x0, 0x1001), (0x2fff, 0x1000), (0x0, 0x10000)] {
            assert!(matches!(space.map(range(iova, len)), Err(MapError::Overlap { .. })), "{iova:#x}");
        }
        assert!(matches!(
            space.map(DmaRange { iova: 0x8000, len: 0, writable: true, backing: None }),
            Err(MapError::Invalid { .. })
        ));
        assert!(matches!(
            space.map(DmaRange { iova: u64::MAX, len: 2, writable: true, backing: None }),
            Err(MapError::Invalid { .. })
        ));
        assert!(matches!(
            space.map(DmaRange { iova: 0x8000, len: 0x2000, writable: true, backing: Some(backing(0x1000)) }),
            Err(MapError::Invalid { .. })
        ));
    }

    #[test]
    fn unmap_takes_whole_ranges_only() {
        let space = DmaSpace::new(PinPolicy::Off);
        for i in 1..5 {
            space.map(range(i * 0x1000, 0x1000)).unwrap();
        }
        assert!(space.unmap(0x1800, 0x800).is_err());
        assert!(space.unmap(0x1000, 0x1800).is_err());
        assert!(space.unmap(0x9000, 0x1000).is_err());
        space.unmap(0x2000, 0x2000).unwrap();
        assert!(space.view().read(0x2000, &mut [0]).is_err());
        assert!(space.view().read(0x4000, &mut [0]).is_ok());
        space.unmap(0, u64::MAX).unwrap();
        assert_eq!(space.mapped_bytes(), 0);
    }

    #[test]
    fn access_modes() {
        let space = DmaSpace::new(PinPolicy::Off);
        space.map(DmaRange { writable: false, ..range(0x1000, 0x1000) }).unwrap();
        space.map(DmaRange { iova: 0x2000, len: 0x1000, writable: true, backing: None }).unwrap();
        let view = space.view();
        assert!(view.read(0x1000, &mut [0]).is_ok());
        assert_eq!(view.write(0x1000, &[0]), Err(DmaError::Denied { addr: 0x1000 }));
        assert_eq!(view.read(0x2000, &mut [0]), Err(DmaError::Denied { addr: 0x2000 }));
        assert_eq!(view.load_u32(0x1002, Ordering::Acquire), Err(DmaError::Misaligned { addr: 0x1002 }));
    }

    #[test]
    fn atomic_update() {
        let space = DmaSpace::new(PinPolicy::Off);
        space.map(range(0x1000, 0x1000)).unwrap();
        let view = space.view();
        assert_eq!(view.update_u64(0x1008, |v| Some(v + 5)), Ok(0));
        assert_eq!(view.update_u64(0x1008, |v| (v == 4).then_some(9)), Ok(5));
        assert_eq!(view.update_u64(0x1008, |v| (v == 5).then_some(9)), Ok(5));
        assert_eq!(view.update_u64(0x1008, Some), Ok(9));
        assert!(view.update_u64(0x1004, Some).is_err());
    }

    #[test]
    fn a_disabled_space_resolves_nothing() {
        let space = DmaSpace::new(PinPolicy::Off);
        space.map(range(0x1000, 0x1000)).unwrap();
        space.set_enabled(false);
        assert!(!space.is_enabled());
        assert_eq!(space.view().write(0x1000, &[1]), Err(DmaError::Denied { addr: 0x1000 }));
        assert_eq!(space.view().read(0x1000, &mut [0]), Err(DmaError::Denied { addr: 0x1000 }));
        space.map(range(0x2000, 0x1000)).unwrap();
        space.set_enabled(true);
        assert!(space.view().write(0x2000, &[1]).is_ok());
    }

    #[test]
    fn unmap_waits_for_views() {
        let space = DmaSpace::new(PinPolicy::Off);
        space.map(range(0x1000, 0x1000)).unwrap();
        let view = space.view();
        let (done, wait) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let other = &space;
            scope.spawn(move || {
                other.unmap(0x1000, 0x1000).unwrap();
                done.send(()).unwrap();
            });
            assert!(wait.try_recv().is_err());
            view.write(0x1000, &[1]).unwrap();
            drop(view);
            wait.recv().unwrap();
        });
        assert_eq!(space.mapped_bytes(), 0);
    }
}
