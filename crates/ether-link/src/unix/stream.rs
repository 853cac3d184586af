//! `-netdev stream`: a connection with a length in front of each frame.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_base::LogLimit;
use pvrdma_link::{Connector, Frames, Link, LinkInspect, Readiness, Reconnect};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketFlags};

use super::buffer::enlarge;
use super::open::{PathConnector, ready_listener};
use crate::framing::{Deframer, NoFrame, PREFIX, put};

/// Bytes that are read or written at a time.
const CHUNK: usize = 256 << 10;

/// Role of this end in the connection.
#[derive(Debug)]
enum Role {
    Listen(Arc<OwnedFd>, PathBuf),
    Connect(Reconnect, PathBuf),
    /// Uses a given connection, which is not replaced when it ends.
    Given,
}

/// Reads more data into the deframer. Returns `false` if none has arrived.
fn fill(input: &mut Deframer, socket: &OwnedFd) -> Result<bool, Errno> {
    match rustix::net::recv(socket, input.room(), RecvFlags::DONTWAIT) {
        Ok((0, _)) => Err(Errno::PIPE),
        Ok((count, _)) => {
            input.filled(count);
            Ok(true)
        }
        Err(Errno::AGAIN | Errno::INTR) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Data that are being written.
#[derive(Debug, Default)]
struct Output {
    /// Frames with their lengths, one after the other.
    chunk: Vec<u8>,
    /// Part of the last taken frame that is still to be written.
    rest: Range<usize>,
}

impl Output {
    /// Writes the rest of a frame. Returns `true` if none is left.
    fn flush(&mut self, socket: &OwnedFd) -> Result<bool, Errno> {
        while !self.rest.is_empty() {
            let Some(written) = write(socket, self.chunk.get(self.rest.clone()).ok_or(Errno::PROTO)?)? else {
                return Ok(false);
            };
            self.rest.start = self.rest.start.saturating_add(written);
        }
        Ok(true)
    }

    /// Writes the frames from index `from` on that fit into one call, and keeps the rest of the last one. Returns the
    /// number of frames taken.
    fn write(&mut self, socket: &OwnedFd, frames: &Frames, from: usize) -> Result<usize, Errno> {
        self.chunk.clear();
        for frame in frames.iter_from(from) {
            if self.chunk.len() > CHUNK {
                break;
            }
            put(frame, &mut self.chunk).map_err(|NoFrame| Errno::MSGSIZE)?;
        }
        let Some(written) = write(socket, &self.chunk)? else { return Ok(0) };
        let (mut taken, mut end) = (0, 0_usize);
        for frame in frames.iter_from(from) {
            if end >= written {
                break;
            }
            end = end.saturating_add(PREFIX).saturating_add(frame.len());
            taken += 1;
        }
        self.rest = written..end;
        Ok(taken)
    }
}

/// Writes without waiting. `None` if there is no room.
fn write(socket: &OwnedFd, bytes: &[u8]) -> Result<Option<usize>, Errno> {
    loop {
        match rustix::net::send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(written) => return Ok(Some(written)),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(None),
            Err(errno) => return Err(errno),
        }
    }
}

#[derive(Debug)]
pub(super) struct Connection {
    socket: Arc<OwnedFd>,
    input: Mutex<Deframer>,
    output: Mutex<Output>,
    /// The rest of a frame is still to be written. Changed only while `output` is locked.
    unsent: AtomicBool,
}

impl Connection {
    fn new(socket: OwnedFd) -> Arc<Self> {
        let (input, output) = (Mutex::new(Deframer::new(CHUNK)), Mutex::default());
        Arc::new(Self { socket: Arc::new(socket), input, output, unsent: AtomicBool::new(false) })
    }

    /// Appends received frames, at most `most`.
    fn receive(&self, frames: &mut Frames, most: usize) -> Result<(), Errno> {
        let mut input = self.input.lock();
        for _ in 0..most {
            loop {
                if let Some(frame) = input.frame().map_err(|NoFrame| Errno::PROTO)? {
                    frames.push(frame);
                    break;
                }
                if !fill(&mut input, &self.socket)? {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Writes frames from index `from` on. Returns the number taken.
    pub(super) fn send(&self, frames: &Frames, from: usize) -> Result<usize, Errno> {
        let output = &mut *self.output.lock();
        let mut next = from;
        while output.flush(&self.socket)? && next < frames.len() {
            let taken = output.write(&self.socket, frames, next)?;
            if taken == 0 {
                break;
            }
            next = next.saturating_add(taken);
        }
        self.unsent.store(!output.rest.is_empty(), Ordering::Release);
        Ok(next.saturating_sub(from))
    }

    /// Ends the connection, for waiting threads as well. Returns the number of frames in progress, which are lost.
    pub(super) fn end(&self) -> u64 {
        // Fails if the other end has closed the connection already.
        let _ = rustix::net::shutdown(&*self.socket, rustix::net::Shutdown::Both);
        // The lock waits for a thread that is still sending. Threads that send later get an error, because the socket
        // is shut down.
        let _output = self.output.lock();
        u64::from(self.unsent.swap(false, Ordering::AcqRel))
    }
}

/// A link over a stream socket. Frames sent while there is no connection are lost, as without a cable.
#[derive(Debug)]
pub struct StreamLink {
    role: Role,
    connection: Mutex<Option<Arc<Connection>>>,
    lost: AtomicU64,
    log: LogLimit,
}

impl StreamLink {
    /// Accepts one connection at a time from `listener`, and the next one when it ends. QEMU: `server=off`.
    ///
    /// # Errors
    /// The listener cannot be used.
    pub fn listen(listener: UnixListener) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let path = address.as_pathname().map(Path::to_owned).unwrap_or_default();
        Ok(Self::from_listener(ready_listener(listener)?, path))
    }

    /// Does the same as [`Self::listen`] with a [prepared](ready_listener) listener that is bound to `path`, which is
    /// for descriptions only.
    pub fn from_listener(listener: OwnedFd, path: PathBuf) -> Self {
        Self::new(Role::Listen(Arc::new(listener), path), None)
    }

    /// Connects to `path` as soon as a process listens there, and again whenever the connection has ended. QEMU:
    /// `server=on`.
    pub fn connect(path: PathBuf) -> Self {
        let connector = Arc::new(PathConnector::stream(path.clone()));
        Self::with_connector(connector, path)
    }

    /// Does the same as [`Self::connect`] with connections to `path` from `connector`
    /// ([`connect_stream`](super::connect_stream)). The path is for descriptions only.
    pub fn with_connector(connector: Arc<dyn Connector>, path: PathBuf) -> Self {
        Self::new(Role::Connect(Reconnect::new(connector), path), None)
    }

    /// Uses this connection.
    pub fn over(socket: UnixStream) -> Self {
        enlarge(&socket);
        Self::new(Role::Given, Some(Connection::new(socket.into())))
    }

    fn new(role: Role, connection: Option<Arc<Connection>>) -> Self {
        Self { role, connection: Mutex::new(connection), lost: AtomicU64::new(0), log: LogLimit::new() }
    }

    /// Returns the link as its user specified it, for the log.
    fn name(&self) -> String {
        match &self.role {
            Role::Listen(_, path) => format!("link unix:{}", path.display()),
            Role::Connect(_, path) => format!("link unix-connect:{}", path.display()),
            Role::Given => "link".to_owned(),
        }
    }

    pub(super) fn connection(&self) -> Option<Arc<Connection>> {
        self.connection.lock().clone()
    }

    /// Returns the connection. Establishes one if there is none and it can be established now.
    fn connect_now(&self) -> Option<Arc<Connection>> {
        let mut connection = self.connection.lock();
        if connection.is_none() {
            let socket = match &self.role {
                Role::Listen(listener, _) => accept(listener),
                Role::Connect(reconnect, _) => reconnect.attempt(),
                Role::Given => None,
            }?;
            self.log.log(module_path!(), log::Level::Info, &self.name(), format_args!("connected"));
            *connection = Some(Connection::new(socket));
        }
        connection.clone()
    }

    fn hang_up(&self, old: &Arc<Connection>, errno: Errno) {
        let mut connection = self.connection.lock();
        if connection.as_ref().is_some_and(|now| Arc::ptr_eq(now, old)) {
            self.log.log(module_path!(), log::Level::Info, &self.name(), format_args!("disconnected: {errno}"));
            *connection = None;
            self.lost.fetch_add(old.end(), Ordering::Relaxed);
        }
    }
}

/// Accepts a connection, if there is one.
fn accept(listener: &OwnedFd) -> Option<OwnedFd> {
    let socket = rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK).ok()?;
    enlarge(&socket);
    Some(socket)
}

impl Link for StreamLink {
    fn receive(&self, frames: &mut Frames, most: usize) {
        let Some(connection) = self.connect_now() else { return };
        if let Err(errno) = connection.receive(frames, most) {
            self.hang_up(&connection, errno);
        }
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        let all = frames.len().saturating_sub(from);
        let lost = |count: usize| self.lost.fetch_add(count as u64, Ordering::Relaxed);
        let Some(connection) = self.connection() else {
            lost(all);
            return all;
        };
        connection.send(frames, from).unwrap_or_else(|errno| {
            self.hang_up(&connection, errno);
            lost(all);
            all
        })
    }

    fn unsent(&self) -> bool {
        self.connection.lock().as_ref().is_some_and(|connection| connection.unsent.load(Ordering::Acquire))
    }

    fn readiness(&self) -> Readiness {
        match (self.connection(), &self.role) {
            (Some(connection), _) => {
                // A complete frame that was read beyond `most` does not make the socket readable.
                let held = connection.input.try_lock().is_none_or(|mut input| input.has_frame());
                Readiness {
                    readable: Some(Arc::clone(&connection.socket)),
                    writable: Some(Arc::clone(&connection.socket)),
                    wait: held.then_some(Duration::ZERO),
                    ..Readiness::default()
                }
            }
            (None, Role::Listen(listener, _)) => {
                Readiness { readable: Some(Arc::clone(listener)), ..Readiness::default() }
            }
            (None, Role::Connect(reconnect, _)) => {
                Readiness { wait: Some(reconnect.interval()), ..Readiness::default() }
            }
            (None, Role::Given) => Readiness::default(),
        }
    }

    fn inspect(&self) -> LinkInspect {
        let up = self.connection.try_lock().map(|connection| connection.is_some());
        let (name, peers) = match &self.role {
            Role::Listen(_, path) => (path.display().to_string(), Vec::new()),
            Role::Connect(_, path) => (String::new(), vec![path.display().to_string()]),
            Role::Given => (String::new(), Vec::new()),
        };
        LinkInspect { kind: "unix", name, peers, up: up.into() }
    }

    fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}
