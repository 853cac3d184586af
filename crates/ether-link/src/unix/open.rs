//! What needs paths: sockets made ready for a link, and connections.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType};

use super::buffer::enlarge;
use crate::Connector;

/// Makes a listening socket ready for [`StreamLink::from_listener`](super::StreamLink::from_listener).
///
/// # Errors
/// The system refuses.
pub fn ready_listener(listener: UnixListener) -> io::Result<OwnedFd> {
    listener.set_nonblocking(true)?;
    Ok(listener.into())
}

/// Makes a bound datagram socket ready for [`DatagramLink::from_socket`](super::DatagramLink::from_socket). Nothing can
/// be sent from it any more: otherwise whoever holds it could send to any path.
///
/// # Errors
/// The system refuses.
pub fn ready_datagram(socket: UnixDatagram) -> io::Result<OwnedFd> {
    socket.set_nonblocking(true)?;
    rustix::net::shutdown(&socket, Shutdown::Write)?;
    Ok(socket.into())
}

/// Connects to the stream socket at `path`, without waiting for whoever listens there.
///
/// # Errors
/// Nobody does, or does not keep up.
pub fn connect_stream(path: &Path) -> io::Result<OwnedFd> {
    connect(path, SocketType::STREAM)
}

/// Connects to the datagram socket at `path`.
///
/// # Errors
/// There is none.
pub fn connect_datagram(path: &Path) -> io::Result<OwnedFd> {
    connect(path, SocketType::DGRAM)
}

fn connect(path: &Path, kind: SocketType) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
    enlarge(&socket);
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Ok(()) => Ok(socket),
        // Its queue is full; this is no connection in progress.
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
    /// To a listening stream socket.
    pub const fn stream(path: PathBuf) -> Self {
        Self { path, connect: connect_stream }
    }

    /// To a bound datagram socket.
    pub const fn datagram(path: PathBuf) -> Self {
        Self { path, connect: connect_datagram }
    }
}

impl Connector for PathConnector {
    fn connect(&self) -> io::Result<OwnedFd> {
        (self.connect)(&self.path)
    }
}
