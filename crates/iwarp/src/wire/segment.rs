//! The headers of a DDP segment and of the RDMAP message in it (RFC 5041 4, RFC 5040 4). DDP reserves a byte, and in
//! untagged segments four more, for the protocol above it, so both headers are treated as one here.

use pvrdma_packet::field::{field, put};

use super::Cause;

const TAGGED: u8 = 0x80;
const LAST: u8 = 0x40;
const DDP_VERSION_MASK: u8 = 0x03;
const DDP_VERSION: u8 = 1;
const RDMAP_VERSION_SHIFT: u32 = 6;
const RDMAP_VERSION: u8 = 1;
const OPCODE_MASK: u8 = 0x0f;

/// RDMAP message (RFC 5040 4.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[expect(missing_docs, reason = "the names are those of RFC 5040")]
#[repr(u8)]
pub enum Opcode {
    Write = 0,
    ReadRequest = 1,
    ReadResponse = 2,
    Send = 3,
    SendInvalidate = 4,
    SendSolicited = 5,
    SendSolicitedInvalidate = 6,
    Terminate = 7,
}

impl Opcode {
    /// Decodes the field.
    pub const fn new(value: u8) -> Option<Self> {
        Some(match value {
            0 => Self::Write,
            1 => Self::ReadRequest,
            2 => Self::ReadResponse,
            3 => Self::Send,
            4 => Self::SendInvalidate,
            5 => Self::SendSolicited,
            6 => Self::SendSolicitedInvalidate,
            7 => Self::Terminate,
            _ => return None,
        })
    }

    /// Returns the opcode of a SEND.
    pub const fn send(solicited: bool, invalidates: bool) -> Self {
        match (solicited, invalidates) {
            (false, false) => Self::Send,
            (false, true) => Self::SendInvalidate,
            (true, false) => Self::SendSolicited,
            (true, true) => Self::SendSolicitedInvalidate,
        }
    }

    /// Returns the queue number of an untagged message. `None`: the message is tagged.
    pub const fn queue(self) -> Option<u32> {
        match self {
            Self::Write | Self::ReadResponse => None,
            Self::Send | Self::SendInvalidate | Self::SendSolicited | Self::SendSolicitedInvalidate => Some(0),
            Self::ReadRequest => Some(1),
            Self::Terminate => Some(2),
        }
    }

    /// Returns `true` if the receiver is asked to raise a solicited event.
    pub const fn is_solicited(self) -> bool {
        matches!(self, Self::SendSolicited | Self::SendSolicitedInvalidate)
    }

    /// Returns `true` if the header names an STag that the receiver invalidates.
    pub const fn invalidates(self) -> bool {
        matches!(self, Self::SendInvalidate | Self::SendSolicitedInvalidate)
    }
}

/// Place of a segment's payload at the receiver.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Placement {
    /// Memory that the sender names.
    Tagged {
        /// Steering tag.
        stag: u32,
        /// Tagged offset of the segment.
        offset: u64,
    },
    /// The next buffer of a queue.
    Untagged {
        /// STag to invalidate, for opcodes that have one; otherwise 0.
        stag: u32,
        /// Queue number.
        queue: u32,
        /// Message sequence number, from 1 in each queue.
        msn: u32,
        /// Offset of the segment in the message.
        offset: u32,
    },
}

/// Header of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SegmentHeader {
    /// Last segment of its message.
    pub last: bool,
    /// The message.
    pub opcode: Opcode,
    /// Place of the payload.
    pub placement: Placement,
}

/// Bytes of a header. Only the bit that determines its length has been interpreted.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RawHeader {
    /// Header of a tagged segment.
    Tagged([u8; 14]),
    /// Header of an untagged segment.
    Untagged([u8; 18]),
}

impl RawHeader {
    /// Length of the shortest header.
    pub const MIN_LEN: usize = 14;

    /// Splits a segment into header and payload. Returns `None` if the segment is shorter than its header.
    pub fn split(segment: &[u8]) -> Option<(Self, &[u8])> {
        if segment.first()? & TAGGED == 0 {
            segment.split_first_chunk().map(|(header, payload)| (Self::Untagged(*header), payload))
        } else {
            segment.split_first_chunk().map(|(header, payload)| (Self::Tagged(*header), payload))
        }
    }

    /// The bytes.
    pub const fn bytes(&self) -> &[u8] {
        match self {
            Self::Tagged(bytes) => bytes,
            Self::Untagged(bytes) => bytes,
        }
    }
}

impl SegmentHeader {
    /// Length of the longest header.
    pub const MAX_LEN: usize = 18;

    /// Decodes a header. Reserved bits are ignored.
    ///
    /// # Errors
    /// A version is not 1, the opcode is unknown, or the opcode belongs to the other kind of segment.
    pub fn parse(raw: &RawHeader) -> Result<Self, Cause> {
        let (control, placement) = match raw {
            RawHeader::Tagged(bytes) => {
                let stag = u32::from_be_bytes(field::<2, _, _>(bytes));
                let offset = u64::from_be_bytes(field::<6, _, _>(bytes));
                (field::<0, 2, _>(bytes), Placement::Tagged { stag, offset })
            }
            RawHeader::Untagged(bytes) => {
                let placement = Placement::Untagged {
                    stag: u32::from_be_bytes(field::<2, _, _>(bytes)),
                    queue: u32::from_be_bytes(field::<6, _, _>(bytes)),
                    msn: u32::from_be_bytes(field::<10, _, _>(bytes)),
                    offset: u32::from_be_bytes(field::<14, _, _>(bytes)),
                };
                (field::<0, 2, _>(bytes), placement)
            }
        };
        let tagged = matches!(placement, Placement::Tagged { .. });
        let [ddp, rdmap] = control;
        if ddp & DDP_VERSION_MASK != DDP_VERSION {
            return Err(if tagged { Cause::TAGGED_VERSION } else { Cause::UNTAGGED_VERSION });
        }
        if rdmap >> RDMAP_VERSION_SHIFT != RDMAP_VERSION {
            return Err(Cause::RDMAP_VERSION);
        }
        let opcode = Opcode::new(rdmap & OPCODE_MASK).filter(|opcode| opcode.queue().is_none() == tagged);
        let opcode = opcode.ok_or(Cause::UNEXPECTED_OPCODE)?;
        Ok(Self { last: ddp & LAST != 0, opcode, placement })
    }

    /// Encodes the header.
    pub fn to_raw(self) -> RawHeader {
        let last = if self.last { LAST } else { 0 };
        let rdmap = RDMAP_VERSION << RDMAP_VERSION_SHIFT | self.opcode as u8;
        match self.placement {
            Placement::Tagged { stag, offset } => {
                let mut bytes = [0; 14];
                put::<0, _, _>(&mut bytes, [TAGGED | last | DDP_VERSION, rdmap]);
                put::<2, _, _>(&mut bytes, stag.to_be_bytes());
                put::<6, _, _>(&mut bytes, offset.to_be_bytes());
                RawHeader::Tagged(bytes)
            }
            Placement::Untagged { stag, queue, msn, offset } => {
                let mut bytes = [0; 18];
                put::<0, _, _>(&mut bytes, [last | DDP_VERSION, rdmap]);
                put::<2, _, _>(&mut bytes, stag.to_be_bytes());
                put::<6, _, _>(&mut bytes, queue.to_be_bytes());
                put::<10, _, _>(&mut bytes, msn.to_be_bytes());
                put::<14, _, _>(&mut bytes, offset.to_be_bytes());
                RawHeader::Untagged(bytes)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_those_of_the_rfcs() {
        let write = SegmentHeader {
            last: true,
            opcode: Opcode::Write,
            placement: Placement::Tagged { stag: 0x0102_0304, offset: 0x0506_0708_090a_0b0c },
        };
        assert_eq!(write.to_raw().bytes(), [0xc1, 0x40, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
        let send = SegmentHeader {
            last: false,
            opcode: Opcode::SendInvalidate,
            placement: Placement::Untagged { stag: 0x0102_0304, queue: 0, msn: 1, offset: 0x0a0b_0c0d },
        };
        let bytes = [0x01, 0x44, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 1, 10, 11, 12, 13];
        assert_eq!(send.to_raw().bytes(), bytes);
        for header in [write, send] {
            assert_eq!(SegmentHeader::parse(&header.to_raw()), Ok(header));
        }
    }

    /// Every pair of control bytes either parses to a header that is encoded with the same meaning, or is refused with
    /// the code of its kind.
    #[test]
    fn every_control_field() {
        for (ddp, rdmap) in (0..=u8::MAX).flat_map(|ddp| (0..=u8::MAX).map(move |rdmap| (ddp, rdmap))) {
            let mut segment = [0; 18];
            segment[..2].copy_from_slice(&[ddp, rdmap]);
            let (raw, payload) = RawHeader::split(&segment).unwrap();
            let tagged = ddp & 0x80 != 0;
            assert_eq!((raw.bytes().len(), payload.len()), if tagged { (14, 4) } else { (18, 0) });
            let expected_tagged = [0, 2].contains(&(rdmap & 15));
            match SegmentHeader::parse(&raw) {
                Ok(header) => {
                    assert!(ddp & 3 == 1 && rdmap >> 6 == 1 && rdmap & 15 < 8 && tagged == expected_tagged);
                    assert_eq!(header.to_raw().bytes()[..2], [ddp & 0xc3, rdmap & 0xcf]);
                }
                Err(Cause::TAGGED_VERSION) => assert!(tagged && ddp & 3 != 1),
                Err(Cause::UNTAGGED_VERSION) => assert!(!tagged && ddp & 3 != 1),
                Err(Cause::RDMAP_VERSION) => assert!(rdmap >> 6 != 1),
                Err(cause) => {
                    assert_eq!(cause, Cause::UNEXPECTED_OPCODE);
                    assert!(rdmap & 15 > 7 || tagged != expected_tagged);
                }
            }
        }
    }

    #[test]
    fn a_segment_shorter_than_its_header_has_none() {
        for length in 0..14 {
            assert_eq!(RawHeader::split(&vec![0xc1; length]), None);
        }
        for length in 0..18 {
            assert_eq!(RawHeader::split(&vec![0x41; length]), None);
        }
    }
}
