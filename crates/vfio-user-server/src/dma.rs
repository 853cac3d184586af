//! Client memory: ranges of files that the client sends with DMA_MAP.

use std::fmt::Display;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use log::debug;
use pvrdma_guest_memory::{DmaRange, DmaSpace, MapError, PinError, PinPolicy};
use rustix::io::Errno;
use vfio_bindings::bindings::vfio::{VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE, VFIO_DMA_UNMAP_FLAG_ALL};

use crate::sigbus::Eviction;

use super::client_connection::{ClientRange, FilePart};
use super::endpoint::Endpoint;
use super::files::Files;
use super::kept::RangeFile;
use super::pinner::{Pinner, pin_advice};
use super::request::{DmaMap, DmaUnmap};

/// Mask of the offset in a page: ranges consist of whole pages.
const PAGE_MASK: u64 = 0xfff;

/// Size from which on a writable range without a file counts as guest memory, and not as a ROM or another device's
/// registers.
const SURELY_MEMORY: u64 = 16 << 20;

/// Memory of one client.
#[derive(Debug)]
pub(crate) struct DmaMaps<'a> {
    endpoint: &'a Endpoint,
    space: &'a Arc<DmaSpace>,
    files: Files<'a>,
    /// Locks mapped memory, if the policy requires that.
    pinner: Option<Pinner>,
    /// A range was unmapped since the last [`Self::settle`].
    unsettled: bool,
}

impl<'a> DmaMaps<'a> {
    /// Creates an empty map for the client at the other end of `stream`.
    pub(crate) fn new(endpoint: &'a Endpoint, stream: &'a UnixStream) -> Self {
        let eviction = Eviction::new(endpoint.memory.revocation(), stream);
        Self {
            endpoint,
            space: &endpoint.memory,
            files: Files::new(endpoint.files, eviction),
            pinner: None,
            unsettled: false,
        }
    }

    /// Returns `true` if the client has taken memory away without DMA_UNMAP. It must not be served any more.
    pub(crate) fn are_lost(&self) -> bool {
        self.files.are_lost()
    }

    /// Adds a range. A range without a file is recorded but not accessible: a ROM, or the registers of another device.
    ///
    /// # Errors
    /// The range or its file cannot be used, and nothing has changed.
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
                    self.endpoint.warn(module_path!(), format_args!(
                        "{size} bytes of guest memory at {address:#x} are not shared with us and no RDMA will work there: \
                         the VMM needs shared memory (share=on)"
                    ));
                }
                None
            }
            (Some(fd), None) => {
                let backing = self.files.backing(fd, offset, size, writable);
                Some(backing.map_err(|error| self.refuse(&error, error.errno()))?)
            }
            (Some(_), Some(_)) => return Err(Errno::INVAL),
        };
        debug!("map {address:#x}+{size:#x} writable {writable} accessible {}", backing.is_some());
        let memory = backing.is_some();
        let file = backing.as_ref().and_then(|backing| backing.mapping.file_offset());
        let file = file.map(|within| RangeFile(Arc::clone(within.arc())));
        self.endpoint.stats.cost.set(self.files.held());
        self.space.map(DmaRange { iova: address, len: size, writable, backing }).map_err(|error| {
            self.unsettled = true;
            self.refused(&error)
        })?;
        self.endpoint.note_range(request, writable, file);
        if memory && self.space.policy() == PinPolicy::All {
            self.pin();
        }
        Ok(())
    }

    /// Adds a range as another server has described it.
    ///
    /// # Errors
    /// As for [`Self::map`], and if the range refers to a file that does not exist.
    pub(crate) fn adopt(&mut self, range: &ClientRange, files: &[OwnedFd]) -> Result<(), Errno> {
        let ClientRange { address, size, writable, memory } = *range;
        let flags = if writable { VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE } else { VFIO_DMA_MAP_FLAG_READ };
        let (offset, fds) = match memory {
            Some(FilePart { file, offset }) => {
                let file = files.get(file).ok_or(Errno::INVAL)?.try_clone();
                (offset, vec![file.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?])
            }
            None => (0, Vec::new()),
        };
        self.map(&DmaMap { flags, offset, address, size }, fds)
    }

    /// Locks and populates mapped memory in the background. If no thread can be started, memory is locked when the
    /// guest's driver activates the device, and populated on use.
    fn pin(&mut self) {
        if let Some(pinner) = &self.pinner {
            return pinner.wake();
        }
        let (name, stats) = (self.endpoint.name.clone(), Arc::clone(&self.endpoint.stats));
        let failed =
            move |error: &PinError| stats.log.error(module_path!(), &name, format_args!("{}", pin_advice(error)));
        match Pinner::start(Arc::clone(self.space), failed) {
            Ok(pinner) => self.pinner = Some(pinner),
            Err(error) => self.endpoint.warn(module_path!(), format_args!("no thread to lock guest memory: {error}")),
        }
    }

    /// Removes ranges and returns the number of removed bytes. When this returns, nothing accesses that memory any
    /// more.
    ///
    /// # Errors
    /// The range does not exist, and nothing has changed.
    pub(crate) fn unmap(&mut self, request: &DmaUnmap) -> Result<u64, Errno> {
        let DmaUnmap { flags, address, size } = *request;
        let removed = match flags {
            0 => {
                self.space.unmap(address, size).map_err(|error| self.refused(&error))?;
                size
            }
            VFIO_DMA_UNMAP_FLAG_ALL if address == 0 && size == 0 => {
                let mapped = self.space.mapped_bytes();
                self.space.unmap_all();
                mapped
            }
            VFIO_DMA_UNMAP_FLAG_ALL => return Err(Errno::INVAL),
            // The client asks for the bitmap of the removed range. The log outlives the range, so the client can get a
            // report instead.
            _ => return Err(Errno::NOTSUP),
        };
        self.endpoint.forget_ranges(address, size);
        debug!("unmap {address:#x}+{size:#x} flags {flags:#x}");
        self.unsettled = true;
        Ok(removed)
    }

    /// Closes files that no range uses any more. Called at the first request that does not change the map. Firmware
    /// removes and adds the same memory in one series of changes, and if each change mapped it anew, all its pages
    /// would be faulted in again.
    pub(crate) fn settle(&mut self) {
        if std::mem::take(&mut self.unsettled) {
            self.files.settle();
            self.endpoint.forget_files();
            self.endpoint.stats.cost.set(self.files.held());
        }
    }

    /// Releases all memory, when the client has disconnected.
    pub(crate) fn clear(&mut self) {
        self.pinner = None;
        self.space.stop_dirty_log();
        self.space.unmap_all();
        // The flag concerns this client and must not affect the next one.
        self.space.take_stalled();
        self.files.clear();
        self.files.readmit();
        self.endpoint.stats.cost.set((0, 0));
    }

    /// Counts and logs the reason for refusing a file. Returns the error for the client.
    pub(crate) fn refuse(&self, reason: impl Display, errno: Errno) -> Errno {
        self.endpoint.stats.counters.client_memory_refused.increment();
        self.endpoint.warn(module_path!(), format_args!("{reason}"));
        errno
    }

    /// Counts and logs a refusal, and returns its errno for the client.
    fn refused(&self, error: &MapError) -> Errno {
        self.endpoint.stats.counters.client_memory_refused.increment();
        self.endpoint.warn(module_path!(), format_args!("{error}"));
        match error {
            MapError::Invalid { .. } | MapError::NoMatch { .. } => Errno::INVAL,
            MapError::Overlap { .. } => Errno::EXIST,
            MapError::TooMany => Errno::NOSPC,
        }
    }
}

impl Drop for DmaMaps<'_> {
    fn drop(&mut self) {
        self.clear();
    }
}
