//! Frames: four bytes of length, little endian, and so many bytes of JSON. Descriptors travel with the first byte.

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
/// Bytes of the length.
const PREFIX: usize = 4;
/// Bytes that are read at a time, so that a length that is announced takes no memory before its bytes come.
const CHUNK: usize = 64 << 10;

/// Why a stream of frames cannot go on.
#[derive(Debug, Error)]
pub enum FrameError {
    /// The socket failed.
    #[error(transparent)]
    Socket(#[from] io::Error),
    /// The other side announced more than is taken.
    #[error("a frame of {length} bytes, at most {most} are taken")]
    TooLong {
        /// Bytes that were announced.
        length: usize,
        /// Bytes that are taken.
        most: usize,
    },
    /// The stream ended inside a frame.
    #[error("the stream ended inside a frame")]
    Cut,
    /// Descriptors came that nobody wants, or more of them.
    #[error("more descriptors than are taken")]
    Descriptors,
    /// What is in the frame is not what it should be.
    #[error("not understood: {0}")]
    Content(#[from] serde_json::Error),
}

/// One frame.
#[derive(Debug, Default)]
pub struct Frame {
    /// Its JSON.
    pub body: Vec<u8>,
    /// What came with it.
    pub fds: Vec<OwnedFd>,
}

/// What a stream had to give.
#[derive(Debug)]
pub enum Received {
    /// A whole frame.
    Frame(Frame),
    /// Nothing more for now; only from a socket that does not wait.
    Pending,
    /// The end, between two frames.
    Closed,
}

/// Puts frames together from the bytes of a stream, however they come.
#[derive(Debug, Default)]
pub struct FrameReader {
    prefix: [u8; PREFIX],
    /// Bytes of the prefix that are there.
    prefixed: usize,
    frame: Frame,
    max_fds: usize,
}

impl FrameReader {
    /// A reader that takes no descriptors.
    pub fn new() -> Self {
        Self::default()
    }

    /// A reader that takes at most [`MAX_DESCRIPTORS`] with a frame.
    pub fn with_descriptors() -> Self {
        Self { max_fds: MAX_DESCRIPTORS, ..Self::default() }
    }

    /// Bytes of a frame that is not whole yet, and room for more of it.
    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        self.frame.body.capacity()
    }

    /// Reads until a frame of at most `most` bytes is whole, or the socket has nothing more.
    ///
    /// # Errors
    /// The stream is of no use any more.
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

    /// Reads up to `length` bytes. Returns `false` if the socket has nothing more now.
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

    /// Reads once. `None`: nothing is there.
    fn read(&mut self, stream: &UnixStream, room: &mut [u8]) -> Result<Option<usize>, FrameError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        loop {
            // What finds no room here, the kernel closes.
            let mut control = match self.max_fds {
                0 => RecvAncillaryBuffer::default(),
                _ => RecvAncillaryBuffer::new(&mut space),
            };
            let buffer = &mut [IoSliceMut::new(room)];
            let received = match rustix::net::recvmsg(stream, buffer, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(received) => received,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Ok(None),
                // Whoever ends with our bytes unread resets the stream: an end like any other.
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

/// A message as a frame.
///
/// # Errors
/// It cannot be JSON, or is too long for a length.
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

/// Sends a frame with descriptors. After an error the stream is of no use any more.
///
/// # Errors
/// The socket failed; one that does not wait, because it is full.
pub fn send(mut stream: &UnixStream, frame: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    if fds.len() > MAX_DESCRIPTORS {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
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
