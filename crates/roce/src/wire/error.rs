//! Why a frame is not taken or not built.

use pvrdma_packet::Truncated;
use thiserror::Error;

/// Why bytes are not a RoCE packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Error)]
pub enum ParseError {
    /// Another protocol: somebody else may want this frame.
    #[error("not RoCE")]
    NotRoce,
    /// Shorter than its headers say.
    #[error("truncated in the {0}")]
    Truncated(&'static str),
    /// A header field has a value that cannot be right.
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

/// A packet that was damaged on its way. Dropped silently (IBA 9.6.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Error)]
pub enum CrcError {
    /// The invariant CRC does not match.
    #[error("bad ICRC")]
    Icrc,
    /// The UDP checksum is neither zero nor right.
    #[error("bad UDP checksum")]
    UdpChecksum,
}

/// Why a packet cannot be laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Error)]
pub enum BuildError {
    /// The opcode wants other extension headers.
    #[error("extension headers do not belong to the opcode")]
    Shape,
    /// The buffer is too small.
    #[error("buffer too small")]
    NoRoom,
    /// More than the length fields can say.
    #[error("payload too long")]
    TooLong,
}
