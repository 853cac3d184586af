//! What a tunnel's end is to be, and why it cannot be.

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
/// Networks at one address and port. The program that tells them apart is half as long as the kernel allows.
pub const MAX_NETWORKS: usize = 1024;

/// `ADDRESS` or `ADDRESS:PORT`, where the port of VXLAN is the default; an IPv6 address with a port stands in brackets.
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

/// One end of a tunnel.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VxlanConfig {
    /// Where datagrams come, and from which address they are sent.
    pub local: SocketAddr,
    /// Other ends. No two have the same IP address, because the sender of a datagram is told by it.
    pub remotes: Vec<SocketAddr>,
    /// The network.
    pub vni: Vni,
    /// Datagrams of others are taken, too. See the module for what that means.
    pub open: bool,
}

/// Why a tunnel cannot be set up.
#[derive(Debug, Error)]
pub enum VxlanError {
    /// Nobody could ever be spoken to.
    #[error("a vxlan link needs a remote, or must learn remotes")]
    NoRemote,
    /// There are too many.
    #[error("{0} remotes are more than {MAX_REMOTES}")]
    TooManyRemotes(usize),
    /// Two remotes cannot be told apart.
    #[error("two remotes have the address {0}")]
    SameAddress(IpAddr),
    /// It cannot be reached from there.
    #[error("the remote {remote} cannot be reached from {local}: one is IPv4 and the other IPv6")]
    Family {
        /// The remote.
        remote: SocketAddr,
        /// Our end.
        local: SocketAddr,
    },
    /// An address that nothing can be sent to.
    #[error("{0} is not the address of one host")]
    NoHost(SocketAddr),
    /// The address is somebody else's.
    #[error("{0} is not an address of this host")]
    NotOurs(IpAddr),
    /// Datagrams could not be told apart.
    #[error("VNI {vni} is in use at {local}")]
    SameVni {
        /// The network.
        vni: Vni,
        /// Our end.
        local: SocketAddr,
    },
    /// There are too many.
    #[error("more than {MAX_NETWORKS} networks at {0}")]
    TooManyNetworks(SocketAddr),
    /// No socket. What the system said is the source.
    #[error("vxlan at {local}")]
    Io {
        /// Our end.
        local: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
}

impl VxlanConfig {
    /// Checks that the values go together.
    ///
    /// # Errors
    /// They do not.
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
