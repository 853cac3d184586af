//! Progress of the send requests of a queue pair.

use serde::Serialize;

/// Progress of a queue pair at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct SendProgress {
    /// Requests completed successfully and datagrams sent, since RESET.
    pub requests: u64,
    /// Bytes in them.
    pub bytes: u64,
    /// Remaining retransmissions.
    pub retries_left: u8,
    /// Path to the peer: `unresolved`, `local`, `wire` or `datagram`.
    pub path: &'static str,
}
