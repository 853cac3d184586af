//! The global route header of RoCE v1.

use pvrdma_packet::field::{field, put, u24, u24_bytes};
use pvrdma_verbs_types::Gid;

use super::error::ParseError;

/// Header of 40 bytes with the layout of IPv6, announced by ethertype 0x8915 (IBA 8.3).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Grh {
    /// Traffic class: DSCP in bits 7-2, ECN in 1-0.
    pub traffic_class: u8,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Hop limit; without effect, because RoCE v1 is not routed.
    pub hop_limit: u8,
    /// GID of the sender.
    pub source: Gid,
    /// GID of the receiver.
    pub destination: Gid,
}

impl Grh {
    /// Length of the header in bytes.
    pub const LEN: usize = 40;
    /// Next header: InfiniBand transport.
    const NEXT_HEADER: u8 = 0x1b;

    /// Parses the header, and returns it with the bytes that follow it (BTH through ICRC).
    #[inline]
    pub(super) fn from_bytes(header: &[u8; Self::LEN]) -> Result<(Self, u16), ParseError> {
        let (fixed, source, destination) = parts(header);
        if fixed.version != 6 || fixed.next_header != Self::NEXT_HEADER {
            return Err(ParseError::Invalid("global route header"));
        }
        let FixedPart { traffic_class, flow_label, hop_limit, payload_len, .. } = fixed;
        Ok((Self { traffic_class, flow_label, hop_limit, source, destination }, payload_len))
    }

    /// Encodes the header for `payload_len` bytes of payload.
    #[inline]
    pub fn to_bytes(self, payload_len: u16) -> [u8; Self::LEN] {
        let Self { traffic_class, flow_label, hop_limit, source, destination } = self;
        let next_header = Self::NEXT_HEADER;
        join(
            &FixedPart { version: 6, traffic_class, flow_label, payload_len, next_header, hop_limit },
            source,
            destination,
        )
    }
}

/// The first eight bytes, which GRH and IPv6 share.
pub(super) struct FixedPart {
    pub(super) version: u8,
    pub(super) traffic_class: u8,
    pub(super) flow_label: u32,
    pub(super) payload_len: u16,
    pub(super) next_header: u8,
    pub(super) hop_limit: u8,
}

#[inline]
pub(super) fn parts(header: &[u8; 40]) -> (FixedPart, Gid, Gid) {
    let [first, second, label_middle, label_low] = field::<0, _, _>(header);
    let [next_header, hop_limit] = field::<6, _, _>(header);
    let fixed = FixedPart {
        version: first >> 4,
        traffic_class: first << 4 | second >> 4,
        flow_label: u24([second & 0xf, label_middle, label_low]),
        payload_len: u16::from_be_bytes(field::<4, _, _>(header)),
        next_header,
        hop_limit,
    };
    (fixed, Gid(field::<8, _, _>(header)), Gid(field::<24, _, _>(header)))
}

#[inline]
pub(super) fn join(fixed: &FixedPart, source: Gid, destination: Gid) -> [u8; 40] {
    let [label_high, label_middle, label_low] = u24_bytes(fixed.flow_label);
    let first = fixed.version << 4 | fixed.traffic_class >> 4;
    let second = fixed.traffic_class << 4 | label_high & 0xf;
    let mut header = [0; 40];
    put::<0, _, _>(&mut header, [first, second, label_middle, label_low]);
    put::<4, _, _>(&mut header, fixed.payload_len.to_be_bytes());
    put::<6, _, _>(&mut header, [fixed.next_header, fixed.hop_limit]);
    put::<8, _, _>(&mut header, source.0);
    put::<24, _, _>(&mut header, destination.0);
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_field_has_its_bits() {
        let grh = Grh {
            traffic_class: 0xa5,
            flow_label: 0xc_b97f,
            hop_limit: 64,
            source: Gid([1; 16]),
            destination: Gid([2; 16]),
        };
        let bytes = grh.to_bytes(0x1234);
        assert_eq!(bytes[..8], [0x6a, 0x5c, 0xb9, 0x7f, 0x12, 0x34, 0x1b, 64]);
        assert_eq!(Grh::from_bytes(&bytes), Ok((grh, 0x1234)));
        // Excess bits are cut off.
        assert_eq!(Grh { flow_label: 0xfff0_0000, ..grh }.to_bytes(0)[..4], [0x6a, 0x50, 0, 0]);
    }

    #[test]
    fn another_version_or_protocol_is_refused() {
        for (at, bits) in [(0, 0x20), (6, 1)] {
            let mut bytes = Grh::default().to_bytes(0);
            bytes[at] ^= bits;
            assert_eq!(Grh::from_bytes(&bytes), Err(ParseError::Invalid("global route header")));
        }
    }
}
