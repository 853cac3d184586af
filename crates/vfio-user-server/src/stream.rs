//! Message stream of one client: receives whole messages and sends whole replies.

use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use thiserror::Error;

use super::examine::DescriptorError;
use super::message::{Command, HEADER_ONLY, HEADER_SIZE, Header, MAX_MSG_FDS, MessageKind};
use crate::endpoint::Endpoint;
use crate::keeper::client::KeeperError;
use crate::keeper::receive::{Taken, Wanted, take};

/// Most bytes of an answer that the kernel takes in one piece: a stream socket allocates at least this much at once.
pub(crate) const ATOMIC_ANSWER: usize = 4096;

/// Bytes that are peeked before a message is received. Most messages fit, in particular a doorbell write with its
/// header, so one peek and one read suffice for them.
const GLANCE: usize = 64;

/// Number of further peeks while a message is not whole. Together they take less than 50 microseconds.
const MORE_GLANCES: usize = 20;

/// A buffer that grew beyond this for one message is freed after it.
const KEPT_BUFFER: usize = 64 << 10;

/// Reason why a connection ends.
#[derive(Debug, Error)]
pub(crate) enum ConnectionError {
    /// The socket failed.
    #[error("socket: {0}")]
    Socket(#[from] io::Error),
    /// The stream ended inside a message.
    #[error("the client hung up in the middle of a message")]
    Truncated,
    /// The position of the next message is unknown.
    #[error("{command:?} with an impossible message size of {size}")]
    Framing {
        /// Command in the header.
        command: Command,
        /// Size in the header.
        size: u32,
    },
    /// The header has changed since it was peeked: its bytes are in pages to which the client still writes.
    #[error("a message changed while it was read")]
    Changed,
    /// The keeper cannot receive the client's descriptors.
    #[error(transparent)]
    Keeper(#[from] KeeperError),
    /// The client has stopped waiting for this reply, and would take it for that to another request.
    #[error("{command:?} took {millis} ms, the client no longer waits for it")]
    Late {
        /// Command that took too long.
        command: Command,
        /// Time that it took.
        millis: u128,
    },
}

/// Message from the client. Its body stays in the receiver's buffer.
#[derive(Debug)]
pub(crate) struct Message {
    /// Requested command.
    pub(crate) command: Command,
    /// Permission to answer; absent if there must be no answer.
    pub(crate) reply: Option<Reply>,
    /// Descriptors received with the message.
    pub(crate) fds: Vec<OwnedFd>,
    /// The message carried more descriptors than the server accepts.
    pub(crate) too_many_fds: bool,
    /// Reason why the descriptors of the message are not in [`Self::fds`].
    pub(crate) refused: Option<DescriptorError>,
    /// Kind of the message.
    pub(crate) kind: MessageKind,
}

/// Permission to answer one request, once.
#[must_use = "every request without NO_REPLY is answered"]
#[derive(Debug)]
pub(crate) struct Reply {
    id: u16,
    command: Command,
    received: Instant,
}

impl Reply {
    /// Answers with success. `message` has room for the header in front of the body; `file` is sent along.
    ///
    /// # Errors
    /// The socket failed.
    pub(crate) fn send(
        self,
        stream: &UnixStream,
        message: &mut [u8],
        file: Option<BorrowedFd<'_>>,
    ) -> Result<(), ConnectionError> {
        let size = u32::try_from(message.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
        let header = Header { id: self.id, command: self.command, size, flags: Header::REPLY, error: 0 };
        let Some(room) = message.first_chunk_mut::<HEADER_SIZE>() else {
            return Err(io::Error::from(io::ErrorKind::InvalidData).into());
        };
        *room = header.to_bytes();
        let sent = file.map_or(Ok(0), |file| send_with(stream, message, file))?;
        // `write_all` continues after a short write; usually one call suffices.
        (&*stream).write_all(message.get(sent..).unwrap_or_default())?;
        Ok(())
    }

    /// Answers with an error.
    ///
    /// # Errors
    /// The socket failed.
    pub(crate) fn error(self, stream: &UnixStream, errno: Errno) -> Result<(), ConnectionError> {
        let header = Header {
            id: self.id,
            command: self.command,
            size: HEADER_ONLY,
            flags: Header::REPLY | Header::ERROR,
            // Never 0, which clients take for success.
            error: u32::try_from(errno.raw_os_error()).unwrap_or(1),
        };
        (&*stream).write_all(&header.to_bytes())?;
        Ok(())
    }

    /// Returns the time at which the request was received.
    pub(crate) const fn received(&self) -> Instant {
        self.received
    }
}

/// Sends as much of a message as the stream accepts, with a descriptor. Returns the number of bytes sent.
fn send_with(stream: &UnixStream, message: &[u8], file: BorrowedFd<'_>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [file];
    if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    loop {
        match rustix::net::sendmsg(stream, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            sent => return Ok(sent?),
        }
    }
}

/// Receiving end of the stream.
///
/// This type never reads bytes that carry descriptors. Reading them without space for descriptors drops the last
/// reference to the files, and reading them with space installs the descriptors; both may block on another process. So
/// the receiver first peeks at all bytes, without space for descriptors, and leaves bytes that carry some to the
/// keeper. The descriptors of one `sendmsg` belong to its first byte, and a peek or a read ends behind the bytes of a
/// `sendmsg` that carries some.
#[derive(Debug)]
pub(crate) struct Receiver<'a> {
    stream: &'a UnixStream,
    /// Endpoint with the rules for descriptors, and the keeper that receives them in place of this process. `None`: no
    /// keeper, and the default rules.
    endpoint: Option<&'a Endpoint>,
    /// Last received message, with its header.
    message: Vec<u8>,
}

/// Beginning of the next message, which is still in the socket.
#[derive(Debug)]
pub(crate) struct Seen {
    bytes: [u8; GLANCE],
    glance: Glance,
}

/// Result of a peek at the stream.
#[derive(Debug)]
struct Glance {
    /// Number of bytes; 0 at the end of the stream.
    bytes: usize,
    /// Some of these bytes, or bytes behind them, carry descriptors.
    marked: bool,
}

impl<'a> Receiver<'a> {
    pub(crate) const fn new(stream: &'a UnixStream, endpoint: Option<&'a Endpoint>) -> Self {
        Self { stream, endpoint, message: Vec::new() }
    }

    /// Returns the body of the last received message.
    pub(crate) fn body(&self) -> &[u8] {
        self.message.get(HEADER_SIZE..).unwrap_or_default()
    }

    /// Waits for the next message without receiving any of it. Returns `None` at the end of the stream.
    ///
    /// # Errors
    /// The stream is broken.
    pub(crate) fn wait(&self) -> Result<Option<Seen>, ConnectionError> {
        let mut bytes = [0; GLANCE];
        let glance = self.look(&mut bytes)?;
        Ok((glance.bytes != 0).then_some(Seen { bytes, glance }))
    }

    /// Receives exactly the message that [`Self::wait`] saw, so that descriptors are never attributed to another
    /// message.
    ///
    /// # Errors
    /// The stream is broken, or the message cannot be delimited. In the second case an error reply has been sent.
    // Long: the steps share the message that arrives.
    pub(crate) fn receive(&mut self, seen: &Seen) -> Result<Message, ConnectionError> {
        let Seen { bytes: seen, glance } = seen;
        let mut came = Came::default();
        let (mut first, mut done) = ([0; HEADER_SIZE], 0);
        match seen.first_chunk().filter(|_| glance.bytes >= HEADER_SIZE) {
            Some(header) => first = *header,
            // The header arrives in pieces. Until it is complete, the permitted kinds of descriptors are unknown, so
            // none are permitted.
            None => {
                self.begin();
                done = self.fill(&mut first, Wanted::Nothing, &mut came)?;
                if done < HEADER_SIZE {
                    return Err(ConnectionError::Truncated);
                }
            }
        }
        let header = Header::parse(&first);
        let kind = header.kind();
        let reply = (kind == MessageKind::Request || kind == MessageKind::Invalid).then(|| Reply {
            id: header.id,
            command: header.command,
            received: Instant::now(),
        });
        let size = match header.body_size() {
            Ok(size) => HEADER_SIZE.saturating_add(size),
            Err(errno) => {
                if let Some(reply) = reply {
                    reply.error(self.stream, errno)?;
                }
                return Err(ConnectionError::Framing { command: header.command, size: header.size });
            }
        };
        let mut message = std::mem::take(&mut self.message);
        if message.capacity() > KEPT_BUFFER && size <= KEPT_BUFFER {
            message = Vec::new();
        }
        message.resize(size, 0);
        let (taken, rest) = message.split_at_mut(done);
        taken.copy_from_slice(first.get(..done).unwrap_or_default());
        let whole = done == 0 && self.is_whole(glance, size)?;
        if whole {
            done += read(self.stream, rest)?;
        } else if done == 0 {
            self.begin();
        }
        done += self.fill(message.get_mut(done..).unwrap_or_default(), self.wanted(header.command), &mut came)?;
        self.message = message;
        if done < size {
            return Err(ConnectionError::Truncated);
        }
        if !whole {
            self.end();
        }
        // The read copies the peeked bytes again, and pages that the client gave to the socket (vmsplice) may have
        // changed.
        if self.message.first_chunk() != Some(&first) {
            return Err(ConnectionError::Changed);
        }
        let Came { fds, lost, refused } = came;
        Ok(Message { command: header.command, reply, fds, too_many_fds: lost, refused, kind })
    }

    /// Returns `true` if one read receives a message of this size, without descriptors. The message is then received
    /// whole or not at all, even if this process is killed; see [`crate::recover`].
    fn is_whole(&self, glance: &Glance, size: usize) -> Result<bool, ConnectionError> {
        Ok(!glance.marked && (size <= glance.bytes || size <= GLANCE && self.becomes_whole(size)?))
    }

    /// Returns `true` if a message of this size, which fits a glance, is in the socket a moment later. Clients of the
    /// crate `vfio_user` write header and body one after the other, and a mark for each doorbell would be slow.
    fn becomes_whole(&self, size: usize) -> Result<bool, ConnectionError> {
        let mut bytes = [0; GLANCE];
        for _ in 0..MORE_GLANCES {
            std::thread::yield_now();
            let glance = self.look(&mut bytes)?;
            if glance.marked || glance.bytes >= size {
                return Ok(!glance.marked);
            }
        }
        Ok(false)
    }

    /// Marks the stream as possibly inside a message, for the next worker.
    fn begin(&self) {
        if let Some(endpoint) = self.endpoint {
            endpoint.note_begin();
        }
    }

    /// Marks the stream as between two messages.
    fn end(&self) {
        if let Some(endpoint) = self.endpoint {
            endpoint.note_end();
        }
    }

    /// Returns the kind of descriptors that a message with this command may carry.
    fn wanted(&self, command: Command) -> Wanted {
        match command {
            Command::DMA_MAP => Wanted::Memory { sealed: self.endpoint.is_some_and(|endpoint| endpoint.files.sealed) },
            Command::DEVICE_SET_IRQS => Wanted::Interrupts,
            _ => Wanted::Nothing,
        }
    }

    /// Waits for bytes, and copies some without receiving them.
    fn look(&self, buf: &mut [u8]) -> Result<Glance, ConnectionError> {
        let mut control = RecvAncillaryBuffer::default();
        let seen = rustix::io::retry_on_intr(|| {
            rustix::net::recvmsg(self.stream, &mut [IoSliceMut::new(buf)], &mut control, RecvFlags::PEEK)
        });
        match seen {
            Ok(seen) => Ok(Glance { bytes: seen.bytes, marked: seen.flags.contains(ReturnFlags::CTRUNC) }),
            // A client that is killed with unread replies resets the stream, which is a normal end.
            Err(Errno::CONNRESET) => Ok(Glance { bytes: 0, marked: false }),
            Err(errno) => Err(io::Error::from(errno).into()),
        }
    }

    /// Receives bytes until `buf` is full or the stream ends. Returns the number of bytes.
    fn fill(&self, buf: &mut [u8], wanted: Wanted, came: &mut Came) -> Result<usize, ConnectionError> {
        let mut done = 0;
        while let Some(rest) = buf.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let glance = self.look(rest)?;
            let seen = rest.get_mut(..glance.bytes).unwrap_or_default();
            let count = if glance.marked { came.add(self.take(wanted, seen)?) } else { read(self.stream, seen)? };
            if count == 0 {
                break;
            }
            done += count;
        }
        Ok(done)
    }

    /// Receives bytes that carry descriptors.
    fn take(&self, wanted: Wanted, buf: &mut [u8]) -> Result<Taken, ConnectionError> {
        match self.endpoint.and_then(|endpoint| endpoint.keeper.as_ref()) {
            Some(keeper) => Ok(keeper.take(wanted, buf)?),
            None => Ok(take(self.stream.as_fd(), wanted, buf).map_err(io::Error::from)?),
        }
    }
}

/// Reads bytes that were peeked and carry no descriptors. Returns fewer only if the stream is broken.
fn read(stream: &UnixStream, buf: &mut [u8]) -> Result<usize, ConnectionError> {
    match rustix::io::retry_on_intr(|| rustix::io::read(stream, &mut *buf)) {
        Ok(count) => Ok(count),
        Err(Errno::CONNRESET) => Ok(0),
        Err(errno) => Err(io::Error::from(errno).into()),
    }
}

/// Descriptors of one message.
#[derive(Default)]
struct Came {
    fds: Vec<OwnedFd>,
    lost: bool,
    refused: Option<DescriptorError>,
}

impl Came {
    /// Adds the descriptors of one part of the message. Returns the number of bytes of that part.
    fn add(&mut self, taken: Taken) -> usize {
        self.lost |= taken.lost || self.fds.len().saturating_add(taken.fds.len()) > MAX_MSG_FDS;
        self.refused = self.refused.or(taken.refused);
        self.fds.extend(taken.fds);
        if self.lost || self.refused.is_some() {
            self.fds.clear();
        }
        taken.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::EventfdFlags;

    /// Sends `bytes` with one `sendmsg` that carries `count` eventfds.
    fn send(stream: &UnixStream, bytes: &[u8], count: usize) {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let fds = vec![event.as_fd(); count];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(&fds)));
        let sent = rustix::net::sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::empty());
        assert_eq!(sent, Ok(bytes.len()));
    }

    fn message(command: Command, body: &[u8]) -> Vec<u8> {
        let size = u32::try_from(HEADER_SIZE + body.len()).unwrap();
        [&Header { id: 1, command, size, flags: 0, error: 0 }.to_bytes()[..], body].concat()
    }

    /// Kernel behaviour that this file relies on.
    #[test]
    fn the_kernel_shows_descriptors_without_taking_them() {
        let (client, server) = UnixStream::pair().unwrap();
        let receiver = Receiver::new(&server, None);
        let look = |most: usize| {
            let mut bytes = vec![0; most];
            let glance = receiver.look(&mut bytes).unwrap();
            bytes.truncate(glance.bytes);
            (String::from_utf8(bytes).unwrap(), glance.marked)
        };
        let seen = |text: &str, marked| (text.to_owned(), marked);
        for (bytes, count) in [("aaaa", 0), ("bbbb", 2), ("cccc", 0), ("dddd", 1)] {
            send(&client, bytes.as_bytes(), count);
        }
        for _ in 0..3 {
            // A peek ends behind the bytes that carry descriptors.
            assert_eq!(look(64), seen("aaaabbbb", true));
            assert_eq!(look(5), seen("aaaab", true));
            // Kernels also examine the bytes behind those that they copy, so the mark may refer to later bytes.
            assert_eq!(look(4).0, "aaaa");
        }
        // Taking the bytes in front leaves the descriptors with theirs.
        let taken = take(server.as_fd(), Wanted::Interrupts, &mut [0; 4]).unwrap();
        assert_eq!((taken.bytes, taken.fds.len(), taken.lost), (4, 0, false));
        assert_eq!(look(1), seen("b", true));
        // The first byte carries all of its descriptors.
        let taken = take(server.as_fd(), Wanted::Interrupts, &mut [0; 1]).unwrap();
        assert_eq!((taken.bytes, taken.fds.len(), taken.lost), (1, 2, false));
        assert_eq!(look(7).0, "bbbcccc");
        assert_eq!(look(64), seen("bbbccccdddd", true));
        // A read takes the bytes in front of a marked part as well, and none behind it.
        send(&client, b"eeee", 0);
        let taken = take(server.as_fd(), Wanted::Interrupts, &mut [0; 64]).unwrap();
        assert_eq!((taken.bytes, taken.fds.len(), taken.lost), (11, 1, false));
        assert_eq!(look(64), seen("eeee", false));
        drop(client);
        read(&server, &mut [0; 4]).unwrap();
        assert_eq!(look(64), seen("", false));
    }

    #[test]
    fn descriptors_stay_with_the_message_that_brought_them() {
        let (client, server) = UnixStream::pair().unwrap();
        let doorbell = message(Command::REGION_WRITE, &[0; 24]);
        let irqs = message(Command::DEVICE_SET_IRQS, &[0; 20]);
        let long = message(Command::REGION_WRITE, &[7; 5000]);
        send(&client, &doorbell, 0);
        send(&client, &irqs, 3);
        send(&client, &doorbell, 0);
        send(&client, &doorbell, 1);
        send(&client, &long, 0);
        send(&client, &long, 1);
        // Two messages in one `sendmsg`, whose descriptors belong to the first; and messages in several parts.
        send(&client, &[&irqs[..], &irqs].concat(), 2);
        send(&client, &irqs[..HEADER_SIZE], 1);
        send(&client, &irqs[HEADER_SIZE..], 1);
        send(&client, &irqs[..3], 1);
        send(&client, &irqs[3..], 1);
        send(&client, &irqs, 17);
        let mut receiver = Receiver::new(&server, None);
        for (number, (fds, lost, size)) in [
            (0, false, 24),
            (3, false, 20),
            (0, false, 24),
            (0, true, 24),
            (0, false, 5000),
            (0, true, 5000),
            (2, false, 20),
            (0, false, 20),
            (2, false, 20),
            // The header was incomplete, so the kind of descriptors was not known yet.
            (0, true, 20),
            (0, true, 20),
        ]
        .into_iter()
        .enumerate()
        {
            let seen = receiver.wait().unwrap().unwrap();
            let message = receiver.receive(&seen).unwrap();
            assert_eq!((message.fds.len(), message.too_many_fds), (fds, lost), "{number}");
            assert_eq!(receiver.body().len(), size, "{number}");
        }
        assert_eq!(receiver.body(), &irqs[HEADER_SIZE..]);
    }
}
