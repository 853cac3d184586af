//! One client's socket: whole messages in, whole replies out.

use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use thiserror::Error;

use super::message::{Command, HEADER_ONLY, HEADER_SIZE, Header, MAX_MSG_FDS, MessageKind};

/// A buffer that grew beyond this for one message is given back after it.
const KEPT_BUFFER: usize = 64 << 10;

/// Why a connection ends.
#[derive(Debug, Error)]
pub(crate) enum ConnectionError {
    /// The socket failed.
    #[error("socket: {0}")]
    Socket(#[from] io::Error),
    /// The stream ended inside a message.
    #[error("the client hung up in the middle of a message")]
    Truncated,
    /// Nobody can tell where the next message begins.
    #[error("{command:?} with an impossible message size of {size}")]
    Framing {
        /// What the header asked for.
        command: Command,
        /// The size it gave.
        size: u32,
    },
    /// The client has given up on this reply and would take it for something else.
    #[error("{command:?} took {millis} ms, the client no longer waits for it")]
    Late {
        /// What took so long.
        command: Command,
        /// How long.
        millis: u128,
    },
}

/// One message from the client. Its body stays in the receiver's buffer.
#[derive(Debug)]
pub(crate) struct Message {
    /// What is asked.
    pub(crate) command: Command,
    /// The right to answer; absent if there must be no answer.
    pub(crate) reply: Option<Reply>,
    /// Descriptors that came along.
    pub(crate) fds: Vec<OwnedFd>,
    /// More descriptors came than we take.
    pub(crate) too_many_fds: bool,
    /// What kind of message it is.
    pub(crate) kind: MessageKind,
}

/// The right to answer one request, once.
#[must_use = "every request without NO_REPLY is answered"]
#[derive(Debug)]
pub(crate) struct Reply {
    id: u16,
    command: Command,
    received: Instant,
}

impl Reply {
    /// Answers with success. `message` has room for the header in front of the body; `file` goes with it.
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
        // `write_all` carries on after a short write; one call is the rule.
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
            // Never 0: clients take that for success.
            error: u32::try_from(errno.raw_os_error()).unwrap_or(1),
        };
        (&*stream).write_all(&header.to_bytes())?;
        Ok(())
    }

    /// When the request was received.
    pub(crate) const fn received(&self) -> Instant {
        self.received
    }
}

/// Sends what the stream takes of a message, with a descriptor. Returns how many bytes that were.
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

/// The receiving end.
#[derive(Debug)]
pub(crate) struct Receiver<'a> {
    stream: &'a UnixStream,
    body: Vec<u8>,
}

impl<'a> Receiver<'a> {
    pub(crate) const fn new(stream: &'a UnixStream) -> Self {
        Self { stream, body: Vec::new() }
    }

    /// The body of the message received last.
    pub(crate) fn body(&self) -> &[u8] {
        &self.body
    }

    /// Waits for one message and takes exactly that, so that descriptors never reach the wrong one. `None` at the end
    /// of the stream.
    ///
    /// # Errors
    /// The stream is broken or the message cannot be delimited; the latter has been answered.
    pub(crate) fn receive(&mut self) -> Result<Option<Message>, ConnectionError> {
        let mut fds = Fds::default();
        let mut header = [0; HEADER_SIZE];
        match self.fill(&mut header, &mut fds)? {
            0 => return Ok(None),
            HEADER_SIZE => {}
            _ => return Err(ConnectionError::Truncated),
        }
        let header = Header::parse(&header);
        let kind = header.kind();
        let reply = (kind == MessageKind::Request || kind == MessageKind::Invalid).then(|| Reply {
            id: header.id,
            command: header.command,
            received: Instant::now(),
        });
        let size = match header.body_size() {
            Ok(size) => size,
            Err(errno) => {
                if let Some(reply) = reply {
                    reply.error(self.stream, errno)?;
                }
                return Err(ConnectionError::Framing { command: header.command, size: header.size });
            }
        };
        let mut body = std::mem::take(&mut self.body);
        if body.capacity() > KEPT_BUFFER && size <= KEPT_BUFFER {
            body = Vec::new();
        }
        body.resize(size, 0);
        let filled = self.fill(&mut body, &mut fds)?;
        self.body = body;
        if filled < size {
            return Err(ConnectionError::Truncated);
        }
        Ok(Some(Message { command: header.command, reply, fds: fds.taken, too_many_fds: fds.lost, kind }))
    }

    /// Reads until `buf` is full or the stream ends. Returns how much was read.
    fn fill(&self, buf: &mut [u8], fds: &mut Fds) -> Result<usize, ConnectionError> {
        let mut done = 0;
        while let Some(rest) = buf.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MSG_FDS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let received = match rustix::net::recvmsg(
                self.stream,
                &mut [IoSliceMut::new(rest)],
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            ) {
                Ok(received) => received,
                Err(Errno::INTR) => continue,
                // A client that is killed with our replies unread resets the stream. That is an end like any other.
                Err(Errno::CONNRESET) => break,
                Err(errno) => return Err(io::Error::from(errno).into()),
            };
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    rights.for_each(|fd| fds.push(fd));
                }
            }
            fds.lost |= received.flags.contains(ReturnFlags::CTRUNC);
            if received.bytes == 0 {
                break;
            }
            done += received.bytes;
        }
        Ok(done)
    }
}

/// Descriptors of one message. What is too much is closed at once.
#[derive(Default)]
struct Fds {
    taken: Vec<OwnedFd>,
    lost: bool,
}

impl Fds {
    fn push(&mut self, fd: OwnedFd) {
        if self.taken.len() < MAX_MSG_FDS {
            self.taken.push(fd);
        } else {
            self.lost = true;
        }
    }
}
