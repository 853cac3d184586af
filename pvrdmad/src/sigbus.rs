//! Surviving a client that cuts off its memory file under us.
//!
//! Guest memory is a file that another process may shorten at any time; the next access to what is gone raises SIGBUS
//! here. One client must not end the daemon for all, so the handler puts an empty page where the lost one was. That
//! guest's data is gone either way; the count of repairs lets the daemon say so. Any other SIGBUS keeps its usual
//! effect.
#![expect(unsafe_code, reason = "a signal handler and the mapping it repairs")]

use std::io;
use std::ptr;
use std::sync::Arc;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};

use log::warn;
use parking_lot::Mutex;
use vm_memory::mmap::MmapRegion;

/// Most guest mappings at one time.
const SLOTS: usize = 1024;

/// `si_code` of an access to a part of a mapping that its file does not have (any more). Memory that failed has others.
const BUS_ADRERR: i32 = 2;

/// One guest mapping, as the handler sees it. Free while `len` is 0.
struct Slot {
    start: AtomicUsize,
    len: AtomicUsize,
    page: AtomicUsize,
    protection: AtomicUsize,
}

impl Slot {
    /// The page around `addr`: its address, size and protection, if it lies in this mapping.
    fn page_at(&self, addr: usize) -> Option<(usize, usize, i32)> {
        let len = self.len.load(Ordering::Acquire);
        let start = self.start.load(Ordering::Relaxed);
        let page = self.page.load(Ordering::Relaxed);
        let protection = self.protection.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        // A slot that changed meanwhile is not the one of the mapping that is being accessed.
        if len == 0 || self.len.load(Ordering::Relaxed) != len {
            return None;
        }
        let into = addr.checked_sub(start).filter(|&into| into < len)?;
        let slack = into.checked_rem(page)?;
        Some((addr.checked_sub(slack)?, page, i32::try_from(protection).ok()?))
    }
}

static TABLE: [Slot; SLOTS] = [const {
    Slot {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        page: AtomicUsize::new(0),
        protection: AtomicUsize::new(0),
    }
}; SLOTS];

/// Writers of [`TABLE`] take turns. The handler takes no lock.
static WRITERS: Mutex<()> = Mutex::new(());

static REPAIRED: AtomicU64 = AtomicU64::new(0);

/// Protects one guest mapping from the loss of its file. Drop it before the mapping.
#[derive(Debug)]
pub struct Guard {
    slot: usize,
}

impl Guard {
    /// Protects `mapping`, whose pages have `page` bytes. `None` if there are too many mappings.
    pub fn new(mapping: &Arc<MmapRegion>, page: usize) -> Option<Self> {
        install();
        let _turn = WRITERS.lock();
        let (slot, entry) = TABLE.iter().enumerate().find(|(_, slot)| slot.len.load(Ordering::Relaxed) == 0)?;
        entry.start.store(mapping.as_ptr() as usize, Ordering::Relaxed);
        entry.page.store(page, Ordering::Relaxed);
        entry.protection.store(usize::try_from(mapping.prot()).unwrap_or(0), Ordering::Relaxed);
        entry.len.store(mapping.size().next_multiple_of(page.max(1)), Ordering::Release);
        Some(Self { slot })
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _turn = WRITERS.lock();
        if let Some(slot) = TABLE.get(self.slot) {
            slot.len.store(0, Ordering::Release);
            fence(Ordering::SeqCst);
        }
    }
}

/// How many lost pages have been replaced since the start.
pub fn repaired() -> u64 {
    REPAIRED.load(Ordering::Relaxed)
}

/// Installs the handler, once.
pub fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if let Err(error) = set_handler() {
            // Log: once, at the start.
            warn!("cannot handle SIGBUS, a client that truncates its memory can end the daemon: {error}");
        }
    });
}

fn set_handler() -> io::Result<()> {
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_sigbus;
    // SAFETY: an all-zero sigaction is a valid one; the fields that matter are set below.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler has the type that SA_SIGINFO asks for and does only what a signal handler may: atomic loads
    // and the system calls mmap, sigaction and raise.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a valid siginfo_t, and `si_addr` is the field of a SIGBUS it raised
    // itself; for others the value is not used, as their code is not BUS_ADRERR.
    let (code, addr) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    let lost = if code == BUS_ADRERR { TABLE.iter().find_map(|slot| slot.page_at(addr)) } else { None };
    if let Some((page, len, protection)) = lost
        && replace(page, len, protection)
    {
        REPAIRED.fetch_add(1, Ordering::Relaxed);
        return;
    }
    // SAFETY: an all-zero sigaction is the default action. Raised again it takes effect as soon as this handler
    // returns.
    unsafe {
        let default: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, &raw const default, ptr::null_mut());
        libc::raise(signal);
    }
}

/// Puts an empty page where a page of a file is gone.
fn replace(page: usize, len: usize, protection: i32) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    let at = ptr::with_exposed_provenance_mut(page);
    // SAFETY: the page belongs to a guest mapping, which is alive because somebody has just accessed it. Its memory is
    // only ever accessed with volatile or atomic operations that expect any content, so new content breaks nothing.
    // `errno` is put back because the interrupted code may be about to read it.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        let result = libc::mmap(at, len, protection, flags, -1, 0);
        *errno = before;
        result != libc::MAP_FAILED
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::fs::MemfdFlags;
    use vm_memory::{Bytes, FileOffset, VolatileMemory};

    use super::*;

    #[test]
    fn a_truncated_file_reads_as_zero() {
        let file = File::from(rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(16 << 12).unwrap();
        let mapping =
            Arc::new(MmapRegion::<()>::from_file(FileOffset::new(file.try_clone().unwrap(), 0), 16 << 12).unwrap());
        let _guard = Guard::new(&mapping, 4096).unwrap();
        let memory = mapping.as_volatile_slice();
        memory.write_obj(0x1234_5678_u32, 5 << 12).unwrap();
        memory.write_obj(0x9abc_def0_u32, 0).unwrap();
        file.set_len(1 << 12).unwrap();
        let before = repaired();
        assert_eq!(memory.read_obj::<u32>(5 << 12).unwrap(), 0);
        assert_eq!(repaired(), before + 1);
        memory.write_obj(7_u32, 15 << 12).unwrap();
        assert_eq!(memory.read_obj::<u32>(15 << 12).unwrap(), 7);
        assert_eq!(memory.read_obj::<u32>(0).unwrap(), 0x9abc_def0);
    }

    #[test]
    fn only_registered_ranges_are_repaired() {
        let mapping = Arc::new(MmapRegion::<()>::new(4 << 12).unwrap());
        let start = mapping.as_ptr() as usize;
        let find = |addr| TABLE.iter().find_map(|slot| slot.page_at(addr));
        assert_eq!(find(start), None);
        let guard = Guard::new(&mapping, 4096).unwrap();
        assert_eq!(find(start + 0x1fff).map(|(page, len, _)| (page, len)), Some((start + 0x1000, 4096)));
        // What lies behind it may be another test's, so only the slot of this one is asked.
        assert_eq!(TABLE[guard.slot].page_at(start + (4 << 12)), None);
        drop(guard);
        assert_eq!(find(start), None);
    }
}
