//! What an administrator chooses.

use std::time::Duration;

use pvrdma_verbs::Network;
use serde::{Deserialize, Serialize};

/// Which GID of the host stands for guests whose own address the host does not have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum GidIndex {
    /// The first RoCE v2 address that routers know, or else the first at all.
    #[default]
    Auto,
    /// The one at this index of the port's GID table.
    Fixed(u32),
}

/// How far the guests' connection managers (`rdma_cm`) reach.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum CmMode {
    /// As with [`CmMode::Umad`] if that is possible; otherwise as with [`CmMode::Local`], with a warning.
    #[default]
    Auto,
    /// Everybody, through `/dev/infiniband/umadN`.
    Umad,
    /// Guests of this process.
    Local,
}

/// What to use of the host, and how much.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct IbverbsConfig {
    /// Name of the RDMA device, as in `/sys/class/infiniband`.
    pub device: String,
    /// Number of its port; the first is 1.
    pub port: u8,
    /// The host's GID for guests.
    pub gid_index: GidIndex,
    /// Bytes of guest memory that one device may have registered, counted once for each registration.
    pub max_pinned: u64,
    /// Pieces of scattered memory that one device may have mapped side by side, or registered one by one where that is
    /// not possible. Each is one of the process's mappings (`vm.max_map_count`), or a memory region of the host's.
    pub max_mappings: u64,
    /// Networks whose addresses are put on the host's interface while guests have them. Others must be there already.
    pub add_addresses: Vec<Network>,
    /// How far the guests' connection managers reach.
    pub cm: CmMode,
    /// For how long after a completion the host's queues are polled before the thread sleeps.
    pub poll: Duration,
}

impl IbverbsConfig {
    /// Port 1 of a device, with its own choice of GID, 64 GiB a guest, and the connection manager if it can be had.
    pub fn new(device: impl Into<String>) -> Self {
        Self {
            device: device.into(),
            port: 1,
            gid_index: GidIndex::Auto,
            max_pinned: 64 << 30,
            max_mappings: 16_384,
            add_addresses: Vec::new(),
            cm: CmMode::Auto,
            poll: Duration::from_micros(50),
        }
    }
}
