//! The UDP header of RoCE v2 (RFC 768, IBA annex A17) and the choice of source ports.

use pvrdma_packet::{
    ROCE_PORT, UdpHeader,
    field::{field, put},
};
use pvrdma_verbs_types::Qpn;

/// First source port. With the 14 selectable bits it gives 0xc000..=0xffff.
const FIRST_SOURCE_PORT: u16 = 0xc000;

/// UDP header fields that a sender chooses. The destination port is always [`ROCE_PORT`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Udp {
    /// Source port. Constant for a QP, so that a QP is one flow; the receiver ignores it.
    pub source_port: u16,
    /// Checksum; 0 means none, and is sent over IPv4 and IPv6 alike.
    pub checksum: u16,
}

/// Information that parsing needs besides the values.
pub(super) struct Parsed {
    pub(super) udp: Udp,
    pub(super) destination_port: u16,
    pub(super) length: u16,
}

impl Udp {
    /// Length of the header in bytes.
    pub const LEN: usize = UdpHeader::LEN;

    #[inline]
    pub(super) fn from_bytes(header: &[u8; Self::LEN]) -> Parsed {
        let word = u16::from_be_bytes;
        Parsed {
            udp: Self { source_port: word(field::<0, _, _>(header)), checksum: word(field::<6, _, _>(header)) },
            destination_port: word(field::<2, _, _>(header)),
            length: word(field::<4, _, _>(header)),
        }
    }

    #[inline]
    pub(super) fn to_bytes(self, length: u16) -> [u8; Self::LEN] {
        let mut header = [0; Self::LEN];
        put::<0, _, _>(&mut header, self.source_port.to_be_bytes());
        put::<2, _, _>(&mut header, ROCE_PORT.to_be_bytes());
        put::<4, _, _>(&mut header, length.to_be_bytes());
        put::<6, _, _>(&mut header, self.checksum.to_be_bytes());
        header
    }
}

/// Flow label of a connected QP: that of the consumer or, if it is 0, one computed from both QPNs as Linux does for the
/// source port. Routers that select paths by the label see one flow for each connection.
#[inline]
pub const fn connected_flow_label(flow_label: u32, local: Qpn, remote: Qpn) -> u32 {
    let label = flow_label & 0xf_ffff;
    if label != 0 {
        return label;
    }
    let mut mix = local.get() as u64 * remote.get() as u64;
    mix ^= mix >> 20;
    mix ^= mix >> 40;
    low_bits(mix)
}

/// Source port of a connected QP, chosen as Linux does: from the flow label, or from both QPNs if that is 0.
#[inline]
pub const fn connected_source_port(flow_label: u32, local: Qpn, remote: Qpn) -> u16 {
    let label = connected_flow_label(flow_label, local, remote);
    let [_, _, high, low] = ((label & 0x3fff) ^ (label >> 14)).to_be_bytes();
    FIRST_SOURCE_PORT | u16::from_be_bytes([high, low])
}

/// Source port of a datagram QP, chosen as Linux does.
#[inline]
pub const fn datagram_source_port(local: Qpn) -> u16 {
    let [_, _, high, low] = (local.get().wrapping_mul(0x61c8_8647) >> 18).to_be_bytes();
    FIRST_SOURCE_PORT | u16::from_be_bytes([high, low])
}

/// Returns the low 20 bits.
const fn low_bits(mix: u64) -> u32 {
    let [.., b2, b1, b0] = mix.to_be_bytes();
    u32::from_be_bytes([0, b2 & 0xf, b1, b0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_ports_of_linux() {
        let (a, b) = (Qpn::new(0x11), Qpn::new(0x211));
        assert_eq!(connected_source_port(0, a, b), 0xe321);
        assert_eq!(connected_source_port(0, b, a), 0xe321);
        assert_eq!(connected_source_port(0x12345, a, b), 0xe341);
        assert_eq!(datagram_source_port(Qpn::GSI), 55410);
        // A product of 48 bits, folded twice.
        let (c, d) = (Qpn::new(0x00fe_dcba), Qpn::new(0x0098_7654));
        assert_eq!(connected_flow_label(0, c, d), 0x2_a423);
        assert_eq!(connected_source_port(0, c, d), 0xe429);
    }
}
