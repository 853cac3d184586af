//! Listening sockets.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::Pid;

use super::access::SocketAccess;
use super::error::SocketError;
use super::file::{BoundFile, FileIdentity, Folder, is_socket};

/// Maximum number of connections that wait to be accepted.
const BACKLOG: i32 = 16;

/// Listening socket whose file is removed when this is dropped.
#[derive(Debug)]
pub struct SocketFile {
    listener: UnixListener,
    /// `None` if another process has created the socket and removes its file.
    file: Option<BoundFile>,
}

impl SocketFile {
    /// Listens at `path`, for the users that `access` names. The socket of a process that has ended is replaced.
    ///
    /// # Errors
    /// The path is in use, or a system call failed.
    pub fn bind(path: &Path, access: SocketAccess) -> Result<Self, SocketError> {
        let failed = |errno: Errno| SocketError::making(path, errno.into());
        remove_stale(path)?;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(failed)?;
        let file = BoundFile::bind(&socket, path, access)?;
        // Clients cannot connect before this call, so all of them see the final owner and mode.
        rustix::net::listen(&socket, BACKLOG).map_err(failed)?;
        Ok(Self { listener: UnixListener::from(socket), file: Some(file) })
    }

    /// Wraps a socket that listens already and was inherited from the parent process.
    pub const fn inherited(listener: UnixListener) -> Self {
        Self { listener, file: None }
    }

    /// Wraps a socket that listens already and whose file another process of this user has created. That process owns
    /// the file until [`Self::own`] is called.
    pub fn adopt(listener: UnixListener, file: Option<FileIdentity>) -> Self {
        Self { listener, file: file.map(BoundFile::adopt) }
    }

    /// Makes this process the owner of the socket: it removes the file, and [`peer`] returns it.
    ///
    /// # Errors
    /// The system refuses; the file belongs to this process nevertheless.
    pub fn own(&self) -> io::Result<()> {
        self.file.iter().for_each(BoundFile::own);
        // The kernel records the credentials of the last process that called this. Those of the previous owner, which
        // ends, would make the path look abandoned.
        Ok(rustix::net::listen(&self.listener, BACKLOG)?)
    }

    /// Returns the identity of the file. `None` for an inherited socket.
    pub fn identity(&self) -> Option<&FileIdentity> {
        self.file.as_ref().map(BoundFile::identity)
    }

    /// Checks that [`Self::bind`] would succeed, without changing anything.
    ///
    /// # Errors
    /// The error of [`Self::bind`].
    pub fn check(path: &Path, access: SocketAccess) -> Result<(), SocketError> {
        match look(path)? {
            Found::Nothing | Found::Stale => Folder::open(path)?.check_access(access),
            Found::Taken => Err(SocketError::InUse { path: path.to_owned(), pid: None }),
        }
    }

    /// Returns the path if the file does not exist any more. `None` for an inherited socket.
    pub fn lost(&self) -> Option<&Path> {
        self.file.as_ref()?.lost()
    }

    /// Returns the listener.
    pub const fn listener(&self) -> &UnixListener {
        &self.listener
    }
}

fn remove_stale(path: &Path) -> Result<(), SocketError> {
    let failed = |source: io::Error| SocketError::making(path, source);
    if is_stale(path)? { fs::remove_file(path).map_err(failed) } else { Ok(()) }
}

/// State of the path of a socket.
enum Found {
    Nothing,
    /// The socket of a process that has ended.
    Stale,
    /// The socket of a running process.
    Taken,
}

/// Examines a path without connecting, because the server of a device's socket would take a connection for a client.
/// The kernel looks up the socket of the file before it compares the types of both ends. Servers use stream sockets, so
/// a datagram probe fails with EPROTOTYPE if a server is listening.
fn look(path: &Path) -> Result<Found, SocketError> {
    let failed = |source: io::Error| SocketError::making(path, source);
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Nothing),
        Err(error) => return Err(failed(error)),
        Ok(_) if !is_socket(path) => return Err(SocketError::NotASocket(path.to_owned())),
        Ok(_) => {}
    }
    let address = SocketAddrUnix::new(path).map_err(|_| SocketError::TooLong(path.to_owned()))?;
    let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
    match probe.and_then(|probe| rustix::net::connect(&probe, &address)) {
        Ok(()) | Err(Errno::PROTOTYPE) => Ok(Found::Taken),
        Err(Errno::CONNREFUSED) => Ok(Found::Stale),
        Err(Errno::NOENT) => Ok(Found::Nothing),
        Err(Errno::ACCESS | Errno::PERM) => Err(SocketError::Foreign(path.to_owned())),
        Err(errno) => Err(failed(errno.into())),
    }
}

/// Returns `true` if the path has the socket of a process that has ended, and `false` if there is no file.
fn is_stale(path: &Path) -> Result<bool, SocketError> {
    match look(path)? {
        Found::Nothing => return Ok(false),
        Found::Stale => return Ok(true),
        Found::Taken => {}
    }
    // Only a connection shows the PID of the listening process.
    match UnixStream::connect(path) {
        Ok(stream) => match peer(&stream) {
            // Workers that inherited the socket from that process end shortly after it.
            Some(pid) if has_ended(pid) => Ok(true),
            pid => Err(SocketError::InUse { path: path.to_owned(), pid }),
        },
        Err(error) => match error.kind() {
            io::ErrorKind::ConnectionRefused => Ok(true),
            io::ErrorKind::NotFound => Ok(false),
            io::ErrorKind::PermissionDenied => Err(SocketError::Foreign(path.to_owned())),
            _ => Err(SocketError::making(path, error)),
        },
    }
}

/// Returns `true` if the process does not exist.
fn has_ended(pid: Pid) -> bool {
    rustix::process::test_kill_process(pid) == Err(Errno::SRCH)
}

/// Returns the process at the other end: the listener, or the process that has connected.
pub fn peer(socket: impl AsFd) -> Option<Pid> {
    rustix::net::sockopt::socket_peercred(socket).ok().map(|credentials| credentials.pid)
}
