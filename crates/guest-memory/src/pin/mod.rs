//! Keeping guest memory resident.
//!
//! A limit is asked before memory is populated: a lock that takes effect when a page is faulted in counts against
//! `RLIMIT_MEMLOCK` and the device's own share for all of its bytes, and costs nothing else.

pub(super) mod lock;
mod runs;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use thiserror::Error;
use vm_memory::mmap::MmapRegion;

use self::lock::{HOST_PAGE, lock, memlock_limit, populate, unlock};
use self::runs::Runs;
use super::part::Part;
use super::{Charge, DmaRange, DmaSpace, Kept, MemoryBudget, MemoryLimits};

/// How guest memory is kept resident.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PinPolicy {
    /// Everything the VMM maps is locked, and populated from then on; a device whose memory cannot be locked refuses to
    /// activate.
    #[default]
    All,
    /// Registered memory only, for as long as it is registered.
    Registered,
    /// Nothing is locked.
    Off,
}

/// Why guest memory could not be locked.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PinRefusal {
    /// What the kernel said.
    #[error("{0}")]
    Kernel(String),
    /// Which limit of the device is used up.
    #[error("{0}")]
    Device(String),
}

impl PinRefusal {
    fn kernel(error: &std::io::Error) -> Self {
        Self::Kernel(error.to_string())
    }
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
    /// Why.
    pub reason: PinRefusal,
}

/// Bytes that a part takes: its entry, and two ends of segments in the tree of its mapping, whose nodes may be half
/// empty.
const PART_BYTES: u64 = size_of::<Part>() as u64 + 2 * 64;
/// Bytes of a registration that is pinned, beside its parts.
const GUARD_BYTES: u64 = size_of::<Pinned>() as u64 + 48;

/// Keeps the pages of one registration resident.
#[derive(Debug)]
pub struct PinGuard(Option<Box<Pinned>>);

#[derive(Debug)]
struct Pinned {
    space: Arc<DmaSpace>,
    parts: Box<[Part]>,
    /// What is remembered of it.
    _charge: Charge,
}

impl PinGuard {
    /// Holds nothing.
    pub const fn none() -> Self {
        Self(None)
    }

    /// Pins parts of the space.
    pub(super) fn new(space: Arc<DmaSpace>, parts: Vec<Part>, budget: &Arc<MemoryBudget>) -> Result<Self, PinError> {
        let bytes = GUARD_BYTES.saturating_add(PART_BYTES.saturating_mul(parts.len() as u64));
        let charge = budget.charge(Kept::Pins, bytes);
        let charge = space.with_pins(|pins| {
            let charge = charge.map_err(|over| pins.error(bytes_of(&parts), PinRefusal::Device(over.to_string())))?;
            pins.pin_parts(&parts).map(|()| charge)
        })?;
        Ok(Self(Some(Box::new(Pinned { space, parts: parts.into_boxed_slice(), _charge: charge }))))
    }
}

impl Drop for PinGuard {
    fn drop(&mut self) {
        if let Some(pinned) = self.0.take() {
            pinned.space.with_pins(|pins| pins.unpin_parts(&pinned.parts));
        }
    }
}

/// With [`PinPolicy::Registered`]: what is locked of a mapping.
#[derive(Debug, Default)]
struct Registered {
    runs: Runs,
    /// Parts of it that are pinned.
    parts: usize,
}

/// With [`PinPolicy::All`]: a range that is not populated completely yet.
#[derive(Debug)]
struct Pending {
    range: DmaRange,
    done: u64,
}

/// What is locked.
#[derive(Debug, Default)]
pub(super) struct PinTable {
    limits: MemoryLimits,
    /// By first address.
    registered: BTreeMap<usize, Registered>,
    /// Parts in all of [`Self::registered`], and their runs, and bytes of these.
    parts: usize,
    runs: usize,
    run_bytes: u64,
    /// With [`PinPolicy::All`]: locked mappings by first address. Locked until they are gone: ranges that come and go
    /// share them.
    whole: BTreeMap<usize, Weak<MmapRegion>>,
    /// With [`PinPolicy::All`]: ranges by first bus address that could not be locked, and why.
    failed: BTreeMap<u64, (u64, PinRefusal)>,
    failed_bytes: u64,
    /// With [`PinPolicy::All`]: bytes of ranges that are populated and locked.
    ranges_locked: u64,
    /// With [`PinPolicy::All`]: by first bus address.
    pending: BTreeMap<u64, Pending>,
}

impl PinTable {
    pub(super) fn new(limits: MemoryLimits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// Notes a range that is to be locked.
    pub(super) fn queue_range(&mut self, range: DmaRange) {
        if range.backing.is_some() && range.writable {
            self.pending.insert(range.iova, Pending { range, done: 0 });
        }
    }

    /// Locks some more of what was queued. Returns whether there is still more.
    pub(super) fn pin_some(&mut self, budget: u64) -> bool {
        let Some((iova, mut next)) = self.pending.pop_first() else { return false };
        match self.pin_step(&mut next, budget) {
            Ok(step) => {
                self.ranges_locked = self.ranges_locked.saturating_add(step);
                if next.done < next.range.len {
                    self.pending.insert(iova, next);
                }
            }
            Err(reason) => self.fail(iova, &next, reason),
        }
        !self.pending.is_empty()
    }

    /// Locks all that was queued, and populates none of it.
    pub(super) fn lock_pending(&mut self) {
        for (iova, next) in std::mem::take(&mut self.pending) {
            let locked = next.range.backing.as_ref().map_or(Ok(()), |backing| self.lock_mapping(&backing.mapping));
            match locked {
                Ok(()) => drop(self.pending.insert(iova, next)),
                Err(reason) => self.fail(iova, &next, reason),
            }
        }
    }

    fn fail(&mut self, iova: u64, pending: &Pending, reason: PinRefusal) {
        self.ranges_locked = self.ranges_locked.saturating_sub(pending.done);
        self.failed_bytes = self.failed_bytes.saturating_add(pending.range.len);
        self.failed.insert(iova, (pending.range.len, reason));
    }

    fn pin_step(&mut self, next: &mut Pending, budget: u64) -> Result<u64, PinRefusal> {
        let Some(backing) = &next.range.backing else { return Ok(0) };
        self.lock_mapping(&backing.mapping)?;
        let step = budget.min(next.range.len.saturating_sub(next.done));
        // Inside the backing, whose size is a usize.
        #[expect(clippy::cast_possible_truncation, reason = "bounded by the backing's size")]
        let (start, end) = pages(backing.offset + next.done as usize, step as usize);
        populate(&backing.mapping, start, end - start).map_err(|error| PinRefusal::kernel(&error))?;
        next.done += step;
        Ok(step)
    }

    /// Locks all of a mapping, as one: however many ranges share it, it stays one mapping of the kernel's.
    fn lock_mapping(&mut self, mapping: &Arc<MmapRegion>) -> Result<(), PinRefusal> {
        let address = mapping.as_ptr() as usize;
        let known = |known: &Weak<MmapRegion>| std::ptr::eq(known.as_ptr(), Arc::as_ptr(mapping));
        if self.whole.get(&address).is_some_and(known) {
            return Ok(());
        }
        self.whole.retain(|_, mapping| mapping.strong_count() > 0);
        let locked: u64 = self.whole.values().filter_map(Weak::upgrade).map(|mapping| mapping.size() as u64).sum();
        self.check_bytes(locked.saturating_add(mapping.size() as u64))?;
        lock(mapping, 0, mapping.size()).map_err(|error| PinRefusal::kernel(&error))?;
        self.whole.insert(address, Arc::downgrade(mapping));
        Ok(())
    }

    fn check_bytes(&self, bytes: u64) -> Result<(), PinRefusal> {
        let limit = self.limits.locked_bytes;
        if bytes > limit {
            Err(PinRefusal::Device(format!("the device's limit of locked memory is {limit} bytes")))
        } else {
            Ok(())
        }
    }

    /// The lock itself is left to the unmapping of the file: other ranges may share its pages.
    pub(super) fn unpin_range(&mut self, range: &DmaRange) {
        if range.backing.is_none() || !range.writable {
            return;
        }
        let locked = if let Some(pending) = self.pending.remove(&range.iova) {
            pending.done
        } else if let Some((len, _)) = self.failed.remove(&range.iova) {
            self.failed_bytes = self.failed_bytes.saturating_sub(len);
            0
        } else {
            range.len
        };
        self.ranges_locked = self.ranges_locked.saturating_sub(locked);
    }

    pub(super) fn status(&self) -> Result<(), PinError> {
        let Some((_, reason)) = self.failed.values().next() else { return Ok(()) };
        Err(self.error(self.failed_bytes, reason.clone()))
    }

    pub(super) const fn pinned_bytes(&self) -> u64 {
        self.ranges_locked.saturating_add(self.run_bytes)
    }

    pub(super) fn pin_parts(&mut self, parts: &[Part]) -> Result<(), PinError> {
        for (done, part) in parts.iter().enumerate() {
            if let Err(reason) = self.pin_part(part) {
                let error = self.error(bytes_of(parts), reason);
                self.unpin_parts(parts.get(..done).unwrap_or_default());
                return Err(error);
            }
        }
        Ok(())
    }

    fn pin_part(&mut self, (mapping, offset, len): &Part) -> Result<(), PinRefusal> {
        if self.parts >= self.limits.pinned_parts {
            let problem = format!("the device's limit of {} registered pieces of memory is used up", self.parts);
            return Err(PinRefusal::Device(problem));
        }
        let (start, end) = pages(*offset, *len);
        let registered = self.registered.entry(mapping.as_ptr() as usize).or_default();
        let (count, bytes) = (registered.runs.count(), registered.runs.bytes());
        let others = self.runs.saturating_sub(count);
        let mut gaps = registered.runs.gaps(start, end);
        if others + registered.runs.count_with(&gaps) > self.limits.lock_runs {
            // Too scattered: locked with all that lies between, as one.
            gaps = registered.runs.gaps(0, mapping.size().next_multiple_of(HOST_PAGE));
        }
        let result = self.lock_gaps(mapping, &gaps, others);
        let result = result.and_then(|()| {
            populate(mapping, start, end - start).map_err(|error| {
                gaps.iter().for_each(|gap| unlock(mapping, gap.start, gap.len()));
                PinRefusal::kernel(&error)
            })
        });
        let Some(registered) = self.registered.get_mut(&(mapping.as_ptr() as usize)) else { return result };
        if result.is_ok() {
            gaps.into_iter().for_each(|gap| registered.runs.cover(gap));
            registered.runs.acquire(start, end);
            registered.parts += 1;
            self.parts += 1;
            self.runs = others + registered.runs.count();
            self.run_bytes = self.run_bytes.saturating_sub(bytes).saturating_add(registered.runs.bytes());
        } else if registered.parts == 0 {
            self.registered.remove(&(mapping.as_ptr() as usize));
        }
        result
    }

    /// Asks the limits and locks what is missing. `others`: runs of other mappings.
    fn lock_gaps(
        &self,
        mapping: &Arc<MmapRegion>,
        gaps: &[std::ops::Range<usize>],
        others: usize,
    ) -> Result<(), PinRefusal> {
        let (Some(first), Some(last)) = (gaps.first(), gaps.last()) else { return Ok(()) };
        let registered = self.registered.get(&(mapping.as_ptr() as usize));
        if registered.map_or(1, |registered| registered.runs.count_with(gaps)) + others > self.limits.lock_runs {
            let limit = self.limits.lock_runs;
            let problem = format!("the device's share of {limit} locked pieces with gaps between them is used up");
            return Err(PinRefusal::Device(problem));
        }
        let bytes: usize = gaps.iter().map(std::ops::Range::len).sum();
        self.check_bytes(self.run_bytes.saturating_add(bytes as u64))?;
        // What lies between two gaps is locked already.
        lock(mapping, first.start, last.end - first.start).map_err(|error| {
            gaps.iter().for_each(|gap| unlock(mapping, gap.start, gap.len()));
            PinRefusal::kernel(&error)
        })
    }

    pub(super) fn unpin_parts(&mut self, parts: &[Part]) {
        parts.iter().for_each(|part| self.unpin_part(part));
    }

    fn unpin_part(&mut self, (mapping, offset, len): &Part) {
        let address = mapping.as_ptr() as usize;
        let Some(registered) = self.registered.get_mut(&address) else { return };
        let (start, end) = pages(*offset, *len);
        let (count, bytes) = (registered.runs.count(), registered.runs.bytes());
        let others = self.runs.saturating_sub(count);
        let idle = registered.runs.release(start, end);
        registered.parts = registered.parts.saturating_sub(1);
        self.parts = self.parts.saturating_sub(1);
        self.run_bytes = self.run_bytes.saturating_sub(bytes);
        if registered.parts == 0 {
            unlock(mapping, 0, mapping.size().next_multiple_of(HOST_PAGE));
            self.registered.remove(&address);
            self.runs = others;
            return;
        }
        for gap in idle {
            // A hole that costs more than it frees stays locked.
            if others + registered.runs.count_without(&gap) <= self.limits.lock_runs {
                unlock(mapping, gap.start, gap.len());
                registered.runs.uncover(gap);
            }
        }
        self.runs = others + registered.runs.count();
        self.run_bytes = self.run_bytes.saturating_add(registered.runs.bytes());
    }

    fn error(&self, needed: u64, reason: PinRefusal) -> PinError {
        PinError { needed, locked: self.pinned_bytes(), limit: memlock_limit(), reason }
    }
}

/// Bytes of parts.
fn bytes_of(parts: &[Part]) -> u64 {
    parts.iter().map(|(_, _, len)| *len as u64).sum()
}

/// The host pages around a part: offsets of the first and behind the last.
const fn pages(offset: usize, len: usize) -> (usize, usize) {
    // A mapping begins on a page border and ends on one, so both are inside.
    (offset - offset % HOST_PAGE, (offset + len).next_multiple_of(HOST_PAGE))
}
