//! Configuration of iWARP.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;

use pvrdma_verbs::Prefix;
use pvrdma_verbs_types::Gid;

/// Bytes of a TCP segment on Ethernet with an MTU of 1500 bytes: without the headers of IPv6 and TCP, and time stamps.
const DEFAULT_MSS: usize = 1428;

/// TCP sockets for the guest's addresses, which the embedder provides. Threads of the engine call these methods, so
/// they must not wait for a peer.
///
/// # Example
///
/// Sockets of a kernel that has the guest's addresses:
///
/// ```
/// use std::io;
/// use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
/// use std::sync::Arc;
///
/// use pvrdma_rxe::{IwarpConfig, Rxe, RxeConfig, Sockets};
/// use rustix::io::Errno;
/// use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};
///
/// #[derive(Debug)]
/// struct KernelSockets;
///
/// impl Sockets for KernelSockets {
///     fn connect(&self, from: IpAddr, to: SocketAddr) -> io::Result<TcpStream> {
///         let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
///         let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
///         let socket = socket_with(family, SocketType::STREAM, flags, None)?;
///         bind(&socket, &SocketAddr::new(from, 0))?;
///         match connect(&socket, &to) {
///             Ok(()) | Err(Errno::INPROGRESS) => Ok(socket.into()),
///             Err(errno) => Err(errno.into()),
///         }
///     }
///
///     fn listen(&self, address: SocketAddr) -> io::Result<TcpListener> {
///         let listener = TcpListener::bind(address)?;
///         listener.set_nonblocking(true)?;
///         Ok(listener)
///     }
/// }
///
/// let backend = Rxe::new(RxeConfig::default())?;
/// let station = backend.station("52:54:00:00:00:01".parse()?);
/// let peers = vec!["10.0.7.0/24".parse()?];
/// station.set_iwarp(Some(IwarpConfig::new(Arc::new(KernelSockets), peers)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Sockets: Send + Sync + fmt::Debug {
    /// Begins a connection from an address of the guest to a peer. Returns a socket that does not block, whose
    /// connection may still be in progress.
    ///
    /// # Errors
    /// The guest gets a rejection: for [`io::ErrorKind::ConnectionRefused`] with the reason that no program listens.
    fn connect(&self, from: IpAddr, to: SocketAddr) -> io::Result<TcpStream>;

    /// Listens for peers at an address and port of the guest. The socket must not block.
    ///
    /// # Errors
    /// The address is not available. The device tries again when its addresses change.
    fn listen(&self, address: SocketAddr) -> io::Result<TcpListener>;

    /// Returns the address by which the guest knows a peer that has connected, from that of the socket.
    fn peer(&self, address: SocketAddr) -> SocketAddr {
        address
    }

    /// Returns the maximum length in bytes of the TCP segments that a connected socket sends. FPDUs are not longer.
    fn segment_size(&self, socket: &TcpStream) -> usize {
        let _ = socket;
        DEFAULT_MSS
    }
}

/// Peers that queue pairs of a device reach by iWARP instead of RoCE.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct IwarpConfig {
    /// Sockets of the device.
    pub sockets: Arc<dyn Sockets>,
    /// Addresses of the peers. Devices of this process that are reached by local delivery are not affected.
    pub peers: Vec<Prefix>,
    /// Requests the CRC of MPA. It is used if either end requests it.
    pub crc: bool,
}

impl IwarpConfig {
    /// Creates a configuration with the CRC.
    pub fn new(sockets: Arc<dyn Sockets>, peers: Vec<Prefix>) -> Self {
        Self { sockets, peers, crc: true }
    }

    /// Returns `true` if a peer is reached by iWARP.
    pub(crate) fn reaches(&self, peer: Gid) -> bool {
        self.peers.iter().any(|prefix| prefix.contains(peer))
    }
}

pvrdma_base::setters!(IwarpConfig {
    with_crc => crc: bool,
});
