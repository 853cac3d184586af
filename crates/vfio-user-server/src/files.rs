//! Files of guest memory: which are taken, and what of them is mapped.
//!
//! A thread that touches a page waits until it is there, with the locks that it holds. So only files are taken whose
//! pages nobody else has to bring: of memfd, tmpfs and hugetlbfs. What is mapped is what ranges need, and how much that
//! may be is limited for each device.

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
use crate::sigbus::{Eviction, Guard};

/// How long [`Files::clear`] waits for others.
const PATIENCE: Duration = Duration::from_secs(1);

/// Mappings of a file that are no larger than their range. With more of them, as behind a vIOMMU, small ranges get a
/// [`WINDOW`], so that all ranges have few mappings.
const EXACT: usize = 16;

/// Bytes that are mapped for the ranges in them together, from a multiple of as many on.
const WINDOW: usize = 1 << 30;

/// What of guest memory a device takes from its client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileRules {
    /// Only files that cannot shrink any more (`F_SEAL_SHRINK`).
    pub sealed: bool,
    /// Files at a time. Each is a descriptor of the process.
    pub files: usize,
    /// Mappings at a time. Each is one of those that the kernel gives the process (`vm.max_map_count`).
    pub mappings: usize,
    /// Bytes of mappings at a time.
    pub mapped_bytes: u64,
}

impl Default for FileRules {
    fn default() -> Self {
        Self { sealed: false, files: 64, mappings: 1024, mapped_bytes: 1 << 40 }
    }
}

/// Why a file, or a range of it, is not mapped.
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
    /// What a client is told.
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

/// A part of a file. The guard goes first, so that nothing is replaced where something else may be mapped.
#[derive(Debug)]
struct Mapped<'a> {
    _guard: Guard<'a>,
    mapping: Arc<MmapRegion>,
    /// Where in the file it starts, in bytes.
    start: usize,
}

impl Mapped<'_> {
    /// What is behind `start..end` of the file, if it is all here.
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

/// The files of one client.
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

    /// Numbers of files and of mappings.
    pub(super) fn held(&self) -> (usize, usize) {
        (self.files.len(), self.files.values().map(|file| file.mappings.len()).sum())
    }

    /// Memory was lost.
    pub(super) fn are_lost(&self) -> bool {
        self.eviction.is_due()
    }

    /// Forgets that memory was lost, for the next client.
    pub(super) fn readmit(&self) {
        self.eviction.take_back();
    }

    /// Lets go of what no range uses any more.
    pub(super) fn settle(&mut self) {
        self.files.retain(|_, file| {
            file.mappings.retain(|mapped| Arc::strong_count(&mapped.mapping) > 1);
            !file.mappings.is_empty()
        });
    }

    /// Lets go of everything: unmaps it and closes the files, which takes long for large ones and so is done by this
    /// thread. Another that still uses a mapping, as one that just ends a registration, is waited for.
    pub(super) fn clear(&mut self) {
        let start = Instant::now();
        for (_, file) in self.files.drain() {
            for mapped in file.mappings {
                while Arc::strong_count(&mapped.mapping) > 1 && start.elapsed() < PATIENCE {
                    thread::sleep(Duration::from_millis(1));
                }
            }
        }
    }

    /// What is behind `offset..offset+size` of a file; mapped if it is not yet.
    ///
    /// # Errors
    /// The file is not one that is taken, or a limit is reached.
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
            // Ranges that come and go leave mappings behind until the map is settled.
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
        open.mappings.push(Mapped { _guard: guard, mapping, start: from });
        Ok(backing)
    }

    /// Asks the limits for another mapping of `size` bytes.
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

    /// Which part of the file is mapped for a range: whole pages, or a window around it.
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

/// Maps a part of a file shared, for writing too if the file allows it or the range demands it.
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

    /// Unmapping a large file, and closing the last descriptor of one that was deleted, takes as long as the client
    /// likes.
    #[test]
    fn mappings_end_on_the_thread_that_clears_them() {
        let (stream, _other) = UnixStream::pair().unwrap();
        let space = DmaSpace::new(PinPolicy::Off);
        let mut files = Files::new(FileRules::default(), Eviction::new(space.revocation(), &stream));
        let memory = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, 1 << 20).unwrap();
        let mapping = files.backing(memory, 0, 1 << 20, true).unwrap().mapping;
        let gone = Arc::downgrade(&mapping);
        let (begin, begun) = channel();
        // Of another device, in the middle of something.
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
}
