//! Several networks at one local address and UDP port, each with its own sockets, possibly in different processes.
//!
//! The receiving sockets form a group (SO_REUSEPORT), and a classic BPF program selects the socket by the VNI
//! (SO_ATTACH_REUSEPORT_CBPF). The program sees a datagram from the VXLAN header on. Datagrams with an unknown VNI or
//! without a header go to the first socket. Its owner drops and counts them, as every owner does with datagrams of
//! other networks.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock, Weak};

use libc::sock_filter;
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::{AttachReusePortCbpf, ReusePort, UdpGroSegment};
use parking_lot::Mutex;

use super::config::{MAX_NETWORKS, VxlanConfig, VxlanError};
use super::header::Vni;
use super::sockets::{bind_shared, failed, sockets_with};

/// The networks at one local address and UDP port. A process that opens sockets for others keeps one for each address
/// and port.
#[derive(Debug)]
pub struct VxlanPort {
    local: SocketAddr,
    /// Networks in the order of their sockets in the kernel's group.
    networks: Mutex<Vec<Network>>,
}

#[derive(Debug)]
struct Network {
    vni: Vni,
    /// Duplicate of the receiving socket.
    socket: OwnedFd,
    /// Index of the receiving socket in the kernel's group.
    position: usize,
}

impl VxlanPort {
    /// Creates the state of an address and port without networks. The port must not be 0.
    pub const fn new(local: SocketAddr) -> Self {
        Self { local, networks: Mutex::new(Vec::new()) }
    }

    /// Creates the sockets of a network, like [`sockets`](super::sockets), in addition to those of other networks.
    ///
    /// A single network has the port to itself. With several networks, another process of this user could join the
    /// group as well, because the kernel checks only the user.
    ///
    /// # Errors
    /// The configuration is inconsistent, the network already exists, or the address is in use or not local.
    pub fn open(&self, config: &VxlanConfig) -> Result<Vec<OwnedFd>, VxlanError> {
        let networks = &mut *self.networks.lock();
        if config.local != self.local || self.local.port() == 0 {
            return Err(VxlanError::Io { local: config.local, source: io::ErrorKind::InvalidInput.into() });
        }
        if networks.iter().any(|network| network.vni == config.vni) {
            return Err(VxlanError::SameVni { vni: config.vni, local: self.local });
        }
        if networks.len() >= MAX_NETWORKS {
            return Err(VxlanError::TooManyNetworks(self.local));
        }
        let sockets = sockets_with(config, |local| match networks.as_slice() {
            [] => UdpSocket::bind(local),
            there => {
                there.iter().try_for_each(|network| setsockopt(&network.socket, ReusePort, &true))?;
                bind_shared(local)
            }
        })?;
        let first = sockets.first().ok_or_else(|| failed(config)(io::ErrorKind::InvalidInput.into()))?;
        let socket = first.try_clone().map_err(failed(config))?;
        let position = networks.len();
        networks.push(Network { vni: config.vni, socket, position });
        if let Err(errno) = arrange(networks) {
            // Returning this error closes the sockets, which then leave the group.
            networks.pop();
            return Err(failed(config)(errno.into()));
        }
        if networks.len() > 1 {
            discard(first);
        }
        Ok(sockets)
    }

    /// Adds a network whose sockets another process has created at this position. The kernel's group exists already, so
    /// nothing is configured.
    ///
    /// # Errors
    /// The process has no descriptors left, or the network or its position is taken.
    fn adopt(&self, config: &VxlanConfig, position: usize, sockets: &[OwnedFd]) -> io::Result<()> {
        let networks = &mut *self.networks.lock();
        let taken = networks.iter().any(|network| network.vni == config.vni || network.position == position);
        let Some(first) = sockets.first().filter(|_| !taken) else { return Err(io::ErrorKind::InvalidInput.into()) };
        let socket = first.try_clone()?;
        let at = networks.partition_point(|network| network.position < position);
        networks.insert(at, Network { vni: config.vni, socket, position });
        Ok(())
    }

    /// Returns the index of a network's receiving socket in the kernel's group.
    fn position(&self, vni: Vni) -> Option<usize> {
        self.networks.lock().iter().find(|network| network.vni == vni).map(|network| network.position)
    }

    /// Removes a network. To be called after all duplicates of its sockets were closed: only then does the receiving
    /// socket leave the kernel's group.
    pub fn close(&self, vni: Vni) {
        let networks = &mut *self.networks.lock();
        let Some(index) = networks.iter().position(|network| network.vni == vni) else { return };
        // This keeps the order of the kernel, which also moves the last socket to the place of the closed one.
        networks.swap_remove(index);
        if let Some(moved) = networks.get_mut(index) {
            moved.position = index;
        }
        if let Err(errno) = arrange(networks) {
            // Log: an administrator takes networks away.
            log::warn!("vxlan at {}: datagrams may come to the wrong network and be dropped: {errno}", self.local);
        }
    }
}

/// The addresses and ports at which a process creates sockets.
#[derive(Debug, Default)]
pub struct VxlanPorts(Mutex<HashMap<SocketAddr, Weak<VxlanPort>>>);

impl VxlanPorts {
    /// Creates the sockets of a network, in addition to those of other networks.
    ///
    /// # Errors
    /// Those of [`VxlanPort::open`].
    pub fn open(&self, config: &VxlanConfig) -> Result<VxlanSockets, VxlanError> {
        let port = self.port(config.local);
        let sockets = port.open(config)?;
        Ok(VxlanSockets { sockets, port, vni: config.vni, owned: OnceLock::from(()) })
    }

    /// Uses the sockets of a network that another process has created, with all other networks at the same address and
    /// port. The kernel's group of sockets is not changed before [`VxlanSockets::own`].
    ///
    /// # Errors
    /// The process has no descriptors left, or the network or its position is taken.
    pub fn adopt(&self, config: &VxlanConfig, position: usize, sockets: Vec<OwnedFd>) -> io::Result<VxlanSockets> {
        let port = self.port(config.local);
        port.adopt(config, position, &sockets)?;
        Ok(VxlanSockets { sockets, port, vni: config.vni, owned: OnceLock::new() })
    }

    fn port(&self, local: SocketAddr) -> Arc<VxlanPort> {
        let mut ports = self.0.lock();
        ports.retain(|_, port| port.strong_count() > 0);
        if let Some(port) = ports.get(&local).and_then(Weak::upgrade) {
            return port;
        }
        let port = Arc::new(VxlanPort::new(local));
        ports.insert(local, Arc::downgrade(&port));
        port
    }
}

/// The sockets of a network. To be dropped after all duplicates were closed ([`VxlanPort::close`]).
#[derive(Debug)]
pub struct VxlanSockets {
    sockets: Vec<OwnedFd>,
    port: Arc<VxlanPort>,
    vni: Vni,
    /// Set once this process owns the sockets.
    owned: OnceLock<()>,
}

impl VxlanSockets {
    /// Makes this process the owner of adopted sockets, which removes their network from the kernel's group in the end.
    pub fn own(&self) {
        self.owned.get_or_init(|| ());
    }

    /// Returns the position of the network for [`VxlanPorts::adopt`].
    pub fn position(&self) -> usize {
        self.port.position(self.vni).unwrap_or_default()
    }

    /// Returns the number of sockets.
    pub fn count(&self) -> usize {
        self.sockets.len()
    }

    /// Returns duplicates for [`VxlanLink::from_sockets`](super::VxlanLink::from_sockets).
    ///
    /// # Errors
    /// The process has no descriptors left.
    pub fn duplicates(&self) -> io::Result<Vec<OwnedFd>> {
        self.sockets.iter().map(OwnedFd::try_clone).collect()
    }
}

impl Drop for VxlanSockets {
    fn drop(&mut self) {
        self.sockets.clear();
        if self.owned.get().is_some() {
            self.port.close(self.vni);
        }
    }
}

/// Configures the assignment of networks to sockets in the kernel.
fn arrange(networks: &[Network]) -> nix::Result<()> {
    // GRO could coalesce datagrams of several networks, and the socket of the first one would get all of them.
    for network in networks {
        if let Err(errno) = setsockopt(&network.socket, UdpGroSegment, &(networks.len() == 1)) {
            log::debug!("the kernel puts no trains together: {errno}");
        }
    }
    let [first, _, ..] = networks else { return Ok(()) };
    let mut program = program(networks.iter().map(|network| network.vni));
    let len = u16::try_from(program.len()).map_err(|_| nix::errno::Errno::EINVAL)?;
    setsockopt(&first.socket, AttachReusePortCbpf, &libc::sock_fprog { len, filter: program.as_mut_ptr() })
}

/// Returns the program that maps a datagram's VNI to its index in a list.
fn program(vnis: impl Iterator<Item = Vni>) -> Vec<sock_filter> {
    let step = |code: u32, jf, k| sock_filter { code: u16::try_from(code).unwrap_or(0), jt: 0, jf, k };
    let give = |index| step(libc::BPF_RET | libc::BPF_K, 0, index);
    let load = step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 4);
    let mut program = vec![load, step(libc::BPF_ALU | libc::BPF_RSH | libc::BPF_K, 0, 8)];
    for (index, vni) in (0..).zip(vnis) {
        program.extend([step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, vni.get()), give(index)]);
    }
    program.push(give(0));
    program
}

/// Drops datagrams that arrived before the program was attached, because they may belong to any network.
fn discard(socket: &OwnedFd) {
    use rustix::net::{RecvFlags, recv};
    while recv(socket, &mut [0_u8; 1], RecvFlags::DONTWAIT).is_ok() {}
}
