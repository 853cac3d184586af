//! The client's memory: files that come with DMA_MAP, mapped here once each.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use log::{debug, warn};
use pvrdma_guest_memory::{Backing, DmaRange, DmaSpace, MapError, PinPolicy};
use rustix::fs::FileType;
use rustix::io::Errno;
use vfio_bindings::bindings::vfio::{VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE, VFIO_DMA_UNMAP_FLAG_ALL};
use vm_memory::FileOffset;
use vm_memory::mmap::{MmapRegion, MmapRegionError};

use crate::sigbus::Guard;

use super::pinner::Pinner;
use super::request::{DmaMap, DmaUnmap};

/// Ranges are whole pages.
const PAGE_MASK: u64 = 0xfff;

/// A writable range without a file that is as large as this is guest memory and not a ROM or another device's register.
const SURELY_MEMORY: u64 = 16 << 20;

/// A file by device and inode. The numbers stay its own while we have it mapped.
type FileId = (u64, u64);

/// One mapping of a whole file. The guard goes first, so that nothing is repaired where something else may be mapped.
#[derive(Debug)]
struct MappedFile {
    _guard: Guard,
    mapping: Arc<MmapRegion>,
}

/// The memory one client has given us.
#[derive(Debug)]
pub(crate) struct DmaMaps {
    space: Arc<DmaSpace>,
    files: HashMap<FileId, MappedFile>,
    /// Mappings that a larger or more permissive one of the same file has replaced.
    replaced: Vec<MappedFile>,
    /// Locks what is mapped, where the policy wants that.
    pinner: Option<Pinner>,
    /// Something was unmapped since the last [`Self::settle`].
    unsettled: bool,
}

impl DmaMaps {
    pub(crate) fn new(space: Arc<DmaSpace>) -> Self {
        Self { space, files: HashMap::new(), replaced: Vec::new(), pinner: None, unsettled: false }
    }

    /// Adds a range. Without a file it is only known to be there: a ROM, or the registers of another device.
    ///
    /// # Errors
    /// The range or its file cannot be used; nothing has changed then.
    pub(crate) fn map(&mut self, request: &DmaMap, fds: Vec<OwnedFd>) -> Result<(), Errno> {
        let DmaMap { flags, offset, address, size } = *request;
        let readable = flags & (VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE) != 0;
        if !readable || (address | size | offset) & PAGE_MASK != 0 || size == 0 {
            return Err(Errno::INVAL);
        }
        let writable = flags & VFIO_DMA_MAP_FLAG_WRITE != 0;
        let mut fds = fds.into_iter();
        let backing = match (fds.next(), fds.next()) {
            (None, _) => {
                if writable && size >= SURELY_MEMORY {
                    warn!(
                        "{size} bytes of guest memory at {address:#x} are not shared with us and no RDMA will work there: \
                         the VMM needs shared memory (share=on)"
                    );
                }
                None
            }
            (Some(fd), None) => Some(self.backing(fd, offset, size, writable)?),
            (Some(_), Some(_)) => return Err(Errno::INVAL),
        };
        debug!("map {address:#x}+{size:#x} writable {writable} accessible {}", backing.is_some());
        let memory = backing.is_some();
        self.space.map(DmaRange { iova: address, len: size, writable, backing }).map_err(|error| {
            self.unsettled = true;
            errno_of(&error)
        })?;
        if memory && self.space.policy() == PinPolicy::All {
            self.pin();
        }
        Ok(())
    }

    /// Has what is mapped locked. Without a thread for it, it is done when the guest's driver activates the device.
    fn pin(&mut self) {
        match &self.pinner {
            Some(pinner) => pinner.wake(),
            None => match Pinner::start(Arc::clone(&self.space)) {
                Ok(pinner) => self.pinner = Some(pinner),
                Err(error) => warn!("no thread to lock guest memory: {error}"),
            },
        }
    }

    /// Removes ranges. When this returns, nothing accesses that memory any more. Returns how many bytes that were.
    ///
    /// # Errors
    /// There is no such range; nothing has changed then.
    pub(crate) fn unmap(&mut self, request: &DmaUnmap) -> Result<u64, Errno> {
        let DmaUnmap { flags, address, size } = *request;
        let removed = match flags {
            0 => {
                self.space.unmap(address, size).map_err(|error| errno_of(&error))?;
                size
            }
            VFIO_DMA_UNMAP_FLAG_ALL if address == 0 && size == 0 => {
                let mapped = self.space.mapped_bytes();
                self.space.unmap_all();
                mapped
            }
            VFIO_DMA_UNMAP_FLAG_ALL => return Err(Errno::INVAL),
            // Dirty pages are not tracked.
            _ => return Err(Errno::NOTSUP),
        };
        debug!("unmap {address:#x}+{size:#x} flags {flags:#x}");
        self.unsettled = true;
        Ok(removed)
    }

    /// Lets go of files that no range uses any more. Called when something else than a change of the map happens:
    /// firmware removes and adds the same memory in one go, and mapping it anew each time would fault in all its pages
    /// again.
    pub(crate) fn settle(&mut self) {
        if std::mem::take(&mut self.unsettled) {
            self.files.retain(|_, file| Arc::strong_count(&file.mapping) > 1);
            self.replaced.retain(|file| Arc::strong_count(&file.mapping) > 1);
        }
    }

    /// Lets go of everything, as when the client has gone.
    pub(crate) fn clear(&mut self) {
        self.pinner = None;
        self.space.unmap_all();
        self.files.clear();
        self.replaced.clear();
    }

    fn backing(&mut self, fd: OwnedFd, offset: u64, size: u64, writable: bool) -> Result<Backing, Errno> {
        let stat = rustix::fs::fstat(&fd)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(Errno::INVAL);
        }
        let length = usize::try_from(stat.st_size).map_err(|_| Errno::OVERFLOW)?;
        let start = usize::try_from(offset).map_err(|_| Errno::OVERFLOW)?;
        let end = usize::try_from(size).ok().and_then(|size| start.checked_add(size)).ok_or(Errno::OVERFLOW)?;
        if end > length {
            warn!("a range ends at {end:#x} in a file of {length:#x} bytes");
            return Err(Errno::INVAL);
        }
        let id = (stat.st_dev, stat.st_ino);
        let fits =
            |mapping: &MmapRegion| mapping.size() >= end && (!writable || mapping.prot() & libc::PROT_WRITE != 0);
        if let Some(file) = self.files.get(&id).filter(|file| fits(&file.mapping)) {
            return Ok(Backing { mapping: Arc::clone(&file.mapping), offset: start });
        }
        // The whole file from its start: with huge pages an offset that suits the guest need not be one that can be
        // mapped. The length of such a file is a multiple of its page size, which `munmap` insists on.
        let page = page_size(&fd, usize::try_from(stat.st_blksize).map_err(|_| Errno::INVAL)?)?;
        let mapping = Arc::new(map_file(File::from(fd), length, writable)?);
        let guard = Guard::new(&mapping, page).ok_or(Errno::NOSPC)?;
        let backing = Backing { mapping: Arc::clone(&mapping), offset: start };
        if let Some(old) = self.files.insert(id, MappedFile { _guard: guard, mapping }) {
            self.replaced.push(old);
            self.unsettled = true;
        }
        Ok(backing)
    }
}

impl Drop for DmaMaps {
    fn drop(&mut self) {
        self.clear();
    }
}

/// What the kernel maps and unmaps as one. Other file systems suggest block sizes that have nothing to do with it.
fn page_size(fd: &OwnedFd, block: usize) -> Result<usize, Errno> {
    const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;
    Ok(if rustix::fs::fstatfs(fd)?.f_type == HUGETLBFS_MAGIC { block } else { 4096 })
}

/// Maps a file shared, for writing too if the file allows it or the range demands it.
fn map_file(file: File, length: usize, writable: bool) -> Result<MmapRegion, Errno> {
    let file = FileOffset::new(file, 0);
    let flags = libc::MAP_NORESERVE | libc::MAP_SHARED;
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

fn errno_of(error: &MapError) -> Errno {
    warn!("{error}");
    match error {
        MapError::Invalid { .. } | MapError::NoMatch { .. } => Errno::INVAL,
        MapError::Overlap { .. } => Errno::EXIST,
        MapError::TooMany => Errno::NOSPC,
    }
}
