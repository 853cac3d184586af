//! Export of the state of a stream.

use serde::Serialize;

use super::{End, Stream, StreamStats};

/// State of a stream as plain data.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct StreamInspect {
    /// FPDUs have a CRC.
    pub crc: bool,
    /// READ requests of the peer that may be outstanding.
    pub ird: u16,
    /// READ requests of this end that may be outstanding.
    pub ord: u16,
    /// Requests that are posted and not done.
    pub requests: usize,
    /// READs that wait for their responses.
    pub reads: usize,
    /// READs of the peer that are not answered completely.
    pub responses: usize,
    /// Bytes that TCP has not taken.
    pub not_taken: u64,
    /// This end may send: it is the initiator, or the peer has sent something.
    pub open: bool,
    /// A SEND of the peer waits for a receive.
    pub waits_for_receive: bool,
    /// End of the connection.
    pub end: Option<End>,
    /// Counters.
    pub stats: StreamStats,
}

impl Stream {
    /// Exports the state.
    pub fn inspect(&self) -> StreamInspect {
        StreamInspect {
            crc: self.negotiated.crc,
            ird: self.negotiated.ird,
            ord: self.negotiated.ord,
            requests: self.requests.len(),
            reads: self.reads.len(),
            responses: self.responses.len(),
            not_taken: self.built.saturating_sub(self.taken),
            open: self.open,
            waits_for_receive: self.waiting.is_some(),
            end: self.end,
            stats: self.stats,
        }
    }
}
