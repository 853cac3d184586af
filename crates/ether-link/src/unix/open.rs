//! Operations that need paths: preparing sockets for a link, and connecting.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};

use pvrdma_link::Connector;
use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType};

use super::buffer::enlarge;

/// Prepares a listening socket for [`StreamLink::from_listener`](super::StreamLink::from_listener).
///
/// # Errors
/// The system refuses.
pub fn ready_listener(listener: UnixListener) -> io::Result<OwnedFd> {
    listener.set_nonblocking(true)?;
    Ok(listener.into())
}

/// Prepares a bound datagram socket for [`DatagramLink::from_socket`](super::DatagramLink::from_socket). Sending
/// through it is disabled: a process that holds it could otherwise send to any path.
///
/// # Errors
/// The system refuses.
pub fn ready_datagram(socket: UnixDatagram) -> io::Result<OwnedFd> {
    socket.set_nonblocking(true)?;
    rustix::net::shutdown(&socket, Shutdown::Write)?;
    Ok(socket.into())
}

/// Connects to the stream socket at `path`, without waiting for the listener to accept.
///
/// # Errors
/// No socket listens there, or its queue is full.
pub fn connect_stream(path: &Path) -> io::Result<OwnedFd> {
    connect(path, SocketType::STREAM)
}

/// Connects to the datagram socket at `path`.
///
/// # Errors
/// There is no such socket.
pub fn connect_datagram(path: &Path) -> io::Result<OwnedFd> {
    connect(path, SocketType::DGRAM)
}

fn connect(path: &Path, kind: SocketType) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
    enlarge(&socket);
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Ok(()) => Ok(socket),
        // The listener's queue is full. On a Unix socket, this does not mean that a connection is in progress.
        Err(rustix::io::Errno::AGAIN) => Err(io::ErrorKind::ConnectionRefused.into()),
        Err(errno) => Err(errno.into()),
    }
}

/// Connects to a path, for a process that may.
#[derive(Clone, Debug)]
pub struct PathConnector {
    path: PathBuf,
    connect: fn(&Path) -> io::Result<OwnedFd>,
}

impl PathConnector {
    /// Connects to a listening stream socket.
    pub const fn stream(path: PathBuf) -> Self {
        Self { path, connect: connect_stream }
    }

    /// Connects to a bound datagram socket.
    pub const fn datagram(path: PathBuf) -> Self {
        Self { path, connect: connect_datagram }
    }
}

impl Connector for PathConnector {
    fn connect(&self) -> io::Result<OwnedFd> {
        (self.connect)(&self.path)
    }
}
