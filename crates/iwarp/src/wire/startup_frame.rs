//! The request and the reply of the MPA startup (RFC 5044 7.1, RFC 6581 6).

use pvrdma_packet::field::field;
use thiserror::Error;

/// Longest private data, with the enhanced data in it.
pub const MAX_PRIVATE_DATA: usize = 512;
/// Value of IRD or ORD that is not negotiated.
pub const NOT_NEGOTIATED: u16 = 0x3fff;
/// Bytes in front of the private data.
const HEADER_LEN: usize = 20;
/// Longest frame.
pub const MAX_STARTUP_FRAME: usize = HEADER_LEN + MAX_PRIVATE_DATA;

const MARKERS: u8 = 0x80;
const CRC: u8 = 0x40;
const REJECTED: u8 = 0x20;
const ENHANCED: u8 = 0x10;
/// Flag of the IRD field: a ready-to-receive message is requested, or will be sent.
const PEER_TO_PEER: u16 = 0x8000;
/// Second flag of each field: the RTR may be a zero-length SEND (IRD field) or READ (ORD field).
const SECOND: u16 = 0x4000;
/// First flag of the ORD field: the RTR may be a zero-length WRITE.
const RTR_WRITE: u16 = 0x8000;

/// Direction of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FrameKind {
    /// From the initiator.
    Request,
    /// From the responder.
    Reply,
}

impl FrameKind {
    const fn key(self) -> &'static [u8; 16] {
        match self {
            Self::Request => b"MPA ID Req Frame",
            Self::Reply => b"MPA ID Rep Frame",
        }
    }
}

/// Enhanced data of revision 2: READ resources and ready-to-receive message (RTR).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Enhanced {
    /// The initiator sends an RTR before anything else.
    pub peer_to_peer: bool,
    /// The RTR may be a zero-length SEND.
    pub rtr_send: bool,
    /// The RTR may be a zero-length WRITE.
    pub rtr_write: bool,
    /// The RTR may be a zero-length READ.
    pub rtr_read: bool,
    /// Number of READ requests that the sender of the frame executes at a time, or [`NOT_NEGOTIATED`].
    pub ird: u16,
    /// Number of READ requests that the sender of the frame may have outstanding, or [`NOT_NEGOTIATED`].
    pub ord: u16,
}

impl Enhanced {
    const LEN: usize = 4;

    fn from_bytes(bytes: [u8; Self::LEN]) -> Self {
        let ird = u16::from_be_bytes(field::<0, _, _>(&bytes));
        let ord = u16::from_be_bytes(field::<2, _, _>(&bytes));
        Self {
            peer_to_peer: ird & PEER_TO_PEER != 0,
            rtr_send: ird & SECOND != 0,
            rtr_write: ord & RTR_WRITE != 0,
            rtr_read: ord & SECOND != 0,
            ird: ird & NOT_NEGOTIATED,
            ord: ord & NOT_NEGOTIATED,
        }
    }

    fn to_bytes(self) -> [u8; Self::LEN] {
        let bit = |set: bool, bit: u16| if set { bit } else { 0 };
        let ird = bit(self.peer_to_peer, PEER_TO_PEER) | bit(self.rtr_send, SECOND) | self.ird & NOT_NEGOTIATED;
        let ord = bit(self.rtr_write, RTR_WRITE) | bit(self.rtr_read, SECOND) | self.ord & NOT_NEGOTIATED;
        let ([i0, i1], [o0, o1]) = (ird.to_be_bytes(), ord.to_be_bytes());
        [i0, i1, o0, o1]
    }
}

/// A frame of the startup.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StartupFrame {
    /// Direction.
    pub kind: FrameKind,
    /// The sender wants to receive markers.
    pub markers: bool,
    /// The sender wants the CRC to be used.
    pub crc: bool,
    /// The connection is rejected; in replies only.
    pub rejected: bool,
    /// Revision, 1 or 2.
    pub revision: u8,
    /// Enhanced data, in revision 2 only.
    pub enhanced: Option<Enhanced>,
    /// Private data of the program.
    pub private_data: Vec<u8>,
}

/// Reason why bytes are not a frame of the startup.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum FrameError {
    /// The key is not that of the frame.
    #[error("not a frame of the MPA startup")]
    Key,
    /// The revision is unknown.
    #[error("MPA revision {0}")]
    Revision(u8),
    /// The private data is longer than the RFC allows, or shorter than its enhanced data.
    #[error("{0} bytes of private data")]
    PrivateData(u16),
}

impl StartupFrame {
    /// Parses the frame at the start of `bytes`. Returns it with its length, or `None` if it has not arrived
    /// completely. Reserved bits are ignored.
    ///
    /// # Errors
    /// The bytes cannot become a frame of this kind.
    pub fn parse(kind: FrameKind, bytes: &[u8]) -> Result<Option<(Self, usize)>, FrameError> {
        let shorter = bytes.iter().zip(kind.key());
        if shorter.clone().any(|(got, wanted)| got != wanted) {
            return Err(FrameError::Key);
        }
        let Some((header, rest)) = bytes.split_first_chunk::<HEADER_LEN>() else { return Ok(None) };
        let [flags, revision] = field::<16, 2, _>(header);
        let length = u16::from_be_bytes(field::<18, _, _>(header));
        if !matches!(revision, 1 | 2) {
            return Err(FrameError::Revision(revision));
        }
        let enhanced = revision == 2 && flags & ENHANCED != 0;
        let private_len = usize::from(length);
        if private_len > MAX_PRIVATE_DATA || enhanced && private_len < Enhanced::LEN {
            return Err(FrameError::PrivateData(length));
        }
        let Some(mut private_data) = rest.get(..private_len) else { return Ok(None) };
        let enhanced = match private_data.split_first_chunk() {
            Some((bytes, behind)) if enhanced => {
                private_data = behind;
                Some(Enhanced::from_bytes(*bytes))
            }
            _ => None,
        };
        let frame = Self {
            kind,
            markers: flags & MARKERS != 0,
            crc: flags & CRC != 0,
            rejected: kind == FrameKind::Reply && flags & REJECTED != 0,
            revision,
            enhanced,
            private_data: private_data.to_vec(),
        };
        Ok(Some((frame, HEADER_LEN + private_len)))
    }

    /// Encodes the frame. Private data beyond [`MAX_PRIVATE_DATA`] is cut.
    pub fn to_bytes(&self) -> Vec<u8> {
        let bit = |set: bool, bit: u8| if set { bit } else { 0 };
        let flags = bit(self.markers, MARKERS)
            | bit(self.crc, CRC)
            | bit(self.rejected, REJECTED)
            | bit(self.enhanced.is_some(), ENHANCED);
        let mut private_data = Vec::with_capacity(MAX_PRIVATE_DATA);
        private_data.extend(self.enhanced.into_iter().flat_map(Enhanced::to_bytes));
        let room = MAX_PRIVATE_DATA.saturating_sub(private_data.len());
        private_data.extend(self.private_data.iter().take(room));
        let length = u16::try_from(private_data.len()).unwrap_or_default();
        let mut bytes = self.kind.key().to_vec();
        bytes.extend([flags, self.revision]);
        bytes.extend(length.to_be_bytes());
        bytes.extend(private_data);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> StartupFrame {
        StartupFrame {
            kind: FrameKind::Request,
            markers: false,
            crc: true,
            rejected: false,
            revision: 2,
            enhanced: Some(Enhanced { peer_to_peer: true, rtr_read: true, ird: 16, ord: 300, ..Enhanced::default() }),
            private_data: vec![7; 56],
        }
    }

    #[test]
    fn a_request_has_the_bytes_of_the_rfc() {
        let bytes = request().to_bytes();
        assert_eq!(bytes[..24], *b"MPA ID Req Frame\x50\x02\x00\x3c\x80\x10\x41\x2c");
        assert_eq!(bytes[24..], [7; 56]);
        assert_eq!(StartupFrame::parse(FrameKind::Request, &bytes), Ok(Some((request(), 80))));
    }

    #[test]
    fn every_flag_and_reserved_bit() {
        for flags in 0..=u8::MAX {
            for enhanced in 0..=15_u16 {
                let mut bytes = request().to_bytes();
                bytes[16] = flags;
                bytes[20] = (bytes[20] & 0x3f) | u8::try_from(enhanced & 3).unwrap() << 6;
                bytes[22] = (bytes[22] & 0x3f) | u8::try_from(enhanced >> 2).unwrap() << 6;
                let (frame, _) = StartupFrame::parse(FrameKind::Request, &bytes).unwrap().unwrap();
                // Rejections are in replies, and reserved bits are ignored.
                bytes[16] = flags & 0xd0;
                assert_eq!(frame.to_bytes(), bytes);
            }
        }
    }

    #[test]
    fn a_reply_can_reject() {
        let reply = StartupFrame { kind: FrameKind::Reply, rejected: true, revision: 1, enhanced: None, ..request() };
        let bytes = reply.to_bytes();
        assert_eq!(bytes[..20], *b"MPA ID Rep Frame\x60\x01\x00\x38");
        assert_eq!(StartupFrame::parse(FrameKind::Reply, &bytes), Ok(Some((reply, 76))));
        assert_eq!(StartupFrame::parse(FrameKind::Request, &bytes), Err(FrameError::Key));
    }

    #[test]
    fn every_cut_is_incomplete() {
        let bytes = request().to_bytes();
        for cut in 0..bytes.len() {
            assert_eq!(StartupFrame::parse(FrameKind::Request, &bytes[..cut]), Ok(None));
        }
    }

    #[test]
    fn a_wrong_key_is_found_at_its_first_wrong_byte() {
        let bytes = request().to_bytes();
        for at in 0..16 {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1;
            assert_eq!(StartupFrame::parse(FrameKind::Request, &bytes[..=at]), Err(FrameError::Key));
        }
    }

    #[test]
    fn revisions_and_lengths_beyond_the_rfc_are_refused() {
        let with = |at: usize, value: &[u8]| {
            let mut bytes = request().to_bytes();
            bytes.truncate(20);
            bytes[at..at + value.len()].copy_from_slice(value);
            StartupFrame::parse(FrameKind::Request, &bytes)
        };
        for revision in [0, 3, 255] {
            assert_eq!(with(17, &[revision]), Err(FrameError::Revision(revision)));
        }
        for length in [0, 3, 513, u16::MAX] {
            assert_eq!(with(18, &length.to_be_bytes()), Err(FrameError::PrivateData(length)));
        }
        assert_eq!(with(18, &512_u16.to_be_bytes()), Ok(None));
        // Revision 1 has no enhanced data, so none is missing.
        assert!(
            with(16, &[0x50, 1, 0, 0]).is_ok_and(|parsed| parsed.is_some_and(|(frame, _)| frame.enhanced.is_none()))
        );
    }
}
