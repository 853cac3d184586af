//! SIGBUS handler for clients that truncate their memory files.
//!
//! Another process may truncate a file of guest memory at any time, and the next access to the lost part raises SIGBUS
//! here. One client must not end the process for all others, so the handler replaces the mapping with empty memory: one
//! gigabyte of it around the page. Replacing single pages would split the mapping into many. Replacing all of it would
//! take time in proportion to the client's memory, on a thread that may serve other devices. The handler also revokes
//! the client's memory and shuts its connection down. The connection's thread then resets the device and unmaps the
//! rest. Any other SIGBUS has its usual effect.
#![expect(unsafe_code, reason = "a signal handler and the mapping it replaces")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::ptr;
use std::sync::Arc;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use log::warn;
use parking_lot::Mutex;
use pvrdma_handover::SeqLock;
use vm_memory::mmap::MmapRegion;

/// Maximum number of guest mappings in a process. Unused slots at the end of the table take no memory.
const SLOTS: usize = 32_768;

/// Bytes of a mapping that are replaced at a time.
const PART: usize = 1 << 30;

/// `si_code` of an access to a part of a mapping that is beyond the end of its file. Hardware memory errors have other
/// codes.
const BUS_ADRERR: i32 = 2;

/// Description of a guest mapping for the handler.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Found {
    start: usize,
    len: usize,
    /// Address of the flag of the owner's [`Eviction`], which the guard keeps alive. 0: the client is gone.
    lost: usize,
    /// Socket of the client.
    socket: i32,
}

/// Table entry for one guest mapping: the fields of a [`Found`]. The handler reads it without a lock.
struct Slot(SeqLock<4>);

impl Found {
    /// Returns the part of the mapping around an address in it: start and length in bytes.
    const fn part(&self, addr: usize) -> (usize, usize) {
        let into = addr.saturating_sub(self.start);
        let first = into - into % PART;
        let rest = self.len.saturating_sub(first);
        (self.start + first, if rest < PART { rest } else { PART })
    }
}

impl Slot {
    /// Returns the mapping if it contains `addr`. The fields are consistent: the accessing thread keeps its mapping, so
    /// the slot of that mapping does not change, and a slot that changes meanwhile belongs to another one.
    fn around(&self, addr: usize) -> Option<Found> {
        let [start, len, lost, socket] = self.0.read()?;
        let found = Found { start, len, lost, socket: i32::try_from(socket).ok()? };
        addr.checked_sub(found.start).filter(|&into| into < found.len).map(|_| found)
    }

    /// Writes the slot. The caller holds [`WRITERS`].
    fn set(&self, found: Option<Found>) {
        // Descriptors are not negative.
        self.0
            .write(found.map(|Found { start, len, lost, socket }| [start, len, lost, socket.unsigned_abs() as usize]));
    }
}

static TABLE: [Slot; SLOTS] = [const { Slot(SeqLock::empty()) }; SLOTS];

/// Slots from this index on have never been used. A search does not touch their pages.
static USED: AtomicUsize = AtomicUsize::new(0);

/// Serializes writers of [`TABLE`]. The handler takes no lock.
static WRITERS: Mutex<()> = Mutex::new(());

/// Mappings of clients that are gone, and that other threads still use. A claim is dropped before its mapping.
static LEFT: Mutex<Vec<(Claim, Arc<MmapRegion>)>> = Mutex::new(Vec::new());

static REPLACED: AtomicU64 = AtomicU64::new(0);

/// Actions on the client whose memory is lost: a flag is set, and its socket is shut down in both directions.
#[derive(Clone, Debug)]
pub struct Eviction<'a> {
    lost: Arc<AtomicBool>,
    socket: BorrowedFd<'a>,
}

impl<'a> Eviction<'a> {
    /// Uses the flag of a space, [`pvrdma_guest_memory::DmaSpace::revocation`].
    pub fn new(lost: Arc<AtomicBool>, socket: &'a UnixStream) -> Self {
        Self { lost, socket: socket.as_fd() }
    }

    /// Clears the flag. The caller has unmapped all memory that may be lost.
    pub(crate) fn take_back(&self) {
        self.lost.store(false, Ordering::Relaxed);
    }

    /// Returns `true` if memory is lost.
    pub fn is_due(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }
}

/// Protects one guest mapping from the truncation of its file. Must be dropped before the mapping.
#[derive(Debug)]
pub struct Guard<'a> {
    claim: Claim,
    _eviction: Eviction<'a>,
}

/// Slot of a mapping, until it is dropped.
#[derive(Debug)]
struct Claim(usize);

impl<'a> Guard<'a> {
    /// Protects `mapping`. Returns `None` if there are too many mappings.
    pub fn new(mapping: &Arc<MmapRegion>, eviction: &Eviction<'a>) -> Option<Self> {
        install();
        let _turn = WRITERS.lock();
        let used = USED.load(Ordering::Relaxed);
        let free = TABLE.iter().take(used).position(|slot| slot.0.read().is_none());
        let slot = free.unwrap_or(used);
        let entry = TABLE.get(slot)?;
        entry.set(Some(Found {
            start: mapping.as_ptr() as usize,
            len: mapping.size(),
            lost: Arc::as_ptr(&eviction.lost).expose_provenance(),
            socket: eviction.socket.as_raw_fd(),
        }));
        USED.fetch_max(slot + 1, Ordering::Release);
        Some(Self { claim: Claim(slot), _eviction: eviction.clone() })
    }

    /// Protects the mapping for as long as another thread uses it, without its client, which is gone. The mapping ends
    /// at the next [`sweep`] after that.
    pub(crate) fn outlive_client(self, mapping: Arc<MmapRegion>) {
        let Self { claim, _eviction } = self;
        claim.set(Some(Found { start: mapping.as_ptr() as usize, len: mapping.size(), lost: 0, socket: 0 }));
        LEFT.lock().push((claim, mapping));
    }
}

impl Claim {
    fn set(&self, found: Option<Found>) {
        let _turn = WRITERS.lock();
        if let Some(slot) = TABLE.get(self.0) {
            slot.set(found);
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.set(None);
    }
}

/// Unmaps memory of clients that are gone, if no thread uses it any more.
pub(crate) fn sweep() {
    LEFT.lock().retain(|(_, mapping)| Arc::strong_count(mapping) > 1);
}

/// Returns the number of replacements since the process started.
pub fn replaced() -> u64 {
    REPLACED.load(Ordering::Relaxed)
}

fn find(addr: usize) -> Option<Found> {
    let used = USED.load(Ordering::Acquire);
    TABLE.iter().take(used).find_map(|slot| slot.around(addr))
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
    // SAFETY: the handler has the type that SA_SIGINFO asks for, and is async-signal-safe: it does atomic loads and the
    // system calls mmap, shutdown, sigaction and raise.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a valid siginfo_t, and `si_addr` is the field of a SIGBUS that it
    // raised itself. For other signals the value is not used, because their code is not BUS_ADRERR.
    let (code, addr) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    let lost = if code == BUS_ADRERR { find(addr) } else { None };
    if lost.is_some_and(|found| {
        // A huge page may be larger than a part, and cannot be replaced partially.
        replace(&found, found.part(addr)) || replace(&found, (found.start, found.len))
    }) {
        return;
    }
    // SAFETY: an all-zero sigaction is the default action. The signal that is raised again takes effect as soon as this
    // handler returns.
    unsafe {
        let default: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, &raw const default, ptr::null_mut());
        libc::raise(signal);
    }
}

/// Replaces a part of a mapping with empty memory, and cuts its client off. Returns `true` on success.
fn replace(found: &Found, (start, len): (usize, usize)) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let at = ptr::with_exposed_provenance_mut(start);
    let lost: *const AtomicBool = ptr::with_exposed_provenance(found.lost);
    // SAFETY: the thread that accessed the mapping holds a view, which keeps the mapping, and so its guard, in place:
    // the addresses are the mapping's own, and unless the client is gone, the flag is alive and the socket is open. The
    // memory is only ever accessed with volatile or atomic operations that expect any content, so new content breaks
    // nothing. `errno` is restored because the interrupted code may be about to read it.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        let replaced = libc::mmap(at, len, protection, flags, -1, 0) != libc::MAP_FAILED;
        if replaced {
            if !lost.is_null() {
                (*lost).store(true, Ordering::Relaxed);
                libc::shutdown(found.socket, libc::SHUT_RDWR);
            }
            REPLACED.fetch_add(1, Ordering::Relaxed);
        }
        *errno = before;
        replaced
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::os::unix::fs::FileExt;

    use rustix::fs::MemfdFlags;
    use vm_memory::{Bytes, FileOffset, VolatileMemory};

    use super::*;

    /// Serializes tests that count replacements.
    static TURN: Mutex<()> = Mutex::new(());

    #[test]
    fn a_truncated_file_reads_as_zero_and_its_client_is_cut_off() {
        let file = File::from(rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(16 << 12).unwrap();
        let mapping =
            Arc::new(MmapRegion::<()>::from_file(FileOffset::new(file.try_clone().unwrap(), 0), 16 << 12).unwrap());
        let (ours, mut client) = UnixStream::pair().unwrap();
        let eviction = Eviction::new(Arc::default(), &ours);
        let _guard = Guard::new(&mapping, &eviction).unwrap();
        let memory = mapping.as_volatile_slice();
        memory.write_obj(0x1234_5678_u32, 5 << 12).unwrap();
        memory.write_obj(0x9abc_def0_u32, 0).unwrap();
        file.set_len(1 << 12).unwrap();
        // The remaining part is not replaced before it has to be.
        assert_eq!(memory.read_obj::<u32>(0).unwrap(), 0x9abc_def0);
        assert!(!eviction.is_due());
        let _turn = TURN.lock();
        let before = replaced();
        assert_eq!(memory.read_obj::<u32>(5 << 12).unwrap(), 0);
        assert!(eviction.is_due());
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
        // The whole mapping is replaced at once.
        memory.write_obj(7_u32, 15 << 12).unwrap();
        assert_eq!(memory.read_obj::<u32>(15 << 12).unwrap(), 7);
        assert_eq!(memory.read_obj::<u32>(0).unwrap(), 0);
        assert_eq!(replaced(), before + 1);
    }

    /// A client that has disconnected can still truncate the memory that another thread is about to read.
    #[test]
    fn a_mapping_in_use_is_protected_without_its_client() {
        let file = File::from(rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(2 << 12).unwrap();
        let place = FileOffset::new(file.try_clone().unwrap(), 0);
        let mapping = Arc::new(MmapRegion::<()>::from_file(place, 2 << 12).unwrap());
        let used = Arc::clone(&mapping);
        let (ours, client) = UnixStream::pair().unwrap();
        let guard = Guard::new(&mapping, &Eviction::new(Arc::default(), &ours)).unwrap();
        guard.outlive_client(mapping);
        drop((ours, client));
        sweep();
        file.set_len(0).unwrap();
        let _turn = TURN.lock();
        let before = replaced();
        assert_eq!(used.as_volatile_slice().read_obj::<u32>(1 << 12).unwrap(), 0);
        assert_eq!(replaced(), before + 1);
        // The mapping ends with its last user.
        let gone = Arc::downgrade(&used);
        drop(used);
        sweep();
        assert_eq!(gone.strong_count(), 0);
    }

    /// Unmapping much memory takes long, and the thread may serve another device.
    #[test]
    fn a_gigabyte_is_replaced_at_a_time() {
        let (len, gib) = (3 << 30, 1 << 30);
        let file = File::from(rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(len as u64).unwrap();
        let place = FileOffset::new(file.try_clone().unwrap(), 0);
        let mapping = Arc::new(MmapRegion::<()>::from_file(place, len).unwrap());
        let (ours, _client) = UnixStream::pair().unwrap();
        let eviction = Eviction::new(Arc::default(), &ours);
        let _guard = Guard::new(&mapping, &eviction).unwrap();
        let memory = mapping.as_volatile_slice();
        file.set_len(gib as u64 + 4096).unwrap();
        memory.write_obj(5_u32, 0).unwrap();
        let _turn = TURN.lock();
        let before = replaced();
        // In the middle part, and at the very end.
        assert_eq!(memory.read_obj::<u32>(2 * gib - 4).unwrap(), 0);
        assert_eq!(memory.read_obj::<u32>(0).unwrap(), 5);
        assert_eq!(memory.read_obj::<u32>(len - 4).unwrap(), 0);
        assert!(eviction.is_due());
        assert_eq!(replaced(), before + 2);
        // A write to the file shows that the middle part was replaced, and that the first part still maps the file.
        file.write_at(&[1; 4], gib as u64).unwrap();
        file.write_at(&[1; 4], 0).unwrap();
        assert_eq!(memory.read_obj::<u32>(gib).unwrap(), 0);
        assert_eq!(memory.read_obj::<u32>(0).unwrap(), 0x0101_0101);
    }

    #[test]
    fn only_registered_ranges_are_replaced() {
        let mapping = Arc::new(MmapRegion::<()>::new(4 << 12).unwrap());
        let start = mapping.as_ptr() as usize;
        assert_eq!(find(start), None);
        let (ours, _client) = UnixStream::pair().unwrap();
        let guard = Guard::new(&mapping, &Eviction::new(Arc::default(), &ours)).unwrap();
        assert_eq!(find(start + 0x1fff).map(|found| (found.start, found.len)), Some((start, 4 << 12)));
        // The addresses behind the mapping may belong to another test, so only the slot of this one is checked.
        assert_eq!(TABLE[guard.claim.0].around(start + (4 << 12)), None);
        drop(guard);
        assert_eq!(find(start), None);
    }
}
