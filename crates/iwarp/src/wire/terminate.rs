//! The body of a Terminate, which ends a connection and gives the reason (RFC 5040 4.8).

use super::{Cause, RawHeader, ReadRequest};

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
/// Bits that the RFC reserves, and in which `siw` has these flags.
const FLAGS_OF_SIW: u8 = 0x07;

/// Returns the first and the third byte of a body in the order of the RFC.
///
/// On little-endian machines, Linux's `siw` fills both bytes from the least significant bit: the type of the error is
/// in the upper half of the first byte, the layer in the lower half. Without any flag the order remains unknown, and
/// the RFC applies.
const fn in_order(kind: u8, flags: u8) -> (u8, u8) {
    if flags & (HAS_LENGTH | HAS_HEADER | HAS_READ) == 0 && flags & FLAGS_OF_SIW != 0 {
        (kind.rotate_left(4), flags.reverse_bits())
    } else {
        (kind, flags)
    }
}

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
        let (kind, flags) = in_order(kind, flags);
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
    fn the_order_of_siw_is_recognized() {
        let whole = Terminate { cause: Cause { code: 1, ..Cause::READ_STAG }, ..terminate() };
        let mut bytes = whole.to_bytes();
        assert_eq!(bytes[..3], [0x01, 0x01, 0xe0]);
        (bytes[0], bytes[2]) = (0x10, 0x07);
        assert_eq!(Terminate::parse(&bytes), whole);
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
