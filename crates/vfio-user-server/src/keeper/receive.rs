//! Receives bytes with descriptors from a client's socket, and examines the descriptors.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};

use crate::examine::{self, DescriptorError};
use crate::message::MAX_MSG_FDS;

/// Kind of descriptors that a message may carry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Wanted {
    /// The message carries none.
    Nothing,
    /// One file of guest memory. `sealed`: it must not be able to shrink.
    Memory { sealed: bool },
    /// Eventfds.
    Interrupts,
}

impl Wanted {
    /// Returns the maximum number of descriptors.
    pub(crate) const fn most(self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Memory { .. } => 1,
            Self::Interrupts => MAX_MSG_FDS,
        }
    }

    fn examine(self, fd: &OwnedFd) -> Result<(), DescriptorError> {
        match self {
            Self::Nothing => Err(Errno::INVAL.into()),
            Self::Memory { sealed } => examine::memory(fd.as_fd(), sealed).map(drop),
            Self::Interrupts => examine::interrupt(fd),
        }
    }
}

/// Result of a receive from the socket.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    /// Number of bytes.
    pub(crate) bytes: usize,
    /// Descriptors: all of the wanted kind, or none.
    pub(crate) fds: Vec<OwnedFd>,
    /// The message carried more descriptors than allowed.
    pub(crate) lost: bool,
    /// Reason why received descriptors were refused.
    pub(crate) refused: Option<DescriptorError>,
}

/// Receives the available bytes of a message, and none beyond `buffer`. If one descriptor is refused, all descriptors
/// of the message are closed. `close` may block forever.
///
/// # Errors
/// Nothing is available (`EAGAIN`), or the socket failed.
pub(crate) fn take(stream: BorrowedFd<'_>, wanted: Wanted, buffer: &mut [u8]) -> Result<Taken, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MSG_FDS))];
    // Descriptors without space are not installed, and the kernel drops them without FUSE's FLUSH.
    let room = match wanted {
        Wanted::Nothing => 0,
        Wanted::Memory { .. } => rustix::cmsg_space!(ScmRights(1)),
        Wanted::Interrupts => space.len(),
    };
    let mut control = RecvAncillaryBuffer::new(space.get_mut(..room).unwrap_or_default());
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(stream, &mut [IoSliceMut::new(buffer)], &mut control, flags)
    })?;
    let mut taken = Taken { bytes: received.bytes, ..Taken::default() };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            taken.fds.extend(fds);
        }
    }
    // The kernel rounds the space up, so more descriptors may have been installed than wanted.
    taken.lost = received.flags.contains(ReturnFlags::CTRUNC) || taken.fds.len() > wanted.most();
    taken.refused = taken.fds.iter().find_map(|fd| wanted.examine(fd).err());
    if taken.lost || taken.refused.is_some() {
        taken.fds.clear();
    }
    Ok(taken)
}
