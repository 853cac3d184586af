//! Errors of opening an interface.

use rustix::io::Errno;
use thiserror::Error;

/// Error of opening the interface.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum AfPacketError {
    /// The process lacks the privilege.
    #[error("{0}: raw frames need CAP_NET_RAW (and CAP_NET_ADMIN for large buffers)")]
    Privilege(String),
    /// The interface does not exist.
    #[error("{0}: no such interface")]
    NoInterface(String),
    /// The frames of the interface do not begin with an Ethernet header.
    #[error("{0}: not an Ethernet interface")]
    NotEthernet(String),
    /// The system refused.
    #[error("{interface}: cannot open a packet socket: {errno}")]
    System {
        /// Name of the interface.
        interface: String,
        /// Error of the system.
        errno: Errno,
    },
}

impl AfPacketError {
    pub(super) fn new(interface: &str, errno: Errno) -> Self {
        let interface = interface.to_owned();
        match errno {
            Errno::PERM | Errno::ACCESS => Self::Privilege(interface),
            Errno::NODEV | Errno::NXIO => Self::NoInterface(interface),
            Errno::PROTONOSUPPORT => Self::NotEthernet(interface),
            errno => Self::System { interface, errno },
        }
    }
}
