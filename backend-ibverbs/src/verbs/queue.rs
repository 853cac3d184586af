//! Completion channels, completion queues and shared receive queues.
#![expect(unsafe_code, reason = "calls libibverbs")]

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::batch::RecvBatch;
use super::device::HostDevice;
use super::errno::{check, destroyed};
use super::memory::HostPd;
use crate::sys::{CompChannel, Cq, SRQ_LIMIT, Srq, SrqAttr, SrqInitAttr, Wc};

fn number(value: u32) -> io::Result<c_int> {
    c_int::try_from(value).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
}

/// A completion channel: reports which completion queues have completions.
#[derive(Debug)]
pub(crate) struct Channel {
    device: Arc<HostDevice>,
    raw: NonNull<CompChannel>,
}

// SAFETY: see the head of the parent module.
unsafe impl Send for Channel {}
// SAFETY: likewise.
unsafe impl Sync for Channel {}

impl Channel {
    pub(crate) fn new(device: &Arc<HostDevice>) -> io::Result<Self> {
        // SAFETY: the device is open.
        let raw = unsafe { (device.library.ibv_create_comp_channel)(device.raw.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        let channel = Self { device: Arc::clone(device), raw };
        rustix::io::ioctl_fionbio(channel.as_fd(), true)?;
        Ok(channel)
    }

    /// Returns the address of a queue with completions, as in [`HostCq::address`]. Does not wait.
    pub(crate) fn next_event(&self) -> Option<usize> {
        let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel exists, both pointers are valid for writing; the descriptor does not block.
        let code = unsafe { (self.device.library.ibv_get_cq_event)(self.raw.as_ptr(), &raw mut cq, &raw mut context) };
        check(code).ok()?;
        let address = cq.addr();
        // SAFETY: the queue exists: destroying it waits for this acknowledgement.
        unsafe { (self.device.library.ibv_ack_cq_events)(cq, 1) };
        Some(address)
    }
}

impl AsFd for Channel {
    /// Returns a descriptor that is readable when there is an event.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the library keeps the descriptor open for as long as the channel exists.
        unsafe { BorrowedFd::borrow_raw(self.raw.as_ref().fd) }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once; its queues hold an `Arc` of it.
        let code = unsafe { (self.device.library.ibv_destroy_comp_channel)(self.raw.as_ptr()) };
        destroyed("completion channel", code);
    }
}

/// A completion queue.
#[derive(Debug)]
pub(crate) struct HostCq {
    channel: Arc<Channel>,
    pub(super) raw: NonNull<Cq>,
}

// SAFETY: see the head of the parent module.
unsafe impl Send for HostCq {}
// SAFETY: likewise.
unsafe impl Sync for HostCq {}

impl HostCq {
    pub(crate) fn new(channel: &Arc<Channel>, entries: u32) -> io::Result<Self> {
        let device = &channel.device;
        let entries = number(entries)?;
        // SAFETY: device and channel exist; no context is passed.
        let raw = unsafe {
            (device.library.ibv_create_cq)(device.raw.as_ptr(), entries, ptr::null_mut(), channel.raw.as_ptr(), 0)
        };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        Ok(Self { channel: Arc::clone(channel), raw })
    }

    /// Returns the address that identifies the queue in events.
    pub(crate) fn address(&self) -> usize {
        self.raw.as_ptr().addr()
    }

    /// Resizes the queue. The caller makes sure that no thread polls it meanwhile.
    pub(crate) fn resize(&self, entries: u32) -> io::Result<()> {
        let entries = number(entries)?;
        // SAFETY: the queue exists.
        check(unsafe { (self.channel.device.library.ibv_resize_cq)(self.raw.as_ptr(), entries) })
    }

    /// Returns the capacity of the queue.
    pub(crate) fn entries(&self) -> u32 {
        // SAFETY: only `resize` changes the object, whose caller keeps others away.
        u32::try_from(unsafe { self.raw.as_ref() }.cqe).unwrap_or(0)
    }

    /// Takes completions. Returns the number of filled `entries`.
    pub(crate) fn poll(&self, entries: &mut [Wc]) -> io::Result<usize> {
        let poll = self.channel.device.ops().poll_cq.ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))?;
        let room = c_int::try_from(entries.len()).unwrap_or(c_int::MAX);
        // SAFETY: the queue exists, `entries` has room for that many, and every bit pattern is a `Wc`.
        let count = unsafe { poll(self.raw.as_ptr(), room, entries.as_mut_ptr()) };
        usize::try_from(count).map_err(|_| io::Error::other("the host's completion queue cannot be polled"))
    }

    /// Requests one event with the next completion.
    pub(crate) fn arm(&self) -> io::Result<()> {
        let device = &self.channel.device;
        let arm = device.ops().req_notify_cq.ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))?;
        // SAFETY: the queue exists.
        check(unsafe { arm(self.raw.as_ptr(), 0) })
    }
}

impl Drop for HostCq {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once; its queue pairs hold an `Arc` of it.
        destroyed("completion queue", unsafe { (self.channel.device.library.ibv_destroy_cq)(self.raw.as_ptr()) });
    }
}

/// A shared receive queue.
#[derive(Debug)]
pub(crate) struct HostSrq {
    pd: Arc<HostPd>,
    pub(super) raw: NonNull<Srq>,
}

// SAFETY: see the head of the parent module.
unsafe impl Send for HostSrq {}
// SAFETY: likewise.
unsafe impl Sync for HostSrq {}

impl HostSrq {
    pub(crate) fn new(pd: &Arc<HostPd>, max_wr: u32, max_sge: u32) -> io::Result<Self> {
        let attr = SrqAttr { max_wr, max_sge, srq_limit: 0 };
        let mut init = SrqInitAttr { srq_context: ptr::null_mut(), attr };
        // SAFETY: the domain exists, `init` is valid for reading and writing.
        let raw = unsafe { (pd.device.library.ibv_create_srq)(pd.raw.as_ptr(), &raw mut init) };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        Ok(Self { pd: Arc::clone(pd), raw })
    }

    /// Returns the address that identifies the queue in events.
    pub(crate) fn address(&self) -> usize {
        self.raw.as_ptr().addr()
    }

    pub(crate) fn set_limit(&self, srq_limit: u32) -> io::Result<()> {
        let mut attr = SrqAttr { srq_limit, ..SrqAttr::default() };
        // SAFETY: the queue exists, `attr` is only read.
        check(unsafe { (self.pd.device.library.ibv_modify_srq)(self.raw.as_ptr(), &raw mut attr, SRQ_LIMIT) })
    }

    /// Posts the batch. Returns the number of requests accepted.
    pub(crate) fn post(&self, batch: &mut RecvBatch) -> (usize, io::Result<()>) {
        let Some(post) = self.pd.device.ops().post_srq_recv else {
            return (0, Err(io::Error::from(io::ErrorKind::Unsupported)));
        };
        // SAFETY: the queue exists; the list is that of the batch.
        batch.post(|first, bad| unsafe { post(self.raw.as_ptr(), first, bad) })
    }
}

impl Drop for HostSrq {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once; its queue pairs hold an `Arc` of it.
        destroyed("shared receive queue", unsafe { (self.pd.device.library.ibv_destroy_srq)(self.raw.as_ptr()) });
    }
}
