//! Configuration of a tunnel's end, and its errors.

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::header::Vni;
use super::table::MAX_REMOTES;

/// The UDP port of VXLAN (RFC 7348, section 5).
pub const VXLAN_PORT: u16 = 4789;
/// Maximum number of networks at one address and port. The program that distinguishes them is then half as long as the
/// kernel permits.
pub const MAX_NETWORKS: usize = 1024;

/// `ADDRESS` or `ADDRESS:PORT`, with the port of VXLAN as default; an IPv6 address with a port is in brackets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct TunnelAddress(pub SocketAddr);

impl FromStr for TunnelAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let plain = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
        let with_default = |_| plain.parse().map(|ip: IpAddr| SocketAddr::new(ip, VXLAN_PORT));
        let address = text.parse().or_else(with_default);
        address.map(Self).map_err(|_| format!("'{text}' is not an IP address, IPv4:PORT or [IPv6]:PORT"))
    }
}

impl TryFrom<String> for TunnelAddress {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// Configuration of one end of a tunnel.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct VxlanConfig {
    /// Address at which datagrams are received, and from which they are sent.
    pub local: SocketAddr,
    /// Other ends. Their IP addresses must be distinct, because the sender of a datagram is identified by it.
    pub remotes: Vec<SocketAddr>,
    /// Network identifier.
    pub vni: Vni,
    /// Datagrams of senders other than the remotes are accepted as well. See the module for the consequences.
    pub open: bool,
}

pvrdma_base::setters!(VxlanConfig {
    with_local => local: SocketAddr,
    with_remotes => remotes: Vec<SocketAddr>,
    with_vni => vni: Vni,
    with_open => open: bool,
});

/// Error of setting up a tunnel.
#[derive(Debug, Error)]
pub enum VxlanError {
    /// There is no remote, and none can be learned.
    #[error("a vxlan link needs a remote, or must learn remotes")]
    NoRemote,
    /// There are too many remotes.
    #[error("{0} remotes are more than {MAX_REMOTES}")]
    TooManyRemotes(usize),
    /// Two remotes have the same address and cannot be distinguished.
    #[error("two remotes have the address {0}")]
    SameAddress(IpAddr),
    /// The remote cannot be reached from the local address.
    #[error("the remote {remote} cannot be reached from {local}: one is IPv4 and the other IPv6")]
    Family {
        /// Address of the remote.
        remote: SocketAddr,
        /// Local address.
        local: SocketAddr,
    },
    /// The address cannot be a destination.
    #[error("{0} is not the address of one host")]
    NoHost(SocketAddr),
    /// The address is not one of this host.
    #[error("{0} is not an address of this host")]
    NotOurs(IpAddr),
    /// The network is already in use at this address and port.
    #[error("VNI {vni} is in use at {local}")]
    SameVni {
        /// Network identifier.
        vni: Vni,
        /// Local address.
        local: SocketAddr,
    },
    /// There are too many networks.
    #[error("more than {MAX_NETWORKS} networks at {0}")]
    TooManyNetworks(SocketAddr),
    /// The socket cannot be created. The system's error is the source.
    #[error("vxlan at {local}")]
    Io {
        /// Local address.
        local: SocketAddr,
        /// Error of the system.
        source: io::Error,
    },
}

impl VxlanConfig {
    /// Creates the configuration of an end without remotes, for the network 0.
    pub fn new(local: SocketAddr) -> Self {
        Self { local, remotes: Vec::new(), vni: Vni::default(), open: false }
    }

    /// Checks that the configuration is consistent.
    ///
    /// # Errors
    /// It is not.
    pub fn check(&self) -> Result<(), VxlanError> {
        let mut seen = HashSet::new();
        for &remote in &self.remotes {
            let ip = remote.ip();
            if remote.is_ipv4() != self.local.is_ipv4() {
                return Err(VxlanError::Family { remote, local: self.local });
            }
            if ip.is_unspecified() || ip.is_multicast() || remote.port() == 0 {
                return Err(VxlanError::NoHost(remote));
            }
            if !seen.insert(ip) {
                return Err(VxlanError::SameAddress(ip));
            }
        }
        match self.remotes.len() {
            0 if !self.open => Err(VxlanError::NoRemote),
            count if count > MAX_REMOTES => Err(VxlanError::TooManyRemotes(count)),
            _ => Ok(()),
        }
    }
}
