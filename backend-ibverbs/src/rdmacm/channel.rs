//! Event channels.
#![expect(unsafe_code, reason = "calls librdmacm")]

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use super::libraries::Libraries;
use crate::sys::rdmacm as sys;

/// A channel that reports the events of its identifiers.
#[derive(Debug)]
pub(crate) struct EventChannel {
    pub(super) libraries: Libraries,
    pub(super) raw: NonNull<sys::EventChannel>,
}

// SAFETY: see the head of the parent module.
unsafe impl Send for EventChannel {}
// SAFETY: likewise.
unsafe impl Sync for EventChannel {}

impl EventChannel {
    /// Opens a channel whose events are read without waiting.
    pub(crate) fn open(libraries: &Libraries) -> io::Result<Arc<Self>> {
        // SAFETY: the function has no preconditions.
        let raw = unsafe { (libraries.cm.rdma_create_event_channel)() };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        let channel = Self { libraries: libraries.clone(), raw };
        rustix::io::ioctl_fionbio(&channel, true)?;
        Ok(Arc::new(channel))
    }
}

impl AsFd for EventChannel {
    /// Returns a descriptor that is readable when there is an event.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the library keeps the descriptor open until the channel is destroyed.
        unsafe { BorrowedFd::borrow_raw(self.raw.as_ref().fd) }
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: opened once, destroyed once; identifiers hold an `Arc` of it.
        unsafe { (self.libraries.cm.rdma_destroy_event_channel)(self.raw.as_ptr()) };
    }
}
