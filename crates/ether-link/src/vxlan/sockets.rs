//! Creation of the sockets of a tunnel's end.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};

use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::{IpRecvTos, Ipv6RecvTClass, UdpGroSegment};
use rustix::net::sockopt::{
    set_socket_recv_buffer_size, set_socket_recv_buffer_size_force, set_socket_reuseport, set_socket_send_buffer_size,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::config::{VxlanConfig, VxlanError};
use super::output::SOCKETS;

/// Requested receive buffer of the receiving socket, in bytes. The system limits it.
const RECEIVE_BUFFER: usize = 8 << 20;
/// Requested send buffer of each sending socket, in bytes. The system limits it.
const SEND_BUFFER: usize = 4 << 20;

/// Creates the sockets of a tunnel's end: first the receiving one, then the sending ones.
///
/// # Errors
/// The configuration is inconsistent, or the address is in use or not local.
pub fn sockets(config: &VxlanConfig) -> Result<Vec<OwnedFd>, VxlanError> {
    sockets_with(config, UdpSocket::bind)
}

/// Returns a function that converts a system error about the sockets of `config`.
pub(super) fn failed(config: &VxlanConfig) -> impl Fn(io::Error) -> VxlanError + use<> {
    let local = config.local;
    move |source| match source.kind() {
        io::ErrorKind::AddrNotAvailable => VxlanError::NotOurs(local.ip()),
        _ => VxlanError::Io { local, source },
    }
}

/// Creates the sockets, with `bind` to bind the receiving one.
pub(super) fn sockets_with(
    config: &VxlanConfig,
    bind: impl FnOnce(SocketAddr) -> io::Result<UdpSocket>,
) -> Result<Vec<OwnedFd>, VxlanError> {
    config.check()?;
    let mut any_port = config.local;
    any_port.set_port(0);
    let mut sockets = vec![bind(config.local).and_then(input).map_err(failed(config))?];
    for _ in 0..SOCKETS {
        sockets.push(output(any_port).map_err(failed(config))?);
    }
    Ok(sockets)
}

/// Binds a socket to an address that may be shared with other sockets, if those permit it.
pub(super) fn bind_shared(local: SocketAddr) -> io::Result<UdpSocket> {
    let family = if local.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let socket = rustix::net::socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    set_socket_reuseport(&socket, true)?;
    rustix::net::bind(&socket, &local)?;
    Ok(socket.into())
}

/// Prepares the receiving socket. The kernel coalesces trains and reports the outer traffic class, which routers may
/// have marked.
fn input(socket: UdpSocket) -> io::Result<OwnedFd> {
    let local = socket.local_addr()?;
    // The link works without each of these options.
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
        log::debug!("the kernel does not report traffic classes of packets: {error}");
    }
    Ok(socket.into())
}

/// Creates a sending socket with a port that the system chooses. No peer sends to it.
fn output(local: SocketAddr) -> io::Result<OwnedFd> {
    let socket = UdpSocket::bind(local)?;
    let enlarged = set_socket_send_buffer_size(&socket, SEND_BUFFER);
    // Datagrams that arrive here are never read, so the buffer is as small as possible.
    let closed = set_socket_recv_buffer_size(&socket, 0);
    if let Err(error) = enlarged.and(closed) {
        log::debug!("the buffers of a socket keep their size: {error}");
    }
    Ok(socket.into())
}

/// Returns the port that a socket is bound to.
pub(super) fn port(socket: &impl AsFd) -> io::Result<u16> {
    let address = rustix::net::getsockname(socket)?;
    SocketAddr::try_from(address).map(|address| address.port()).map_err(io::Error::from)
}
