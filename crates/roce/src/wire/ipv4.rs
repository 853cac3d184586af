//! The IPv4 header of RoCE v2 (RFC 791), without options, and the ECN bits of RFC 3168.

use pvrdma_packet::{
    Checksum, PROTOCOL_UDP,
    field::{field, put},
};
use pvrdma_verbs_types::Gid;

use super::error::ParseError;

const DONT_FRAGMENT: u16 = 0x4000;
const MORE_FRAGMENTS: u16 = 0x2000;
const FRAGMENT_OFFSET: u16 = 0x1fff;

/// IPv4 header fields that a sender chooses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Ipv4 {
    /// Type of service: DSCP in bits 7-2, ECN in 1-0.
    pub traffic_class: u8,
    /// Identification. The ICRC covers it, so the sender must know the final value.
    pub identification: u16,
    /// DF; RoCE packets are never fragmented.
    pub dont_fragment: bool,
    /// Time to live.
    pub hop_limit: u8,
    /// Address of the sender.
    pub source: [u8; 4],
    /// Address of the receiver.
    pub destination: [u8; 4],
}

impl Ipv4 {
    /// Length of the header in bytes, without options.
    pub const LEN: usize = 20;

    /// Parses the header, and returns it with the bytes that follow it.
    #[inline]
    pub(super) fn from_bytes(header: &[u8; Self::LEN]) -> Result<(Self, u16), ParseError> {
        let [version, traffic_class] = field::<0, _, _>(header);
        if version >> 4 != 4 {
            return Err(ParseError::Invalid("IPv4 version"));
        }
        let [hop_limit, protocol] = field::<8, _, _>(header);
        let flags = u16::from_be_bytes(field::<6, _, _>(header));
        // Later fragments have no UDP header, so they cannot be identified as RoCE.
        if protocol != PROTOCOL_UDP || flags & FRAGMENT_OFFSET != 0 {
            return Err(ParseError::NotRoce);
        }
        if version & 0xf != 5 {
            return Err(ParseError::Invalid("IPv4 header length"));
        }
        if flags & MORE_FRAGMENTS != 0 {
            return Err(ParseError::Fragment);
        }
        let mut sum = Checksum::default();
        sum.add(header);
        if sum.finish() != 0 {
            return Err(ParseError::Invalid("IPv4 header checksum"));
        }
        let payload_len = u16::from_be_bytes(field::<2, _, _>(header))
            .checked_sub(20)
            .ok_or(ParseError::Invalid("IPv4 total length"))?;
        let ipv4 = Self {
            traffic_class,
            identification: u16::from_be_bytes(field::<4, _, _>(header)),
            dont_fragment: flags & DONT_FRAGMENT != 0,
            hop_limit,
            source: field::<12, _, _>(header),
            destination: field::<16, _, _>(header),
        };
        Ok((ipv4, payload_len))
    }

    /// Encodes the header with its checksum. `total_len` includes the header.
    #[inline]
    pub fn to_bytes(self, total_len: u16) -> [u8; Self::LEN] {
        let mut header = [0; Self::LEN];
        put::<0, _, _>(&mut header, [0x45, self.traffic_class]);
        put::<2, _, _>(&mut header, total_len.to_be_bytes());
        put::<4, _, _>(&mut header, self.identification.to_be_bytes());
        put::<6, _, _>(&mut header, if self.dont_fragment { DONT_FRAGMENT } else { 0 }.to_be_bytes());
        put::<8, _, _>(&mut header, [self.hop_limit, PROTOCOL_UDP]);
        put::<12, _, _>(&mut header, self.source);
        put::<16, _, _>(&mut header, self.destination);
        let mut sum = Checksum::default();
        sum.add(&header);
        put::<10, _, _>(&mut header, sum.finish().to_be_bytes());
        header
    }
}

/// Returns an IPv4 address as a GID: `::ffff:a.b.c.d`.
#[inline]
pub(super) const fn mapped(address: [u8; 4]) -> Gid {
    let [a, b, c, d] = address;
    Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d])
}

/// Explicit congestion notification, the low two bits of the traffic class.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Ecn {
    /// The sender does not react to marks.
    NotCapable,
    /// ECT(0): the sender reacts to marks.
    Capable0,
    /// ECT(1): the sender reacts to marks.
    Capable1,
    /// CE: a switch on the path was congested.
    Congested,
}

impl Ecn {
    /// Extracts the bits from a traffic class.
    #[inline]
    pub const fn of(traffic_class: u8) -> Self {
        match traffic_class & 3 {
            0 => Self::NotCapable,
            1 => Self::Capable1,
            2 => Self::Capable0,
            _ => Self::Congested,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IP: Ipv4 = Ipv4 {
        traffic_class: 2,
        identification: 0x1234,
        dont_fragment: true,
        hop_limit: 64,
        source: [10, 0, 0, 1],
        destination: [10, 0, 0, 2],
    };

    /// Parses a header with some bits inverted and a corrected checksum.
    fn parse(at: usize, bits: u8) -> Result<(Ipv4, u16), ParseError> {
        let mut header = IP.to_bytes(0x345);
        header[at] ^= bits;
        header[10..12].fill(0);
        let mut sum = Checksum::default();
        sum.add(&header);
        header[10..12].copy_from_slice(&sum.finish().to_be_bytes());
        Ipv4::from_bytes(&header)
    }

    #[test]
    fn what_is_no_plain_header_is_refused() {
        assert_eq!(parse(0, 0), Ok((IP, 0x345 - 20)));
        assert_eq!(parse(6, 0x40), Ok((Ipv4 { dont_fragment: false, ..IP }, 0x345 - 20)));
        assert_eq!(parse(0, 0x20), Err(ParseError::Invalid("IPv4 version")));
        assert_eq!(parse(0, 0x01), Err(ParseError::Invalid("IPv4 header length")));
        assert_eq!(parse(0, 0x02), Err(ParseError::Invalid("IPv4 header length")));
        assert_eq!(parse(9, 0x01), Err(ParseError::NotRoce), "another protocol");
        for (at, bits) in [(6, 0x01), (6, 0x10), (7, 0x01), (7, 0x80)] {
            assert_eq!(parse(at, bits), Err(ParseError::NotRoce), "a fragment's rest");
        }
        assert_eq!(parse(6, 0x20), Err(ParseError::Fragment));
        // The total length includes the header.
        assert_eq!(parse(2, 0x03).map(|(_, length)| length), Ok(0x45 - 20));
        let short = |length: u16| Ipv4::from_bytes(&IP.to_bytes(length)).map(|(_, length)| length);
        assert_eq!((short(20), short(21)), (Ok(0), Ok(1)));
        assert_eq!(short(19), Err(ParseError::Invalid("IPv4 total length")));
        let mut damaged = IP.to_bytes(20);
        damaged[1] ^= 1;
        assert_eq!(Ipv4::from_bytes(&damaged), Err(ParseError::Invalid("IPv4 header checksum")));
    }

    #[test]
    fn congestion_marks() {
        let marks = [Ecn::NotCapable, Ecn::Capable1, Ecn::Capable0, Ecn::Congested];
        for class in 0..=u8::MAX {
            assert_eq!(Ecn::of(class), marks[usize::from(class) % 4]);
        }
    }
}
