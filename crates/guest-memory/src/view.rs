//! Access to guest memory while its map is locked.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pvrdma_base::locks::RwLockReadGuard;
use vm_memory::mmap::MmapRegion;
use vm_memory::{Bytes, VolatileMemory, VolatileSlice};

use super::map::Map;
use super::part::Part;
use super::stall::Hold;
use super::{Direction, DmaError, DmaRange, SpaceId};

/// View of a space: keeps its map locked for reading.
pub struct DmaView<'a> {
    pub(super) id: SpaceId,
    pub(super) enabled: bool,
    /// Accesses that are denied, observed or logged. As a rule there are none, so that an access tests one flag.
    pub(super) guarded: Guarded,
    pub(super) map: RwLockReadGuard<'a, Map>,
    /// Measures how long the view is held. It must be the last field: it is dropped after the map is unlocked.
    pub(super) hold: Hold<'a>,
}

/// Kinds of access that need more than a look-up in the memory map.
#[derive(Clone, Copy)]
pub(super) struct Guarded {
    pub(super) reads: bool,
    pub(super) writes: bool,
}

impl fmt::Debug for DmaView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DmaView").field("id", &self.id).field("ranges", &self.map.ranges.len()).finish()
    }
}

/// A piece of guest memory as mapped in this process, for adapters that register it with hardware.
#[derive(Clone, Debug)]
pub struct HostPiece {
    /// Mapping that contains the piece.
    pub mapping: Arc<MmapRegion>,
    /// Offset in bytes of the piece in the mapping.
    pub offset: usize,
    /// Length in bytes.
    pub len: usize,
    /// `true` if the device may write to it.
    pub writable: bool,
}

impl DmaView<'_> {
    /// Returns the identifier of the space.
    pub const fn id(&self) -> SpaceId {
        self.id
    }

    /// Returns the longest piece of `addr..addr+len` that is contiguous in this process: at least one byte, at most
    /// `len`. A piece that is lent for writing counts as written in the log of written pages
    /// ([`DmaSpace::start_dirty_log`](crate::DmaSpace::start_dirty_log)).
    ///
    /// # Errors
    /// The first byte cannot be accessed.
    // Always inline, as `find`, `slice`, `load_u32` and `store_u32`: every copy calls them several times, mostly with a
    // constant length or direction that decides some of the checks.
    #[inline(always)]
    pub fn piece(&self, addr: u64, len: u64, direction: Direction) -> Result<VolatileSlice<'_>, DmaError> {
        let piece = self.find(addr, len, direction)?;
        let guarded = match direction {
            Direction::Read => self.guarded.reads,
            Direction::Write => self.guarded.writes,
        };
        if guarded {
            self.guard(addr, &piece, direction)?;
        }
        Ok(piece)
    }

    /// Denies, logs or observes an access.
    #[cold]
    fn guard(&self, addr: u64, piece: &VolatileSlice<'_>, direction: Direction) -> Result<(), DmaError> {
        if !self.enabled {
            return Err(DmaError::Denied { addr });
        }
        if direction == Direction::Write
            && let Some(log) = &self.map.log
        {
            // The page is marked before it is written: a report that takes the mark waits for this view.
            log.mark(addr, piece.len() as u64);
        }
        self.hold.touch(piece);
        Ok(())
    }

    /// As [`Self::piece`], but without accessing the memory now, and even if access is disabled.
    #[inline(always)]
    fn find(&self, addr: u64, len: u64, direction: Direction) -> Result<VolatileSlice<'_>, DmaError> {
        let after = self.map.ranges.partition_point(|r| r.iova <= addr);
        let unmapped = DmaError::Unmapped { addr, len };
        let range = after.checked_sub(1).and_then(|i| self.map.ranges.get(i)).ok_or(unmapped)?;
        // The arithmetic of this function wraps only so that it is not checked again: the range begins at or below the
        // address, the address is inside the range, and `map` has checked that the backing covers the range.
        let into = addr.wrapping_sub(range.iova);
        if into >= range.len {
            return Err(unmapped);
        }
        let denied = DmaError::Denied { addr };
        let backing = range.backing.as_ref().ok_or(denied)?;
        if direction == Direction::Write && !range.writable {
            return Err(denied);
        }
        #[expect(clippy::cast_possible_truncation, reason = "bounded by the backing's size")]
        let (offset, count) =
            (backing.offset.wrapping_add(into as usize), len.min(range.len.wrapping_sub(into)) as usize);
        backing.mapping.get_slice(offset, count).map_err(|_| unmapped)
    }

    /// Returns `addr..addr+len` if it is contiguous in this process.
    ///
    /// # Errors
    /// Part of the memory cannot be accessed, or it extends over more than one range.
    #[inline(always)]
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
    /// Part of the memory cannot be read; `buf` may be partly filled.
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
    /// Part of the memory cannot be written; part of `buf` may have been written.
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
    /// The address is misaligned or cannot be read.
    #[inline(always)]
    pub fn load_u32(&self, addr: u64, order: Ordering) -> Result<u32, DmaError> {
        let slice = self.slice(addr, 4, Direction::Read)?;
        slice.load::<u32>(0, order).map(u32::from_le).map_err(|_| DmaError::Misaligned { addr })
    }

    /// Writes a little-endian word in one access.
    ///
    /// # Errors
    /// The address is misaligned or cannot be written.
    #[inline(always)]
    pub fn store_u32(&self, addr: u64, value: u32, order: Ordering) -> Result<(), DmaError> {
        let slice = self.slice(addr, 4, Direction::Write)?;
        slice.store(value.to_le(), 0, order).map_err(|_| DmaError::Misaligned { addr })
    }

    /// Updates eight aligned bytes atomically, also with respect to the guest's processors. `change` maps the old value
    /// to the new one and may be called more than once. Returns the old value.
    ///
    /// # Errors
    /// The address is misaligned or cannot be written.
    pub fn update_u64(&self, addr: u64, change: impl Fn(u64) -> Option<u64>) -> Result<u64, DmaError> {
        let slice = self.slice(addr, 8, Direction::Write)?;
        let word = slice.get_atomic_ref::<AtomicU64>(0).map_err(|_| DmaError::Misaligned { addr })?;
        let result =
            word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| change(u64::from_le(old)).map(u64::to_le));
        Ok(u64::from_le(result.unwrap_or_else(|unchanged| unchanged)))
    }

    /// Looks up the memory of `addr..addr+len` and appends it to `pieces`, merged with the last of them if it is
    /// adjacent.
    ///
    /// # Errors
    /// Part of the memory cannot be accessed, or cannot be written although `direction` requires it.
    pub fn host_pieces(
        &self,
        addr: u64,
        len: u64,
        direction: Direction,
        pieces: &mut Vec<HostPiece>,
    ) -> Result<(), DmaError> {
        let unmapped = DmaError::Unmapped { addr, len };
        let end = addr.checked_add(len).ok_or(unmapped)?;
        let mut at = addr;
        while at < end {
            if !self.enabled {
                return Err(DmaError::Denied { addr: at });
            }
            // This checks the access and returns the length of the contiguous piece.
            let count = self.find(at, end - at, direction)?.len();
            let after = self.map.ranges.partition_point(|r| r.iova <= at);
            let range = after.checked_sub(1).and_then(|i| self.map.ranges.get(i)).ok_or(unmapped)?;
            let backing = range.backing.as_ref().ok_or(DmaError::Denied { addr: at })?;
            // This fits: the piece lies inside the backing, whose size is a usize.
            #[expect(clippy::cast_possible_truncation, reason = "bounded by the backing's size")]
            let offset = backing.offset + (at - range.iova) as usize;
            match pieces.last_mut() {
                Some(last)
                    if Arc::ptr_eq(&last.mapping, &backing.mapping)
                        && last.offset + last.len == offset
                        && last.writable == range.writable =>
                {
                    last.len += count;
                }
                _ => pieces.push(HostPiece {
                    mapping: Arc::clone(&backing.mapping),
                    offset,
                    len: count,
                    writable: range.writable,
                }),
            }
            at += count as u64;
        }
        Ok(())
    }

    /// Returns all ranges, in the order of their addresses.
    pub fn ranges(&self) -> &[DmaRange] {
        &self.map.ranges
    }

    /// Returns all accessible ranges: first bus address and memory.
    pub fn all_pieces(&self) -> Vec<(u64, HostPiece)> {
        self.map
            .ranges
            .iter()
            .filter_map(|range| {
                let backing = range.backing.as_ref().filter(|_| self.enabled)?;
                let len = usize::try_from(range.len).ok()?;
                let mapping = Arc::clone(&backing.mapping);
                Some((range.iova, HostPiece { mapping, offset: backing.offset, len, writable: range.writable }))
            })
            .collect()
    }

    /// Collects the backing memory of `addr..addr+len`, without inaccessible parts. A part that is adjacent to the last
    /// one in `out` is merged with it.
    pub(super) fn backings(&self, addr: u64, len: u64, out: &mut Vec<Part>) {
        let Some(end) = addr.checked_add(len) else { return };
        let first = self.map.ranges.partition_point(|r| r.end() <= addr);
        for range in self.map.ranges.iter().skip(first).take_while(|r| r.iova < end) {
            let Some(backing) = &range.backing else { continue };
            let (from, to) = (addr.max(range.iova), end.min(range.end()));
            // This fits: the piece lies inside the backing, whose size is a usize.
            #[expect(clippy::cast_possible_truncation, reason = "bounded by the backing's size")]
            let (offset, count) = (backing.offset + (from - range.iova) as usize, (to - from) as usize);
            match out.last_mut() {
                Some((mapping, first, len)) if Arc::ptr_eq(mapping, &backing.mapping) && *first + *len == offset => {
                    *len += count;
                }
                _ => out.push((Arc::clone(&backing.mapping), offset, count)),
            }
        }
    }
}
