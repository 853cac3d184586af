//! The calls that keep memory resident. The only unsafe code of this crate.
#![expect(unsafe_code, reason = "madvise, mlock2 and munlock take addresses")]

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

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

/// Faults in a part of a mapping.
pub(super) fn populate(mapping: &MmapRegion, offset: usize, len: usize) -> io::Result<()> {
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

/// `RLIMIT_MEMLOCK` in words.
pub(super) fn memlock_limit() -> String {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit writes into the struct it is given.
    if unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } != 0 {
        return "unknown".to_owned();
    }
    if limit.rlim_cur == libc::RLIM_INFINITY { "unlimited".to_owned() } else { format!("{} KiB", limit.rlim_cur >> 10) }
}
