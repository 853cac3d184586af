//! Event channels.
#![expect(unsafe_code, reason = "calls librdmacm")]

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::Libraries;
use super::event::HostEvent;
use super::id::CmId;
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

    /// Returns the next event, or `None` if there is none.
    ///
    /// # Errors
    /// The channel is unusable.
    pub(crate) fn next_event(self: &Arc<Self>) -> io::Result<Option<HostEvent>> {
        let mut raw = ptr::null_mut();
        // SAFETY: the channel is open, `raw` valid for writing. The descriptor does not block.
        if unsafe { (self.libraries.cm.rdma_get_cm_event)(self.raw.as_ptr(), &raw mut raw) } != 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(error),
            };
        }
        // SAFETY: the library returned the event, which is valid until it is acknowledged below.
        let event = unsafe { *raw };
        let (private_data, length) = (event.conn.private_data, usize::from(event.conn.private_data_len));
        let private_data = if length == 0 || private_data.is_null() {
            Vec::new()
        } else {
            // SAFETY: the event points to that many bytes in itself. Each event of a connection has this variant of
            // the union, and the library clears it for all other events.
            unsafe { std::slice::from_raw_parts(private_data, length) }.to_vec()
        };
        let new = (event.event == sys::CONNECT_REQUEST).then(|| NonNull::new(event.id)).flatten();
        let new = new.map(|raw| CmId { channel: Arc::clone(self), raw });
        let subject = if event.event == sys::CONNECT_REQUEST { event.listen_id } else { event.id };
        let event = HostEvent::new(subject.addr(), &event, private_data, new);
        // SAFETY: the event is acknowledged once and not used afterwards.
        unsafe { (self.libraries.cm.rdma_ack_cm_event)(raw) };
        Ok(Some(event))
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
