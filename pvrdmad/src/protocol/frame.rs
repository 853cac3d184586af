//! Frames: a length of four bytes, little endian, followed by that many bytes of JSON. Descriptors travel with the
//! first byte.

use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use serde::Serialize;
use thiserror::Error;

/// Most descriptors of a frame.
pub const MAX_DESCRIPTORS: usize = 32;
/// Size of the length prefix in bytes.
const PREFIX: usize = 4;
/// Bytes per read. The buffer grows only with the data that arrives, so an announced length alone allocates nothing.
const CHUNK: usize = 64 << 10;

/// Reason why a stream of frames cannot continue.
#[derive(Debug, Error)]
pub enum FrameError {
    /// The socket failed.
    #[error(transparent)]
    Socket(#[from] io::Error),
    /// The peer announced a frame longer than the limit.
    #[error("a frame of {length} bytes, at most {most} are taken")]
    TooLong {
        /// Announced length in bytes.
        length: usize,
        /// Limit in bytes.
        most: usize,
    },
    /// The stream ended inside a frame.
    #[error("the stream ended inside a frame")]
    Cut,
    /// Descriptors arrived that are not accepted, or too many of them.
    #[error("more descriptors than are taken")]
    Descriptors,
    /// The content of the frame is invalid.
    #[error("not understood: {0}")]
    Content(#[from] serde_json::Error),
}

/// A frame.
#[derive(Debug, Default)]
pub struct Frame {
    /// Its JSON.
    pub body: Vec<u8>,
    /// Descriptors that arrived with it.
    pub fds: Vec<OwnedFd>,
}

/// Result of reading from a stream.
#[derive(Debug)]
pub enum Received {
    /// A complete frame.
    Frame(Frame),
    /// No more data for now; returned only by a non-blocking socket.
    Pending,
    /// The end of the stream, between two frames.
    Closed,
}

/// Reassembles frames from the bytes of a stream, however they are split.
#[derive(Debug, Default)]
pub struct FrameReader {
    prefix: [u8; PREFIX],
    /// Bytes of the prefix that have arrived.
    prefixed: usize,
    frame: Frame,
    max_fds: usize,
}

impl FrameReader {
    /// Creates a reader that accepts no descriptors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a reader that accepts at most [`MAX_DESCRIPTORS`] with a frame.
    pub fn with_descriptors() -> Self {
        Self { max_fds: MAX_DESCRIPTORS, ..Self::default() }
    }

    /// Capacity of the buffer for the incomplete frame, in bytes.
    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        self.frame.body.capacity()
    }

    /// Reads until a frame of at most `most` bytes is complete, or the socket has no more data.
    ///
    /// # Errors
    /// The stream cannot be used any more.
    pub fn receive(&mut self, stream: &UnixStream, most: usize) -> Result<Received, FrameError> {
        while self.prefixed < PREFIX {
            let mut prefix = self.prefix;
            let Some(room) = prefix.get_mut(self.prefixed..) else { return Err(FrameError::Cut) };
            match self.read(stream, room)? {
                None => return Ok(Received::Pending),
                Some(0) if self.prefixed == 0 => return Ok(Received::Closed),
                Some(0) => return Err(FrameError::Cut),
                Some(count) => self.prefixed = self.prefixed.saturating_add(count),
            }
            self.prefix = prefix;
        }
        let length = usize::try_from(u32::from_le_bytes(self.prefix)).unwrap_or(usize::MAX);
        if length > most {
            return Err(FrameError::TooLong { length, most });
        }
        let mut body = std::mem::take(&mut self.frame.body);
        let result = self.fill(stream, &mut body, length);
        self.frame.body = body;
        if !result? {
            return Ok(Received::Pending);
        }
        self.prefixed = 0;
        Ok(Received::Frame(std::mem::take(&mut self.frame)))
    }

    /// Reads up to `length` bytes. Returns `false` if the socket has no more data for now.
    fn fill(&mut self, stream: &UnixStream, body: &mut Vec<u8>, length: usize) -> Result<bool, FrameError> {
        while body.len() < length {
            let before = body.len();
            body.resize(length.min(before.saturating_add(CHUNK)), 0);
            let read = self.read(stream, body.get_mut(before..).unwrap_or_default());
            body.truncate(before.saturating_add(read.as_ref().ok().copied().flatten().unwrap_or(0)));
            match read? {
                None => return Ok(false),
                Some(0) => return Err(FrameError::Cut),
                Some(_) => {}
            }
        }
        Ok(true)
    }

    /// Reads once. Returns `None` if there is no data.
    fn read(&mut self, stream: &UnixStream, room: &mut [u8]) -> Result<Option<usize>, FrameError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        loop {
            // The kernel closes descriptors that do not fit into this buffer.
            let mut control = match self.max_fds {
                0 => RecvAncillaryBuffer::default(),
                _ => RecvAncillaryBuffer::new(&mut space),
            };
            let buffer = &mut [IoSliceMut::new(room)];
            let received = match rustix::net::recvmsg(stream, buffer, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(received) => received,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Ok(None),
                // A peer that closes its end while data is unread resets the stream. This is treated like any other
                // end.
                Err(Errno::CONNRESET) => return Ok(Some(0)),
                Err(errno) => return Err(io::Error::from(errno).into()),
            };
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    self.frame.fds.extend(rights);
                }
            }
            if received.flags.contains(ReturnFlags::CTRUNC) || self.frame.fds.len() > self.max_fds {
                return Err(FrameError::Descriptors);
            }
            return Ok(Some(received.bytes));
        }
    }
}

/// Encodes a message as a frame.
///
/// # Errors
/// The message cannot be represented as JSON, or is too long for the prefix.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, FrameError> {
    let mut bytes = vec![0; PREFIX];
    serde_json::to_writer(&mut bytes, message)?;
    let length = bytes.len().saturating_sub(PREFIX);
    let prefix = u32::try_from(length).map_err(|_| FrameError::TooLong { length, most: u32::MAX as usize })?;
    if let Some(room) = bytes.first_chunk_mut() {
        *room = prefix.to_le_bytes();
    }
    Ok(bytes)
}

/// Sends a frame with descriptors. After an error the stream cannot be used any more.
///
/// # Errors
/// The socket failed. A non-blocking socket also fails when it is full.
pub fn send(mut stream: &UnixStream, frame: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    if fds.len() > MAX_DESCRIPTORS {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // The sandbox of a worker forbids `sendmsg`, because its messages can carry an address.
    if fds.is_empty() {
        return stream.write_all(frame);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let sent = loop {
        match rustix::net::sendmsg(stream, &[IoSlice::new(frame)], &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            sent => break sent?,
        }
    };
    stream.write_all(frame.get(sent..).unwrap_or_default())
}
