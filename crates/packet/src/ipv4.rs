//! The IPv4 header (RFC 791).

use crate::field::peek;

/// More fragments follow.
const MORE_FRAGMENTS: u16 = 0x2000;
const FRAGMENT_OFFSET: u16 = 0x1fff;

/// View of an IPv4 packet, from the first byte of its header. The packet may be cut off anywhere: a field is `None` if
/// the bytes end before it does. No field is validated.
#[derive(Clone, Copy, Debug)]
pub struct Ipv4Header<'a>(&'a [u8]);

impl<'a> Ipv4Header<'a> {
    /// Length in bytes of a header without options.
    pub const LEN: usize = 20;

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

    /// Returns the length that the header says it has with its options, in bytes: 0 to 60.
    #[inline]
    pub fn header_len(self) -> Option<usize> {
        peek::<0, 1>(self.0).map(|[first]| usize::from(first & 0xf) * 4)
    }

    /// Returns DSCP and ECN.
    #[inline]
    pub fn traffic_class(self) -> Option<u8> {
        peek::<1, 1>(self.0).map(|[class]| class)
    }

    /// Returns the length that the header says the packet has, in bytes.
    #[inline]
    pub fn total_len(self) -> Option<u16> {
        peek::<2, 2>(self.0).map(u16::from_be_bytes)
    }

    /// Returns `true` if the packet is a fragment.
    #[inline]
    pub fn is_fragment(self) -> Option<bool> {
        peek::<6, 2>(self.0).map(|bits| u16::from_be_bytes(bits) & (MORE_FRAGMENTS | FRAGMENT_OFFSET) != 0)
    }

    /// Returns `true` if the payload of the packet begins with the header of its protocol, because the packet is whole
    /// or the first fragment.
    #[inline]
    pub fn has_first_byte(self) -> Option<bool> {
        peek::<6, 2>(self.0).map(|bits| u16::from_be_bytes(bits) & FRAGMENT_OFFSET == 0)
    }

    /// Returns the protocol of the payload.
    #[inline]
    pub fn protocol(self) -> Option<u8> {
        peek::<9, 1>(self.0).map(|[protocol]| protocol)
    }

    /// Returns the source address followed by the destination address.
    #[inline]
    pub fn addresses(self) -> Option<[u8; 8]> {
        peek::<12, 8>(self.0)
    }

    /// Returns the source address.
    #[inline]
    pub fn source(self) -> Option<[u8; 4]> {
        peek::<12, 4>(self.0)
    }

    /// Returns the destination address.
    #[inline]
    pub fn destination(self) -> Option<[u8; 4]> {
        peek::<16, 4>(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKET: [u8; 20] = [0x46, 0xb9, 0x12, 0x34, 0, 1, 0, 0, 64, 17, 0, 0, 10, 1, 2, 3, 10, 4, 5, 6];

    #[test]
    fn each_field_has_its_bytes() {
        let header = Ipv4Header::new(&PACKET);
        assert_eq!((header.version(), header.header_len(), header.traffic_class()), (Some(4), Some(24), Some(0xb9)));
        assert_eq!((header.total_len(), header.protocol()), (Some(0x1234), Some(17)));
        assert_eq!(header.addresses(), Some([10, 1, 2, 3, 10, 4, 5, 6]));
        assert_eq!((header.source(), header.destination()), (Some([10, 1, 2, 3]), Some([10, 4, 5, 6])));
    }

    #[test]
    fn flags_and_offset_identify_fragments() {
        for (bits, is_fragment, has_first_byte) in [
            ([0, 0], false, true),
            // "Do not fragment", and the reserved bit.
            ([0xc0, 0], false, true),
            ([0x20, 0], true, true),
            ([0x20, 1], true, false),
            ([0x10, 0], true, false),
            ([0, 0x80], true, false),
        ] {
            let mut packet = PACKET;
            packet[6..8].copy_from_slice(&bits);
            let header = Ipv4Header::new(&packet);
            assert_eq!((header.is_fragment(), header.has_first_byte()), (Some(is_fragment), Some(has_first_byte)));
        }
    }

    #[test]
    fn cut_off_fields_are_missing() {
        for len in 0..PACKET.len() {
            let header = Ipv4Header::new(&PACKET[..len]);
            assert_eq!((header.version().is_some(), header.header_len().is_some()), (len >= 1, len >= 1));
            assert_eq!((header.traffic_class().is_some(), header.total_len().is_some()), (len >= 2, len >= 4));
            assert_eq!((header.is_fragment().is_some(), header.has_first_byte().is_some()), (len >= 8, len >= 8));
            assert_eq!((header.protocol().is_some(), header.source().is_some()), (len >= 10, len >= 16));
            assert_eq!((header.destination(), header.addresses()), (None, None));
        }
    }
}
