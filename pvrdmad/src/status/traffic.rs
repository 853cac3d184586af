//! What the queue pairs of a device move, as its worker tells it.

use serde::Deserialize;

/// What [`pvrdma_dev::QpTraffic`] says.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub struct QueuePairTraffic {
    /// Its number on the wire.
    pub qpn: u32,
    /// Transport service.
    #[serde(rename = "type")]
    pub qp_type: String,
    /// Its state. `None`: its attributes were being changed.
    pub state: Option<String>,
    /// The other end of a connection.
    pub peer: Option<QueuePairPeer>,
    /// Send requests that have not ended. `None`: the ring could not be read.
    pub send_ring_used: Option<u32>,
    /// Elements of the send ring.
    pub send_ring_size: u32,
    /// What it has moved. `None`: it was busy, or its adapter does not count.
    pub progress: Option<QueuePairProgress>,
}

/// The other end of a connection.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub struct QueuePairPeer {
    /// Its number.
    pub qpn: u32,
    /// Where it is.
    pub gid: String,
}

/// What a queue pair has moved.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub struct QueuePairProgress {
    /// Requests that ended.
    pub requests: u64,
    /// Bytes in them.
    pub bytes: u64,
    /// Retransmissions that are left.
    pub retries_left: u8,
    /// How requests get to the peer.
    pub path: String,
}
