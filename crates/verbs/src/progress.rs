//! How far the send requests of a queue pair have come.

use serde::Serialize;

/// A queue pair's requests at one moment, in short.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct SendProgress {
    /// Requests that ended with success and datagrams, since RESET.
    pub requests: u64,
    /// Bytes in them.
    pub bytes: u64,
    /// Retransmissions that are left.
    pub retries_left: u8,
    /// How they get to the peer: `unresolved`, `local`, `wire` or `datagram`.
    pub path: &'static str,
}
