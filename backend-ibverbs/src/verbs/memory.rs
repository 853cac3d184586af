//! Protection domains, memory regions, memory windows and address handles.
#![expect(unsafe_code, reason = "calls libibverbs")]

use std::ffi::{c_int, c_uint};
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use super::device::HostDevice;
use super::errno::{check, destroyed};
use crate::contiguous_mapping::ContiguousMapping;
use crate::sys::{Ah, AhAttr, MW_TYPE_2, Mr, Mw, Pd};

/// A protection domain.
#[derive(Debug)]
pub(crate) struct HostPd {
    pub(super) device: Arc<HostDevice>,
    pub(super) raw: NonNull<Pd>,
}

// SAFETY: see the head of the parent module.
unsafe impl Send for HostPd {}
// SAFETY: likewise.
unsafe impl Sync for HostPd {}

impl HostPd {
    pub(crate) fn new(device: &Arc<HostDevice>) -> io::Result<Self> {
        // SAFETY: the device is open.
        let raw = unsafe { (device.library.ibv_alloc_pd)(device.raw.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        Ok(Self { device: Arc::clone(device), raw })
    }
}

impl Drop for HostPd {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once; everything in it holds an `Arc` of it.
        destroyed("protection domain", unsafe { (self.device.library.ibv_dealloc_pd)(self.raw.as_ptr()) });
    }
}

/// A memory region over guest memory.
#[derive(Debug)]
pub(crate) struct HostMr {
    pd: Arc<HostPd>,
    pub(super) raw: NonNull<Mr>,
    // Dropped after `drop` has ended the registration.
    mapping: ContiguousMapping,
    /// Difference between the addresses by which requests name the memory and those of the guest, modulo 2^64.
    shift: u64,
}

// SAFETY: see the head of the parent module.
unsafe impl Send for HostMr {}
// SAFETY: likewise.
unsafe impl Sync for HostMr {}

impl HostMr {
    /// Registers `length` bytes of the mapping from `offset` on, under the addresses from `iova` on, or under those of
    /// this process if the adapter knows no others ([`Self::shift`]).
    pub(crate) fn register(
        pd: &Arc<HostPd>,
        mapping: ContiguousMapping,
        offset: usize,
        length: usize,
        iova: u64,
        access: c_uint,
    ) -> io::Result<Self> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        if offset.checked_add(length).is_none_or(|end| end > mapping.len()) {
            return Err(invalid());
        }
        let access = c_int::try_from(access).map_err(|_| invalid())?;
        let start = mapping.as_ptr().wrapping_add(offset);
        let shift = if pd.device.registers_own_addresses() { (start.addr() as u64).wrapping_sub(iova) } else { 0 };
        let iova = iova.wrapping_add(shift);
        // SAFETY: the domain exists. The range lies in the mapping, which this object keeps until after the
        // registration has ended; it is memory that is shared with a guest, so no reference to it exists anywhere.
        let raw = unsafe { (pd.device.library.ibv_reg_mr_iova)(pd.raw.as_ptr(), start.cast(), length, iova, access) };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        Ok(Self { pd: Arc::clone(pd), raw, mapping, shift })
    }

    /// Returns the number to add to an address of the guest for requests of the host, modulo 2^64.
    pub(crate) const fn shift(&self) -> u64 {
        self.shift
    }

    pub(crate) const fn lkey(&self) -> u32 {
        // SAFETY: the library does not change the object while it exists.
        unsafe { self.raw.as_ref() }.lkey
    }

    pub(crate) const fn rkey(&self) -> u32 {
        // SAFETY: likewise.
        unsafe { self.raw.as_ref() }.rkey
    }
}

impl Drop for HostMr {
    fn drop(&mut self) {
        // SAFETY: registered once, deregistered once. Each poster of requests with it holds it until they were posted.
        let code = unsafe { (self.pd.device.library.ibv_dereg_mr)(self.raw.as_ptr()) };
        if check(code).is_err() {
            // The adapter may still access the memory, so its addresses must not be reused for another mapping.
            self.mapping.leak();
        }
        destroyed("memory region", code);
    }
}

/// A memory window, bound and invalidated by work requests.
#[derive(Debug)]
pub(crate) struct HostMw {
    pd: Arc<HostPd>,
    pub(super) raw: NonNull<Mw>,
}

// SAFETY: see the head of the parent module.
unsafe impl Send for HostMw {}
// SAFETY: likewise.
unsafe impl Sync for HostMw {}

impl HostMw {
    pub(crate) fn new(pd: &Arc<HostPd>) -> io::Result<Self> {
        let unsupported = || io::Error::from(io::ErrorKind::Unsupported);
        let alloc = pd.device.ops().alloc_mw.ok_or_else(unsupported)?;
        // SAFETY: the domain exists, and the operation is its device's.
        let raw = unsafe { alloc(pd.raw.as_ptr(), MW_TYPE_2) };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        Ok(Self { pd: Arc::clone(pd), raw })
    }

    /// Returns the key as allocated; bits 31:8 never change.
    pub(crate) const fn key(&self) -> u32 {
        // SAFETY: only `bound` changes the object, in one thread at a time, and never these bits.
        unsafe { self.raw.as_ref() }.rkey
    }

    /// Stores the key that a bind request has given the window, because providers read the current key from the object.
    ///
    /// The caller holds the lock of the region that the window belongs to.
    pub(crate) fn bound(&self, key: u32) {
        // SAFETY: the object exists; the caller's lock keeps others from it.
        unsafe { (*self.raw.as_ptr()).rkey = key };
    }
}

impl Drop for HostMw {
    fn drop(&mut self) {
        if let Some(dealloc) = self.pd.device.ops().dealloc_mw {
            // SAFETY: made once, destroyed once.
            destroyed("memory window", unsafe { dealloc(self.raw.as_ptr()) });
        }
    }
}

/// Address handle: the path to the peer of a datagram.
#[derive(Debug)]
pub(crate) struct HostAh {
    pd: Arc<HostPd>,
    pub(super) raw: NonNull<Ah>,
}

// SAFETY: see the head of the parent module.
unsafe impl Send for HostAh {}
// SAFETY: likewise.
unsafe impl Sync for HostAh {}

impl HostAh {
    /// Creates an address handle. May wait for address resolution.
    pub(crate) fn new(pd: &Arc<HostPd>, attr: &AhAttr) -> io::Result<Self> {
        let mut attr = *attr;
        // SAFETY: the domain exists; `attr` is only read.
        let raw = unsafe { (pd.device.library.ibv_create_ah)(pd.raw.as_ptr(), &raw mut attr) };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        Ok(Self { pd: Arc::clone(pd), raw })
    }
}

impl Drop for HostAh {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once. Requests that use it hold it until they complete.
        destroyed("address handle", unsafe { (self.pd.device.library.ibv_destroy_ah)(self.raw.as_ptr()) });
    }
}
