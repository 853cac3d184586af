//! Framed PDUs: a DDP segment with its length, pad and CRC in the byte stream (RFC 5044 4).

use thiserror::Error;

use super::RawHeader;

/// Bytes of the length field.
pub const LENGTH_LEN: usize = 2;
/// Bytes of the CRC field, which is present even if the connection does not use the CRC.
pub const CRC_LEN: usize = 4;
/// Longest FPDU: a segment of 65,535 bytes with its pad.
pub const MAX_FPDU: usize = fpdu_len(u16::MAX as usize);
/// Smallest limit on FPDUs that a sender must support: segments of 128 bytes (RFC 5044 4.1).
pub const MIN_FPDU: usize = fpdu_len(128);

/// Length of the FPDU of a segment.
pub const fn fpdu_len(segment: usize) -> usize {
    (LENGTH_LEN + segment).next_multiple_of(4) + CRC_LEN
}

/// Returns the maximum length of a segment whose FPDU fits into `room` bytes: the MULPDU, if `room` is the effective
/// MSS of the connection (RFC 5044 4.1).
pub fn max_segment(room: usize) -> usize {
    (room - room % 4).saturating_sub(LENGTH_LEN + CRC_LEN).min(usize::from(u16::MAX))
}

/// Reason why bytes are not an FPDU. Nothing behind them can be parsed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum FpduError {
    /// The length is that of no segment.
    #[error("length {0}")]
    Length(u16),
    /// The CRC does not match.
    #[error("bad CRC")]
    Crc,
}

/// An FPDU at the beginning of received bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fpdu<'a> {
    /// The DDP segment.
    pub segment: &'a [u8],
    /// Length of the FPDU in the stream.
    pub len: usize,
}

impl<'a> Fpdu<'a> {
    /// Parses the FPDU at the start of `bytes`, and checks its CRC if the connection uses it. Returns `None` if it has
    /// not arrived completely.
    ///
    /// # Errors
    /// The length is less than that of any header, or the CRC is wrong.
    pub fn parse(bytes: &'a [u8], crc: bool) -> Result<Option<Self>, FpduError> {
        let Some((length, rest)) = bytes.split_first_chunk() else { return Ok(None) };
        let length = u16::from_be_bytes(*length);
        let segment_len = usize::from(length);
        if segment_len < RawHeader::MIN_LEN {
            return Err(FpduError::Length(length));
        }
        let len = fpdu_len(segment_len);
        let (Some(segment), Some(whole)) = (rest.get(..segment_len), bytes.get(..len)) else { return Ok(None) };
        let Some((covered, sum)) = whole.split_last_chunk() else { return Ok(None) };
        if crc && crc32c::crc32c(covered) != u32::from_le_bytes(*sum) {
            return Err(FpduError::Crc);
        }
        Ok(Some(Self { segment, len }))
    }
}

/// Completes the FPDU in `out`, whose segment of `segment` bytes begins at [`LENGTH_LEN`]: writes length, pad and CRC.
/// Without `crc`, the CRC field is 0. Returns the length of the FPDU, or `None` if it does not fit.
pub fn seal(out: &mut [u8], segment: usize, crc: bool) -> Option<usize> {
    let length = u16::try_from(segment).ok()?;
    let len = fpdu_len(segment);
    let (covered, sum) = out.get_mut(..len)?.split_last_chunk_mut::<CRC_LEN>()?;
    covered.first_chunk_mut().map(|field| *field = length.to_be_bytes())?;
    covered.get_mut(LENGTH_LEN + segment..)?.fill(0);
    // The bits of the CRC are sent in the order that iSCSI defines (RFC 5044 4.4).
    *sum = if crc { crc32c::crc32c(covered).to_le_bytes() } else { [0; CRC_LEN] };
    Some(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sealed(segment: &[u8], crc: bool) -> Vec<u8> {
        let mut out = vec![0xee; fpdu_len(segment.len())];
        out[LENGTH_LEN..LENGTH_LEN + segment.len()].copy_from_slice(segment);
        let len = seal(&mut out, segment.len(), crc).unwrap();
        assert_eq!(len, out.len());
        out
    }

    #[test]
    fn lengths_are_those_of_the_rfc() {
        assert_eq!([0, 1, 2, 3, 14, 46].map(fpdu_len), [8, 8, 8, 12, 20, 52]);
        // MULPDU = EMSS - (6 + EMSS mod 4).
        for emss in [536, 1448, 1449, 1450, 1451, 8948] {
            let segment = max_segment(emss);
            assert_eq!(segment, emss - (6 + emss % 4));
            assert!(fpdu_len(segment) <= emss && fpdu_len(segment + 1) > emss - emss % 4);
        }
        assert_eq!((max_segment(0), max_segment(usize::MAX)), (0, 65535));
        assert_eq!((MAX_FPDU, MIN_FPDU), (65544, 136));
    }

    /// The values of RFC 3720 B.4, which has the same CRC.
    #[test]
    fn the_crc_is_that_of_iscsi() {
        assert_eq!(crc32c::crc32c(&[0; 32]).to_le_bytes(), [0xaa, 0x36, 0x91, 0x8a]);
        assert_eq!(crc32c::crc32c(&[0xff; 32]).to_le_bytes(), [0x43, 0xab, 0xa8, 0x62]);
    }

    #[test]
    fn every_cut_is_incomplete_and_every_flipped_bit_is_found() {
        for length in [14, 15, 16, 17, 255] {
            let segment: Vec<u8> = (0..length).collect();
            let bytes = sealed(&segment, true);
            assert_eq!(Fpdu::parse(&bytes, true), Ok(Some(Fpdu { segment: &segment, len: bytes.len() })));
            for cut in 0..bytes.len() {
                assert_eq!(Fpdu::parse(&bytes[..cut], true), Ok(None));
            }
            for bit in 16..bytes.len() * 8 {
                let mut damaged = bytes.clone();
                damaged[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(Fpdu::parse(&damaged, true), Err(FpduError::Crc));
            }
        }
    }

    #[test]
    fn without_crc_the_field_is_there_and_ignored() {
        let mut bytes = sealed(&[7; 14], false);
        assert_eq!(bytes[16..], [0; 4]);
        bytes[17] = 9;
        assert!(Fpdu::parse(&bytes, false).is_ok_and(|parsed| parsed.is_some()));
    }

    #[test]
    fn a_short_length_is_refused_before_the_rest_arrives() {
        for length in 0..14_u16 {
            assert_eq!(Fpdu::parse(&length.to_be_bytes(), true), Err(FpduError::Length(length)));
        }
    }

    #[test]
    fn an_fpdu_that_does_not_fit_is_not_sealed() {
        assert_eq!(seal(&mut [0; 19], 14, true), None);
        assert_eq!(seal(&mut vec![0; 70_000], 65_536, true), None);
    }
}
