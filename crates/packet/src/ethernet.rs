//! The Ethernet header, with or without an IEEE 802.1Q tag.

use crate::field::{be16, field, put};
use crate::{MacAddr, Truncated};

/// Ethertype: the protocol of the payload. Any number is possible.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct EtherType(pub u16);

impl EtherType {
    /// IPv4.
    pub const IPV4: Self = Self(0x0800);
    /// ARP (RFC 826).
    pub const ARP: Self = Self(0x0806);
    /// RARP (RFC 903).
    pub const RARP: Self = Self(0x8035);
    /// An IEEE 802.1Q tag.
    pub const VLAN: Self = Self(0x8100);
    /// IPv6.
    pub const IPV6: Self = Self(0x86dd);
    /// A service tag of IEEE 802.1ad.
    pub const SERVICE_VLAN: Self = Self(0x88a8);
    /// MAC control: pauses of the link (IEEE 802.3, annex 31A).
    pub const MAC_CONTROL: Self = Self(0x8808);
    /// RoCE v1.
    pub const ROCE: Self = Self(0x8915);
    /// Tags in front of another one, as bridges sent them before IEEE 802.1ad, and can still be configured to.
    pub const OLD_SERVICE_VLANS: [Self; 3] = [Self(0x9100), Self(0x9200), Self(0x9300)];

    /// Returns `true` for the tags that IEEE defines: of 802.1Q and of 802.1ad.
    #[inline]
    pub const fn is_ieee_tag(self) -> bool {
        matches!(self, Self::VLAN | Self::SERVICE_VLAN)
    }

    /// Returns `true` for all tags: those of IEEE and those of older bridges.
    #[inline]
    pub const fn is_tag(self) -> bool {
        let [first, second, third] = Self::OLD_SERVICE_VLANS;
        self.is_ieee_tag() || self.0 == first.0 || self.0 == second.0 || self.0 == third.0
    }
}

/// IEEE 802.1Q tag control information.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Vlan {
    /// Priority code point, 3 bits.
    pub pcp: u8,
    /// Drop eligible indicator.
    pub dei: bool,
    /// VLAN identifier, 12 bits. 0 means priority-tagged: the frame belongs to no VLAN.
    pub vid: u16,
}

impl Vlan {
    /// Decodes the tag control information.
    #[inline]
    pub const fn from_tci(tci: [u8; 2]) -> Self {
        let [high, low] = tci;
        Self { pcp: high >> 5, dei: high & 0x10 != 0, vid: u16::from_be_bytes([high & 0xf, low]) }
    }

    /// Encodes the tag control information.
    #[inline]
    pub const fn tci(self) -> [u8; 2] {
        let [high, low] = (self.vid & 0xfff).to_be_bytes();
        [self.pcp << 5 | (self.dei as u8) << 4 | high, low]
    }
}

/// The Ethernet header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Ethernet {
    /// Destination MAC address.
    pub destination: MacAddr,
    /// Source MAC address.
    pub source: MacAddr,
    /// IEEE 802.1Q tag, if there is one.
    pub vlan: Option<Vlan>,
}

impl Ethernet {
    /// Length in bytes of a header without a tag.
    pub const UNTAGGED_LEN: usize = 14;
    /// Offset of the ethertype, or of the first tag: the length of both addresses in bytes.
    pub const TYPE_AT: usize = 12;
    /// Length of a tag in bytes.
    pub const TAG_LEN: usize = 4;

    /// Splits a frame into header, ethertype and payload.
    ///
    /// # Errors
    /// The frame is shorter than the header.
    #[inline]
    pub fn parse(frame: &[u8]) -> Result<(Self, EtherType, &[u8]), Truncated> {
        let short = Truncated("Ethernet header");
        let (header, rest) = frame.split_first_chunk::<{ Self::UNTAGGED_LEN }>().ok_or(short)?;
        let ethertype = EtherType(u16::from_be_bytes(field::<12, _, _>(header)));
        let mut ethernet = Self {
            destination: MacAddr(field::<0, _, _>(header)),
            source: MacAddr(field::<6, _, _>(header)),
            vlan: None,
        };
        if ethertype != EtherType::VLAN {
            return Ok((ethernet, ethertype, rest));
        }
        let ([high, low, type_high, type_low], rest) = rest.split_first_chunk::<{ Self::TAG_LEN }>().ok_or(short)?;
        ethernet.vlan = Some(Vlan::from_tci([*high, *low]));
        Ok((ethernet, EtherType(u16::from_be_bytes([*type_high, *type_low])), rest))
    }

    /// Returns the type field behind the two addresses: the ethertype of an untagged frame, or that of the first tag.
    /// `None` if the frame ends before it does.
    #[inline]
    pub fn first_type(frame: &[u8]) -> Option<EtherType> {
        be16(frame, Self::TYPE_AT).map(EtherType)
    }

    /// Looks behind at most `most` tags for which `is_tag` returns `true`. Returns the offset of the bytes behind the
    /// ethertype, and the ethertype: a tag if there are more tags than `most`, `None` if the frame ends before it does.
    #[inline]
    pub fn behind_tags(frame: &[u8], most: usize, is_tag: impl Fn(EtherType) -> bool) -> (usize, Option<EtherType>) {
        let mut at = Self::TYPE_AT;
        let mut kind = Self::first_type(frame);
        for _ in 0..most {
            if !kind.is_some_and(&is_tag) {
                break;
            }
            at += Self::TAG_LEN;
            kind = be16(frame, at).map(EtherType);
        }
        (at + 2, kind)
    }

    /// Length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a header is never empty")]
    #[inline]
    pub const fn len(&self) -> usize {
        match self.vlan {
            Some(_) => Self::UNTAGGED_LEN + Self::TAG_LEN,
            None => Self::UNTAGGED_LEN,
        }
    }

    /// Returns the VLAN of this frame. A priority-tagged frame belongs to none.
    #[inline]
    pub fn vlan_id(&self) -> Option<u16> {
        self.vlan.map(|vlan| vlan.vid).filter(|&vid| vid != 0)
    }

    /// Encodes the bytes before the optional tag. They end with `ethertype` or, if there is a tag, with 0x8100;
    /// [`Self::tag_bytes`] follow then.
    #[inline]
    pub fn to_bytes(self, ethertype: EtherType) -> [u8; Self::UNTAGGED_LEN] {
        let mut header = [0; Self::UNTAGGED_LEN];
        put::<0, _, _>(&mut header, self.destination.0);
        put::<6, _, _>(&mut header, self.source.0);
        let first = if self.vlan.is_some() { EtherType::VLAN } else { ethertype };
        put::<12, _, _>(&mut header, first.0.to_be_bytes());
        header
    }

    /// Encodes the tag and the ethertype behind it.
    #[inline]
    pub fn tag_bytes(self, ethertype: EtherType) -> Option<[u8; Self::TAG_LEN]> {
        let [high, low] = self.vlan?.tci();
        let [type_high, type_low] = ethertype.0.to_be_bytes();
        Some([high, low, type_high, type_low])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tag_control_information() {
        let vlan = Vlan { pcp: 3, dei: true, vid: 0x82a };
        assert_eq!(vlan.tci(), [0x78, 0x2a]);
        assert_eq!(Vlan::from_tci(vlan.tci()), vlan);
    }

    #[test]
    fn priority_tag_is_no_vlan() {
        let mut ethernet = Ethernet { vlan: Some(Vlan { pcp: 5, dei: false, vid: 0 }), ..Ethernet::default() };
        assert_eq!(ethernet.vlan_id(), None);
        ethernet.vlan = Some(Vlan { vid: 42, ..Vlan::default() });
        assert_eq!(ethernet.vlan_id(), Some(42));
    }

    #[test]
    fn frames_are_looked_at_behind_their_tags() {
        let frame = |types: &[u16]| {
            let tags = types.iter().flat_map(|kind| [kind.to_be_bytes(), [0, 5]].concat());
            [&[0; 12][..], &tags.collect::<Vec<_>>(), &[8, 0, 0x45]].concat()
        };
        let behind = |frame: &[u8]| Ethernet::behind_tags(frame, 2, EtherType::is_tag);
        for (types, expected) in [
            (&[][..], (14, EtherType::IPV4)),
            (&[0x8100], (18, EtherType::IPV4)),
            (&[0x9100, 0x8100], (22, EtherType::IPV4)),
            (&[0x88a8, 0x8100, 0x8100], (22, EtherType::VLAN)),
            (&[0x9200, 0x9300], (22, EtherType::IPV4)),
            (&[0x9400], (14, EtherType(0x9400))),
        ] {
            let frame = frame(types);
            assert_eq!(behind(&frame), (expected.0, Some(expected.1)), "{types:x?}");
            assert_eq!(
                Ethernet::first_type(&frame),
                frame[12..].first_chunk().map(|kind| EtherType(u16::from_be_bytes(*kind)))
            );
        }
        let tagged = frame(&[0x8100]);
        assert_eq!(Ethernet::behind_tags(&tagged, 2, |_| false), (14, Some(EtherType::VLAN)));
        for len in 0..tagged.len() {
            assert_eq!(behind(&tagged[..len]).1.is_some(), len >= 18);
            assert_eq!(Ethernet::first_type(&tagged[..len]).is_some(), len >= 14);
        }
    }

    #[test]
    fn short_frames_are_refused() {
        let mut frame = [0; 18];
        frame[12] = 0x81;
        assert!(Ethernet::parse(&frame).is_ok());
        assert!(Ethernet::parse(&frame[..17]).is_err());
        assert!(Ethernet::parse(&frame[..13]).is_err());
    }
}
