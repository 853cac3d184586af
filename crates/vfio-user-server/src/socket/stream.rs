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
use super::file::{BoundFile, Folder, is_socket};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 16;

/// A listening socket whose file goes away with it.
#[derive(Debug)]
pub struct SocketFile {
    listener: UnixListener,
    /// None if whoever started us has made it.
    file: Option<BoundFile>,
}

impl SocketFile {
    /// Listens at `path`, for whom `access` names. The socket of a process that is gone is replaced.
    ///
    /// # Errors
    /// Something is there already, or the system refused.
    pub fn bind(path: &Path, access: SocketAccess) -> Result<Self, SocketError> {
        let failed = |errno: Errno| SocketError::making(path, errno.into());
        remove_stale(path)?;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(failed)?;
        let file = BoundFile::bind(&socket, path, access)?;
        // Before it listens nobody can connect.
        rustix::net::listen(&socket, BACKLOG).map_err(failed)?;
        Ok(Self { listener: UnixListener::from(socket), file: Some(file) })
    }

    /// Listens where whoever started us has begun to.
    pub const fn inherited(listener: UnixListener) -> Self {
        Self { listener, file: None }
    }

    /// Checks whether [`Self::bind`] could do what it does, and does nothing.
    ///
    /// # Errors
    /// What it would fail with.
    pub fn check(path: &Path, access: SocketAccess) -> Result<(), SocketError> {
        match look(path)? {
            Found::Nothing | Found::Stale => Folder::open(path)?.check_access(access),
            Found::Taken => Err(SocketError::InUse { path: path.to_owned(), pid: None }),
        }
    }

    /// Its path, if the file is not there any more. None if it is not ours.
    pub fn lost(&self) -> Option<&Path> {
        self.file.as_ref()?.lost()
    }

    /// What to accept from.
    pub const fn listener(&self) -> &UnixListener {
        &self.listener
    }
}

fn remove_stale(path: &Path) -> Result<(), SocketError> {
    let failed = |source: io::Error| SocketError::making(path, source);
    if is_stale(path)? { fs::remove_file(path).map_err(failed) } else { Ok(()) }
}

/// What is at the path of a socket.
enum Found {
    Nothing,
    /// The socket of a process that is gone.
    Stale,
    /// The socket of a process.
    Taken,
}

/// Finds out what is at a path without connecting: the server at a device's socket would take that for a client. The
/// kernel looks for the socket behind the file before it compares the types of both ends, and servers have streams.
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

/// Returns `true` if there is the socket of a process that is gone, and `false` if there is nothing.
fn is_stale(path: &Path) -> Result<bool, SocketError> {
    match look(path)? {
        Found::Nothing => return Ok(false),
        Found::Stale => return Ok(true),
        Found::Taken => {}
    }
    // Only a connection tells whose it is.
    match UnixStream::connect(path) {
        Ok(stream) => match peer(&stream) {
            // Workers that have it from there end with it, which takes a moment.
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

/// Returns `true` if there is no such process any more.
fn has_ended(pid: Pid) -> bool {
    rustix::process::test_kill_process(pid) == Err(Errno::SRCH)
}

/// The process at the other end: who listens there, or has connected.
pub fn peer(socket: impl AsFd) -> Option<Pid> {
    rustix::net::sockopt::socket_peercred(socket).ok().map(|credentials| credentials.pid)
}
