//! The 40 bytes in front of a received datagram: the network header that the packet has, or would have, on the wire
//! (interface specification 9.8, RoCE notes section 11).

use pvrdma_roce::wire::{Grh, Ipv4, Ipv6};
use pvrdma_verbs_types::{Gid, GidType, NetworkType};

/// Number of bytes of the header area.
pub(crate) const HEADER_LEN: usize = Grh::LEN;

/// Number of bytes of BTH, DETH and ICRC.
const TRANSPORT_LEN: u16 = 12 + 8 + 4;
/// Number of bytes of a UDP header.
const UDP_LEN: u16 = 8;
/// Number of bytes of an IPv4 header without options.
const IPV4_LEN: u16 = 20;

/// Fields of the header.
pub(crate) struct Header {
    pub(crate) kind: GidType,
    pub(crate) source: Gid,
    pub(crate) destination: Gid,
    pub(crate) traffic_class: u8,
    pub(crate) flow_label: u32,
    pub(crate) hop_limit: u8,
    /// Number of bytes of payload, at most a path MTU.
    pub(crate) payload: u16,
    pub(crate) immediate: bool,
}

impl Header {
    fn ipv4(&self) -> Option<([u8; 4], [u8; 4])> {
        (self.kind == GidType::RoceV2).then(|| Some((self.source.ipv4()?, self.destination.ipv4()?)))?
    }

    /// Returns the type of the network header.
    pub(crate) fn network(&self) -> NetworkType {
        match self.kind {
            GidType::RoceV1 => NetworkType::RoceV1,
            GidType::RoceV2 if self.ipv4().is_some() => NetworkType::Ipv4,
            GidType::RoceV2 => NetworkType::Ipv6,
        }
    }

    /// Returns the header area.
    pub(crate) fn bytes(&self) -> [u8; HEADER_LEN] {
        let &Self { source, destination, traffic_class, flow_label, hop_limit, .. } = self;
        let immediate = if self.immediate { 4 } else { 0 };
        let padded = self.payload.saturating_add(3) & !3;
        let transport = TRANSPORT_LEN.saturating_add(immediate).saturating_add(padded);
        if let Some((source, destination)) = self.ipv4() {
            let ip = Ipv4 { traffic_class, identification: 0, dont_fragment: true, hop_limit, source, destination };
            // The first 20 bytes stay zero, so that receivers do not mistake them for an IPv6 header.
            let mut bytes = [0; HEADER_LEN];
            bytes[HEADER_LEN - Ipv4::LEN..].copy_from_slice(&ip.to_bytes(transport.saturating_add(UDP_LEN + IPV4_LEN)));
            return bytes;
        }
        match self.kind {
            GidType::RoceV1 => Grh { traffic_class, flow_label, hop_limit, source, destination }.to_bytes(transport),
            GidType::RoceV2 => {
                let ip = Ipv6 { traffic_class, flow_label, hop_limit, source, destination };
                ip.to_bytes(transport.saturating_add(UDP_LEN))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(kind: GidType, source: &str, destination: &str) -> Header {
        let gid = |text: &str| Gid(text.parse::<std::net::Ipv6Addr>().unwrap().octets());
        Header {
            kind,
            source: gid(source),
            destination: gid(destination),
            traffic_class: 0,
            flow_label: 0x1_2345,
            hop_limit: 64,
            payload: 5,
            immediate: false,
        }
    }

    #[test]
    fn ipv4_has_a_valid_checksum_behind_twenty_zeros() {
        let header = header(GidType::RoceV2, "::ffff:192.168.77.12", "::ffff:192.168.77.11");
        assert_eq!(header.network(), NetworkType::Ipv4);
        let bytes = header.bytes();
        assert_eq!(bytes[..20], [0; 20]);
        let ip: [u8; 20] = bytes[20..].try_into().unwrap();
        // Expected values as captured from the kernel's implementation for a datagram of five bytes, except for the
        // identification.
        assert_eq!(ip[..4], [0x45, 0, 0, 0x40 - 4]);
        assert_eq!(ip[6..10], [0x40, 0, 0x40, 0x11]);
        assert_eq!(ip[12..], [192, 168, 77, 12, 192, 168, 77, 11]);
        // Checksum over a valid header (RFC 1071).
        let sum: u32 = ip.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
    }

    #[test]
    fn ipv6_and_v1() {
        let v6 = header(GidType::RoceV2, "fe80::1", "fe80::2");
        assert_eq!(v6.network(), NetworkType::Ipv6);
        let bytes = v6.bytes();
        assert_eq!(bytes[..8], [0x60, 0x01, 0x23, 0x45, 0, 40, 17, 64]);
        assert_eq!(bytes[24..], v6.destination.0);
        let v1 = header(GidType::RoceV1, "fe80::1", "::ffff:10.0.0.1");
        assert_eq!(v1.network(), NetworkType::RoceV1);
        assert_eq!(v1.bytes()[..8], [0x60, 0x01, 0x23, 0x45, 0, 32, 0x1b, 64]);
        assert_eq!(v1.bytes()[8..24], v1.source.0);
    }
}
