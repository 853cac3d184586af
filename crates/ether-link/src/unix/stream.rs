//! `-netdev stream`: a connection with a length in front of each frame.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_verbs::LogLimit;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::buffer::enlarge;
use crate::{Frames, Link, LinkInspect, MAX_LINK_FRAME, Readiness};

/// Bytes of the length.
const PREFIX: usize = 4;
/// Bytes that are read or written at a time.
const CHUNK: usize = 256 << 10;
/// Time between two attempts to connect.
const RECONNECT: Duration = Duration::from_millis(500);

/// Which side of the connection we are.
#[derive(Debug)]
enum Role {
    Listen(Arc<OwnedFd>, UnixListener),
    Connect(PathBuf),
    /// A connection that was made by somebody else and has no successor.
    Given,
}

#[derive(Debug)]
struct Input {
    /// At least a prefix and the longest frame.
    buffer: Vec<u8>,
    start: usize,
    end: usize,
}

impl Input {
    /// The next frame, if it is here. An error: the other side does not speak this protocol.
    fn frame(&mut self) -> Result<Option<&[u8]>, Errno> {
        let Some(held) = self.buffer.get(self.start..self.end) else { return Err(Errno::PROTO) };
        let Some((prefix, rest)) = held.split_first_chunk::<PREFIX>() else { return Ok(None) };
        let length = usize::try_from(u32::from_be_bytes(*prefix)).map_err(|_| Errno::PROTO)?;
        if length > MAX_LINK_FRAME {
            return Err(Errno::PROTO);
        }
        let Some(frame) = rest.get(..length) else { return Ok(None) };
        self.start = self.start.saturating_add(PREFIX + length);
        Ok(Some(frame))
    }

    /// Reads more behind what is here. `false`: nothing has come.
    fn fill(&mut self, socket: &OwnedFd) -> Result<bool, Errno> {
        self.buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end.saturating_sub(self.start));
        let Some(room) = self.buffer.get_mut(self.end..) else { return Err(Errno::PROTO) };
        match rustix::net::recv(socket, room, RecvFlags::DONTWAIT) {
            Ok((0, _)) => Err(Errno::PIPE),
            Ok((count, _)) => {
                self.end = self.end.saturating_add(count);
                Ok(true)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(errno) => Err(errno),
        }
    }
}

/// What is being written.
#[derive(Debug, Default)]
struct Output {
    /// A chunk of frames with their lengths, used again.
    chunk: Vec<u8>,
    /// Bytes of the first frame, with its length, that are written already.
    partial: usize,
}

#[derive(Debug)]
struct Connection {
    socket: Arc<OwnedFd>,
    input: Mutex<Input>,
    output: Mutex<Output>,
}

impl Connection {
    fn new(socket: UnixStream) -> Arc<Self> {
        enlarge(&socket);
        let buffer = vec![0; CHUNK + PREFIX + MAX_LINK_FRAME];
        Arc::new(Self {
            socket: Arc::new(socket.into()),
            input: Mutex::new(Input { buffer, start: 0, end: 0 }),
            output: Mutex::default(),
        })
    }
}

/// A link over a stream socket. While nobody is connected, what is sent is lost, as without a cable.
#[derive(Debug)]
pub struct StreamLink {
    role: Role,
    connection: Mutex<Option<Arc<Connection>>>,
    lost: AtomicU64,
    log: LogLimit,
}

impl StreamLink {
    /// Takes one connection at a time from `listener`; the next one when it ends. QEMU: `server=off`.
    ///
    /// # Errors
    /// The listener cannot be used.
    pub fn listen(listener: UnixListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let waited_for = Arc::new(listener.as_fd().try_clone_to_owned()?);
        Ok(Self::new(Role::Listen(waited_for, listener), None))
    }

    /// Connects to `path`, as soon as somebody listens there and whenever the connection ended. QEMU: `server=on`.
    pub fn connect(path: PathBuf) -> Self {
        Self::new(Role::Connect(path), None)
    }

    /// Uses this connection.
    pub fn over(socket: UnixStream) -> Self {
        Self::new(Role::Given, Some(Connection::new(socket)))
    }

    fn new(role: Role, connection: Option<Arc<Connection>>) -> Self {
        Self { role, connection: Mutex::new(connection), lost: AtomicU64::new(0), log: LogLimit::new() }
    }

    /// Where it listens, if it does and the socket has a path.
    fn path(&self) -> Option<String> {
        let Role::Listen(_, listener) = &self.role else { return None };
        let address = listener.local_addr().ok()?;
        Some(address.as_pathname()?.display().to_string())
    }

    /// The link as its user wrote it, for the log.
    fn name(&self) -> String {
        match &self.role {
            Role::Listen(..) => self.path().map_or_else(|| "link unix".to_owned(), |path| format!("link unix:{path}")),
            Role::Connect(path) => format!("link unix-connect:{}", path.display()),
            Role::Given => "link".to_owned(),
        }
    }

    fn connection(&self) -> Option<Arc<Connection>> {
        self.connection.lock().clone()
    }

    /// The connection, making one if there is none.
    fn connect_now(&self) -> Option<Arc<Connection>> {
        let mut connection = self.connection.lock();
        if connection.is_none() {
            let socket = match &self.role {
                Role::Listen(_, listener) => listener.accept().map(|(socket, _)| socket).ok(),
                Role::Connect(path) => UnixStream::connect(path).ok(),
                Role::Given => None,
            }?;
            self.log.log(log::Level::Info, &self.name(), format_args!("connected"));
            *connection = Some(Connection::new(socket));
        }
        connection.clone()
    }

    /// Ends the connection as the other side would.
    #[cfg(test)]
    pub(super) fn cut(&self) {
        if let Some(connection) = self.connection() {
            rustix::net::shutdown(&connection.socket, rustix::net::Shutdown::Both).unwrap();
        }
    }

    fn hang_up(&self, old: &Arc<Connection>, errno: Errno) {
        let mut connection = self.connection.lock();
        if connection.as_ref().is_some_and(|now| Arc::ptr_eq(now, old)) {
            self.log.log(log::Level::Info, &self.name(), format_args!("disconnected: {errno}"));
            *connection = None;
        }
    }

    fn receive_from(connection: &Connection, frames: &mut Frames, most: usize) -> Result<(), Errno> {
        let mut input = connection.input.lock();
        for _ in 0..most {
            loop {
                if let Some(frame) = input.frame()? {
                    frames.push(frame);
                    break;
                }
                if !input.fill(&connection.socket)? {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Writes frames. One that is written in part does not count: its caller presents it again.
    fn send_to(connection: &Connection, frames: &Frames, from: usize) -> Result<usize, Errno> {
        let Output { chunk, partial } = &mut *connection.output.lock();
        let mut next = from;
        while next < frames.len() {
            chunk.clear();
            for frame in frames.iter_from(next) {
                if chunk.len() > CHUNK {
                    break;
                }
                let length = u32::try_from(frame.len()).map_err(|_| Errno::MSGSIZE)?;
                chunk.extend_from_slice(&length.to_be_bytes());
                chunk.extend_from_slice(frame);
            }
            let rest = chunk.get(*partial..).ok_or(Errno::PROTO)?;
            let written = match rustix::net::send(&connection.socket, rest, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(written) => written,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => break,
                Err(errno) => return Err(errno),
            };
            *partial = partial.saturating_add(written);
            while let Some(left) = frames.get(next).and_then(|frame| partial.checked_sub(PREFIX + frame.len())) {
                *partial = left;
                next += 1;
            }
        }
        Ok(next.saturating_sub(from))
    }
}

impl Link for StreamLink {
    fn receive(&self, frames: &mut Frames, most: usize) {
        let Some(connection) = self.connect_now() else { return };
        if let Err(errno) = Self::receive_from(&connection, frames, most) {
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
        Self::send_to(&connection, frames, from).unwrap_or_else(|errno| {
            self.hang_up(&connection, errno);
            lost(all);
            all
        })
    }

    fn readiness(&self) -> Readiness {
        match (self.connection(), &self.role) {
            (Some(connection), _) => {
                // A whole frame that was read beyond `most` makes no noise any more.
                let held = connection.input.try_lock().is_none_or(|mut input| {
                    let start = input.start;
                    let held = !matches!(input.frame(), Ok(None));
                    input.start = start;
                    held
                });
                Readiness {
                    readable: Some(Arc::clone(&connection.socket)),
                    writable: Some(Arc::clone(&connection.socket)),
                    wait: held.then_some(Duration::ZERO),
                }
            }
            (None, Role::Listen(listener, _)) => {
                Readiness { readable: Some(Arc::clone(listener)), ..Readiness::default() }
            }
            (None, Role::Connect(_)) => Readiness { wait: Some(RECONNECT), ..Readiness::default() },
            (None, Role::Given) => Readiness::default(),
        }
    }

    fn inspect(&self) -> LinkInspect {
        let up = self.connection.try_lock().map(|connection| connection.is_some());
        let (name, peers) = match &self.role {
            Role::Listen(..) => (self.path().unwrap_or_default(), Vec::new()),
            Role::Connect(path) => (String::new(), vec![path.display().to_string()]),
            Role::Given => (String::new(), Vec::new()),
        };
        LinkInspect { kind: "unix", name, peers, up: up.into() }
    }

    fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}
