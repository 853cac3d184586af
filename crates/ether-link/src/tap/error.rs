//! Errors of opening a tap device.

use std::io;

use thiserror::Error;

use crate::InterfaceName;

/// Error of opening a tap device.
#[derive(Debug, Error)]
pub enum TapError {
    /// The host has no tun/tap driver, or this process may not use it.
    #[error("/dev/net/tun: {0}")]
    NoTun(io::Error),
    /// This user may neither create the interface nor attach to it.
    #[error(
        "tap {0}: not permitted; make it for this user with 'ip tuntap add dev {0} mode tap user NAME', or give CAP_NET_ADMIN"
    )]
    NotPermitted(InterfaceName),
    /// Another process is attached to the interface.
    #[error("tap {0}: another program is attached to it")]
    Busy(InterfaceName),
    /// The interface of this name is not a suitable tap device.
    #[error("tap {name}: {source}; is there an interface of that name which is no tap without queues?")]
    Other {
        /// Name of the interface.
        name: InterfaceName,
        /// Error of the system.
        source: io::Error,
    },
}
