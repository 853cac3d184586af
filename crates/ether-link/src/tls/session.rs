//! A connection: TLS over a non-blocking socket, and the frames in it.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use pvrdma_link::Frames;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use rustls::Connection;

use crate::framing::{Deframer, NoFrame, put};

/// Bytes that are read or encrypted at a time.
const CHUNK: usize = 64 << 10;
/// Longest plaintext of a TLS record.
const RECORD: usize = 16 << 10;

/// Reason for the end of a connection.
#[derive(Debug)]
pub(super) enum End {
    /// The other end closed it.
    Closed,
    /// The system reported an error.
    System(io::Error),
    /// The received data are not TLS, not meant for this end, or damaged.
    Tls(rustls::Error),
    /// The received data are not a frame.
    NoFrame,
}

impl End {
    /// Returns `true` if the other end of a TLS link would never send this.
    pub(super) const fn is_malformed(&self) -> bool {
        match self {
            Self::NoFrame => true,
            Self::Tls(error) => !matches!(error, rustls::Error::AlertReceived(_)),
            Self::Closed | Self::System(_) => false,
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("the other side closed the connection"),
            Self::System(error) => error.fmt(f),
            Self::Tls(error) => error.fmt(f),
            Self::NoFrame => f.write_str("a length came that no frame has"),
        }
    }
}

impl From<rustls::Error> for End {
    fn from(error: rustls::Error) -> Self {
        Self::Tls(error)
    }
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        Self::System(error)
    }
}

impl From<NoFrame> for End {
    fn from(NoFrame: NoFrame) -> Self {
        Self::NoFrame
    }
}

/// The socket, as the output of TLS.
struct Wire<'a>(&'a OwnedFd);

impl Write for Wire<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(self.0, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// TLS state and buffers over a socket. Its memory is bounded: an encrypted chunk and a frame of maximum length in one
/// direction; a chunk, a record and a frame of maximum length in the other.
pub(super) struct Stream {
    tls: Connection,
    /// Bytes that were read from the socket.
    arrived: Vec<u8>,
    /// Bytes to be encrypted.
    plain: Vec<u8>,
    deframer: Deframer,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("tls", &self.tls).finish_non_exhaustive()
    }
}

impl Stream {
    pub(super) fn new(mut tls: Connection) -> Self {
        // This code bounds the data that it gives to TLS, so the limit of TLS is not needed.
        tls.set_buffer_limit(None);
        Self { tls, arrived: vec![0; CHUNK], plain: Vec::new(), deframer: Deframer::new(CHUNK + RECORD) }
    }

    pub(super) const fn tls(&self) -> &Connection {
        &self.tls
    }

    /// Writes encrypted data to the socket. Returns `true` if none is left.
    pub(super) fn flush(&mut self, socket: &OwnedFd) -> Result<bool, End> {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut Wire(socket)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }

    /// Returns the next frame. Before authentication is complete, this advances the handshake.
    pub(super) fn next(&mut self, socket: &OwnedFd) -> Result<Option<&[u8]>, End> {
        while !self.deframer.has_frame() {
            if !self.fill(socket)? {
                return Ok(None);
            }
        }
        Ok(self.deframer.frame()?)
    }

    /// Reads more data. Returns `false` if none has arrived. The caller has taken all earlier frames.
    fn fill(&mut self, socket: &OwnedFd) -> Result<bool, End> {
        let mut left = match rustix::net::recv(socket, &mut *self.arrived, RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(End::Closed),
            Ok((count, _)) => self.arrived.get(..count).unwrap_or_default(),
            Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
            Err(errno) => return Err(End::System(errno.into())),
        };
        while !left.is_empty() {
            if self.tls.read_tls(&mut left)? == 0 {
                return Err(End::Closed);
            }
            let state = self.tls.process_new_packets();
            // Frames that arrived intact are delivered, even if the data behind them are damaged.
            let open = drain(&mut self.tls, &mut self.deframer)?;
            state?;
            if !open {
                return if self.deframer.has_frame() { Ok(true) } else { Err(End::Closed) };
            }
        }
        Ok(true)
    }

    /// Encrypts a chunk of frames from index `from` on. Returns the number taken, and how many of those cannot be sent.
    fn encrypt(&mut self, frames: &Frames, from: usize) -> Result<(usize, u64), End> {
        self.plain.clear();
        let (mut taken, mut lost) = (0_usize, 0);
        for frame in frames.iter_from(from) {
            if self.plain.len() >= CHUNK {
                break;
            }
            lost += u64::from(put(frame, &mut self.plain).is_err());
            taken = taken.saturating_add(1);
        }
        self.tls.writer().write_all(&self.plain)?;
        Ok((taken, lost))
    }

    /// Sends an empty frame, which tells the peer that this end accepts frames from now on.
    pub(super) fn greet(&mut self) -> Result<(), End> {
        let mut empty = Vec::new();
        put(&[], &mut empty)?;
        Ok(self.tls.writer().write_all(&empty)?)
    }
}

/// Moves decrypted data to the deframer. Returns `false` if the other end has closed the session.
fn drain(tls: &mut Connection, deframer: &mut Deframer) -> Result<bool, End> {
    loop {
        let room = deframer.room();
        if room.is_empty() {
            return Err(End::NoFrame);
        }
        match tls.reader().read(room) {
            Ok(0) => return Ok(false),
            Ok(count) => deframer.filled(count),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}

/// A connection to the authenticated peer.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) socket: Arc<OwnedFd>,
    /// Address of the peer.
    pub(super) peer: SocketAddr,
    stream: Mutex<Stream>,
    /// Part of the taken frames is still to be written. Changed only while `stream` is locked, so that the last of
    /// several senders leaves the right value.
    unsent: AtomicBool,
}

impl Session {
    pub(super) fn new(socket: OwnedFd, peer: SocketAddr, stream: Stream) -> Self {
        Self { socket: Arc::new(socket), peer, stream: Mutex::new(stream), unsent: AtomicBool::new(false) }
    }

    /// Appends received frames, at most `most`.
    pub(super) fn receive(&self, frames: &mut Frames, most: usize) -> Result<(), End> {
        let stream = &mut *self.stream.lock();
        for _ in 0..most {
            let Some(frame) = stream.next(&self.socket)? else { break };
            // An empty frame only shows that the peer is alive.
            if !frame.is_empty() {
                frames.push(frame);
            }
        }
        // TLS may have records of its own to send.
        if stream.flush(&self.socket)? {
            self.unsent.store(false, Ordering::Release);
        }
        Ok(())
    }

    /// Sends frames from index `from` on. Returns the number taken, and how many of those are lost.
    pub(super) fn send(&self, frames: &Frames, from: usize) -> Result<(usize, u64), End> {
        let stream = &mut *self.stream.lock();
        let (mut next, mut all_lost) = (from, 0_u64);
        loop {
            let left = stream.flush(&self.socket)?;
            if !left || next >= frames.len() {
                self.unsent.store(!left, Ordering::Release);
                return Ok((next.saturating_sub(from), all_lost));
            }
            let (taken, lost) = stream.encrypt(frames, next)?;
            next = next.saturating_add(taken);
            all_lost = all_lost.saturating_add(lost);
        }
    }

    /// Returns `true` if part of the taken frames has not been written because the socket had no room.
    pub(super) fn is_unsent(&self) -> bool {
        self.unsent.load(Ordering::Acquire)
    }

    /// Returns `true` if a frame has already been read, or another thread is using the stream.
    pub(super) fn holds(&self) -> bool {
        self.stream.try_lock().is_none_or(|mut stream| stream.deframer.has_frame())
    }

    /// Ends the connection, for waiting threads as well. Returns the number of frames in progress, which are lost.
    pub(super) fn end(&self) -> u64 {
        // Fails if the other end has closed the connection already.
        let _ = rustix::net::shutdown(&*self.socket, rustix::net::Shutdown::Both);
        // The lock waits for a thread that is still sending. Threads that send later get an error, because the socket
        // is shut down.
        let _stream = self.stream.lock();
        u64::from(self.unsent.swap(false, Ordering::AcqRel))
    }
}
