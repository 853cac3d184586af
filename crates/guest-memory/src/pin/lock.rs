//! The calls that keep memory resident, and those that measure how long it lets its users wait. The only unsafe code
//! of this crate.
#![expect(
    unsafe_code,
    reason = "madvise, mlock2 and munlock take addresses, lseek with SEEK_DATA, the coarse clock and getrusage are not in std"
)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use log::warn;
use vm_memory::mmap::MmapRegion;

/// Page size of the host, as this file counts it.
pub(super) const HOST_PAGE: usize = 4096;

/// The address of a part of a mapping that begins on a page border.
fn address(mapping: &MmapRegion, offset: usize, len: usize) -> io::Result<*mut libc::c_void> {
    let inside = offset.checked_add(len).is_some_and(|end| end <= mapping.size().next_multiple_of(HOST_PAGE));
    if !inside || !offset.is_multiple_of(HOST_PAGE) {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    Ok(mapping.as_ptr().wrapping_add(offset).cast())
}

/// Locks a part of a mapping. What is not there yet is locked when it is faulted in: this populates nothing, but the
/// kernel's limit is asked for all of it.
pub(super) fn lock(mapping: &MmapRegion, offset: usize, len: usize) -> io::Result<()> {
    let start = address(mapping, offset, len)?;
    // SAFETY: start..start+len lies inside a mapping that `mapping` keeps alive; the call changes residency only.
    if unsafe { libc::mlock2(start, len, libc::MLOCK_ONFAULT) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Faults in those pages of a part of a mapping that its file has, and no others: what the owner of the file has not
/// used yet stays unused, because a page that this process faults in is charged to its control group and not to the
/// owner's. Memory without a file is this process's own and is faulted in completely.
///
/// The owner can make holes between the look and the call. A part is looked at once, so what that has the process
/// allocate is no more than the owner had allocated before.
///
/// # Errors
/// A page cannot be had, as one behind the end of the file.
pub(super) fn populate(mapping: &MmapRegion, offset: usize, len: usize) -> io::Result<()> {
    let Some(place) = mapping.file_offset() else { return populate_all(mapping, offset, len) };
    let (file, start) = (place.file(), place.start());
    let end = start.saturating_add(offset.saturating_add(len).min(mapping.size()) as u64);
    let mut at = start.saturating_add(offset as u64);
    if at >= end {
        return Ok(());
    }
    // The end of the file is a hole, and behind it there is not even that.
    match seek(file, libc::SEEK_HOLE, end - 1) {
        Ok(_) => {}
        // On hugetlbfs: a page that is there cannot be swapped.
        Err(error) if error.raw_os_error() == Some(libc::ESPIPE) => return Ok(()),
        Err(error) => return Err(error),
    }
    while at < end
        && let Some(data) = found(seek(file, libc::SEEK_DATA, at))?.filter(|&data| data < end)
    {
        let hole = found(seek(file, libc::SEEK_HOLE, data))?.unwrap_or(end).clamp(data, end);
        // Both lie in the mapping, whose size is a usize. Data begins on a page border, or where the part does.
        #[expect(clippy::cast_possible_truncation, reason = "bounded by the size of the mapping")]
        let (first, last) = ((data - start) as usize, ((hole - start) as usize).next_multiple_of(HOST_PAGE));
        populate_all(mapping, first - first % HOST_PAGE, last - (first - first % HOST_PAGE))?;
        // More than `at`, so the loop ends whatever the file's owner does to it.
        at = start.saturating_add(last as u64);
    }
    Ok(())
}

/// Where data or a hole begins at or behind `at`. This moves the position that the file's owner may share, which VMMs
/// do not use for guest memory.
fn seek(file: &File, whence: libc::c_int, at: u64) -> io::Result<u64> {
    let at = libc::off_t::try_from(at).map_err(io::Error::other)?;
    // SAFETY: lseek takes no address.
    let found = unsafe { libc::lseek(file.as_raw_fd(), at, whence) };
    u64::try_from(found).map_err(|_| io::Error::last_os_error())
}

/// `None`: there is none.
fn found(result: io::Result<u64>) -> io::Result<Option<u64>> {
    match result {
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
        result => result.map(Some),
    }
}

/// Faults in a part of a mapping.
fn populate_all(mapping: &MmapRegion, offset: usize, len: usize) -> io::Result<()> {
    let start = address(mapping, offset, len)?;
    let advise = |advice| {
        // SAFETY: as above; the advice faults pages in, for which the kernel reads or writes none of them.
        if unsafe { libc::madvise(start, len, advice) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    let unknown = |error: &io::Error| error.raw_os_error() == Some(libc::EINVAL);
    match advise(libc::MADV_POPULATE_WRITE) {
        // A mapping that is for reading only.
        Err(error) if unknown(&error) => match advise(libc::MADV_POPULATE_READ) {
            Err(error) if unknown(&error) => populate_by_lock(mapping, offset, len),
            result => result,
        },
        result => result,
    }
}

/// Kernels before 5.14 do not know the advice; a lock without conditions faults the pages in as well.
fn populate_by_lock(mapping: &MmapRegion, offset: usize, len: usize) -> io::Result<()> {
    let start = address(mapping, offset, len)?;
    // SAFETY: as above.
    if unsafe { libc::mlock(start, len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // One mapping of the kernel's again with what lies beside it.
    lock(mapping, offset, len)
}

/// Unlocks a part of a mapping.
pub(super) fn unlock(mapping: &MmapRegion, offset: usize, len: usize) {
    static FAILURES: AtomicU64 = AtomicU64::new(0);
    let result = address(mapping, offset, len).and_then(|start| {
        // SAFETY: as above.
        if unsafe { libc::munlock(start, len) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    });
    if let Err(error) = result {
        let count = FAILURES.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        if count.is_power_of_two() {
            // Log: a guest decides how often it registers memory; the lines of all its life are few.
            warn!("munlock of {len} bytes: {error} ({count} times so far)");
        }
    }
}

/// Monotonic time, some milliseconds late; it costs less than the exact time.
#[inline]
pub(crate) fn coarse_time() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: clock_gettime writes into the struct it is given.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut now) };
    // Neither is negative.
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// How often the calling thread has slept, as in a page fault that waits, and not only lost its processor to others.
pub(crate) fn voluntary_switches() -> u64 {
    // SAFETY: an all-zero rusage is a valid one.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: getrusage writes into the struct it is given. If it fails, no switch is seen.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    usage.ru_nvcsw.unsigned_abs()
}

/// `RLIMIT_MEMLOCK` in words.
pub(super) fn memlock_limit() -> String {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit writes into the struct it is given.
    if unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } != 0 {
        return "unknown".to_owned();
    }
    if limit.rlim_cur == libc::RLIM_INFINITY { "unlimited".to_owned() } else { format!("{} KiB", limit.rlim_cur >> 10) }
}
