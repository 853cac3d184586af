//! The client's memory: ranges of files that come with DMA_MAP.

use std::fmt::Display;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use log::debug;
use pvrdma_guest_memory::{DmaRange, DmaSpace, MapError, PinError, PinPolicy};
use rustix::io::Errno;
use vfio_bindings::bindings::vfio::{VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE, VFIO_DMA_UNMAP_FLAG_ALL};

use crate::sigbus::Eviction;

use super::endpoint::Endpoint;
use super::files::Files;
use super::pinner::{Pinner, pin_advice};
use super::request::{DmaMap, DmaUnmap};

/// Ranges are whole pages.
const PAGE_MASK: u64 = 0xfff;

/// A writable range without a file that is as large as this is guest memory and not a ROM or another device's register.
const SURELY_MEMORY: u64 = 16 << 20;

/// The memory one client has given us.
#[derive(Debug)]
pub(crate) struct DmaMaps<'a> {
    endpoint: &'a Endpoint,
    space: &'a Arc<DmaSpace>,
    files: Files<'a>,
    /// Locks what is mapped, where the policy wants that.
    pinner: Option<Pinner>,
    /// Something was unmapped since the last [`Self::settle`].
    unsettled: bool,
}

impl<'a> DmaMaps<'a> {
    /// Nothing yet, for the client at the other end of `stream`.
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

    /// The client has taken memory away without telling, and is not served any more.
    pub(crate) fn are_lost(&self) -> bool {
        self.files.are_lost()
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
        self.endpoint.stats.cost.set(self.files.held());
        self.space.map(DmaRange { iova: address, len: size, writable, backing }).map_err(|error| {
            self.unsettled = true;
            self.refused(&error)
        })?;
        if memory && self.space.policy() == PinPolicy::All {
            self.pin();
        }
        Ok(())
    }

    /// Has what is mapped locked and populated. Without a thread for it, it is locked when the guest's driver activates
    /// the device, and populated when it is used.
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

    /// Removes ranges. When this returns, nothing accesses that memory any more. Returns how many bytes that were.
    ///
    /// # Errors
    /// There is no such range; nothing has changed then.
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
            self.files.settle();
            self.endpoint.stats.cost.set(self.files.held());
        }
    }

    /// Lets go of everything, as when the client has gone.
    pub(crate) fn clear(&mut self) {
        self.pinner = None;
        self.space.unmap_all();
        // Of this client, and not of the next.
        self.space.take_stalled();
        self.files.clear();
        self.files.readmit();
        self.endpoint.stats.cost.set((0, 0));
    }

    /// Counts and logs why a file is not taken. Returns the error for the client.
    pub(crate) fn refuse(&self, reason: impl Display, errno: Errno) -> Errno {
        self.endpoint.stats.counters.client_memory_refused.increment();
        self.endpoint.warn(module_path!(), format_args!("{reason}"));
        errno
    }

    /// What a client is told of a refusal, which the log has in words.
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
