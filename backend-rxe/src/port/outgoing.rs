//! Classification of frames of the network function: RoCE, or a message about the addresses of a host.
//!
//! Such a frame would speak for the RDMA function or for another host. Receivers parse as liberally as the standards
//! allow, so this parser also looks behind VLAN tags and IPv6 extension headers. A frame that it cannot parse, but some
//! receiver might, is dropped.

use pvrdma_packet::field::be16;
use pvrdma_packet::{Discovery, EtherType, Ethernet, Extension, ExtensionKind, Ipv6Header, PROTOCOL_UDP, Vlan};

use super::classify::{ipv4_roce, is_roce_port};
use super::stations::{self, Station};

/// Maximum number of tags that the parser looks behind.
const MOST_TAGS: usize = 7;
/// Maximum number of headers behind that of IPv6 that the parser looks at.
const MOST_HEADERS: usize = 8;
/// Maximum value of the length field, which is at the place of the ethertype. IEEE 802.3 leaves the values from 1501 on
/// undefined, but Linux takes them for lengths, too.
const MAX_LENGTH: u16 = 0x5ff;

/// Claim that a frame makes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Claim {
    /// Nothing that concerns the RDMA function or the addresses of hosts.
    None,
    /// The frame is a packet of a queue pair.
    Roce,
    /// The frame controls the Ethernet link, and not only for its sender.
    Control,
    /// Unknown: there may be more headers than this parser follows, or the rest is in another fragment.
    Hidden,
    /// The frame is ARP, RARP or neighbour discovery, but cannot be parsed.
    Unclear,
    /// Statement of a host about itself.
    Station(Station),
}

/// Returns the claim that a frame makes.
pub(super) fn claim(frame: &[u8]) -> Claim {
    let Some((kind, body)) = behind_tags(frame) else { return Claim::Hidden };
    match kind {
        Some(EtherType::ROCE) => Claim::Roce,
        Some(EtherType::MAC_CONTROL) => Claim::Control,
        Some(EtherType::IPV4) => roce_if(ipv4_roce(body).is_some()),
        Some(EtherType::IPV6) => ipv6(body),
        Some(EtherType::ARP) => station(stations::arp(body)),
        Some(EtherType::RARP) => station(stations::rarp(body)),
        Some(EtherType(..=MAX_LENGTH)) => snap(body),
        _ => Claim::None,
    }
}

/// Returns the ethertype behind all tags, including those of pre-standard bridges, and the bytes that follow it.
/// `None`: the frame has more tags than networks use.
#[inline]
pub(super) fn behind_tags(frame: &[u8]) -> Option<(Option<EtherType>, &[u8])> {
    let (at, kind) = Ethernet::behind_tags(frame, MOST_TAGS, EtherType::is_tag);
    (!kind.is_some_and(EtherType::is_tag)).then(|| (kind, frame.get(at..).unwrap_or_default()))
}

/// Iterates over the VLANs that the tags of a frame name, the outermost first. VLAN 0 is none.
pub(super) fn vlans(frame: &[u8]) -> impl Iterator<Item = u16> {
    let tags = (Ethernet::TYPE_AT..).step_by(Ethernet::TAG_LEN).take(MOST_TAGS);
    let tags = tags.map_while(|at| be16(frame, at + 2).filter(|_| EtherType(be16(frame, at).unwrap_or(0)).is_tag()));
    tags.map(|control| Vlan::from_tci(control.to_be_bytes()).vid).filter(|&vid| vid != 0)
}

const fn roce_if(is_roce: bool) -> Claim {
    if is_roce { Claim::Roce } else { Claim::None }
}

fn station(parsed: Option<Station>) -> Claim {
    parsed.map_or(Claim::Unclear, Claim::Station)
}

/// Classifies an IEEE 802.3 frame. With a SNAP header (RFC 1042) it can carry any ethertype as well. Hosts do not send
/// IP that way, but some accept it.
fn snap(body: &[u8]) -> Claim {
    let Some([0xaa, 0xaa, 3, _, _, _, high, low]) = body.first_chunk() else { return Claim::None };
    match EtherType(u16::from_be_bytes([*high, *low])) {
        EtherType::ROCE | EtherType::IPV4 | EtherType::IPV6 | EtherType::ARP | EtherType::RARP => Claim::Unclear,
        kind if kind.is_tag() => Claim::Unclear,
        _ => Claim::None,
    }
}

fn ipv6(body: &[u8]) -> Claim {
    match transport(body) {
        Transport::Udp(at) => roce_if(is_roce_port(body, at)),
        Transport::Discovery(at) => station(stations::discovery(body, at)),
        Transport::FragmentOfDiscovery => Claim::Unclear,
        Transport::Hidden => Claim::Hidden,
        Transport::Other => Claim::None,
    }
}

/// Protocol behind the extension headers of an IPv6 packet, with its offset.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Transport {
    Udp(usize),
    /// A message of neighbour discovery.
    Discovery(usize),
    /// A message of neighbour discovery in a fragment, which receivers should ignore (RFC 6980).
    FragmentOfDiscovery,
    /// Not visible to this parser, although a receiver may find it.
    Hidden,
    /// Any other protocol, or none.
    Other,
}

/// Looks behind the extension headers of an IPv6 packet. Unlike [`pvrdma_packet::IpPacket`], this does not examine
/// version and lengths, and looks behind authentication headers and at first fragments: some receiver may do the same.
pub(super) fn transport(body: &[u8]) -> Transport {
    let Some(mut header) = Ipv6Header::new(body).next_header() else { return Transport::Other };
    let mut at = Ipv6Header::LEN;
    for _ in 0..MOST_HEADERS {
        let rest = body.get(at..).unwrap_or_default();
        match (header, rest) {
            (PROTOCOL_UDP, _) => return Transport::Udp(at),
            (Discovery::PROTOCOL, [kind, ..]) if Discovery::is_type(*kind) => return Transport::Discovery(at),
            _ => {}
        }
        let Ok(Some(extension)) = Extension::parse(header, rest) else { return Transport::Other };
        at += extension.len;
        match extension.kind {
            ExtensionKind::Fragment { is_first: false } => return Transport::Other,
            ExtensionKind::Fragment { is_first: true } => return in_first_fragment(body, extension.next, at),
            ExtensionKind::Options | ExtensionKind::Authentication => {}
        }
        header = extension.next;
    }
    Transport::Hidden
}

/// Returns the protocol with number `header`, which follows a fragment header at `at`. Only a header in the first eight
/// bytes is certain: other headers may be in the next fragment, although RFC 7112 forbids that, or be replaced by a
/// fragment that overlaps this one.
fn in_first_fragment(body: &[u8], header: u8, at: usize) -> Transport {
    // Receivers ignore bytes behind the end of the packet, so those may contradict the next fragment.
    let length = Ipv6Header::new(body).payload_len().unwrap_or(0);
    let end = body.len().min(Ipv6Header::LEN.saturating_add(length.into()));
    if end < at.saturating_add(4) {
        return Transport::Hidden;
    }
    let rest = body.get(at..end).unwrap_or_default();
    match (header, rest) {
        (PROTOCOL_UDP, _) => Transport::Udp(at),
        (Discovery::PROTOCOL, [kind, ..]) if Discovery::is_type(*kind) => Transport::FragmentOfDiscovery,
        _ if matches!(Extension::parse(header, rest), Ok(None)) => Transport::Other,
        _ => Transport::Hidden,
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use pvrdma_packet::MacAddr;

    use super::*;

    fn frame(tags: &[u8], kind: u16, body: &[u8]) -> Vec<u8> {
        [&[9; Ethernet::TYPE_AT], tags, &kind.to_be_bytes(), body].concat()
    }

    fn v4(fragment: [u8; 2], options: usize, port: u16) -> Vec<u8> {
        let mut body = vec![0; 20 + options + 8];
        body[0] = 0x45 + u8::try_from(options / 4).unwrap();
        (body[6], body[7], body[9]) = (fragment[0], fragment[1], 17);
        body[20 + options + 2..][..2].copy_from_slice(&port.to_be_bytes());
        body
    }

    /// Builds an IPv6 packet with these headers, each given with its own protocol number.
    fn v6(headers: &[(u8, &[u8])]) -> Vec<u8> {
        let mut body = vec![0; Ipv6Header::LEN];
        (body[0], body[6], body[7]) = (0x60, headers[0].0, 255);
        body[8..24].copy_from_slice(&[0xfd; 16]);
        for (at, (_, bytes)) in headers.iter().enumerate() {
            let mut bytes = bytes.to_vec();
            if let Some((next, _)) = headers.get(at + 1) {
                bytes[0] = *next;
            }
            body.extend(bytes);
        }
        let length = u16::try_from(body.len() - Ipv6Header::LEN).unwrap();
        body[4..6].copy_from_slice(&length.to_be_bytes());
        body
    }

    const UDP: &[u8] = &[0, 1, 0x12, 0xb7, 0, 8, 0, 0];
    const OPTIONS: &[u8] = &[0; 8];
    const FIRST: &[u8] = &[0, 0, 0, 1, 0, 0, 0, 7];
    const AUTHENTICATION_24: &[u8] = &[0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    const LATER: &[u8] = &[0, 0, 0, 9, 0, 0, 0, 7];

    #[test]
    fn roce_in_every_dress() {
        let roce = |frame: Vec<u8>| matches!(claim(&frame), Claim::Roce | Claim::Hidden);
        let tags: &[&[u8]] = &[
            &[],
            &[0x81, 0, 0, 5],
            &[0x88, 0xa8, 0, 5, 0x81, 0, 0, 5],
            &[0x91, 0, 0, 5, 0x81, 0, 0, 5, 0x81, 0, 0, 5],
        ];
        for tag in tags {
            assert!(roce(frame(tag, 0x8915, &[])));
            for (body, expected) in [
                (v4([0, 0], 0, 4791), true),
                (v4([0x20, 0], 8, 4791), true),
                (v4([0, 0], 0, 4790), false),
                (v4([0x20, 1], 0, 4791), false),
            ] {
                assert_eq!(roce(frame(tag, 0x0800, &body)), expected);
            }
            for (headers, expected) in [
                (&[(17, UDP)][..], true),
                (&[(0, OPTIONS), (43, OPTIONS), (60, OPTIONS), (17, UDP)], true),
                // Headers of mobility, host identity and Shim6.
                (&[(135, OPTIONS), (139, OPTIONS), (140, OPTIONS), (17, UDP)], true),
                (&[(44, FIRST), (17, UDP)], true),
                (&[(44, FIRST), (60, OPTIONS), (17, UDP)], true),
                // The port is in the next fragment.
                (&[(44, FIRST), (60, OPTIONS)], true),
                (&[(44, LATER), (17, UDP)], false),
                (&[(51, AUTHENTICATION_24), (17, UDP)], true),
                (&[(6, UDP)], false),
                (&[(59, UDP)], false),
                (&[(60, OPTIONS); 9], true),
            ] {
                assert_eq!(roce(frame(tag, 0x86dd, &v6(headers))), expected, "{headers:?}");
            }
        }
        assert!(roce(frame(&[0x81, 0, 0, 5].repeat(9), 0x0800, &[])), "too many tags to look behind");
        assert_eq!(claim(&frame(&[], 0x0806, &[0; 28])), Claim::Unclear);
    }

    /// An overlapping fragment may replace a header that is not at the beginning of the first one, and what looks like
    /// the header behind the last byte of the packet is padding.
    #[test]
    fn a_first_fragment_hides_no_header() {
        let other: &[u8] = &[0, 1, 0, 53, 0, 8, 0, 0];
        let echo: &[u8] = &[128, 0, 0, 0, 0, 0, 0, 0];
        for (protocol, header) in [(17, other), (58, echo)] {
            let plain = |headers: &[(u8, &[u8])]| claim(&frame(&[], 0x86dd, &v6(headers)));
            assert_eq!(plain(&[(44, FIRST), (protocol, header)]), Claim::None);
            assert_eq!(plain(&[(44, FIRST), (60, OPTIONS), (protocol, header)]), Claim::Hidden);
            assert_eq!(plain(&[(44, FIRST), (60, OPTIONS), (44, FIRST), (protocol, header)]), Claim::Hidden);
            let mut padded = v6(&[(44, FIRST), (protocol, header)]);
            for (length, expected) in [(8, Claim::Hidden), (11, Claim::Hidden), (12, Claim::None)] {
                padded[5] = length;
                assert_eq!(claim(&frame(&[], 0x86dd, &padded)), expected, "{length}");
            }
        }
        assert_eq!(claim(&frame(&[], 0x86dd, &v6(&[(44, FIRST), (6, &[0; 20])]))), Claim::None, "TCP");
        assert_eq!(claim(&frame(&[], 0x86dd, &v6(&[(44, FIRST), (60, &[6, 0])]))), Claim::Hidden, "incomplete");
    }

    /// Linux takes every value below 0x600 for a length.
    #[test]
    fn snap_hides_no_packet() {
        let snap = |length, kind: u16| {
            claim(&frame(&[], length, &[&[0xaa, 0xaa, 3, 0, 0, 0][..], &kind.to_be_bytes(), &[0; 40]].concat()))
        };
        for length in [0, 48, 1500, 1501, 0x5ff] {
            for kind in [0x8915, 0x800, 0x86dd, 0x806, 0x8035, 0x8100] {
                assert_eq!(snap(length, kind), Claim::Unclear, "{length} {kind:x}");
            }
            assert_eq!(snap(length, 0x88b5), Claim::None);
        }
        assert_eq!(snap(0x600, 0x806), Claim::None);
    }

    #[test]
    fn short_frames_claim_nothing() {
        let whole = frame(&[0x81, 0, 0, 5], 0x86dd, &v6(&[(0, OPTIONS), (17, UDP)]));
        assert!((0..whole.len() - 4).all(|length| claim(&whole[..length]) == Claim::None));
    }

    #[test]
    fn address_claims_of_arp_and_neighbour_discovery() {
        let arp = |sender: [u8; 4]| {
            let body = [&[0, 1, 8, 0, 6, 4, 0, 1, 2, 2, 2, 2, 2, 2][..], &sender, &[0; 10]].concat();
            claim(&frame(&[], 0x0806, &body))
        };
        let gid = |text: &str| Some(text.parse::<IpAddr>().unwrap().into());
        let hardware = Some(MacAddr([2; 6]));
        let station = |addresses| Station { addresses, probed: None, hardware, is_router: false };
        assert_eq!(arp([10, 0, 0, 7]), Claim::Station(station([gid("10.0.0.7"), None])));
        assert_eq!(arp([0; 4]), Claim::Station(station([None, None])));
        let message = |kind| {
            let option: &[u8] = &[1, 1, 2, 2, 2, 2, 2, 2];
            [&[kind, 0, 0, 0, 0, 0, 0, 0][..], &[0xfc; 16], option].concat()
        };
        let source = gid("fdfd:fdfd:fdfd:fdfd:fdfd:fdfd:fdfd:fdfd");
        let target = gid("fcfc:fcfc:fcfc:fcfc:fcfc:fcfc:fcfc:fcfc");
        for (kind, expected) in [
            (135, Claim::Station(station([source, None]))),
            (136, Claim::Station(station([source, target]))),
            (128, Claim::None),
        ] {
            for headers in [&[(58, &*message(kind))][..], &[(0, OPTIONS), (58, &message(kind))]] {
                assert_eq!(claim(&frame(&[], 0x86dd, &v6(headers))), expected);
            }
        }
    }
}
