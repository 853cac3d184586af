//! Descriptors that signal a change inside the process.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use pvrdma_handover::Event;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

/// Maximum value of an eventfd's counter, at which it is no longer writable.
const FULL: u64 = u64::MAX - 1;

/// Eventfd for [`crate::Readiness`]. The waiter polls it, and the thread that makes a change sets it. Neither can fail
/// or block: writing to a full counter and reading a zero counter return `EAGAIN`, and the descriptor then already has
/// the wanted state.
#[derive(Clone, Debug)]
pub struct Bell(Arc<OwnedFd>);

impl Bell {
    /// Creates a bell that is not readable and is writable.
    ///
    /// # Errors
    /// The process has no descriptors left.
    pub fn new() -> Result<Self, Errno> {
        Ok(Self(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    /// Returns the descriptor to poll.
    #[inline]
    pub fn descriptor(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.0)
    }

    /// Makes the descriptor readable.
    #[inline]
    pub fn ring(&self) {
        self.add(1);
    }

    /// Makes the descriptor not writable.
    #[inline]
    pub fn block(&self) {
        self.add(FULL);
    }

    /// Makes the descriptor not readable, and writable.
    #[inline]
    pub fn clear(&self) {
        let _ = rustix::io::read(&*self.0, &mut [0_u8; 8]);
    }

    #[inline]
    fn add(&self, count: u64) {
        let _ = rustix::io::write(&*self.0, &count.to_ne_bytes());
    }
}

impl AsFd for Bell {
    #[inline]
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Event for Bell {
    #[inline]
    fn signal(&self) {
        self.ring();
    }

    #[inline]
    fn clear(&self) {
        Self::clear(self);
    }
}
