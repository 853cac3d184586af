//! TCP and UDP headers.

use crate::field::peek;

/// View of a UDP datagram, from the first byte of its header (RFC 768). The datagram may be cut off anywhere: a field
/// is `None` if the bytes end before it does. TCP has its ports at the same offsets.
#[derive(Clone, Copy, Debug)]
pub struct UdpHeader<'a>(&'a [u8]);

impl<'a> UdpHeader<'a> {
    /// Length of the header in bytes.
    pub const LEN: usize = 8;

    /// Views the bytes of a datagram.
    #[inline]
    pub const fn new(datagram: &'a [u8]) -> Self {
        Self(datagram)
    }

    /// Returns the bytes of the source port followed by those of the destination port.
    #[inline]
    pub fn ports(self) -> Option<[u8; 4]> {
        peek::<0, 4>(self.0)
    }

    /// Returns the source port.
    #[inline]
    pub fn source_port(self) -> Option<u16> {
        peek::<0, 2>(self.0).map(u16::from_be_bytes)
    }

    /// Returns the destination port.
    #[inline]
    pub fn destination_port(self) -> Option<u16> {
        peek::<2, 2>(self.0).map(u16::from_be_bytes)
    }

    /// Returns the length that the header says the datagram has, in bytes with the header.
    #[inline]
    pub fn length(self) -> Option<u16> {
        peek::<4, 2>(self.0).map(u16::from_be_bytes)
    }
}

/// View of a TCP segment, from the first byte of its header (RFC 9293). The segment may be cut off anywhere: a field is
/// `None` if the bytes end before it does.
#[derive(Clone, Copy, Debug)]
pub struct TcpHeader<'a>(&'a [u8]);

impl<'a> TcpHeader<'a> {
    /// Length in bytes of a header without options.
    pub const LEN: usize = 20;

    /// Views the bytes of a segment.
    #[inline]
    pub const fn new(segment: &'a [u8]) -> Self {
        Self(segment)
    }

    /// Returns the length that the header says it has with its options, in bytes: 0 to 60.
    #[inline]
    pub fn header_len(self) -> Option<usize> {
        peek::<12, 1>(self.0).map(|[offset]| usize::from(offset >> 4) * 4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_field_has_its_bytes() {
        let udp = [0xc0, 1, 0x12, 0xb7, 0x02, 0x03, 0, 0];
        for len in 0..=udp.len() {
            let header = UdpHeader::new(&udp[..len]);
            assert_eq!(header.source_port(), (len >= 2).then_some(0xc001));
            assert_eq!(header.destination_port(), (len >= 4).then_some(4791));
            assert_eq!(header.ports(), (len >= 4).then_some([0xc0, 1, 0x12, 0xb7]));
            assert_eq!(header.length(), (len >= 6).then_some(0x0203));
        }
        let mut tcp = [0; 20];
        tcp[12] = 0x7f;
        for len in 0..=tcp.len() {
            assert_eq!(TcpHeader::new(&tcp[..len]).header_len(), (len >= 13).then_some(28));
        }
    }
}
