//! Errors of parsing and building frames.

use pvrdma_packet::Truncated;
use thiserror::Error;

/// Reason why bytes are not a RoCE packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Error)]
pub enum ParseError {
    /// Another protocol: the frame may be for another receiver.
    #[error("not RoCE")]
    NotRoce,
    /// The frame is shorter than its headers say.
    #[error("truncated in the {0}")]
    Truncated(&'static str),
    /// A header field has an invalid value.
    #[error("invalid {0}")]
    Invalid(&'static str),
    /// A fragment of an IPv4 packet. RoCE is never fragmented.
    #[error("IP fragment")]
    Fragment,
}

impl From<Truncated> for ParseError {
    #[inline]
    fn from(Truncated(header): Truncated) -> Self {
        Self::Truncated(header)
    }
}

/// A packet that was damaged in transit. It is dropped silently (IBA 9.6.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Error)]
pub enum CrcError {
    /// The invariant CRC does not match.
    #[error("bad ICRC")]
    Icrc,
    /// The UDP checksum is neither zero nor correct.
    #[error("bad UDP checksum")]
    UdpChecksum,
}

/// Reason why a packet cannot be built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Error)]
pub enum BuildError {
    /// The opcode requires other extension headers.
    #[error("extension headers do not belong to the opcode")]
    Shape,
    /// The buffer is too small.
    #[error("buffer too small")]
    NoRoom,
    /// The payload exceeds the range of the length fields.
    #[error("payload too long")]
    TooLong,
}
