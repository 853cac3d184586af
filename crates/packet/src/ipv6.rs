//! The IPv6 header and its extension headers (RFC 8200).

use crate::Truncated;
use crate::field::peek;

/// Extension headers (RFC 8200, section 4).
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;
const MOBILITY: u8 = 135;
const HOST_IDENTITY: u8 = 139;
const SHIM6: u8 = 140;

/// View of an IPv6 packet, from the first byte of its header. The packet may be cut off anywhere: a field is `None` if
/// the bytes end before it does. No field is validated. The GRH of RoCE v1 has the same layout.
#[derive(Clone, Copy, Debug)]
pub struct Ipv6Header<'a>(&'a [u8]);

impl<'a> Ipv6Header<'a> {
    /// Length of the header in bytes, without extension headers.
    pub const LEN: usize = 40;

    /// Views the bytes of a packet.
    #[inline]
    pub const fn new(packet: &'a [u8]) -> Self {
        Self(packet)
    }

    /// Returns the version.
    #[inline]
    pub fn version(self) -> Option<u8> {
        peek::<0, 1>(self.0).map(|[first]| first >> 4)
    }

    /// Returns DSCP and ECN.
    #[inline]
    pub fn traffic_class(self) -> Option<u8> {
        peek::<0, 2>(self.0).map(|[first, second]| first << 4 | second >> 4)
    }

    /// Returns the length of everything behind the header that the header gives, in bytes.
    #[inline]
    pub fn payload_len(self) -> Option<u16> {
        peek::<4, 2>(self.0).map(u16::from_be_bytes)
    }

    /// Returns the protocol of the payload, or the number of the first extension header.
    #[inline]
    pub fn next_header(self) -> Option<u8> {
        peek::<6, 1>(self.0).map(|[next]| next)
    }

    /// Returns the hop limit.
    #[inline]
    pub fn hop_limit(self) -> Option<u8> {
        peek::<7, 1>(self.0).map(|[limit]| limit)
    }

    /// Returns the source address followed by the destination address.
    #[inline]
    pub fn addresses(self) -> Option<[u8; 32]> {
        peek::<8, 32>(self.0)
    }

    /// Returns the source address.
    #[inline]
    pub fn source(self) -> Option<[u8; 16]> {
        peek::<8, 16>(self.0)
    }

    /// Returns the destination address.
    #[inline]
    pub fn destination(self) -> Option<[u8; 16]> {
        peek::<24, 16>(self.0)
    }
}

/// An extension header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extension {
    /// Its kind.
    pub kind: ExtensionKind,
    /// Protocol of the bytes behind it, or the number of the next extension header.
    pub next: u8,
    /// Length that it says it has, in bytes. The packet may end before.
    pub len: usize,
}

/// Kind of an extension header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExtensionKind {
    /// Hop-by-hop options, a routing header, or destination options.
    Options,
    /// A fragment header.
    Fragment {
        /// The fragment offset is 0, so that the header of the payload's protocol follows.
        is_first: bool,
    },
    /// An authentication header.
    Authentication,
}

impl Extension {
    /// Number of the authentication header (RFC 4302).
    pub const AUTHENTICATION: u8 = 51;

    /// Numbers of the headers of mobility, host identity and Shim6, which IANA lists as extension headers. Linux does
    /// not look for another header behind them, but other receivers may.
    pub const RARE: [u8; 3] = [MOBILITY, HOST_IDENTITY, SHIM6];

    /// Parses the header with number `protocol` at the start of `bytes`. `None` if this is not the number of an
    /// extension header that another header can follow.
    ///
    /// # Errors
    /// The bytes end before the fields that the result contains.
    #[inline]
    pub fn parse(protocol: u8, bytes: &[u8]) -> Result<Option<Self>, Truncated> {
        let short = Truncated("IPv6 extension header");
        let extension = match protocol {
            HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS | MOBILITY | HOST_IDENTITY | SHIM6 => {
                let [next, eights] = peek::<0, 2>(bytes).ok_or(short)?;
                Self { kind: ExtensionKind::Options, next, len: 8 * (usize::from(eights) + 1) }
            }
            FRAGMENT => {
                let [next, _, high, low] = peek::<0, 4>(bytes).ok_or(short)?;
                let is_first = high == 0 && low & 0xf8 == 0;
                Self { kind: ExtensionKind::Fragment { is_first }, next, len: 8 }
            }
            Self::AUTHENTICATION => {
                let [next, fours] = peek::<0, 2>(bytes).ok_or(short)?;
                Self { kind: ExtensionKind::Authentication, next, len: 4 * (usize::from(fours) + 2) }
            }
            _ => return Ok(None),
        };
        Ok(Some(extension))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet() -> [u8; 40] {
        let mut packet = [0; 40];
        packet[..8].copy_from_slice(&[0x6a, 0x5c, 0xb9, 0x7f, 0x12, 0x34, 17, 64]);
        (packet[8], packet[23], packet[24], packet[39]) = (0xfe, 1, 0xfd, 2);
        packet
    }

    #[test]
    fn each_field_has_its_bytes() {
        let packet = packet();
        let header = Ipv6Header::new(&packet);
        assert_eq!((header.version(), header.traffic_class()), (Some(6), Some(0xa5)));
        assert_eq!(
            (header.payload_len(), header.next_header(), header.hop_limit()),
            (Some(0x1234), Some(17), Some(64))
        );
        assert_eq!(header.addresses().as_ref().map(|both| &both[..]), Some(&packet[8..]));
        let ends = |address: [u8; 16]| (address[0], address[15]);
        assert_eq!((header.source().map(ends), header.destination().map(ends)), (Some((0xfe, 1)), Some((0xfd, 2))));
    }

    #[test]
    fn cut_off_fields_are_missing() {
        let packet = packet();
        for len in 0..packet.len() {
            let header = Ipv6Header::new(&packet[..len]);
            assert_eq!((header.version().is_some(), header.traffic_class().is_some()), (len >= 1, len >= 2));
            assert_eq!((header.payload_len().is_some(), header.next_header().is_some()), (len >= 6, len >= 7));
            assert_eq!((header.hop_limit().is_some(), header.source().is_some()), (len >= 8, len >= 24));
            assert_eq!((header.destination(), header.addresses()), (None, None));
        }
    }

    #[test]
    fn extension_headers() {
        use ExtensionKind::{Authentication, Fragment, Options};
        for (protocol, bytes, kind, len) in [
            (HOP_BY_HOP, &[6, 0][..], Options, 8),
            (ROUTING, &[6, 2], Options, 24),
            (DESTINATION_OPTIONS, &[6, 255], Options, 2048),
            (FRAGMENT, &[6, 0xff, 0, 1], Fragment { is_first: true }, 8),
            (FRAGMENT, &[6, 0, 0, 8], Fragment { is_first: false }, 8),
            (FRAGMENT, &[6, 0, 1, 0], Fragment { is_first: false }, 8),
            (Extension::AUTHENTICATION, &[6, 4], Authentication, 24),
        ] {
            assert_eq!(Extension::parse(protocol, bytes), Ok(Some(Extension { kind, next: 6, len })));
            for cut in 0..bytes.len() {
                assert!(Extension::parse(protocol, &bytes[..cut]).is_err(), "{protocol}");
            }
        }
        for protocol in [6, 17, 50, 58, 59] {
            assert_eq!(Extension::parse(protocol, &[]), Ok(None));
        }
    }
}
