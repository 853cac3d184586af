//! The IPv6 header of RoCE v2 (RFC 8200). Extension headers do not occur.

use pvrdma_packet::{Ipv6Header, PROTOCOL_UDP};
use pvrdma_verbs_types::Gid;

use super::error::ParseError;
use super::grh::{FixedPart, join, parts};

/// IPv6 header fields that a sender chooses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Ipv6 {
    /// Traffic class: DSCP in bits 7-2, ECN in 1-0.
    pub traffic_class: u8,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Hop limit.
    pub hop_limit: u8,
    /// Address of the sender.
    pub source: Gid,
    /// Address of the receiver.
    pub destination: Gid,
}

impl Ipv6 {
    /// Length of the header in bytes.
    pub const LEN: usize = Ipv6Header::LEN;

    /// Parses the header, and returns it with the bytes that follow it.
    #[inline]
    pub(super) fn from_bytes(header: &[u8; Self::LEN]) -> Result<(Self, u16), ParseError> {
        let (fixed, source, destination) = parts(header);
        if fixed.version != 6 {
            return Err(ParseError::Invalid("IPv6 version"));
        }
        if fixed.next_header != PROTOCOL_UDP {
            return Err(ParseError::NotRoce);
        }
        let FixedPart { traffic_class, flow_label, hop_limit, payload_len, .. } = fixed;
        Ok((Self { traffic_class, flow_label, hop_limit, source, destination }, payload_len))
    }

    /// Encodes the header for `payload_len` bytes of payload.
    #[inline]
    pub fn to_bytes(self, payload_len: u16) -> [u8; Self::LEN] {
        let Self { traffic_class, flow_label, hop_limit, source, destination } = self;
        let next_header = PROTOCOL_UDP;
        join(
            &FixedPart { version: 6, traffic_class, flow_label, payload_len, next_header, hop_limit },
            source,
            destination,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_version_or_protocol_is_refused() {
        let bytes = Ipv6::default().to_bytes(8);
        assert_eq!(Ipv6::from_bytes(&bytes), Ok((Ipv6::default(), 8)));
        for (at, bits, refused) in [(0, 0x20, ParseError::Invalid("IPv6 version")), (6, 1, ParseError::NotRoce)] {
            let mut bytes = bytes;
            bytes[at] ^= bits;
            assert_eq!(Ipv6::from_bytes(&bytes), Err(refused));
        }
    }
}
