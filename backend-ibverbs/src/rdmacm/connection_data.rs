//! Parameters of connections.

/// Parameters of a connection, as seen by this end.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct ConnectionData {
    pub(crate) private_data: Vec<u8>,
    /// READs and atomics that this end executes at a time.
    pub(crate) responder_resources: u8,
    /// READs and atomics that this end may have outstanding.
    pub(crate) initiator_depth: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) srq: bool,
    /// In an event, the queue pair of the peer; in a request to the library, that of this end.
    pub(crate) qpn: u32,
}
