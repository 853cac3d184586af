//! Operations that need addresses: listening, and opening connections.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::sockopt::{
    set_socket_keepalive, set_socket_reuseaddr, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl, set_tcp_nodelay,
    set_tcp_user_timeout,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto};
use std::time::Duration;

use pvrdma_link::Connector;

/// Length of the kernel's accept queue: several batches. `TCP_DEFER_ACCEPT` is not used: it would keep silent
/// connections in the kernel's queue of half-open ones, where the link cannot choose which of them to close.
const BACKLOG: i32 = 512;
/// TCP keepalive: idle time before the first probe, interval of the probes, and their number.
const IDLE: Duration = Duration::from_secs(10);
const AGAIN: Duration = Duration::from_secs(5);
const TIMES: u32 = 3;
/// Time in milliseconds after which a connection ends if the other end acknowledges no data (`TCP_USER_TIMEOUT`).
const UNTAKEN_MS: u32 = 15_000;

/// Creates a socket that listens on `address`. Accepted connections inherit its options.
///
/// # Errors
/// The address is in use or not local.
pub fn listener(address: SocketAddr) -> io::Result<OwnedFd> {
    let socket = socket(address)?;
    set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

fn socket(address: SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
    set_tcp_nodelay(&socket, true)?;
    set_socket_keepalive(&socket, true)?;
    set_tcp_keepidle(&socket, IDLE)?;
    set_tcp_keepintvl(&socket, AGAIN)?;
    set_tcp_keepcnt(&socket, TIMES)?;
    set_tcp_user_timeout(&socket, UNTAKEN_MS)?;
    Ok(socket)
}

/// Opens connections to an address, for a process that may.
#[derive(Clone, Copy, Debug)]
pub struct TlsConnector(pub SocketAddr);

impl Connector for TlsConnector {
    /// Starts a connection, which may still be in progress on return.
    fn connect(&self) -> io::Result<OwnedFd> {
        let socket = socket(self.0)?;
        match rustix::net::connect(&socket, &self.0) {
            Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
            Err(errno) => Err(errno.into()),
        }
    }
}
