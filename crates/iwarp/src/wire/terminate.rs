//! The body of a Terminate, which ends a connection and gives the reason (RFC 5040 4.8), and the error codes of all
//! layers.

use std::fmt;

use serde::{Serialize, Serializer};

use super::{RawHeader, ReadRequest};

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

    const fn new(layer: u8, error_type: u8, code: u8) -> Self {
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

/// The segment that a Terminate is about.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RefusedSegment {
    /// Length of the segment.
    pub length: u16,
    /// Its header.
    pub header: RawHeader,
}

/// Terminate.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Terminate {
    /// Reason.
    pub cause: Cause,
    /// The segment that was refused.
    pub segment: Option<RefusedSegment>,
    /// The body of the Read Request that was refused.
    pub read: Option<ReadRequest>,
}

/// The length of the refused segment is present.
const HAS_LENGTH: u8 = 0x80;
/// The header of the refused segment is present.
const HAS_HEADER: u8 = 0x40;
/// The body of the refused Read Request is present.
const HAS_READ: u8 = 0x20;

impl Terminate {
    /// Encodes the body.
    pub fn to_bytes(&self) -> Vec<u8> {
        let Cause { layer, error_type, code } = self.cause;
        let mut flags = 0;
        if self.segment.is_some() {
            flags |= HAS_LENGTH | HAS_HEADER;
        }
        if self.read.is_some() {
            flags |= HAS_READ;
        }
        let mut body = vec![layer << 4 | error_type & 15, code, flags, 0];
        if let Some(segment) = &self.segment {
            body.extend(segment.length.to_be_bytes());
            body.extend(segment.header.bytes());
        }
        if let Some(read) = &self.read {
            body.extend(read.to_bytes());
        }
        body
    }

    /// Decodes a body. Truncated headers are left out, and a body without a code becomes a catastrophic error: a
    /// message that ends the connection anyway is never refused.
    pub fn parse(body: &[u8]) -> Self {
        let Some((&[kind, code, flags, _], mut rest)) = body.split_first_chunk() else {
            return Self { cause: Cause::CATASTROPHIC, segment: None, read: None };
        };
        let cause = Cause { layer: kind >> 4, error_type: kind & 15, code };
        let mut terminate = Self { cause, segment: None, read: None };
        let mut length = 0;
        if flags & HAS_LENGTH != 0 {
            let Some((field, behind)) = rest.split_first_chunk() else { return terminate };
            (length, rest) = (u16::from_be_bytes(*field), behind);
        }
        if flags & HAS_HEADER != 0 {
            let Some((header, behind)) = RawHeader::split(rest) else { return terminate };
            terminate.segment = Some(RefusedSegment { length, header });
            rest = behind;
        }
        if flags & HAS_READ != 0 {
            terminate.read = rest.first_chunk().map(ReadRequest::from_bytes);
        }
        terminate
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Opcode, Placement, SegmentHeader};

    fn terminate() -> Terminate {
        let placement = Placement::Untagged { stag: 0, queue: 1, msn: 2, offset: 0 };
        let header = SegmentHeader { last: true, opcode: Opcode::ReadRequest, placement };
        Terminate {
            cause: Cause::READ_STAG,
            segment: Some(RefusedSegment { length: 46, header: header.to_raw() }),
            read: Some(ReadRequest { sink_stag: 1, sink_offset: 2, length: 3, source_stag: 4, source_offset: 5 }),
        }
    }

    #[test]
    fn what_was_encoded_is_decoded() {
        let whole = terminate();
        for (segment, read, length) in [(None, None, 4), (whole.segment, None, 24), (whole.segment, whole.read, 52)] {
            let terminate = Terminate { segment, read, ..whole };
            let bytes = terminate.to_bytes();
            assert_eq!((bytes.len(), Terminate::parse(&bytes)), (length, terminate));
        }
        assert_eq!(whole.to_bytes()[..6], [0x01, 0x00, 0xe0, 0, 0, 46]);
    }

    #[test]
    fn cut_headers_are_left_out() {
        let whole = terminate();
        let bytes = whole.to_bytes();
        for cut in 0..bytes.len() {
            let parsed = Terminate::parse(&bytes[..cut]);
            let (cause, segment) = match cut {
                0..4 => (Cause::CATASTROPHIC, None),
                4..24 => (whole.cause, None),
                _ => (whole.cause, whole.segment),
            };
            assert_eq!(parsed, Terminate { cause, segment, read: None });
        }
    }

    #[test]
    fn causes_have_the_numbers_of_the_rfcs() {
        let shown = |cause: Cause| cause.to_string();
        assert_eq!(shown(Cause::TOO_LONG), "DDP 1/2/5");
        assert_eq!(shown(Cause::NOT_INVALIDATED), "RDMAP 0/1/9");
        assert_eq!(shown(Cause::NO_RTR), "MPA 2/0/7");
        assert!(Cause::TAGGED_WRAP.is_protection() && Cause::ACCESS_RIGHTS.is_protection());
        assert!(!Cause::NO_BUFFER.is_protection() && !Cause::CRC.is_protection());
    }
}
