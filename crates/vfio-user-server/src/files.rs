//! Files of guest memory: which are accepted, and which parts of them are mapped.
//!
//! A thread that accesses a page waits until the page is present, and holds its locks meanwhile. So only files are
//! accepted whose pages the kernel itself provides: those of memfd, tmpfs and hugetlbfs. Only the parts that DMA ranges
//! need are mapped, up to a limit for each device.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use pvrdma_guest_memory::Backing;
use rustix::io::Errno;
use thiserror::Error;
use vm_memory::FileOffset;
use vm_memory::mmap::{MmapRegion, MmapRegionError};

use super::examine::{self, Candidate, DescriptorError, FileId, PAGE};
use crate::sigbus::{self, Eviction, Guard};

/// Time that [`Files::clear`] waits for other threads.
const PATIENCE: Duration = Duration::from_secs(1);

/// Number of mappings of a file that cover exactly their range. Beyond it, as behind a vIOMMU, small ranges get a
/// mapping of a [`WINDOW`] around them, so that few mappings suffice for all ranges.
const EXACT: usize = 16;

/// Size and alignment of a mapping that the ranges within it share, in bytes.
const WINDOW: usize = 1 << 30;

/// Limits for the guest memory that a device accepts from its client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct FileRules {
    /// Accept only files that cannot shrink (`F_SEAL_SHRINK`).
    pub sealed: bool,
    /// Maximum number of files. Each takes a descriptor of the process.
    pub files: usize,
    /// Maximum number of mappings. Each counts against the process's limit (`vm.max_map_count`).
    pub mappings: usize,
    /// Maximum total size of the mappings, in bytes.
    pub mapped_bytes: u64,
}

impl Default for FileRules {
    fn default() -> Self {
        Self { sealed: false, files: 64, mappings: 1024, mapped_bytes: 1 << 40 }
    }
}

pvrdma_base::setters!(FileRules {
    with_sealed => sealed: bool,
    with_files => files: usize,
    with_mappings => mappings: usize,
    with_mapped_bytes => mapped_bytes: u64,
});

/// Reason why a file, or a range of it, is not mapped.
#[derive(Debug, Error)]
pub(super) enum FileRefusal {
    #[error("{0}")]
    Descriptor(#[from] DescriptorError),
    #[error("{0}")]
    Unmapped(#[from] Errno),
    #[error("a range ends at {end:#x} in a file of {length:#x} bytes")]
    PastEnd { end: usize, length: usize },
    #[error("the range is too large")]
    TooLarge,
    #[error("the device's limit of {0} files of guest memory is used up")]
    Files(usize),
    #[error("the device's limit of {0} mappings is used up")]
    Mappings(usize),
    #[error("the device's limit of {0} bytes of mapped guest memory (max-memory) is used up")]
    Bytes(u64),
    #[error("the process has too many mappings of guest memory")]
    Guards,
}

impl FileRefusal {
    /// Returns the errno for the client.
    pub(super) const fn errno(&self) -> Errno {
        match self {
            Self::Descriptor(refusal) => refusal.errno(),
            Self::Unmapped(errno) => *errno,
            Self::PastEnd { .. } => Errno::INVAL,
            Self::TooLarge => Errno::OVERFLOW,
            Self::Files(_) | Self::Mappings(_) | Self::Bytes(_) | Self::Guards => Errno::NOSPC,
        }
    }
}

/// Mapped part of a file. The guard must be dropped first: after the unmapping, another mapping may get the same
/// addresses, which the SIGBUS handler must not replace.
#[derive(Debug)]
struct Mapped<'a> {
    guard: Guard<'a>,
    mapping: Arc<MmapRegion>,
    /// Offset in the file at which the mapping starts, in bytes.
    start: usize,
}

impl Mapped<'_> {
    /// Returns the mapping for `start..end` of the file, if this mapping contains all of it.
    fn backing(&self, start: usize, end: usize, writable: bool) -> Option<Backing> {
        let offset = start.checked_sub(self.start)?;
        let fits = end.checked_sub(self.start)? <= self.mapping.size();
        let allowed = !writable || self.mapping.prot() & libc::PROT_WRITE != 0;
        (fits && allowed).then(|| Backing { mapping: Arc::clone(&self.mapping), offset })
    }
}

#[derive(Debug)]
struct OpenFile<'a> {
    file: Arc<File>,
    mappings: Vec<Mapped<'a>>,
}

/// Files of one client.
#[derive(Debug)]
pub(super) struct Files<'a> {
    rules: FileRules,
    eviction: Eviction<'a>,
    files: HashMap<FileId, OpenFile<'a>>,
}

impl<'a> Files<'a> {
    pub(super) fn new(rules: FileRules, eviction: Eviction<'a>) -> Self {
        Self { rules, eviction, files: HashMap::new() }
    }

    /// Returns the numbers of files and of mappings.
    pub(super) fn held(&self) -> (usize, usize) {
        (self.files.len(), self.files.values().map(|file| file.mappings.len()).sum())
    }

    /// Returns `true` if memory was lost.
    pub(super) fn are_lost(&self) -> bool {
        self.eviction.is_due()
    }

    /// Clears the flag that memory was lost, for the next client.
    pub(super) fn readmit(&self) {
        self.eviction.take_back();
    }

    /// Drops mappings, and files, that no range uses any more.
    pub(super) fn settle(&mut self) {
        self.files.retain(|_, file| {
            file.mappings.retain(|mapped| Arc::strong_count(&mapped.mapping) > 1);
            !file.mappings.is_empty()
        });
    }

    /// Unmaps and closes all files. This takes long for large files, so it happens on this thread. If another thread
    /// still uses a mapping, for example while it ends a registration, this one waits for it, for a bounded time.
    /// Memory that is in use even then stays mapped and protected until a later call.
    pub(super) fn clear(&mut self) {
        self.clear_within(PATIENCE);
    }

    fn clear_within(&mut self, patience: Duration) {
        let start = Instant::now();
        for (_, file) in self.files.drain() {
            for Mapped { guard, mapping, .. } in file.mappings {
                let is_used = || Arc::strong_count(&mapping) > 1;
                while is_used() && start.elapsed() < patience {
                    thread::sleep(Duration::from_millis(1));
                }
                if is_used() {
                    guard.outlive_client(mapping);
                } else {
                    drop(guard);
                }
            }
        }
        sigbus::sweep();
    }

    /// Returns the mapping for `offset..offset+size` of a file, and creates it if necessary.
    ///
    /// # Errors
    /// The file is not acceptable, or a limit is reached.
    pub(super) fn backing(
        &mut self,
        fd: OwnedFd,
        offset: u64,
        size: u64,
        writable: bool,
    ) -> Result<Backing, FileRefusal> {
        let start = usize::try_from(offset).map_err(|_| FileRefusal::TooLarge)?;
        let size = usize::try_from(size).map_err(|_| FileRefusal::TooLarge)?;
        let end = start.checked_add(size).ok_or(FileRefusal::TooLarge)?;
        let candidate = examine::memory(fd.as_fd(), self.rules.sealed)?;
        if end > candidate.length {
            return Err(FileRefusal::PastEnd { end, length: candidate.length });
        }
        let known = self.files.get(&candidate.id).into_iter().flat_map(|file| &file.mappings);
        if let Some(backing) = known.into_iter().find_map(|mapped| mapped.backing(start, end, writable)) {
            return Ok(backing);
        }
        if self.check(&candidate, end - start).is_err() {
            // Removed ranges leave unused mappings behind until `settle` is called.
            self.settle();
            self.check(&candidate, end - start)?;
        }
        let (from, to) = self.choose(&candidate, start, end);
        let file =
            self.files.get(&candidate.id).map_or_else(|| Arc::new(File::from(fd)), |open| Arc::clone(&open.file));
        let mapping = Arc::new(map_file(&file, from, to - from, writable)?);
        let guard = Guard::new(&mapping, &self.eviction).ok_or(FileRefusal::Guards)?;
        let backing = Backing { mapping: Arc::clone(&mapping), offset: start - from };
        let open = self.files.entry(candidate.id).or_insert_with(|| OpenFile { file, mappings: Vec::new() });
        open.mappings.push(Mapped { guard, mapping, start: from });
        Ok(backing)
    }

    /// Checks the limits for another mapping of `size` bytes.
    fn check(&self, candidate: &Candidate, size: usize) -> Result<(), FileRefusal> {
        let FileRules { files, mappings, mapped_bytes, .. } = self.rules;
        if !self.files.contains_key(&candidate.id) && self.files.len() >= files {
            return Err(FileRefusal::Files(files));
        }
        if self.held().1 >= mappings {
            return Err(FileRefusal::Mappings(mappings));
        }
        let size = size.checked_next_multiple_of(candidate.page).ok_or(FileRefusal::TooLarge)?;
        if self.mapped_bytes().saturating_add(size as u64) > mapped_bytes {
            return Err(FileRefusal::Bytes(mapped_bytes));
        }
        Ok(())
    }

    fn mapped_bytes(&self) -> u64 {
        self.files.values().flat_map(|file| &file.mappings).map(|mapped| mapped.mapping.size() as u64).sum()
    }

    /// Chooses the part of the file to map for a range: whole pages, or a window around it.
    fn choose(&self, candidate: &Candidate, start: usize, end: usize) -> (usize, usize) {
        let around = |unit: usize| (start - start % unit, end.checked_next_multiple_of(unit).unwrap_or(end));
        let exact = around(candidate.page);
        let mappings = self.files.get(&candidate.id).map_or(0, |file| file.mappings.len());
        let (from, to) = around(WINDOW.max(candidate.page));
        let to = to.min(candidate.length - candidate.length % PAGE);
        let fits = to.checked_sub(from).is_some_and(|size| {
            self.mapped_bytes().saturating_add(size as u64) <= self.rules.mapped_bytes && to >= exact.1
        });
        if mappings < EXACT || !fits { exact } else { (from, to) }
    }
}

/// Maps a part of a file shared. The mapping is writable if the file allows it; it must be if `writable`.
fn map_file(file: &Arc<File>, start: usize, length: usize, writable: bool) -> Result<MmapRegion, Errno> {
    let flags = libc::MAP_NORESERVE | libc::MAP_SHARED;
    let file = FileOffset::from_arc(Arc::clone(file), start as u64);
    let map = |protection| MmapRegion::build(Some(file.clone()), length, protection, flags);
    let errno = |error| match error {
        MmapRegionError::Mmap(error) => Errno::from_io_error(&error).unwrap_or(Errno::INVAL),
        _ => Errno::INVAL,
    };
    match map(libc::PROT_READ | libc::PROT_WRITE) {
        Err(_) if !writable => map(libc::PROT_READ).map_err(errno),
        result => result.map_err(errno),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::channel;

    use pvrdma_guest_memory::DmaSpace;
    use pvrdma_guest_memory::PinPolicy;

    use super::*;

    /// Returns the files of a client with one of 1 MiB, and its mapping.
    fn with_a_mapping(stream: &UnixStream) -> (Files<'_>, Arc<MmapRegion>) {
        let space = DmaSpace::new(PinPolicy::Off);
        let mut files = Files::new(FileRules::default(), Eviction::new(space.revocation(), stream));
        let memory = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, 1 << 20).unwrap();
        let mapping = files.backing(memory, 0, 1 << 20, true).unwrap().mapping;
        (files, mapping)
    }

    /// Unmapping a large file, and closing the last descriptor of a deleted one, takes as long as the client
    /// determines.
    #[test]
    fn mappings_end_on_the_thread_that_clears_them() {
        let (stream, _other) = UnixStream::pair().unwrap();
        let (mut files, mapping) = with_a_mapping(&stream);
        let gone = Arc::downgrade(&mapping);
        let (begin, begun) = channel();
        // A thread of another device, which still uses the mapping.
        let other = thread::spawn(move || {
            begun.recv().unwrap();
            thread::yield_now();
            drop(mapping);
        });
        begin.send(()).unwrap();
        files.clear();
        assert_eq!(gone.strong_count(), 0);
        other.join().unwrap();
    }

    /// The client may truncate its memory after it has disconnected, while a thread of another device reads it.
    #[test]
    fn memory_in_use_stays_protected() {
        let (stream, _other) = UnixStream::pair().unwrap();
        let (mut files, mapping) = with_a_mapping(&stream);
        let gone = Arc::downgrade(&mapping);
        files.clear_within(Duration::ZERO);
        assert_eq!(gone.strong_count(), 2);
        drop(mapping);
        files.clear();
        assert_eq!(gone.strong_count(), 0);
    }
}
