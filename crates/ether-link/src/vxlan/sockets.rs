//! The sockets of a tunnel's end, made by whoever may.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};

use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::{IpRecvTos, Ipv6RecvTClass, UdpGroSegment};
use rustix::net::sockopt::{
    set_socket_recv_buffer_size, set_socket_recv_buffer_size_force, set_socket_send_buffer_size,
};

use super::output::SOCKETS;
use super::{VxlanConfig, VxlanError};

/// Bytes that the socket should hold for us. The system caps it.
const RECEIVE_BUFFER: usize = 8 << 20;
/// Bytes that a socket should hold for the network. The system caps it.
const SEND_BUFFER: usize = 4 << 20;

/// Makes the sockets of a tunnel's end: first the one that datagrams come to, then those that they leave from.
///
/// # Errors
/// The values do not go together, or the address is taken or not ours.
pub fn sockets(config: &VxlanConfig) -> Result<Vec<OwnedFd>, VxlanError> {
    config.check()?;
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::AddrNotAvailable => VxlanError::NotOurs(config.local.ip()),
        _ => VxlanError::Io { local: config.local, source },
    };
    let mut any_port = config.local;
    any_port.set_port(0);
    let mut sockets = vec![input(config.local).map_err(failed)?];
    for _ in 0..SOCKETS {
        sockets.push(output(any_port).map_err(failed)?);
    }
    Ok(sockets)
}

/// The socket that datagrams come to. The kernel puts trains together and says what routers did to the traffic class.
fn input(local: SocketAddr) -> io::Result<OwnedFd> {
    let socket = UdpSocket::bind(local)?;
    // All of these are improvements.
    let buffer = set_socket_recv_buffer_size_force(&socket, RECEIVE_BUFFER)
        .or_else(|_| set_socket_recv_buffer_size(&socket, RECEIVE_BUFFER));
    if let Err(error) = buffer {
        log::debug!("the receive buffer keeps its size: {error}");
    }
    if let Err(error) = setsockopt(&socket, UdpGroSegment, &true) {
        log::debug!("the kernel puts no trains together: {error}");
    }
    let class = if local.is_ipv6() {
        setsockopt(&socket, Ipv6RecvTClass, &true)
    } else {
        setsockopt(&socket, IpRecvTos, &true)
    };
    if let Err(error) = class {
        log::debug!("the kernel does not say what traffic class a packet has: {error}");
    }
    Ok(socket.into())
}

/// A socket that sends from a port that the system chooses. Nobody sends to it.
fn output(local: SocketAddr) -> io::Result<OwnedFd> {
    let socket = UdpSocket::bind(local)?;
    let enlarged = set_socket_send_buffer_size(&socket, SEND_BUFFER);
    // What somebody sends here is never read: as little as possible.
    let closed = set_socket_recv_buffer_size(&socket, 0);
    if let Err(error) = enlarged.and(closed) {
        log::debug!("the buffers of a socket keep their size: {error}");
    }
    Ok(socket.into())
}

/// The port that a socket is bound to.
pub(super) fn port(socket: &impl AsFd) -> io::Result<u16> {
    let address = rustix::net::getsockname(socket)?;
    SocketAddr::try_from(address).map(|address| address.port()).map_err(io::Error::from)
}
