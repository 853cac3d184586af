//! RDMA devices of the host.
#![expect(unsafe_code, reason = "calls libibverbs")]

use std::ffi::{CStr, c_int};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use thiserror::Error;

use super::errno::{check, destroyed};
use super::event::HostEvent;
use crate::sys::library::Library;
use crate::sys::load::LoadError;
use crate::sys::{AsyncEvent, Context, DeviceAttr, PORT_ACTIVE, PortAttr, TRANSPORT_IWARP};

/// Reason a device of the host cannot be used.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The library is not available.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The system has no RDMA devices.
    #[error(
        "the host has no RDMA devices that libibverbs knows (/sys/class/infiniband; is the kernel's ib_uverbs loaded?)"
    )]
    NoDevices,
    /// The system has only other devices.
    #[error("the host has no RDMA device '{wanted}', only {found}")]
    NoSuch {
        /// The requested name.
        wanted: String,
        /// Names of the existing devices.
        found: String,
    },
    /// The device exists but cannot be opened.
    #[error(
        "cannot open the RDMA device '{name}': {source} (needs read and write access to its /dev/infiniband/uverbs file)"
    )]
    Open {
        /// Name of the device.
        name: String,
        /// Cause.
        source: io::Error,
    },
    /// The device was opened, but it is not suitable for guests.
    #[error("the RDMA device '{name}': {problem}")]
    Unfit {
        /// Name of the device.
        name: String,
        /// Description of the problem.
        problem: String,
    },
}

/// An open device.
#[derive(Debug)]
pub(crate) struct HostDevice {
    pub(super) library: Arc<Library>,
    pub(super) raw: NonNull<Context>,
    name: String,
    transport: c_int,
    /// Vendor, as the device reports it.
    vendor: u32,
}

// SAFETY: see the head of the parent module.
unsafe impl Send for HostDevice {}
// SAFETY: likewise.
unsafe impl Sync for HostDevice {}

/// Snapshot of a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PortNow {
    pub(crate) active: bool,
    /// `IBV_LINK_LAYER_` number.
    pub(crate) link_layer: u8,
    pub(crate) max_mtu: u32,
    pub(crate) active_mtu: u32,
    pub(crate) max_message: u32,
    pub(crate) gids: u32,
}

impl HostDevice {
    /// Opens a device by name.
    pub(crate) fn open(library: &Arc<Library>, name: &str) -> Result<Self, OpenError> {
        let mut count: c_int = 0;
        // SAFETY: `count` is valid for writing.
        let list = unsafe { (library.ibv_get_device_list)(&raw mut count) };
        if list.is_null() {
            return Err(OpenError::NoDevices);
        }
        let (mut found, mut opened) = (Vec::new(), None);
        for i in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: the list has `count` entries.
            let device = unsafe { *list.add(i) };
            // SAFETY: `device` is of the list, and its name is a string that lives as long.
            let text = unsafe { CStr::from_ptr((library.ibv_get_device_name)(device)) }.to_string_lossy().into_owned();
            if text == name {
                // SAFETY: `device` is of the list, and begins with these fields since version 1.1 of the library's ABI.
                let transport = unsafe { (*device).transport_type };
                // SAFETY: `device` is of the list; an open device does not need the list any more.
                let raw = unsafe { (library.ibv_open_device)(device) };
                let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error);
                opened = Some(raw.map(|raw| (raw, transport)));
            }
            found.push(text);
        }
        // SAFETY: the list came from the library and is freed once.
        unsafe { (library.ibv_free_device_list)(list) };
        match opened {
            Some(Ok((raw, transport))) => {
                let mut opened =
                    Self { library: Arc::clone(library), raw, name: name.to_owned(), transport, vendor: 0 };
                let failed = |source| OpenError::Open { name: name.to_owned(), source };
                opened.vendor = opened.attributes().map_err(failed)?.vendor_id;
                Ok(opened)
            }
            Some(Err(source)) => Err(OpenError::Open { name: name.to_owned(), source }),
            None if found.is_empty() => Err(OpenError::NoDevices),
            None => Err(OpenError::NoSuch { wanted: name.to_owned(), found: found.join(", ") }),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the `IBV_TRANSPORT_` number.
    pub(crate) const fn transport(&self) -> c_int {
        self.transport
    }

    /// Returns `true` if regions have the addresses of this process, whatever addresses are asked for. `siw` ignores
    /// them without an error.
    pub(crate) const fn registers_own_addresses(&self) -> bool {
        /// `SIW_VENDOR_ID`.
        const SIW: u32 = 0x62_6d74;
        self.transport == TRANSPORT_IWARP && self.vendor == SIW
    }

    pub(crate) fn attributes(&self) -> io::Result<DeviceAttr> {
        let mut attr = DeviceAttr::default();
        // SAFETY: the device is open, `attr` valid for writing.
        check(unsafe { (self.library.ibv_query_device)(self.raw.as_ptr(), &raw mut attr) })?;
        Ok(attr)
    }

    pub(crate) fn port(&self, port: u8) -> io::Result<PortNow> {
        let mut attr = PortAttr::default();
        // SAFETY: the device is open, and `attr` is valid for writing the whole struct that the symbol fills.
        check(unsafe { (self.library.ibv_query_port)(self.raw.as_ptr(), port, &raw mut attr) })?;
        let number = |n: c_int| u32::try_from(n).unwrap_or(0);
        Ok(PortNow {
            active: attr.state == PORT_ACTIVE,
            link_layer: attr.link_layer,
            max_mtu: number(attr.max_mtu),
            active_mtu: number(attr.active_mtu),
            max_message: attr.max_msg_sz,
            gids: number(attr.gid_tbl_len),
        })
    }

    /// Takes the next asynchronous event, without waiting for one, and returns the result of `look_up` for it. The
    /// event is acknowledged only after `look_up` has returned, so until then the host's object exists and its address
    /// cannot be reused. `look_up` must not destroy objects, because that would wait for the acknowledgement.
    pub(crate) fn next_event<T>(&self, look_up: impl FnOnce(HostEvent) -> T) -> Option<T> {
        let mut event = AsyncEvent { element: std::ptr::null_mut(), event_type: 0 };
        // SAFETY: the device is open, `event` valid for writing. The descriptor does not block, see `make_nonblocking`.
        check(unsafe { (self.library.ibv_get_async_event)(self.raw.as_ptr(), &raw mut event) }).ok()?;
        let found = look_up(HostEvent::new(event.event_type, event.element.addr()));
        // SAFETY: `event` came from the library and is acknowledged once; nothing of it is used afterwards, and only
        // now may the object it names be destroyed.
        unsafe { (self.library.ibv_ack_async_event)(&raw mut event) };
        Some(found)
    }

    /// Makes [`Self::next_event`] return immediately if there is no event.
    pub(crate) fn make_nonblocking(&self) -> io::Result<()> {
        Ok(rustix::io::ioctl_fionbio(self.as_fd(), true)?)
    }

    /// Returns the provider's operations.
    pub(super) const fn ops(&self) -> &crate::sys::ContextOps {
        // SAFETY: the device is open for as long as `self` lives, and the library does not change the table.
        unsafe { &(*self.raw.as_ptr()).ops }
    }
}

impl AsFd for HostDevice {
    /// Returns a descriptor that is readable when there is an asynchronous event.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the library keeps the descriptor open for as long as the device is.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).async_fd) }
    }
}

impl Drop for HostDevice {
    fn drop(&mut self) {
        // SAFETY: opened once, closed once; everything made from it holds an `Arc` of it.
        destroyed("device", unsafe { (self.library.ibv_close_device)(self.raw.as_ptr()) });
    }
}
