//! Sockets of a network in 127.0.0.0/8.

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU16, Ordering};

use parking_lot::Mutex;
use pvrdma_rxe::Sockets;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};

/// Networks that tests of this process have used.
static NETWORKS: AtomicU16 = AtomicU16::new(1);

/// Sockets of hosts `10.0.0.N`, which are `127.a.b.N` on the loopback interface.
#[derive(Debug)]
pub(crate) struct Loopback {
    network: [u8; 2],
    listening: Mutex<HashSet<u8>>,
}

impl Loopback {
    pub(crate) fn new() -> Self {
        // Other processes may run the same tests.
        let number = NETWORKS.fetch_add(1, Ordering::Relaxed) ^ u16::from_le_bytes(process()).rotate_left(8);
        Self { network: [1 + number.to_be_bytes()[0] % 250, number.to_be_bytes()[1]], listening: Mutex::default() }
    }

    /// Returns the address of a host on the loopback interface.
    pub(crate) fn host(&self, number: u8) -> Ipv4Addr {
        let [a, b] = self.network;
        Ipv4Addr::new(127, a, b, number)
    }

    /// Returns `true` if the guest with this number listens.
    pub(crate) fn listens(&self, number: u8) -> bool {
        self.listening.lock().contains(&number)
    }

    fn map(&self, address: IpAddr) -> io::Result<Ipv4Addr> {
        match address {
            IpAddr::V4(address) => Ok(self.host(address.octets()[3])),
            IpAddr::V6(_) => Err(io::ErrorKind::AddrNotAvailable.into()),
        }
    }
}

fn process() -> [u8; 2] {
    let [a, b, ..] = std::process::id().to_le_bytes();
    [a, b]
}

impl Sockets for Loopback {
    fn connect(&self, from: IpAddr, to: SocketAddr) -> io::Result<TcpStream> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
        bind(&socket, &SocketAddr::new(self.map(from)?.into(), 0))?;
        match connect(&socket, &SocketAddr::new(self.map(to.ip())?.into(), to.port())) {
            Ok(()) | Err(Errno::INPROGRESS) => Ok(socket.into()),
            Err(errno) => Err(errno.into()),
        }
    }

    fn listen(&self, address: SocketAddr) -> io::Result<TcpListener> {
        let host = self.map(address.ip())?;
        let listener = TcpListener::bind((host, address.port()))?;
        listener.set_nonblocking(true)?;
        self.listening.lock().insert(host.octets()[3]);
        Ok(listener)
    }

    fn peer(&self, address: SocketAddr) -> SocketAddr {
        let host = if let IpAddr::V4(address) = address.ip() { address.octets()[3] } else { 0 };
        SocketAddr::new([10, 0, 0, host].into(), address.port())
    }
}
