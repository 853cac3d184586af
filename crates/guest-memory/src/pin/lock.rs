//! System calls that keep memory resident, and those that measure how long an access waited. This is the only unsafe
//! code of the crate.
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

/// Page size of the host that this file assumes.
pub(super) const HOST_PAGE: usize = 4096;

/// Returns the address of a part of a mapping that begins on a page boundary.
fn address(mapping: &MmapRegion, offset: usize, len: usize) -> io::Result<*mut libc::c_void> {
    let inside = offset.checked_add(len).is_some_and(|end| end <= mapping.size().next_multiple_of(HOST_PAGE));
    if !inside || !offset.is_multiple_of(HOST_PAGE) {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    Ok(mapping.as_ptr().wrapping_add(offset).cast())
}

/// Locks a part of a mapping. Pages that are not resident yet are locked when they are faulted in: this populates
/// nothing, but counts all of the part against the kernel's limit.
pub(super) fn lock(mapping: &MmapRegion, offset: usize, len: usize) -> io::Result<()> {
    let start = address(mapping, offset, len)?;
    // SAFETY: start..start+len lies inside a mapping that `mapping` keeps alive; the call changes residency only.
    if unsafe { libc::mlock2(start, len, libc::MLOCK_ONFAULT) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Faults in those pages of a part of a mapping that its file has allocated, and no others: pages that the file's owner
/// has not used yet stay unallocated, because a page that this process faults in is charged to its control group and
/// not to the owner's. Memory without a file belongs to this process and is faulted in completely.
///
/// The owner can punch holes between the check and the call. Each part is checked only once, so this process allocates
/// no more than the owner had allocated before. The cost is linear in the length of the part.
///
/// # Errors
/// A page cannot be faulted in, for example one behind the end of the file.
pub(super) fn populate(mapping: &MmapRegion, offset: usize, len: usize) -> io::Result<()> {
    let Some(place) = mapping.file_offset() else { return populate_all(mapping, offset, len) };
    let (file, start) = (place.file(), place.start());
    let end = start.saturating_add(offset.saturating_add(len).min(mapping.size()) as u64);
    // Unlike fstat, seeking is among the calls of a worker's sandbox.
    let size = match seek(file, libc::SEEK_END, 0) {
        // Hugetlbfs need not support seeking. Its pages need no populating, because a resident one is never swapped
        // out.
        Err(error) if error.raw_os_error() == Some(libc::ESPIPE) => return Ok(()),
        size => size?,
    };
    if end > size.next_multiple_of(HOST_PAGE as u64) {
        return Err(io::Error::from_raw_os_error(libc::ENXIO));
    }
    let mut at = start.saturating_add(offset as u64);
    while at < end {
        let data = found(seek(file, libc::SEEK_DATA, at))?;
        let Some(data) = data.filter(|&data| data < end) else { return Ok(()) };
        let hole = data_end(file, data, end, size)?;
        // Both lie in the mapping, whose size is a usize. Data begins on a page boundary, or where the part does.
        #[expect(clippy::cast_possible_truncation, reason = "bounded by the size of the mapping")]
        let (first, last) = ((data - start) as usize, ((hole - start) as usize).next_multiple_of(HOST_PAGE));
        populate_all(mapping, first - first % HOST_PAGE, last - (first - first % HOST_PAGE))?;
        // The new position is greater than the old one, so the loop ends even if the file's owner changes the file
        // meanwhile.
        at = start.saturating_add(last as u64);
    }
    Ok(())
}

/// Quotient of the length of a file and that of a part from which on the kernel searches for the end of data. Per page,
/// its search costs a tenth of a system call.
const SEARCH_SHARE: u64 = 8;

/// Returns the end of the data that begins at `data`, at most `end`, in a file of `size` bytes.
///
/// The kernel searches up to the next hole and has no limit for it: in the memory of a large guest one search takes
/// milliseconds, and a registration may have a hundred thousand pieces. So only a part that is a considerable share of
/// the file is searched by the kernel, and any other page by page.
fn data_end(file: &File, data: u64, end: u64, size: u64) -> io::Result<u64> {
    if end - data >= size / SEARCH_SHARE {
        return Ok(found(seek(file, libc::SEEK_HOLE, data))?.unwrap_or(end).clamp(data, end));
    }
    let mut next = (data + 1).next_multiple_of(HOST_PAGE as u64);
    while next < end && found(seek(file, libc::SEEK_DATA, next))? == Some(next) {
        next += HOST_PAGE as u64;
    }
    Ok(next.min(end))
}

/// Returns the start of the next data or hole at or after `at`, or the end of the file. This moves the file position
/// that the owner may share; VMMs do not use it for guest memory.
fn seek(file: &File, whence: libc::c_int, at: u64) -> io::Result<u64> {
    let at = libc::off_t::try_from(at).map_err(io::Error::other)?;
    // SAFETY: lseek takes no address.
    let found = unsafe { libc::lseek(file.as_raw_fd(), at, whence) };
    u64::try_from(found).map_err(|_| io::Error::last_os_error())
}

/// Converts `ENXIO`, which means that there is no such data or hole, to `None`.
fn found(result: io::Result<u64>) -> io::Result<Option<u64>> {
    match result {
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
        result => result.map(Some),
    }
}

/// Faults in all pages of a part of a mapping.
fn populate_all(mapping: &MmapRegion, offset: usize, len: usize) -> io::Result<()> {
    let start = address(mapping, offset, len)?;
    let advise = |advice| {
        // SAFETY: as above; the advice faults pages in, for which the kernel reads or writes none of them.
        if unsafe { libc::madvise(start, len, advice) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    let unknown = |error: &io::Error| error.raw_os_error() == Some(libc::EINVAL);
    match advise(libc::MADV_POPULATE_WRITE) {
        // A read-only mapping cannot be populated for writing.
        Err(error) if unknown(&error) => match advise(libc::MADV_POPULATE_READ) {
            Err(error) if unknown(&error) => populate_by_lock(mapping, offset, len),
            result => result,
        },
        result => result,
    }
}

/// Populates by `mlock`: kernels before 5.14 do not have the advice, and an unconditional lock faults the pages in,
/// too.
fn populate_by_lock(mapping: &MmapRegion, offset: usize, len: usize) -> io::Result<()> {
    let start = address(mapping, offset, len)?;
    // SAFETY: as above.
    if unsafe { libc::mlock(start, len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // Locking again with `MLOCK_ONFAULT` gives the part the same flags as its surroundings, so that the kernel merges
    // the mappings again.
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
            // Log: a guest decides how often it registers memory; the lines in the life of the process are few.
            warn!("munlock of {len} bytes: {error} ({count} times so far)");
        }
    }
}

/// Returns the monotonic time, which may lag by some milliseconds; reading it costs less than the exact time.
#[inline]
pub(crate) fn coarse_time() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: clock_gettime writes into the struct it is given.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut now) };
    // Neither field is negative.
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// Returns the number of voluntary context switches of the calling thread. A page fault that waits causes one; a
/// preemption does not.
pub(crate) fn voluntary_switches() -> u64 {
    // SAFETY: an all-zero rusage is a valid one.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: getrusage writes into the struct it is given. If it fails, no switch is seen.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    usage.ru_nvcsw.unsigned_abs()
}

/// Returns `RLIMIT_MEMLOCK` as text.
pub(super) fn memlock_limit() -> String {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit writes into the struct it is given.
    if unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } != 0 {
        return "unknown".to_owned();
    }
    if limit.rlim_cur == libc::RLIM_INFINITY { "unlimited".to_owned() } else { format!("{} KiB", limit.rlim_cur >> 10) }
}
