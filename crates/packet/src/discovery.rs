//! Neighbour discovery (RFC 4861): the messages with which IPv6 hosts announce their addresses.

use crate::field::{field, peek};
use crate::{Ipv6Header, Truncated};

/// Hop limit of a message that no router forwarded (RFC 4861, 6.1 and 7.1).
const HOP_LIMIT: u8 = 255;

/// Message of neighbour discovery.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Discovery<'a> {
    /// ICMPv6 type: one of the constants.
    pub kind: u8,
    /// Source address of the packet.
    pub source: [u8; 16],
    /// Target address. `None`: messages of this type have none.
    pub target: Option<[u8; 16]>,
    /// Options, as bytes.
    options: &'a [u8],
}

impl<'a> Discovery<'a> {
    /// Protocol number of ICMPv6 (RFC 4443).
    pub const PROTOCOL: u8 = 58;
    /// ICMPv6 types (RFC 4861, 4).
    pub const ROUTER_SOLICITATION: u8 = 133;
    /// A router announces itself.
    pub const ROUTER_ADVERTISEMENT: u8 = 134;
    /// A host asks for the link-layer address of the target.
    pub const NEIGHBOUR_SOLICITATION: u8 = 135;
    /// A host announces the link-layer address of the target.
    pub const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
    /// A router announces a better first hop, the target.
    pub const REDIRECT: u8 = 137;

    /// Returns `true` if an ICMPv6 type is one of neighbour discovery.
    #[inline]
    pub const fn is_type(kind: u8) -> bool {
        matches!(kind, Self::ROUTER_SOLICITATION..=Self::REDIRECT)
    }

    /// Parses the message that begins `at` bytes into an IPv6 packet. Bytes behind the end of the packet are ignored,
    /// as receivers treat them as padding. `None` if the message is incomplete or violates RFC 4861: its hop limit is
    /// not 255, or its code is not 0. The checksum and the options are not verified.
    pub fn parse(packet: &'a [u8], at: usize) -> Option<Self> {
        let header: &[u8; Ipv6Header::LEN] = packet.first_chunk()?;
        let ip = Ipv6Header::new(header);
        let message = packet.get(at..Ipv6Header::LEN + usize::from(ip.payload_len()?))?;
        let [kind, code] = peek::<0, 2>(message)?;
        let (fixed, has_target) = match kind {
            Self::ROUTER_SOLICITATION => (8, false),
            Self::ROUTER_ADVERTISEMENT => (16, false),
            Self::NEIGHBOUR_SOLICITATION | Self::NEIGHBOUR_ADVERTISEMENT => (24, true),
            Self::REDIRECT => (40, true),
            _ => return None,
        };
        if ip.hop_limit()? != HOP_LIMIT || code != 0 {
            return None;
        }
        let options = message.get(fixed..)?;
        let target = if has_target { peek::<8, 16>(message) } else { None };
        Some(Self { kind, source: field::<8, _, _>(header), target, options })
    }

    /// Returns the options.
    #[inline]
    pub const fn options(&self) -> DiscoveryOptions<'a> {
        DiscoveryOptions(self.options)
    }
}

/// Option of a message: its type, and all its bytes with type and length.
pub type DiscoveryOption<'a> = (u8, &'a [u8]);

/// Iterator over the options of a message. An option that does not end in the message, or has no length, is an error
/// and the last item.
#[derive(Clone, Debug)]
pub struct DiscoveryOptions<'a>(&'a [u8]);

impl DiscoveryOptions<'_> {
    /// Type of the option with the link-layer address of the source.
    pub const SOURCE_ADDRESS: u8 = 1;
    /// Type of the option with the link-layer address of the target.
    pub const TARGET_ADDRESS: u8 = 2;
}

impl<'a> Iterator for DiscoveryOptions<'a> {
    type Item = Result<DiscoveryOption<'a>, Truncated>;

    fn next(&mut self) -> Option<Self::Item> {
        let bytes = core::mem::take(&mut self.0);
        if bytes.is_empty() {
            return None;
        }
        let split = peek::<0, 2>(bytes).filter(|[_, eights]| *eights > 0).and_then(|[kind, eights]| {
            let (option, rest) = bytes.split_at_checked(8 * usize::from(eights))?;
            self.0 = rest;
            Some((kind, option))
        });
        Some(split.ok_or(Truncated("option of neighbour discovery")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a packet with a message that has no options.
    fn packet(kind: u8, len: usize) -> Vec<u8> {
        let mut packet = vec![0; 40 + len];
        (packet[5], packet[6], packet[7]) = (u8::try_from(len).unwrap(), 58, 255);
        (packet[8], packet[40]) = (0xfe, kind);
        if let Some(target) = packet.get_mut(48) {
            *target = 0xfd;
        }
        packet
    }

    #[test]
    fn messages_of_all_types_are_parsed() {
        let address = |first| [first, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        for (kind, len, has_target) in [
            (Discovery::ROUTER_SOLICITATION, 8, false),
            (Discovery::ROUTER_ADVERTISEMENT, 16, false),
            (Discovery::NEIGHBOUR_SOLICITATION, 24, true),
            (Discovery::NEIGHBOUR_ADVERTISEMENT, 24, true),
            (Discovery::REDIRECT, 40, true),
        ] {
            let whole = packet(kind, len);
            let target = has_target.then_some(address(0xfd));
            let expected = Discovery { kind, source: address(0xfe), target, options: &[] };
            assert!(Discovery::is_type(kind));
            assert_eq!(Discovery::parse(&whole, 40), Some(expected));
            assert_eq!(Discovery::parse(&[&whole[..], &[1; 9]].concat(), 40), Some(expected), "padding");
            assert!((0..whole.len()).all(|len| Discovery::parse(&whole[..len], 40).is_none()), "cut off");
            assert_eq!(Discovery::parse(&packet(kind, len - 1), 40), None, "too short");
            for (at, value) in [(7, 254), (41, 1), (40, 132), (40, 138)] {
                let mut other = whole.clone();
                other[at] = value;
                assert_eq!(Discovery::parse(&other, 40), None, "byte {at}");
            }
        }
        assert!(!Discovery::is_type(132) && !Discovery::is_type(138));
    }

    #[test]
    fn options_end_with_the_first_that_is_malformed() {
        let options = |bytes: &[u8]| {
            let mut packet = packet(Discovery::ROUTER_SOLICITATION, 8);
            packet.extend(bytes);
            packet[5] += u8::try_from(bytes.len()).unwrap();
            let message = Discovery::parse(&packet, 40).unwrap();
            message.options().map(|option| option.ok().map(|(kind, bytes)| (kind, bytes.len()))).collect::<Vec<_>>()
        };
        let [short, long] = [[1, 1, 2, 2, 2, 2, 2, 2].to_vec(), [&[5, 2][..], &[0; 14]].concat()];
        assert_eq!(options(&[]), []);
        assert_eq!(options(&[&short[..], &long].concat()), [Some((1, 8)), Some((5, 16))]);
        assert_eq!(options(&[&short[..], &long[..15]].concat()), [Some((1, 8)), None]);
        assert_eq!(options(&[&short[..], &[1]].concat()), [Some((1, 8)), None]);
        assert_eq!(options(&[&[1, 0][..], &short].concat()), [None]);
    }
}
