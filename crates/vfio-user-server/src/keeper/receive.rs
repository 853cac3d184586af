//! Takes bytes with descriptors from a client's socket, and examines the descriptors.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};

use crate::examine::{self, DescriptorError};
use crate::message::MAX_MSG_FDS;

/// What the descriptors of a message may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Wanted {
    /// The message takes none.
    Nothing,
    /// One file of guest memory; `sealed`: it must not be able to shrink.
    Memory { sealed: bool },
    /// Eventfds.
    Interrupts,
}

impl Wanted {
    /// Most descriptors.
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

/// What was taken from the socket.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    /// Bytes.
    pub(crate) bytes: usize,
    /// Descriptors, all of the kind that is wanted, or none.
    pub(crate) fds: Vec<OwnedFd>,
    /// There were more descriptors than the message takes.
    pub(crate) lost: bool,
    /// Why there are no descriptors although some came.
    pub(crate) refused: Option<DescriptorError>,
}

/// Takes what is there of a message, and no bytes beyond `buffer`. Closes all descriptors that are refused, and with
/// them those that came along: `close` may not return.
///
/// # Errors
/// Nothing is there (`EAGAIN`), or the socket failed.
pub(crate) fn take(stream: BorrowedFd<'_>, wanted: Wanted, buffer: &mut [u8]) -> Result<Taken, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MSG_FDS))];
    // What finds no room is not installed, and the kernel lets go of it without FUSE's FLUSH.
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
    // The room is rounded up.
    taken.lost = received.flags.contains(ReturnFlags::CTRUNC) || taken.fds.len() > wanted.most();
    taken.refused = taken.fds.iter().find_map(|fd| wanted.examine(fd).err());
    if taken.lost || taken.refused.is_some() {
        taken.fds.clear();
    }
    Ok(taken)
}
