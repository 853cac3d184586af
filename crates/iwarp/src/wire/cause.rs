//! Error codes of all layers (RFC 5040 4.8, RFC 5041 8.2, RFC 5044 8, RFC 6581 9).

use std::fmt;

use serde::{Serialize, Serializer};

/// Reason of a Terminate: layer, error type and error code.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Cause {
    /// 0: RDMAP, 1: DDP, 2: MPA.
    pub layer: u8,
    /// Type of the error within the layer, four bits.
    pub error_type: u8,
    /// Code within the type.
    pub code: u8,
}

impl Cause {
    /// RDMAP: local catastrophic error.
    pub const CATASTROPHIC: Self = Self::new(0, 0, 0);
    /// RDMAP: an STag of a Read Request is invalid.
    pub const READ_STAG: Self = Self::new(0, 1, 0);
    /// RDMAP: the stream does not grant the access.
    pub const ACCESS_RIGHTS: Self = Self::new(0, 1, 2);
    /// RDMAP: a tagged offset of a Read Request wraps.
    pub const READ_WRAP: Self = Self::new(0, 1, 4);
    /// RDMAP: the STag cannot be invalidated.
    pub const NOT_INVALIDATED: Self = Self::new(0, 1, 9);
    /// RDMAP: the version is not 1.
    pub const RDMAP_VERSION: Self = Self::new(0, 2, 5);
    /// RDMAP: the opcode is unknown, or not expected here.
    pub const UNEXPECTED_OPCODE: Self = Self::new(0, 2, 6);
    /// RDMAP: an error that is local to the stream, such as one Read Request too many.
    pub const STREAM: Self = Self::new(0, 2, 7);
    /// RDMAP: an operation error without a code of its own.
    pub const OPERATION: Self = Self::new(0, 2, 0xff);
    /// DDP: local catastrophic error.
    pub const DDP_CATASTROPHIC: Self = Self::new(1, 0, 0);
    /// DDP: the STag of a tagged segment is invalid.
    pub const TAGGED_STAG: Self = Self::new(1, 1, 0);
    /// DDP: a tagged segment lies outside of its memory.
    pub const TAGGED_BOUNDS: Self = Self::new(1, 1, 1);
    /// DDP: the tagged offset wraps.
    pub const TAGGED_WRAP: Self = Self::new(1, 1, 3);
    /// DDP: the version of a tagged segment is not 1.
    pub const TAGGED_VERSION: Self = Self::new(1, 1, 4);
    /// DDP: the queue number is invalid.
    pub const QUEUE: Self = Self::new(1, 2, 1);
    /// DDP: the queue has no buffer for the message.
    pub const NO_BUFFER: Self = Self::new(1, 2, 2);
    /// DDP: the message sequence number is not the next one.
    pub const MSN_RANGE: Self = Self::new(1, 2, 3);
    /// DDP: the message offset is not the next one.
    pub const MESSAGE_OFFSET: Self = Self::new(1, 2, 4);
    /// DDP: the message is longer than its buffer.
    pub const TOO_LONG: Self = Self::new(1, 2, 5);
    /// DDP: the version of an untagged segment is not 1.
    pub const UNTAGGED_VERSION: Self = Self::new(1, 2, 6);
    /// MPA: the CRC of an FPDU is wrong.
    pub const CRC: Self = Self::new(2, 0, 2);
    /// MPA: the beginning of an FPDU cannot be found.
    pub const FPDU_START: Self = Self::new(2, 0, 3);
    /// MPA: the request or reply of the startup is invalid.
    pub const STARTUP: Self = Self::new(2, 0, 4);
    /// MPA: the peer has fewer READ resources than the startup requires.
    pub const READ_RESOURCES: Self = Self::new(2, 0, 6);
    /// MPA: the peer offers no usable ready-to-receive message.
    pub const NO_RTR: Self = Self::new(2, 0, 7);

    pub(super) const fn new(layer: u8, error_type: u8, code: u8) -> Self {
        Self { layer, error_type, code }
    }

    /// Returns `true` if memory could not be accessed as the message requested.
    pub const fn is_protection(self) -> bool {
        self.layer <= 1 && self.error_type == 1
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layer = match self.layer {
            0 => "RDMAP",
            1 => "DDP",
            2 => "MPA",
            _ => "layer",
        };
        write!(f, "{layer} {}/{}/{}", self.layer, self.error_type, self.code)
    }
}

impl Serialize for Cause {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
