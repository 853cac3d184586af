//! Keeper process: a single thread, no log, and little memory, because each device has one.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketFlags, sockopt,
};

use super::notes::{KEY, Key, Note, Notes};
use super::receive::{Taken, Wanted, take};
use super::wire::{ANSWER, Answer, CHUNK, MAX_TAIL, Operation, REQUEST, Request, SEATS};
use crate::message::MAX_MSG_FDS;

/// Time for which the previous worker may still run when the next one connects. If a daemon is killed, the kernel kills
/// its workers.
const PREVIOUS: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };

/// Serves the workers that connect to a listening `SOCK_SEQPACKET` socket, one after the other, until there is neither
/// a worker nor a client any more, or no worker for the time `alone`. Only processes of the user that listens are
/// served.
///
/// The caller sandboxes the process before, and calls [`crate::eventfd::prepare`] before the sandbox is active.
///
/// # Errors
/// A worker violates the protocol, or a socket failed.
pub fn serve(listener: BorrowedFd<'_>, alone: Duration) -> io::Result<()> {
    let mut process = Process { alone: Timespec::try_from(alone).ok(), ..Process::default() };
    while process.worker.is_none() {
        process.accept(listener)?;
    }
    process.run(Some(listener))
}

/// Serves one worker, which is connected already, until it closes its socket.
#[cfg(test)]
pub(crate) fn serve_one(worker: OwnedFd) -> io::Result<()> {
    Process { worker: Some(worker), ..Process::default() }.run(None)
}

/// A client.
#[derive(Debug)]
struct Seated {
    stream: OwnedFd,
    notes: Notes<OwnedFd>,
}

#[derive(Default)]
struct Process {
    worker: Option<OwnedFd>,
    seats: [Option<Seated>; SEATS],
    /// Longest time without a worker; `None` is forever.
    alone: Option<Timespec>,
}

/// Next thing to do.
enum Wake {
    /// The worker has sent a request, or closed its socket.
    Request,
    /// Another worker connects.
    Connection,
    /// A client may have hung up.
    Client,
    /// No worker has come: the client's VMM would wait for each answer in vain.
    Alone,
}

impl Process {
    fn is_idle(&self) -> bool {
        self.worker.is_none() && self.seats.iter().all(Option::is_none)
    }

    /// Waits for a connection and serves it from now on, unless it belongs to another user.
    fn accept(&mut self, listener: BorrowedFd<'_>) -> io::Result<()> {
        let accepted = rustix::net::accept_with(listener, SocketFlags::CLOEXEC);
        let worker = match accepted {
            Ok(worker) => worker,
            Err(Errno::INTR | Errno::CONNABORTED) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        };
        // The kernel records for a listening socket the process that made it listen.
        let [own, other] = [listener, worker.as_fd()].map(sockopt::socket_peercred);
        if own?.uid == other?.uid {
            if let Some(previous) = self.worker.take() {
                await_end(&previous)?;
            }
            self.worker = Some(worker);
        }
        Ok(())
    }

    /// Serves the worker until it is gone. Without a worker, waits for the next one, as long as a client is there.
    fn run(&mut self, listener: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut buffer = [0; CHUNK];
        while !self.is_idle() {
            match (self.wait(listener)?, listener) {
                (Wake::Connection, Some(listener)) => self.accept(listener)?,
                (Wake::Client, _) => self.drop_lost_clients(),
                (Wake::Alone, _) => return Ok(()),
                (Wake::Request, _) | (Wake::Connection, None) => match self.answer_request(&mut buffer) {
                    Ok(()) => {}
                    Err(Some(errno)) => return Err(errno.into()),
                    Err(None) => self.worker = None,
                },
            }
        }
        Ok(())
    }

    fn wait(&self, listener: Option<BorrowedFd<'_>>) -> io::Result<Wake> {
        let worker = self.worker.as_ref();
        let mut polled: Vec<_> = worker.iter().map(|worker| PollFd::new(worker, PollFlags::IN)).collect();
        polled.extend(listener.map(|listener| PollFd::from_borrowed_fd(listener, PollFlags::IN)));
        let always = polled.len();
        if worker.is_none() {
            // A worker notices the end of a client itself, and releases it.
            let clients = self.seats.iter().flatten();
            polled.extend(clients.map(|client| PollFd::new(&client.stream, PollFlags::RDHUP)));
        }
        let timeout = self.alone.as_ref().filter(|_| worker.is_none());
        loop {
            match rustix::event::poll(&mut polled, timeout) {
                Ok(0) => return Ok(Wake::Alone),
                Ok(_) => break,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        let woken = polled.iter().position(|polled| !polled.revents().is_empty());
        Ok(match woken {
            Some(0) if worker.is_some() => Wake::Request,
            Some(index) if index < always => Wake::Connection,
            _ => Wake::Client,
        })
    }

    /// Drops the clients that have hung up.
    fn drop_lost_clients(&mut self) {
        const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
        for seat in &mut self.seats {
            let gone = |client: &mut Seated| {
                rustix::event::poll(&mut [PollFd::new(&client.stream, PollFlags::RDHUP)], Some(&NOW)) != Ok(0)
            };
            drop(seat.take_if(gone));
        }
    }

    /// Receives a request, performs it and answers. `Err(None)` means that the worker has closed the socket, which is
    /// the normal end.
    fn answer_request(&mut self, buffer: &mut [u8; CHUNK]) -> Result<(), Option<Errno>> {
        let Some(worker) = &self.worker else { return Err(None) };
        let worker = worker.as_fd();
        let Received { request, tail, fds } = next(worker)?;
        let Some(seat) = self.seats.get_mut(usize::from(request.seat)) else { return Err(Some(Errno::PROTO)) };
        let mut fds = fds.into_iter();
        let taken = match (request.operation, &tail[..], fds.len()) {
            (Operation::Admit, [], 1) => {
                *seat = fds.next().map(|stream| Seated { stream, notes: Notes::default() });
                Taken::default()
            }
            (Operation::Release, [], 0) => {
                // This is the last descriptor of the client's socket. Closing it also closes the descriptors that the
                // client has sent and that were not received.
                *seat = None;
                Taken::default()
            }
            (Operation::Take(wanted), [], 0) => {
                let bytes = usize::try_from(request.bytes).unwrap_or(usize::MAX).min(CHUNK);
                let room = buffer.get_mut(..bytes).unwrap_or_default();
                seat.as_mut().ok_or(Errno::NOTCONN)?.take(wanted, room)
            }
            (Operation::Put, tail, _) => {
                let (key, bytes) = tail.split_first_chunk::<KEY>().ok_or(Errno::PROTO)?;
                let note = Note { bytes: bytes.to_vec(), fds: fds.collect() };
                let fits = seat.as_mut().ok_or(Errno::NOTCONN)?.notes.put(Key::from_bytes(*key), note);
                Taken { refused: (!fits).then_some(Errno::NOSPC.into()), ..Taken::default() }
            }
            (Operation::Forget, tail, 0) => {
                let (first, last) = tail.split_first_chunk::<KEY>().ok_or(Errno::PROTO)?;
                let last = <[u8; KEY]>::try_from(last).map_err(|_| Errno::PROTO)?;
                let notes = &mut seat.as_mut().ok_or(Errno::NOTCONN)?.notes;
                notes.remove(Key::from_bytes(*first), Key::from_bytes(last));
                Taken::default()
            }
            (Operation::Look, [], 0) => {
                let taken = self.seats.each_ref().map(|seat| u8::from(seat.is_some()));
                return told(send(worker, &Answer::with(request.id, taken.len(), 0), &[], &taken));
            }
            (Operation::Recall, tail, 0) => return recall(worker, request.id, seat.as_ref(), tail),
            _ => return Err(Some(Errno::PROTO)),
        };
        answer(worker, request.id, taken, buffer)
    }
}

impl Seated {
    fn take(&mut self, wanted: Wanted, room: &mut [u8]) -> Taken {
        // Before the read: if the worker ends before it has the whole message, the next one does not know where the
        // next message begins.
        self.notes.put(Key::PARTIAL, Note { bytes: Vec::new(), fds: Vec::new() });
        // On failure the answer has no bytes, as at the end of the stream: the worker sees the state of the stream
        // itself.
        take(self.stream.as_fd(), wanted, room).unwrap_or_default()
    }
}

/// Answers with the socket of a client, or with a note about it; without either if there is none.
fn recall(worker: BorrowedFd<'_>, id: u32, seat: Option<&Seated>, from: &[u8]) -> Result<(), Option<Errno>> {
    let nothing = || send(worker, &Answer::with(id, 0, 0), &[], &[]);
    let sent = match (seat, <[u8; KEY]>::try_from(from)) {
        (None, _) => nothing(),
        (Some(Seated { stream, .. }), Err(_)) if from.is_empty() => {
            send(worker, &Answer::with(id, 0, 1), &[stream.as_fd()], &[])
        }
        (Some(_), Err(_)) => return Err(Some(Errno::PROTO)),
        (Some(Seated { notes, .. }), Ok(from)) => match notes.first_from(Key::from_bytes(from)) {
            None => nothing(),
            Some((key, Note { bytes, fds })) => {
                let bytes = [&key.to_bytes()[..], bytes].concat();
                let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                send(worker, &Answer::with(id, bytes.len(), fds.len()), &fds, &bytes)
            }
        },
    };
    told(sent)
}

/// Returns `Err(None)` if the worker has closed the socket.
fn told(sent: Result<(), Errno>) -> Result<(), Option<Errno>> {
    match sent {
        Err(Errno::PIPE | Errno::CONNRESET) => Err(None),
        sent => Ok(sent?),
    }
}

/// Waits until a worker has closed its socket, as it does when it ends, but for a limited time: a worker that was
/// killed and is stuck in the kernel does not run any more.
fn await_end(previous: &OwnedFd) -> io::Result<()> {
    loop {
        return match rustix::event::poll(&mut [PollFd::new(previous, PollFlags::empty())], Some(&PREVIOUS)) {
            Err(Errno::INTR) => continue,
            ended => Ok(ended.map(drop)?),
        };
    }
}

/// A received request.
struct Received {
    request: Request,
    /// Bytes behind the request.
    tail: Vec<u8>,
    fds: Vec<OwnedFd>,
}

/// Receives the next request and the descriptors that it carries.
fn next(worker: BorrowedFd<'_>) -> Result<Received, Option<Errno>> {
    let mut bytes = [0; REQUEST + MAX_TAIL + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MSG_FDS))];
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
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    let (head, tail) = bytes.get(..count).and_then(|bytes| bytes.split_at_checked(REQUEST)).ok_or(Errno::PROTO)?;
    let request = Request::parse(head).filter(|_| tail.len() <= MAX_TAIL).ok_or(Errno::PROTO)?;
    Ok(Received { request, tail: tail.to_vec(), fds })
}

/// Sends the answer to a request, with the received bytes and descriptors.
fn answer(worker: BorrowedFd<'_>, id: u32, taken: Taken, buffer: &[u8]) -> Result<(), Option<Errno>> {
    let fds: Vec<_> = taken.fds.iter().map(AsFd::as_fd).collect();
    match send(worker, &Answer::new(id, &taken), &fds, buffer.get(..taken.bytes).unwrap_or_default()) {
        // Too many descriptors of this user are in flight: the client's descriptors are refused.
        Err(errno @ (Errno::TOOMANYREFS | Errno::NOMEM | Errno::NOBUFS)) if !fds.is_empty() => {
            let bytes = taken.bytes;
            let taken = Taken { bytes, refused: Some(errno.into()), ..Taken::default() };
            answer(worker, id, taken, buffer)
        }
        Err(Errno::PIPE | Errno::CONNRESET) => Err(None),
        sent => Ok(sent?),
    }
}

fn send(worker: BorrowedFd<'_>, head: &Answer, fds: &[BorrowedFd<'_>], bytes: &[u8]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MSG_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    let head: [u8; ANSWER] = head.to_bytes();
    let packet = [IoSlice::new(&head), IoSlice::new(bytes)];
    rustix::io::retry_on_intr(|| rustix::net::sendmsg(worker, &packet, &mut control, SendFlags::NOSIGNAL)).map(drop)
}
