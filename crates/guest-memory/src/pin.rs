//! Keeping guest memory resident: populate and `mlock`. The only unsafe code of this crate.
#![expect(unsafe_code, reason = "madvise, mlock and munlock take addresses")]

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use log::warn;
use thiserror::Error;
use vm_memory::mmap::MmapRegion;

use super::{DmaRange, DmaSpace, PAGE_SIZE};

/// Page size of the host, as this file counts it.
const HOST_PAGE: usize = 4096;

/// How guest memory is kept resident.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PinPolicy {
    /// Everything the VMM maps is populated and locked; the device refuses to activate otherwise.
    #[default]
    All,
    /// Registered memory only, for as long as it is registered.
    Registered,
    /// Nothing is locked.
    Off,
}

/// Guest memory could not be locked.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "cannot keep {needed} bytes of guest memory resident: {reason}; {locked} bytes are locked already, \
     RLIMIT_MEMLOCK is {limit}"
)]
pub struct PinError {
    /// Bytes that should have been locked and are not.
    pub needed: u64,
    /// Bytes this space has locked.
    pub locked: u64,
    /// `RLIMIT_MEMLOCK`, in words.
    pub limit: String,
    /// What the kernel said.
    pub reason: String,
}

/// A piece of a mapping: offset and bytes.
type Part = (Arc<MmapRegion>, usize, usize);

/// Keeps the pages of one registration resident.
#[derive(Debug)]
pub struct PinGuard(Option<(Arc<DmaSpace>, Vec<Part>)>);

impl PinGuard {
    /// Holds nothing.
    pub const fn none() -> Self {
        Self(None)
    }

    pub(super) const fn new(space: Arc<DmaSpace>, parts: Vec<Part>) -> Self {
        Self(Some((space, parts)))
    }
}

impl Drop for PinGuard {
    fn drop(&mut self) {
        if let Some((space, parts)) = self.0.take() {
            space.pins.lock().unpin_parts(&parts);
        }
    }
}

/// What is locked, page by page, because locks of the kernel do not nest and registrations overlap.
#[derive(Debug, Default)]
pub(super) struct PinTable {
    /// Host page address to number of users.
    users: BTreeMap<usize, u32>,
    /// With [`PinPolicy::All`]: ranges by first bus address that could not be locked, and why.
    failed: BTreeMap<u64, (u64, String)>,
    /// With [`PinPolicy::All`]: bytes locked.
    ranges_locked: u64,
    /// With [`PinPolicy::All`]: ranges by first bus address that are not locked completely yet, and how far they are.
    pending: BTreeMap<u64, (DmaRange, u64)>,
}

impl PinTable {
    /// Notes a range that is to be locked.
    pub(super) fn queue_range(&mut self, range: DmaRange) {
        if range.backing.is_some() && range.writable {
            self.pending.insert(range.iova, (range, 0));
        }
    }

    /// Locks some more of what was queued. Returns whether there is still more.
    pub(super) fn pin_some(&mut self, budget: u64) -> bool {
        let Some(mut entry) = self.pending.first_entry() else { return false };
        let (range, done) = entry.get_mut();
        let step = budget.min(range.len - *done);
        // Inside the backing, whose size is a usize.
        #[expect(clippy::cast_possible_truncation, reason = "bounded by the backing's size")]
        let locked =
            range.backing.as_ref().map_or(Ok(()), |b| lock(&b.mapping, b.offset + *done as usize, step as usize));
        match locked {
            Ok(()) => {
                *done += step;
                self.ranges_locked += step;
                if *done == range.len {
                    entry.remove();
                }
            }
            Err(error) => {
                let (iova, (range, done)) = entry.remove_entry();
                self.ranges_locked = self.ranges_locked.saturating_sub(done);
                self.failed.insert(iova, (range.len, error.to_string()));
            }
        }
        !self.pending.is_empty()
    }

    /// The lock itself is left to the unmapping of the file: other ranges may share its pages.
    pub(super) fn unpin_range(&mut self, range: &DmaRange) {
        if range.backing.is_none() || !range.writable {
            return;
        }
        let locked = match self.pending.remove(&range.iova) {
            Some((_, done)) => done,
            None if self.failed.remove(&range.iova).is_some() => 0,
            None => range.len,
        };
        self.ranges_locked = self.ranges_locked.saturating_sub(locked);
    }

    pub(super) fn status(&self) -> Result<(), PinError> {
        let Some((_, reason)) = self.failed.values().next() else { return Ok(()) };
        Err(self.error(self.failed.values().map(|(len, _)| len).sum(), reason.clone()))
    }

    pub(super) fn pinned_bytes(&self) -> u64 {
        self.ranges_locked + self.users.len() as u64 * PAGE_SIZE
    }

    pub(super) fn pin_parts(&mut self, parts: &[Part]) -> Result<(), PinError> {
        for (done, (mapping, offset, len)) in parts.iter().enumerate() {
            if let Err(error) = lock(mapping, *offset, *len) {
                let needed = parts.iter().map(|(_, _, len)| *len as u64).sum();
                self.unpin_parts(parts.get(..done).unwrap_or_default());
                self.unlock_unused(mapping, *offset, *len);
                return Err(self.error(needed, error.to_string()));
            }
            for page in pages(mapping, *offset, *len) {
                *self.users.entry(page).or_insert(0) += 1;
            }
        }
        Ok(())
    }

    fn unpin_parts(&mut self, parts: &[Part]) {
        for (mapping, offset, len) in parts {
            for page in pages(mapping, *offset, *len) {
                if let Entry::Occupied(mut users) = self.users.entry(page) {
                    *users.get_mut() -= 1;
                    if *users.get() == 0 {
                        users.remove();
                    }
                }
            }
            self.unlock_unused(mapping, *offset, *len);
        }
    }

    /// Unlocks the pages of a part that nobody else uses, in runs.
    fn unlock_unused(&self, mapping: &MmapRegion, offset: usize, len: usize) {
        let mut run: Option<(usize, usize)> = None;
        for page in pages(mapping, offset, len) {
            if self.users.contains_key(&page) {
                if let Some((start, end)) = run.take() {
                    unlock(start, end - start);
                }
            } else {
                let end = page + HOST_PAGE;
                run = Some((run.map_or(page, |(start, _)| start), end));
            }
        }
        if let Some((start, end)) = run {
            unlock(start, end - start);
        }
    }

    fn error(&self, needed: u64, reason: String) -> PinError {
        PinError { needed, locked: self.pinned_bytes(), limit: memlock_limit(), reason }
    }
}

/// Host page addresses of a part.
fn pages(mapping: &MmapRegion, offset: usize, len: usize) -> impl Iterator<Item = usize> {
    let start = mapping.as_ptr() as usize + offset;
    let mask = !(HOST_PAGE - 1);
    (start & mask..start + len).step_by(HOST_PAGE)
}

/// Faults in and locks a part of a mapping.
fn lock(mapping: &MmapRegion, offset: usize, len: usize) -> io::Result<()> {
    if offset.checked_add(len).is_none_or(|end| end > mapping.size()) {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    let slack = (mapping.as_ptr() as usize + offset) % HOST_PAGE;
    let start = mapping.as_ptr().wrapping_add(offset).wrapping_sub(slack);
    let len = len + slack;
    // SAFETY: start..start+len lies inside a mapping that `mapping` keeps alive (a mapping begins on a page border, so
    // rounding down stays inside), and MADV_POPULATE_WRITE only faults pages in.
    let populated = unsafe { libc::madvise(start.cast(), len, libc::MADV_POPULATE_WRITE) };
    if populated != 0 {
        let error = io::Error::last_os_error();
        // Kernels before 5.14 do not know the advice; mlock faults the pages in as well.
        if error.raw_os_error() != Some(libc::EINVAL) {
            return Err(error);
        }
    }
    // SAFETY: as above; mlock changes residency only.
    if unsafe { libc::mlock(start.cast(), len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Unlocks pages that are still mapped, because the caller's parts keep their mappings alive.
fn unlock(start: usize, len: usize) {
    static FAILURES: AtomicU64 = AtomicU64::new(0);
    // SAFETY: munlock changes residency only; on an address that is not mapped it fails without effect.
    if unsafe { libc::munlock(std::ptr::with_exposed_provenance(start), len) } != 0 {
        let error = io::Error::last_os_error();
        let count = FAILURES.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        if count.is_power_of_two() {
            // Log: a guest decides how often it registers memory; the lines of all its life are few.
            warn!("munlock of {len} bytes: {error} ({count} times so far)");
        }
    }
}

/// `RLIMIT_MEMLOCK` in words.
fn memlock_limit() -> String {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit writes into the struct it is given.
    if unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } != 0 {
        return "unknown".to_owned();
    }
    if limit.rlim_cur == libc::RLIM_INFINITY { "unlimited".to_owned() } else { format!("{} bytes", limit.rlim_cur) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backing, PageListBuilder};

    fn space_with(policy: PinPolicy, pages: u64) -> Arc<DmaSpace> {
        let space = DmaSpace::new(policy);
        let mapping = Arc::new(MmapRegion::new(usize::try_from(pages * PAGE_SIZE).unwrap()).unwrap());
        space
            .map(DmaRange {
                iova: 0x10_0000,
                len: pages * PAGE_SIZE,
                writable: true,
                backing: Some(Backing { mapping, offset: 0 }),
            })
            .unwrap();
        space
    }

    fn list(first: u64, count: u64) -> crate::PageList {
        let mut builder = PageListBuilder::default();
        for page in first..first + count {
            builder.push(0x10_0000 + page * PAGE_SIZE).unwrap();
        }
        builder.finish()
    }

    #[test]
    fn all_is_locked_when_mapped() {
        let space = space_with(PinPolicy::All, 4);
        space.pin_status().unwrap();
        assert_eq!(space.pinned_bytes(), 4 * PAGE_SIZE);
        space.unmap_all();
        assert_eq!(space.pinned_bytes(), 0);
    }

    #[test]
    fn locking_goes_on_in_steps_and_ends_with_the_range() {
        let space = space_with(PinPolicy::All, 4);
        assert_eq!(space.pinned_bytes(), 0);
        assert!(space.pins.lock().pin_some(PAGE_SIZE));
        assert_eq!(space.pinned_bytes(), PAGE_SIZE);
        space.unmap_all();
        assert_eq!(space.pinned_bytes(), 0);
        assert!(!space.pin_some());
        space.pin_status().unwrap();
    }

    #[test]
    fn overlapping_registrations_keep_their_pages() {
        let space = space_with(PinPolicy::Registered, 8);
        assert_eq!(space.pinned_bytes(), 0);
        let a = space.pin_pages(&list(0, 4)).unwrap();
        let b = space.pin_pages(&list(2, 4)).unwrap();
        assert_eq!(space.pinned_bytes(), 6 * PAGE_SIZE);
        drop(a);
        assert_eq!(space.pinned_bytes(), 4 * PAGE_SIZE);
        drop(b);
        assert_eq!(space.pinned_bytes(), 0);
    }

    #[test]
    fn off_locks_nothing() {
        let space = space_with(PinPolicy::Off, 4);
        let _guard = space.pin_pages(&list(0, 4)).unwrap();
        assert_eq!(space.pinned_bytes(), 0);
    }

    #[test]
    fn the_error_names_need_and_limit() {
        let mut table = PinTable::default();
        table.failed.insert(0x1000, (0x2000, "Cannot allocate memory".to_owned()));
        let text = table.status().unwrap_err().to_string();
        assert!(text.contains("8192 bytes") && text.contains("RLIMIT_MEMLOCK"), "{text}");
    }
}
