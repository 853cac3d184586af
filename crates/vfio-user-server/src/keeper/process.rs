//! Keeper process: a single thread, no log, and little memory, because each device has one.

use std::convert::Infallible;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

use super::receive::{Taken, take};
use super::wire::{ANSWER, Answer, CHUNK, Operation, REQUEST, Request, SEATS};
use crate::message::MAX_MSG_FDS;

/// Serves the worker at the other end of a `SOCK_SEQPACKET` socket until the worker closes it. The caller sandboxes the
/// process before, and calls [`crate::eventfd::prepare`] before the sandbox is active.
///
/// # Errors
/// The peer violates the protocol, or the socket failed.
pub fn serve(worker: BorrowedFd<'_>) -> io::Result<()> {
    match answer_requests(worker) {
        Err(Some(errno)) => Err(errno.into()),
        Err(None) => Ok(()),
    }
}

/// Serves a worker. `Err(None)` means that the worker has closed the socket, which is the normal end.
fn answer_requests(worker: BorrowedFd<'_>) -> Result<Infallible, Option<Errno>> {
    let mut seats: [Option<OwnedFd>; SEATS] = Default::default();
    let mut buffer = [0; CHUNK];
    loop {
        let (request, socket) = next(worker)?;
        let Some(seat) = seats.get_mut(usize::from(request.seat)) else { return Err(Some(Errno::PROTO)) };
        let taken = match (request.operation, socket) {
            (Operation::Admit, Some(socket)) => {
                *seat = Some(socket);
                Taken::default()
            }
            (Operation::Release, None) => {
                // This is the last descriptor of the client's socket. Closing it also closes the descriptors that the
                // client has sent and that were not received.
                *seat = None;
                Taken::default()
            }
            (Operation::Take(wanted), None) => {
                let bytes = usize::try_from(request.bytes).unwrap_or(usize::MAX).min(CHUNK);
                let room = buffer.get_mut(..bytes).unwrap_or_default();
                let stream = seat.as_ref().ok_or(Errno::NOTCONN)?;
                // On failure the answer has no bytes, as at the end of the stream: the worker sees the state of the
                // stream itself.
                take(stream.as_fd(), wanted, room).unwrap_or_default()
            }
            _ => return Err(Some(Errno::PROTO)),
        };
        answer(worker, request.id, taken, &buffer)?;
    }
}

/// Receives the next request and the descriptor that it carries.
fn next(worker: BorrowedFd<'_>) -> Result<(Request, Option<OwnedFd>), Option<Errno>> {
    let mut bytes = [0; REQUEST + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(worker, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)
    });
    let count = match received {
        Ok(received) if received.bytes == 0 => return Err(None),
        Ok(received) => received.bytes,
        Err(Errno::CONNRESET) => return Err(None),
        Err(errno) => return Err(Some(errno)),
    };
    let fd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    let request = bytes.get(..count).and_then(Request::parse).ok_or(Some(Errno::PROTO))?;
    Ok((request, fd))
}

/// Sends the answer to a request, with the received bytes and descriptors.
fn answer(worker: BorrowedFd<'_>, id: u32, taken: Taken, buffer: &[u8]) -> Result<(), Option<Errno>> {
    match send(worker, &Answer::new(id, &taken), &taken.fds, buffer.get(..taken.bytes).unwrap_or_default()) {
        // Too many descriptors of this user are in flight: the client's descriptors are refused.
        Err(errno @ (Errno::TOOMANYREFS | Errno::NOMEM | Errno::NOBUFS)) if !taken.fds.is_empty() => {
            let bytes = taken.bytes;
            let taken = Taken { bytes, refused: Some(errno.into()), ..Taken::default() };
            answer(worker, id, taken, buffer)
        }
        Err(Errno::PIPE | Errno::CONNRESET) => Err(None),
        sent => Ok(sent?),
    }
}

fn send(worker: BorrowedFd<'_>, head: &Answer, fds: &[OwnedFd], bytes: &[u8]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MSG_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(Errno::INVAL);
    }
    let head: [u8; ANSWER] = head.to_bytes();
    let packet = [IoSlice::new(&head), IoSlice::new(bytes)];
    rustix::io::retry_on_intr(|| rustix::net::sendmsg(worker, &packet, &mut control, SendFlags::NOSIGNAL)).map(drop)
}
