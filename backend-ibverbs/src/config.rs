//! Configuration of the backend.

use std::time::Duration;

use pvrdma_verbs::Network;
use serde::{Deserialize, Serialize};

/// Selects the host GID that is used for guests whose own address the host does not have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum GidIndex {
    /// The first RoCE v2 address that is routable, or else the first address.
    #[default]
    Auto,
    /// The address at this index of the port's GID table.
    Fixed(u32),
}

/// Reach of the guests' connection managers (`rdma_cm`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum CmMode {
    /// Like [`CmMode::Umad`] if possible; otherwise like [`CmMode::Local`], with a warning.
    #[default]
    Auto,
    /// All peers, through `/dev/infiniband/umadN`.
    Umad,
    /// Guests of this process only.
    Local,
    /// All peers, through the host's own connection manager (`librdmacm`). Guests of this process are reached directly
    /// if the port speaks RoCE.
    Host,
}

/// Host resources to use, and limits on their use.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct IbverbsConfig {
    /// Name of the RDMA device, as in `/sys/class/infiniband`.
    pub device: String,
    /// Port number; the first is 1.
    pub port: u8,
    /// The host's GID for guests.
    pub gid_index: GidIndex,
    /// Maximum of guest memory that one device may register, in bytes, counted once for each registration.
    pub max_pinned: u64,
    /// Maximum number of pieces of scattered memory that one device may map side by side, or register one by one where
    /// that is not possible. Each piece is one of the process's mappings (`vm.max_map_count`), or a memory region of
    /// the host.
    pub max_mappings: u64,
    /// Networks whose addresses are added to the host's interface while guests use them. Other addresses must exist
    /// already.
    pub add_addresses: Vec<Network>,
    /// Reach of the guests' connection managers.
    pub cm: CmMode,
    /// Allows a port with the link layer InfiniBand, with [`CmMode::Host`]. No test has run on one.
    pub untested_infiniband: bool,
    /// Time after a completion for which the host's queues are polled before the thread sleeps.
    pub poll: Duration,
}

impl IbverbsConfig {
    /// Returns a configuration for port 1 of a device, with automatic choice of the GID, 64 GiB per guest, and the
    /// connection manager if it is available.
    pub fn new(device: impl Into<String>) -> Self {
        Self {
            device: device.into(),
            port: 1,
            gid_index: GidIndex::Auto,
            max_pinned: 64 << 30,
            max_mappings: 16_384,
            add_addresses: Vec::new(),
            cm: CmMode::Auto,
            untested_infiniband: false,
            poll: Duration::from_micros(50),
        }
    }
}

pvrdma_base::setters!(IbverbsConfig {
    with_port => port: u8,
    with_gid_index => gid_index: GidIndex,
    with_max_pinned => max_pinned: u64,
    with_max_mappings => max_mappings: u64,
    with_add_addresses => add_addresses: Vec<Network>,
    with_cm => cm: CmMode,
    with_untested_infiniband => untested_infiniband: bool,
    with_poll => poll: Duration,
});
