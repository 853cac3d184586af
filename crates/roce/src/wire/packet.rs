//! A whole frame, taken apart.

use pvrdma_verbs::{Gid, NetworkType};

use super::bth::Bth;
use super::checksum::Checksum;
use super::error::{CrcError, ParseError};
use super::ethernet::{EtherType, Ethernet};
use super::extension::Extension;
use super::field::{field, put};
use super::grh::Grh;
use super::icrc::Icrc;
use super::ipv4::{Ecn, Ipv4, mapped};
use super::ipv6::Ipv6;
use super::opcode::Shape;
use super::udp::{PROTOCOL_UDP, ROCE_PORT, Udp};

/// Network header, and UDP where there is one.
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

    /// What precedes it in the Ethernet header.
    #[inline]
    pub const fn ethertype(&self) -> EtherType {
        match self {
            Self::V1(_) => EtherType::ROCE,
            Self::V2Ipv4(..) => EtherType::IPV4,
            Self::V2Ipv6(..) => EtherType::IPV6,
        }
    }

    /// Which kind it is.
    #[inline]
    pub const fn kind(&self) -> NetworkType {
        match self {
            Self::V1(_) => NetworkType::RoceV1,
            Self::V2Ipv4(..) => NetworkType::Ipv4,
            Self::V2Ipv6(..) => NetworkType::Ipv6,
        }
    }

    /// The sender's address as GID.
    #[inline]
    pub const fn source(&self) -> Gid {
        match self {
            Self::V1(grh) => grh.source,
            Self::V2Ipv4(ip, _) => mapped(ip.source),
            Self::V2Ipv6(ip, _) => ip.source,
        }
    }

    /// The receiver's address as GID.
    #[inline]
    pub const fn destination(&self) -> Gid {
        match self {
            Self::V1(grh) => grh.destination,
            Self::V2Ipv4(ip, _) => mapped(ip.destination),
            Self::V2Ipv6(ip, _) => ip.destination,
        }
    }

    /// DSCP and ECN.
    #[inline]
    pub const fn traffic_class(&self) -> u8 {
        match self {
            Self::V1(grh) => grh.traffic_class,
            Self::V2Ipv4(ip, _) => ip.traffic_class,
            Self::V2Ipv6(ip, _) => ip.traffic_class,
        }
    }

    /// What switches on the way said about congestion.
    #[inline]
    pub const fn ecn(&self) -> Ecn {
        Ecn::of(self.traffic_class())
    }
}

/// Every field of a packet that its sender chose.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Header {
    /// Link.
    pub ethernet: Ethernet,
    /// Network, and UDP where there is one.
    pub network: Network,
    /// Transport.
    pub bth: Bth,
    /// Transport, as the opcode wants. Empty for an undefined opcode, whose headers then count as payload.
    pub extension: Extension,
}

/// A packet in a received frame: structure checked, content not yet believed ([`Packet::verify`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Packet<'a> {
    /// The values.
    pub header: Header,
    /// The data, without pad bytes.
    pub payload: &'a [u8],
    /// The ICRC as received.
    pub icrc: [u8; Icrc::LEN],
    network: RawNetwork<'a>,
    bth: &'a [u8; Bth::LEN],
    /// After the BTH, through the pad bytes.
    covered: &'a [u8],
}

/// The bytes of the network header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RawNetwork<'a> {
    V1(&'a [u8; Grh::LEN]),
    V2Ipv4(&'a [u8; Ipv4::LEN], &'a [u8; Udp::LEN]),
    V2Ipv6(&'a [u8; Ipv6::LEN], &'a [u8; Udp::LEN]),
}

impl<'a> Packet<'a> {
    /// Takes a frame (without FCS) apart. The end comes from the network header: short frames are padded.
    ///
    /// # Errors
    /// The frame is not RoCE, or is malformed.
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

    /// The ICRC that the packet should have.
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

    /// Checks that the packet is what its sender sent. Before this, nothing in it is to be believed.
    ///
    /// # Errors
    /// Which check failed.
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

    /// Returns `true` if pad count and payload make a multiple of four bytes, as they must (IBA 9.2.3).
    #[inline]
    pub fn pad_is_right(&self) -> bool {
        (self.payload.len() + usize::from(self.header.bth.pad)).is_multiple_of(4)
    }

    /// What the first 40 bytes of a datagram's receive buffer hold: the GRH or IPv6 header as received, or an IPv4
    /// header in the last 20 (IBA annex A17.4.5.1).
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

    /// Returns `true` if the UDP checksum is right or 0, which means that there is none (RFC 768). The ICRC does not
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

/// Takes the network header off; the rest is BTH through ICRC.
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

/// Takes the UDP header off. `length` bytes belong to the IP packet.
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
