//! Traffic of a device's queue pairs, as reported by its worker.

use serde::Deserialize;

/// A queue pair, as [`pvrdma_dev::QpTraffic`] reports it.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub struct QueuePairTraffic {
    /// Its number on the wire.
    pub qpn: u32,
    /// Transport service.
    #[serde(rename = "type")]
    pub qp_type: String,
    /// Its state. `None`: its attributes were being changed.
    pub state: Option<String>,
    /// The peer of a connection.
    pub peer: Option<QueuePairPeer>,
    /// Send requests that have not completed. `None`: the ring could not be read.
    pub send_ring_used: Option<u32>,
    /// Entries of the send ring.
    pub send_ring_size: u32,
    /// Its progress. `None` if it was busy, or its adapter does not count.
    pub progress: Option<QueuePairProgress>,
}

/// The peer of a connection.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub struct QueuePairPeer {
    /// Its queue pair number.
    pub qpn: u32,
    /// Its GID.
    pub gid: String,
}

/// Progress of a queue pair.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub struct QueuePairProgress {
    /// Completed requests.
    pub requests: u64,
    /// Bytes in these requests.
    pub bytes: u64,
    /// Remaining retransmissions.
    pub retries_left: u8,
    /// Route of the requests to the peer.
    pub path: String,
}
