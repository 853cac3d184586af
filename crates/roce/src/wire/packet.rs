//! A complete frame, parsed.

use pvrdma_packet::{
    Checksum, EtherType, Ethernet, PROTOCOL_UDP, ROCE_PORT,
    field::{field, put},
};
use pvrdma_verbs_types::{Gid, NetworkType};

use super::agreement::{ACCEPT_WITHOUT_ICRC, REQUEST_WITHOUT_ICRC};
use super::bth::Bth;
use super::error::{CrcError, ParseError};
use super::extension::Extension;
use super::grh::Grh;
use super::icrc::Icrc;
use super::ipv4::{Ecn, Ipv4, mapped};
use super::ipv6::Ipv6;
use super::opcode::{Service, Shape};
use super::udp::Udp;

/// Network header, and UDP header if there is one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Network {
    /// RoCE v1.
    V1(Grh),
    /// RoCE v2 over IPv4.
    V2Ipv4(Ipv4, Udp),
    /// RoCE v2 over IPv6.
    V2Ipv6(Ipv6, Udp),
}

impl Network {
    /// UDP source port. `None`: RoCE v1.
    #[inline]
    pub const fn source_port(&self) -> Option<u16> {
        match self {
            Self::V1(_) => None,
            Self::V2Ipv4(_, udp) | Self::V2Ipv6(_, udp) => Some(udp.source_port),
        }
    }

    /// Length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a header is never empty")]
    #[inline]
    pub const fn len(&self) -> usize {
        match self {
            Self::V1(_) => Grh::LEN,
            Self::V2Ipv4(..) => Ipv4::LEN + Udp::LEN,
            Self::V2Ipv6(..) => Ipv6::LEN + Udp::LEN,
        }
    }

    /// Ethertype that precedes it in the Ethernet header.
    #[inline]
    pub const fn ethertype(&self) -> EtherType {
        match self {
            Self::V1(_) => EtherType::ROCE,
            Self::V2Ipv4(..) => EtherType::IPV4,
            Self::V2Ipv6(..) => EtherType::IPV6,
        }
    }

    /// Kind of the header.
    #[inline]
    pub const fn kind(&self) -> NetworkType {
        match self {
            Self::V1(_) => NetworkType::RoceV1,
            Self::V2Ipv4(..) => NetworkType::Ipv4,
            Self::V2Ipv6(..) => NetworkType::Ipv6,
        }
    }

    /// Address of the sender as a GID.
    #[inline]
    pub const fn source(&self) -> Gid {
        match self {
            Self::V1(grh) => grh.source,
            Self::V2Ipv4(ip, _) => mapped(ip.source),
            Self::V2Ipv6(ip, _) => ip.source,
        }
    }

    /// Address of the receiver as a GID.
    #[inline]
    pub const fn destination(&self) -> Gid {
        match self {
            Self::V1(grh) => grh.destination,
            Self::V2Ipv4(ip, _) => mapped(ip.destination),
            Self::V2Ipv6(ip, _) => ip.destination,
        }
    }

    /// Traffic class: DSCP and ECN.
    #[inline]
    pub const fn traffic_class(&self) -> u8 {
        match self {
            Self::V1(grh) => grh.traffic_class,
            Self::V2Ipv4(ip, _) => ip.traffic_class,
            Self::V2Ipv6(ip, _) => ip.traffic_class,
        }
    }

    /// Congestion information from switches on the path.
    #[inline]
    pub const fn ecn(&self) -> Ecn {
        Ecn::of(self.traffic_class())
    }
}

/// All fields of a packet that its sender chooses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Header {
    /// Ethernet header.
    pub ethernet: Ethernet,
    /// Network header, and UDP header if there is one.
    pub network: Network,
    /// Base transport header.
    pub bth: Bth,
    /// Extension headers of the opcode. Empty for an undefined opcode, whose headers count as payload.
    pub extension: Extension,
}

/// A packet in a received frame: its structure was checked, its contents were not verified yet ([`Packet::verify`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Packet<'a> {
    /// Header fields.
    pub header: Header,
    /// Payload, without pad bytes.
    pub payload: &'a [u8],
    /// The ICRC as received.
    pub icrc: [u8; Icrc::LEN],
    network: RawNetwork<'a>,
    bth: &'a [u8; Bth::LEN],
    /// Bytes from the end of the BTH through the pad bytes.
    covered: &'a [u8],
}

/// Bytes of the network header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RawNetwork<'a> {
    V1(&'a [u8; Grh::LEN]),
    V2Ipv4(&'a [u8; Ipv4::LEN], &'a [u8; Udp::LEN]),
    V2Ipv6(&'a [u8; Ipv6::LEN], &'a [u8; Udp::LEN]),
}

impl<'a> Packet<'a> {
    /// Parses a frame (without FCS). The network header determines the end of the packet, because short frames are
    /// padded.
    ///
    /// # Errors
    /// The frame is not RoCE, or it is malformed.
    #[inline]
    pub fn parse(frame: &'a [u8]) -> Result<Self, ParseError> {
        let (ethernet, ethertype, bytes) = Ethernet::parse(frame)?;
        let (network, raw, body) = parse_network(ethertype, bytes)?;
        let (bth_bytes, rest) = body.split_first_chunk().ok_or(ParseError::Truncated("BTH"))?;
        let (covered, icrc) = rest.split_last_chunk().ok_or(ParseError::Truncated("ICRC"))?;
        let bth = Bth::from_bytes(bth_bytes);
        let shape = bth.opcode.info().map_or(Shape::None, |info| info.shape);
        let (extension, padded) = Extension::parse(shape, covered).ok_or(ParseError::Truncated("extension headers"))?;
        let payload = padded
            .len()
            .checked_sub(usize::from(bth.pad))
            .and_then(|len| padded.get(..len))
            .ok_or(ParseError::Truncated("payload"))?;
        let header = Header { ethernet, network, bth, extension };
        Ok(Self { header, payload, icrc: *icrc, network: raw, bth: bth_bytes, covered })
    }

    /// Computes the ICRC that the packet should have.
    #[inline]
    pub fn computed_icrc(&self) -> [u8; Icrc::LEN] {
        let mut icrc = match self.network {
            RawNetwork::V1(grh) => Icrc::over_grh(grh, self.bth),
            RawNetwork::V2Ipv4(ip, udp) => Icrc::over_ipv4(ip, udp, self.bth),
            RawNetwork::V2Ipv6(ip, udp) => Icrc::over_ipv6(ip, udp, self.bth),
        };
        icrc.update(self.covered);
        icrc.finish()
    }

    /// Returns `true` if the packet has zeros in place of an ICRC, and the bits with which two ends agree on that
    /// ([`super::agreement`]). The sender alone chooses both, so the receiver must also permit it.
    #[inline]
    pub fn omits_icrc(&self) -> bool {
        if self.icrc != [0; Icrc::LEN] {
            return false;
        }
        let bth = &self.header.bth;
        let agreed = match bth.opcode.info() {
            Some(info) if info.service == Service::Rc && info.operation.is_response() => ACCEPT_WITHOUT_ICRC,
            Some(info) if info.service == Service::Rc => REQUEST_WITHOUT_ICRC,
            _ => return false,
        };
        bth.reserved7 == agreed
    }

    /// Does the same as [`Self::verify`] on a path whose administrator permits packets without an ICRC: such packets
    /// are accepted from a peer that uses the agreement.
    ///
    /// # Errors
    /// The check that failed.
    #[inline]
    pub fn verify_unless_omitted(&self) -> Result<(), CrcError> {
        match self.omits_icrc() {
            true if self.udp_checksum_is_good() => Ok(()),
            true => Err(CrcError::UdpChecksum),
            false => self.verify(),
        }
    }

    /// Verifies the checksums of the packet. Before this, its contents must not be trusted.
    ///
    /// # Errors
    /// The check that failed.
    #[inline]
    pub fn verify(&self) -> Result<(), CrcError> {
        if self.computed_icrc() != self.icrc {
            return Err(CrcError::Icrc);
        }
        if !self.udp_checksum_is_good() {
            return Err(CrcError::UdpChecksum);
        }
        Ok(())
    }

    /// Returns `true` if payload and pad bytes together are a multiple of four bytes, as required (IBA 9.2.3).
    #[inline]
    pub fn pad_is_right(&self) -> bool {
        (self.payload.len() + usize::from(self.header.bth.pad)).is_multiple_of(4)
    }

    /// Returns the first 40 bytes of a datagram's receive buffer: the GRH or IPv6 header as received, or an IPv4 header
    /// in the last 20 bytes (IBA annex A17.4.5.1).
    #[inline]
    pub fn grh_area(&self) -> [u8; Grh::LEN] {
        match self.network {
            RawNetwork::V1(grh) => *grh,
            RawNetwork::V2Ipv6(ip, _) => *ip,
            RawNetwork::V2Ipv4(ip, _) => {
                let mut area = [0; Grh::LEN];
                put::<20, _, _>(&mut area, *ip);
                area
            }
        }
    }

    /// Returns `true` if the UDP checksum is correct, or 0, which means that there is none (RFC 768). The ICRC does not
    /// cover it.
    fn udp_checksum_is_good(&self) -> bool {
        let mut sum = Checksum::default();
        let udp = match self.network {
            RawNetwork::V1(_) => return true,
            RawNetwork::V2Ipv4(ip, udp) => {
                sum.add(&field::<12, 8, _>(ip));
                udp
            }
            RawNetwork::V2Ipv6(ip, udp) => {
                sum.add(&field::<8, 32, _>(ip));
                udp
            }
        };
        if field::<6, 2, _>(udp) == [0, 0] {
            return true;
        }
        // The pseudo header: addresses (above), protocol and UDP length.
        sum.add(&[0, PROTOCOL_UDP]);
        sum.add(&field::<4, 2, _>(udp));
        sum.add(udp);
        sum.add(self.bth);
        sum.add(self.covered);
        sum.add(&self.icrc);
        sum.finish() == 0
    }
}

/// Splits off the network header; the rest is BTH through ICRC.
///
/// Inlined, because a call would copy the headers once more for each received packet.
#[inline(always)]
fn parse_network(ethertype: EtherType, bytes: &[u8]) -> Result<(Network, RawNetwork<'_>, &[u8]), ParseError> {
    match ethertype {
        EtherType::ROCE => {
            let short = ParseError::Truncated("global route header");
            let (grh_bytes, rest) = bytes.split_first_chunk().ok_or(short)?;
            let (grh, length) = Grh::from_bytes(grh_bytes)?;
            let body = rest.get(..usize::from(length)).ok_or(ParseError::Truncated("packet"))?;
            Ok((Network::V1(grh), RawNetwork::V1(grh_bytes), body))
        }
        EtherType::IPV4 => {
            let (ip_bytes, rest) = bytes.split_first_chunk().ok_or(ParseError::NotRoce)?;
            let (ip, length) = Ipv4::from_bytes(ip_bytes)?;
            let (udp, udp_bytes, body) = parse_udp(rest, length)?;
            Ok((Network::V2Ipv4(ip, udp), RawNetwork::V2Ipv4(ip_bytes, udp_bytes), body))
        }
        EtherType::IPV6 => {
            let (ip_bytes, rest) = bytes.split_first_chunk().ok_or(ParseError::NotRoce)?;
            let (ip, length) = Ipv6::from_bytes(ip_bytes)?;
            let (udp, udp_bytes, body) = parse_udp(rest, length)?;
            Ok((Network::V2Ipv6(ip, udp), RawNetwork::V2Ipv6(ip_bytes, udp_bytes), body))
        }
        _ => Err(ParseError::NotRoce),
    }
}

/// Splits off the UDP header. `length` is the number of bytes in the IP packet.
#[inline]
fn parse_udp(bytes: &[u8], length: u16) -> Result<(Udp, &[u8; Udp::LEN], &[u8]), ParseError> {
    let (header, _) = bytes.split_first_chunk().ok_or(ParseError::NotRoce)?;
    let parsed = Udp::from_bytes(header);
    if parsed.destination_port != ROCE_PORT {
        return Err(ParseError::NotRoce);
    }
    if parsed.length != length {
        return Err(ParseError::Invalid("UDP length"));
    }
    let datagram = bytes.get(..usize::from(length)).ok_or(ParseError::Truncated("packet"))?;
    let body = datagram.get(Udp::LEN..).ok_or(ParseError::Invalid("UDP length"))?;
    Ok((parsed.udp, header, body))
}

#[cfg(test)]
mod tests {
    use pvrdma_verbs_types::{Psn, Qpn};

    use super::super::frame::build;
    use super::super::opcode::{Opcode, Position};
    use super::*;

    fn header(network: Network) -> Header {
        let bth = Bth::new(Opcode::send(Position::Only), Qpn::new(0x11), Psn::new(1));
        Header { ethernet: Ethernet::default(), network, bth, extension: Extension::None }
    }

    fn networks() -> [Network; 3] {
        let (source, destination, udp) = (Gid([1; 16]), Gid([2; 16]), Udp { source_port: 0xc001, checksum: 0 });
        [
            Network::V1(Grh { traffic_class: 1, source, destination, ..Grh::default() }),
            Network::V2Ipv4(
                Ipv4 { traffic_class: 2, source: [1, 2, 3, 4], destination: [5, 6, 7, 8], ..Ipv4::default() },
                udp,
            ),
            Network::V2Ipv6(Ipv6 { traffic_class: 3, source, destination, ..Ipv6::default() }, udp),
        ]
    }

    #[test]
    fn only_udp_has_a_source_port() {
        assert_eq!(networks().map(|network| network.source_port()), [None, Some(0xc001), Some(0xc001)]);
    }

    #[test]
    fn what_a_network_header_says() {
        let says = networks().map(|network| {
            (network.kind(), network.len(), network.ethertype(), network.traffic_class(), network.ecn())
        });
        let expected = [
            (NetworkType::RoceV1, 40, EtherType::ROCE, 1, Ecn::Capable1),
            (NetworkType::Ipv4, 28, EtherType::IPV4, 2, Ecn::Capable0),
            (NetworkType::Ipv6, 48, EtherType::IPV6, 3, Ecn::Congested),
        ];
        assert_eq!(says, expected);
        let ends = networks().map(|network| (network.source(), network.destination()));
        let (v4, v6) = ((mapped([1, 2, 3, 4]), mapped([5, 6, 7, 8])), (Gid([1; 16]), Gid([2; 16])));
        assert_eq!(ends, [v6, v4, v6]);
    }

    #[test]
    fn a_datagram_receives_the_network_header() {
        for network in networks() {
            let frame = build(&header(network), b"data").unwrap();
            let area = Packet::parse(&frame).unwrap().grh_area();
            match network {
                Network::V2Ipv4(..) => assert_eq!((&area[..20], &area[20..]), (&[0; 20][..], &frame[14..34])),
                _ => assert_eq!(area, frame[14..54]),
            }
        }
    }

    #[test]
    fn every_pad_count_of_short_payloads() {
        for payload in 0..8_usize {
            let mut frame = build(&header(networks()[0]), &vec![0; payload]).unwrap();
            let padded = payload.next_multiple_of(4);
            for pad in 0..4_u8 {
                // The pad count in the BTH, behind Ethernet and network header.
                frame[14 + 40 + 1] = frame[14 + 40 + 1] & !0x30 | pad << 4;
                match Packet::parse(&frame) {
                    // The parsed parts add up to the original frame, whatever its fields say.
                    Ok(packet) => {
                        assert_eq!((packet.payload.len(), packet.pad_is_right()), (padded - usize::from(pad), true));
                    }
                    Err(error) => assert_eq!((padded, error), (0, ParseError::Truncated("payload"))),
                }
            }
        }
        // One byte more than a multiple of four: no pad count is correct.
        let mut frame = build(&header(networks()[0]), &[0; 4]).unwrap();
        frame.insert(14 + 40 + 12, 0);
        frame[14 + 5] += 1;
        assert!(!Packet::parse(&frame).unwrap().pad_is_right());
    }

    /// Each byte of a datagram is covered by its checksum, and 0 means no checksum.
    #[test]
    fn a_udp_checksum_is_right_or_absent() {
        for network in &networks()[1..] {
            let mut frame = build(&header(*network), b"abcd").unwrap();
            let udp = 14 + network.len() - Udp::LEN;
            let addresses = if network.len() == 28 { udp - 8 } else { udp - 32 };
            assert_eq!(Packet::parse(&frame).unwrap().verify(), Ok(()));
            let mut sum = Checksum::default();
            sum.add(&frame[addresses..]);
            sum.add(&[0, PROTOCOL_UDP]);
            sum.add(&frame[udp + 4..udp + 6]);
            let checksum = sum.finish();
            frame[udp + 6..udp + 8].copy_from_slice(&checksum.to_be_bytes());
            assert_eq!(Packet::parse(&frame).unwrap().verify(), Ok(()), "the ICRC does not cover it");
            for wrong in [checksum ^ 1, checksum.wrapping_add(0x100)] {
                frame[udp + 6..udp + 8].copy_from_slice(&wrong.to_be_bytes());
                assert_eq!(Packet::parse(&frame).unwrap().verify(), Err(CrcError::UdpChecksum));
            }
        }
    }
}
