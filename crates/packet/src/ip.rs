//! IP packets whose lengths all agree, with the offsets of their parts.

use core::ops::Range;

use crate::{EtherType, Ethernet, Extension, ExtensionKind, Ipv4Header, Ipv6Header, TcpHeader, UdpHeader};
use crate::{PROTOCOL_TCP, PROTOCOL_UDP};

/// Highest number of tags in front of the IP header.
const MAX_TAGS: usize = 2;
/// Highest number of extension headers that are parsed.
const MAX_EXTENSIONS: usize = 8;

/// IP version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IpVersion {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// Transport header of an unfragmented packet. All numbers are byte offsets in the frame, and lie in the packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transport {
    /// TCP: its offset, and the length of its header with options, in bytes.
    Tcp {
        /// Start of the header.
        offset: usize,
        /// Length of the header with its options, in bytes.
        header_len: usize,
    },
    /// UDP: its offset.
    Udp {
        /// Start of the header.
        offset: usize,
    },
}

/// A complete IP packet in a frame. All numbers are byte offsets in the frame, and lie in it.
///
/// A device that calculates checksums or cuts segments needs such a packet, because it writes at these offsets. A guard
/// against packets that some receiver may accept must be more lenient, and works on [`Ipv4Header`] and [`Ipv6Header`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IpPacket {
    /// Version.
    pub version: IpVersion,
    /// Start of the header.
    pub offset: usize,
    /// End of the IPv4 header, or of the IPv6 extension headers.
    pub payload: usize,
    /// End of the packet. Padding may follow.
    pub end: usize,
    /// Protocol of the payload.
    pub protocol: u8,
    /// The packet is a fragment.
    pub fragment: bool,
}

impl IpPacket {
    /// Looks behind at most two tags of IEEE 802.1Q or 802.1ad, as Linux does where it leaves work to adapters. Returns
    /// the offset of the bytes behind the ethertype, and the ethertype: see [`Ethernet::behind_tags`].
    #[inline]
    pub fn link_header(frame: &[u8]) -> (usize, Option<EtherType>) {
        Ethernet::behind_tags(frame, MAX_TAGS, EtherType::is_ieee_tag)
    }

    /// Parses the packet in a frame, behind its tags ([`Self::link_header`]). `None` if there is none, or it is
    /// malformed.
    #[inline]
    pub fn of(frame: &[u8]) -> Option<Self> {
        let (offset, kind) = Self::link_header(frame);
        Self::at(frame, kind?, offset)
    }

    /// Parses the packet at an offset in a frame. `None` if the ethertype is not that of IP, or the packet is
    /// malformed: its version or its lengths contradict the ethertype, each other, or the length of the frame.
    #[inline]
    pub fn at(frame: &[u8], kind: EtherType, offset: usize) -> Option<Self> {
        match kind {
            EtherType::IPV4 => Self::ipv4(frame, offset),
            EtherType::IPV6 => Self::ipv6(frame, offset),
            _ => None,
        }
    }

    #[inline]
    fn ipv4(frame: &[u8], offset: usize) -> Option<Self> {
        let header: &[u8; Ipv4Header::LEN] = frame.get(offset..)?.first_chunk()?;
        let header = Ipv4Header::new(header);
        let (header_len, total) = (header.header_len()?, usize::from(header.total_len()?));
        let end = offset + total;
        if header.version()? != 4 || !(Ipv4Header::LEN..=total).contains(&header_len) || end > frame.len() {
            return None;
        }
        let (protocol, fragment) = (header.protocol()?, header.is_fragment()?);
        Some(Self { version: IpVersion::V4, offset, payload: offset + header_len, end, protocol, fragment })
    }

    #[inline]
    fn ipv6(frame: &[u8], offset: usize) -> Option<Self> {
        let header: &[u8; Ipv6Header::LEN] = frame.get(offset..)?.first_chunk()?;
        let header = Ipv6Header::new(header);
        let mut payload = offset + Ipv6Header::LEN;
        let end = payload + usize::from(header.payload_len()?);
        if header.version()? != 6 || end > frame.len() {
            return None;
        }
        let (mut protocol, mut fragment) = (header.next_header()?, false);
        for _ in 0..MAX_EXTENSIONS {
            // Bytes behind an authentication header stay as they are: it protects them.
            if protocol == Extension::AUTHENTICATION || Extension::RARE.contains(&protocol) {
                break;
            }
            let Some(extension) = Extension::parse(protocol, frame.get(payload..end)?).ok()? else { break };
            if extension.len > end - payload {
                return None;
            }
            fragment |= matches!(extension.kind, ExtensionKind::Fragment { .. });
            (protocol, payload) = (extension.next, payload + extension.len);
        }
        Some(Self { version: IpVersion::V6, offset, payload, end, protocol, fragment })
    }

    /// Parses the transport header. `None` if the packet is a fragment or is neither TCP nor UDP, or if the lengths of
    /// the header contradict those of the packet. `frame` is the frame that was parsed.
    #[inline]
    pub fn transport(&self, frame: &[u8]) -> Option<Transport> {
        if self.fragment {
            return None;
        }
        let offset = self.payload;
        let bytes = frame.get(offset..self.end)?;
        match self.protocol {
            PROTOCOL_TCP => {
                let header_len = TcpHeader::new(bytes).header_len()?;
                (TcpHeader::LEN..=bytes.len()).contains(&header_len).then_some(Transport::Tcp { offset, header_len })
            }
            PROTOCOL_UDP => {
                let len = usize::from(UdpHeader::new(bytes).length()?);
                (len >= UdpHeader::LEN && len == bytes.len()).then_some(Transport::Udp { offset })
            }
            _ => None,
        }
    }

    /// Returns the range of source and destination address.
    #[inline]
    pub const fn addresses(&self) -> Range<usize> {
        match self.version {
            IpVersion::V4 => self.offset + 12..self.offset + 20,
            IpVersion::V6 => self.offset + 8..self.offset + 40,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UDP: [u8; 12] = [0xc0, 0, 0, 53, 0, 12, 0, 0, 1, 2, 3, 4];

    fn frame(tags: &[u8], rest: &[u8]) -> Vec<u8> {
        [&[2; 12][..], tags, rest].concat()
    }

    fn v4(options: u8, fragment: u8, protocol: u8, payload: &[u8]) -> Vec<u8> {
        let len = 20 + 4 * options + u8::try_from(payload.len()).unwrap();
        let header = [0x45 + options, 0, 0, len, 0, 1, fragment, 0, 64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        [&[8, 0][..], &header, &[1; 4].repeat(options.into()), payload].concat()
    }

    /// Returns an IPv6 packet. `first` is the number of the header that the payload begins with.
    fn v6(first: u8, payload: &[u8]) -> Vec<u8> {
        let header = [0x60, 0, 0, 0, 0, u8::try_from(payload.len()).unwrap(), first, 64];
        [&[0x86, 0xdd][..], &header, &[0xfd; 32], payload].concat()
    }

    /// Returns payload, end, protocol and fragment.
    fn parts(frame: &[u8]) -> Option<(usize, usize, u8, bool)> {
        IpPacket::of(frame).map(|ip| (ip.payload, ip.end, ip.protocol, ip.fragment))
    }

    #[test]
    fn packets_are_found_behind_two_tags_of_ieee() {
        let packet = v4(1, 0, 17, &UDP);
        let (customer, service) = ([0x81, 0, 0, 5], [0x88, 0xa8, 0, 5]);
        for (tags, found) in [
            (Vec::new(), true),
            (customer.to_vec(), true),
            ([service, customer].concat(), true),
            ([customer; 3].concat(), false),
            ([0x91, 0, 0, 5].to_vec(), false),
        ] {
            let at = 14 + tags.len();
            let expected = found.then_some((at + 24, at + 36, 17, false));
            assert_eq!(parts(&[&frame(&tags, &packet)[..], &[0; 9]].concat()), expected);
        }
    }

    #[test]
    fn packets_whose_lengths_disagree_are_refused() {
        for packet in [v4(0, 0, 17, &UDP), v6(17, &UDP)] {
            let whole = frame(&[], &packet);
            assert!(parts(&whole).is_some());
            assert!((0..whole.len()).all(|len| parts(&whole[..len]).is_none()), "cut off");
            let mut other = whole.clone();
            other[14] ^= 0x20;
            assert_eq!(parts(&other), None, "another version");
        }
        let mut short = frame(&[], &v4(0, 0, 17, &UDP));
        short[14] = 0x44;
        assert_eq!(parts(&short), None, "a header of 16 bytes");
        (short[14], short[17]) = (0x45, 19);
        assert_eq!(parts(&short), None, "shorter than its header");
    }

    #[test]
    fn extension_headers_belong_to_the_packet() {
        let behind = |first: u8, extension: &[u8]| parts(&frame(&[], &v6(first, &[extension, &UDP].concat())));
        assert_eq!(behind(60, &[17, 0, 1, 4, 0, 0, 0, 0]), Some((62, 74, 17, false)));
        assert_eq!(behind(44, &[17, 0, 0, 9, 0, 0, 0, 1]), Some((62, 74, 17, true)));
        assert_eq!(behind(51, &[17, 0, 0, 0, 0, 0, 0, 0]), Some((54, 74, 51, false)), "not looked behind");
        assert_eq!(behind(60, &[17, 1, 1, 4, 0, 0, 0, 0]), Some((70, 74, 17, false)));
        assert_eq!(behind(60, &[17, 2, 1, 4, 0, 0, 0, 0]), None, "longer than the packet");
        let eight = [60, 0, 0, 0, 0, 0, 0, 0].repeat(8);
        assert_eq!(behind(60, &eight), Some((118, 130, 60, false)), "an upper-layer header ends the chain");
    }

    #[test]
    fn transport_headers() {
        let transport = |rest: &[u8]| {
            let frame = frame(&[], rest);
            IpPacket::of(&frame).unwrap().transport(&frame)
        };
        let mut tcp = [0; 24];
        tcp[12] = 0x60;
        assert_eq!(transport(&v4(0, 0, 6, &tcp)), Some(Transport::Tcp { offset: 34, header_len: 24 }));
        assert_eq!(transport(&v6(6, &tcp)), Some(Transport::Tcp { offset: 54, header_len: 24 }));
        assert_eq!(transport(&v4(0, 0, 6, &tcp[..23])), None, "longer than the packet");
        tcp[12] = 0x4f;
        assert_eq!(transport(&v4(0, 0, 6, &tcp)), None, "shorter than a TCP header");
        assert_eq!(transport(&v4(0, 0, 6, &tcp[..12])), None, "cut off");
        assert_eq!(transport(&v4(0, 0, 17, &UDP)), Some(Transport::Udp { offset: 34 }));
        assert_eq!(transport(&v4(0, 0x20, 17, &UDP)), None, "a fragment");
        assert_eq!(transport(&v4(0, 0, 1, &UDP)), None, "ICMP");
        assert_eq!(transport(&v6(17, &UDP[..11])), None, "longer than the packet");
        assert_eq!(transport(&v6(17, &[&UDP[..], &[0]].concat())), None, "shorter than the packet");
        assert_eq!(transport(&v6(17, &[0, 0, 0, 0, 0, 7, 0])), None, "shorter than a UDP header");
    }
}
