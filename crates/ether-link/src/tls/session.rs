//! A connection: TLS over a socket that never waits, and the frames in it.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use rustls::Connection;

use crate::Frames;
use crate::framing::{Deframer, NoFrame, put};

/// Bytes that are read or encrypted at a time.
const CHUNK: usize = 64 << 10;
/// Longest plaintext of a TLS record.
const RECORD: usize = 16 << 10;

/// Why a connection ended.
#[derive(Debug)]
pub(super) enum End {
    /// The other side closed it.
    Closed,
    /// The system said so.
    System(io::Error),
    /// What came is no TLS, or not for us, or damaged.
    Tls(rustls::Error),
    /// What came is no frame.
    NoFrame,
}

impl End {
    /// Returns `true` if what came is not what an end of ours sends.
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

/// A socket, as TLS writes to it.
struct Wire<'a>(&'a OwnedFd);

impl Write for Wire<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(self.0, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// TLS and what it holds, over a socket. Its memory is bounded: a chunk that is encrypted and a longest frame in one
/// direction, a chunk, a record and a longest frame in the other.
pub(super) struct Stream {
    tls: Connection,
    /// What was read from the socket.
    arrived: Vec<u8>,
    /// What is to be encrypted.
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
        // What goes in is bounded here.
        tls.set_buffer_limit(None);
        Self { tls, arrived: vec![0; CHUNK], plain: Vec::new(), deframer: Deframer::new(CHUNK + RECORD) }
    }

    pub(super) const fn tls(&self) -> &Connection {
        &self.tls
    }

    /// Writes what is encrypted. Returns `true` if nothing of it is left.
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

    /// The next frame. While the ends do not know each other yet, this is what goes on with that.
    pub(super) fn next(&mut self, socket: &OwnedFd) -> Result<Option<&[u8]>, End> {
        while !self.deframer.has_frame() {
            if !self.fill(socket)? {
                return Ok(None);
            }
        }
        Ok(self.deframer.frame()?)
    }

    /// Reads more. `false`: nothing has come. All frames have been taken.
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
            // What was intact counts, even if something behind it is not.
            let open = drain(&mut self.tls, &mut self.deframer)?;
            state?;
            if !open {
                return if self.deframer.has_frame() { Ok(true) } else { Err(End::Closed) };
            }
        }
        Ok(true)
    }

    /// Encrypts frames from index `from` on, a chunk of them. Returns how many, and how many of these cannot be sent.
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

    /// Says that this end takes frames from now on, by one that is empty.
    pub(super) fn greet(&mut self) -> Result<(), End> {
        let mut empty = Vec::new();
        put(&[], &mut empty)?;
        Ok(self.tls.writer().write_all(&empty)?)
    }
}

/// Moves what is decrypted to where frames are taken out. Returns `false` if the other side has ended the session.
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

/// A connection to the other end, which has proved who it is.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) socket: Arc<OwnedFd>,
    /// Where it is.
    pub(super) peer: SocketAddr,
    stream: Mutex<Stream>,
    /// Something that was taken is left to be written. Changes with `stream` locked: of several who send, the last one
    /// knows.
    unsent: AtomicBool,
}

impl Session {
    pub(super) fn new(socket: OwnedFd, peer: SocketAddr, stream: Stream) -> Self {
        Self { socket: Arc::new(socket), peer, stream: Mutex::new(stream), unsent: AtomicBool::new(false) }
    }

    /// Appends frames that have come, at most `most`.
    pub(super) fn receive(&self, frames: &mut Frames, most: usize) -> Result<(), End> {
        let stream = &mut *self.stream.lock();
        for _ in 0..most {
            let Some(frame) = stream.next(&self.socket)? else { break };
            // An empty one is a sign of life and nothing more.
            if !frame.is_empty() {
                frames.push(frame);
            }
        }
        // TLS may have something to say by itself.
        if stream.flush(&self.socket)? {
            self.unsent.store(false, Ordering::Release);
        }
        Ok(())
    }

    /// Sends frames from index `from` on. Returns how many were taken, and how many of these are lost.
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

    /// Returns `true` if something that was taken has not left for want of room.
    pub(super) fn is_unsent(&self) -> bool {
        self.unsent.load(Ordering::Acquire)
    }

    /// Returns `true` if a frame is here that was read already, or somebody looks.
    pub(super) fn holds(&self) -> bool {
        self.stream.try_lock().is_none_or(|mut stream| stream.deframer.has_frame())
    }

    /// Ends the connection, for whoever waits for it, too. Returns how much was in progress, which is lost.
    pub(super) fn end(&self) -> u64 {
        // It fails when the other side was faster.
        let _ = rustix::net::shutdown(&*self.socket, rustix::net::Shutdown::Both);
        // Behind whoever is still sending. Who sends from here on is told that the connection has ended.
        let _stream = self.stream.lock();
        u64::from(self.unsent.swap(false, Ordering::AcqRel))
    }
}
