//! Descriptors that say that something changed inside the process.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use pvrdma_handover::Event;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

/// The most that an eventfd counts to: it is not writable any more.
const FULL: u64 = u64::MAX - 1;

/// An eventfd for [`crate::Readiness`]: who waits polls it, who knows of a change sets it. Neither can fail, or wait: a
/// counter that is full is only written, which changes nothing, and one that is zero only read.
#[derive(Clone, Debug)]
pub struct Bell(Arc<OwnedFd>);

impl Bell {
    /// One that is not readable and is writable.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn new() -> Result<Self, Errno> {
        Ok(Self(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    /// What to poll.
    #[inline]
    pub fn descriptor(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.0)
    }

    /// Makes it readable.
    #[inline]
    pub fn ring(&self) {
        self.add(1);
    }

    /// Makes it not writable.
    #[inline]
    pub fn block(&self) {
        self.add(FULL);
    }

    /// Makes it not readable, and writable.
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
