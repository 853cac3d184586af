//! Parameters of connections.

use crate::sys::rdmacm::ConnParam;

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

impl ConnectionData {
    /// Returns the parameters of the library with a copy of their private data.
    pub(crate) fn new(parameters: &ConnParam, private_data: Vec<u8>) -> Self {
        Self {
            private_data,
            responder_resources: parameters.responder_resources,
            initiator_depth: parameters.initiator_depth,
            retry_count: parameters.retry_count,
            rnr_retry: parameters.rnr_retry_count,
            srq: parameters.srq != 0,
            qpn: parameters.qp_num,
        }
    }
}
