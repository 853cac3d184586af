//! Pinning: keeps guest memory resident.
//!
//! Memory is locked before it is populated. Such a lock takes effect when a page is faulted in (`MLOCK_ONFAULT`), but
//! counts with all its bytes against `RLIMIT_MEMLOCK` and the device's own limit at once. So a limit that is too low is
//! found before any memory is allocated.

pub(super) mod guard;
pub(super) mod lock;
mod runs;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Weak};

use thiserror::Error;
use vm_memory::mmap::MmapRegion;

use self::lock::{HOST_PAGE, lock, memlock_limit, populate, unlock};
use self::runs::Runs;
use super::part::Part;
use super::{DmaRange, MemoryLimits};

/// Policy for keeping guest memory resident.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PinPolicy {
    /// All memory that the VMM maps is locked, and populated afterwards; a device whose memory cannot be locked refuses
    /// to activate.
    #[default]
    All,
    /// Only registered memory is locked, for as long as it is registered.
    Registered,
    /// Nothing is locked.
    Off,
}

/// Reason why guest memory could not be locked.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PinRefusal {
    /// The kernel refused, with this error.
    #[error("{0}")]
    Kernel(String),
    /// This limit of the device is reached.
    #[error("{0}")]
    Device(String),
}

impl PinRefusal {
    fn kernel(error: &std::io::Error) -> Self {
        Self::Kernel(error.to_string())
    }
}

/// Error: guest memory could not be locked.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "cannot keep {needed} bytes of guest memory resident: {reason}; {locked} bytes are locked already, \
     RLIMIT_MEMLOCK is {limit}"
)]
pub struct PinError {
    /// Bytes that should be locked and are not.
    pub needed: u64,
    /// Bytes that this space has locked.
    pub locked: u64,
    /// `RLIMIT_MEMLOCK` as text.
    pub limit: String,
    /// Reason.
    pub reason: PinRefusal,
}

/// With [`PinPolicy::Registered`]: locked memory of one mapping.
#[derive(Debug, Default)]
struct Registered {
    runs: Runs,
    /// Number of pinned parts of the mapping.
    parts: usize,
}

/// With [`PinPolicy::All`]: a range that is not completely populated yet.
#[derive(Debug)]
struct Pending {
    range: DmaRange,
    done: u64,
}

/// Table of locked memory.
#[derive(Debug, Default)]
pub(super) struct PinTable {
    limits: MemoryLimits,
    /// With [`PinPolicy::Registered`]: by first address of the mapping.
    registered: BTreeMap<usize, Registered>,
    /// Totals of [`Self::registered`]: parts, runs, and bytes of the runs.
    parts: usize,
    runs: usize,
    run_bytes: u64,
    /// With [`PinPolicy::All`]: locked mappings by first address. They stay locked until they are unmapped, because
    /// several ranges, added and removed at any time, share them.
    whole: BTreeMap<usize, Weak<MmapRegion>>,
    /// With [`PinPolicy::All`]: ranges that could not be locked, by first bus address, with length and reason.
    failed: BTreeMap<u64, (u64, PinRefusal)>,
    failed_bytes: u64,
    /// With [`PinPolicy::All`]: bytes of ranges that are populated and locked.
    ranges_locked: u64,
    /// With [`PinPolicy::All`]: ranges not completely populated yet, by first bus address.
    pending: BTreeMap<u64, Pending>,
}

impl PinTable {
    pub(super) fn new(limits: MemoryLimits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// Queues a range to be locked.
    pub(super) fn queue_range(&mut self, range: DmaRange) {
        if range.backing.is_some() && range.writable {
            self.pending.insert(range.iova, Pending { range, done: 0 });
        }
    }

    /// Locks and populates the next part of the queue, up to `budget` bytes. Returns `true` if more is left.
    pub(super) fn pin_step(&mut self, budget: u64) -> bool {
        let Some((iova, mut next)) = self.pending.pop_first() else { return false };
        match self.pin_part(&mut next, budget) {
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

    /// Locks all queued ranges without populating them.
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

    fn pin_part(&mut self, next: &mut Pending, budget: u64) -> Result<u64, PinRefusal> {
        let Some(backing) = &next.range.backing else { return Ok(0) };
        self.lock_mapping(&backing.mapping)?;
        let step = budget.min(next.range.len.saturating_sub(next.done));
        // This fits: the part lies inside the backing, whose size is a usize.
        #[expect(clippy::cast_possible_truncation, reason = "bounded by the backing's size")]
        let (start, end) = pages(backing.offset + next.done as usize, step as usize);
        populate(&backing.mapping, start, end - start).map_err(|error| PinRefusal::kernel(&error))?;
        next.done += step;
        Ok(step)
    }

    /// Locks all of a mapping at once: it stays a single mapping in the kernel, no matter how many ranges share it.
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

    /// Removes a range from the bookkeeping. Its memory stays locked until the mapping ends, because other ranges may
    /// share its pages.
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

    /// Pins parts of the space, all or none. Parts that touch are locked by one system call, in whatever order they
    /// come: a registration of many single pages would split the process's mappings as often otherwise.
    pub(super) fn pin_parts(&mut self, parts: &[Part]) -> Result<(), PinError> {
        if self.parts.saturating_add(parts.len()) > self.limits.pinned_parts {
            let limit = self.limits.pinned_parts;
            let problem = format!("the device's limit of {limit} registered pieces of memory is used up");
            return Err(self.error(bytes_of(parts), PinRefusal::Device(problem)));
        }
        let sorted = sorted(parts);
        let mut done = 0;
        while let Some(rest) = sorted.get(done..).filter(|rest| !rest.is_empty()) {
            let run = touching(rest);
            if let Err(reason) = self.pin_run(run) {
                self.unpin_sorted(sorted.get(..done).unwrap_or_default());
                return Err(self.error(bytes_of(parts), reason));
            }
            done += run.len();
        }
        Ok(())
    }

    /// Pins parts of one mapping that touch, in ascending order.
    fn pin_run(&mut self, run: &[&Part]) -> Result<(), PinRefusal> {
        let Some((mapping, ..)) = run.first() else { return Ok(()) };
        let (start, end) = run.iter().fold((usize::MAX, 0), |(first, last), (_, offset, len)| {
            let (start, end) = pages(*offset, *len);
            (first.min(start), last.max(end))
        });
        let address = mapping.as_ptr() as usize;
        let registered = self.registered.entry(address).or_default();
        let (count, bytes) = (registered.runs.count(), registered.runs.bytes());
        let others = self.runs.saturating_sub(count);
        let mut gaps = registered.runs.gaps(start, end);
        if others + registered.runs.count_with(&gaps) > self.limits.lock_runs {
            // The parts are too scattered: lock the whole mapping, including the gaps, as one run.
            gaps = registered.runs.gaps(0, mapping.size().next_multiple_of(HOST_PAGE));
        }
        let result = self.lock_gaps(mapping, &gaps, others);
        let result = result.and_then(|()| {
            populate(mapping, start, end - start).map_err(|error| {
                gaps.iter().for_each(|gap| unlock(mapping, gap.start, gap.len()));
                PinRefusal::kernel(&error)
            })
        });
        let Some(registered) = self.registered.get_mut(&address) else { return result };
        if result.is_ok() {
            gaps.into_iter().for_each(|gap| registered.runs.cover(gap));
            for (_, offset, len) in run {
                let (start, end) = pages(*offset, *len);
                registered.runs.acquire(start, end);
            }
            registered.parts += run.len();
            self.parts += run.len();
            self.runs = others + registered.runs.count();
            self.run_bytes = self.run_bytes.saturating_sub(bytes).saturating_add(registered.runs.bytes());
        } else if registered.parts == 0 {
            self.registered.remove(&address);
        }
        result
    }

    /// Checks the limits and locks the gaps. `others` is the number of runs of other mappings.
    fn lock_gaps(&self, mapping: &Arc<MmapRegion>, gaps: &[Range<usize>], others: usize) -> Result<(), PinRefusal> {
        let (Some(first), Some(last)) = (gaps.first(), gaps.last()) else { return Ok(()) };
        let registered = self.registered.get(&(mapping.as_ptr() as usize));
        if registered.map_or(1, |registered| registered.runs.count_with(gaps)) + others > self.limits.lock_runs {
            let limit = self.limits.lock_runs;
            let problem = format!("the device's share of {limit} locked pieces with gaps between them is used up");
            return Err(PinRefusal::Device(problem));
        }
        let bytes: usize = gaps.iter().map(Range::len).sum();
        self.check_bytes(self.run_bytes.saturating_add(bytes as u64))?;
        // Memory between two gaps is locked already, so one call can cover them all.
        lock(mapping, first.start, last.end - first.start).map_err(|error| {
            gaps.iter().for_each(|gap| unlock(mapping, gap.start, gap.len()));
            PinRefusal::kernel(&error)
        })
    }

    pub(super) fn unpin_parts(&mut self, parts: &[Part]) {
        self.unpin_sorted(&sorted(parts));
    }

    /// Unpins parts, in ascending order.
    fn unpin_sorted(&mut self, mut sorted: &[&Part]) {
        while !sorted.is_empty() {
            let (run, rest) = sorted.split_at(touching(sorted).len());
            self.unpin_run(run);
            sorted = rest;
        }
    }

    /// Unpins parts of one mapping that touch, in ascending order.
    fn unpin_run(&mut self, run: &[&Part]) {
        let Some((mapping, ..)) = run.first() else { return };
        let address = mapping.as_ptr() as usize;
        let Some(registered) = self.registered.get_mut(&address) else { return };
        let (count, bytes) = (registered.runs.count(), registered.runs.bytes());
        let others = self.runs.saturating_sub(count);
        let mut idle: Vec<Range<usize>> = Vec::new();
        for (_, offset, len) in run {
            let (start, end) = pages(*offset, *len);
            for range in registered.runs.release(start, end) {
                match idle.last_mut() {
                    Some(last) if last.end == range.start => last.end = range.end,
                    _ => idle.push(range),
                }
            }
        }
        registered.parts = registered.parts.saturating_sub(run.len());
        self.parts = self.parts.saturating_sub(run.len());
        self.run_bytes = self.run_bytes.saturating_sub(bytes);
        if registered.parts == 0 {
            unlock(mapping, 0, mapping.size().next_multiple_of(HOST_PAGE));
            self.registered.remove(&address);
            self.runs = others;
            return;
        }
        for gap in idle {
            // Unlock the gap only if the split does not exceed the limit of runs; otherwise it stays locked.
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

/// Returns the total length of parts in bytes.
fn bytes_of(parts: &[Part]) -> u64 {
    parts.iter().map(|(_, _, len)| *len as u64).sum()
}

/// Returns the parts in ascending order of their mappings and offsets.
fn sorted(parts: &[Part]) -> Vec<&Part> {
    let mut sorted: Vec<&Part> = parts.iter().collect();
    sorted.sort_unstable_by_key(|(mapping, offset, _)| (mapping.as_ptr() as usize, *offset));
    sorted
}

/// Returns the longest beginning of sorted parts whose host pages touch or overlap, in one mapping.
fn touching<'a, 'b>(parts: &'a [&'b Part]) -> &'a [&'b Part] {
    let Some((mapping, offset, len)) = parts.first() else { return parts };
    let (_, mut end) = pages(*offset, *len);
    let touches = |(other, offset, len): &&&Part| {
        let (first, last) = pages(*offset, *len);
        let touches = Arc::ptr_eq(mapping, other) && first <= end;
        end = end.max(last);
        touches
    };
    let count = parts.iter().take_while(touches).count();
    parts.get(..count).unwrap_or_default()
}

/// Returns the host pages around a part: offset of the first, and offset behind the last.
const fn pages(offset: usize, len: usize) -> (usize, usize) {
    // A mapping begins and ends on a page boundary, so both offsets are inside.
    (offset - offset % HOST_PAGE, (offset + len).next_multiple_of(HOST_PAGE))
}
