//! ARP (RFC 826) and RARP (RFC 903).

use crate::MacAddr;
use crate::field::field;

/// ARP or RARP packet for IPv4 addresses on Ethernet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arp {
    /// Operation: one of the constants, or any other number.
    pub operation: u16,
    /// Ethernet address of the sender.
    pub sender_mac: MacAddr,
    /// IPv4 address of the sender.
    pub sender_ip: [u8; 4],
    /// Ethernet address of the target.
    pub target_mac: MacAddr,
    /// IPv4 address of the target.
    pub target_ip: [u8; 4],
}

impl Arp {
    /// Length in bytes.
    pub const LEN: usize = 28;
    /// ARP: which Ethernet address has the target's IPv4 address?
    pub const REQUEST: u16 = 1;
    /// ARP: the answer of the sender.
    pub const REPLY: u16 = 2;
    /// RARP: which IPv4 address has the target?
    pub const REVERSE_REQUEST: u16 = 3;
    /// Ethernet, IPv4, and the lengths of their addresses.
    const KIND: [u8; 6] = [0, 1, 8, 0, 6, 4];

    /// Parses the bytes behind the ethertype. Padding may follow. `None` if they are too few, or the addresses are of
    /// other kinds.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let packet: &[u8; Self::LEN] = bytes.first_chunk()?;
        (field::<0, _, _>(packet) == Self::KIND).then(|| Self {
            operation: u16::from_be_bytes(field::<6, _, _>(packet)),
            sender_mac: MacAddr(field::<8, _, _>(packet)),
            sender_ip: field::<14, _, _>(packet),
            target_mac: MacAddr(field::<18, _, _>(packet)),
            target_ip: field::<24, _, _>(packet),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ipv4_on_ethernet_is_parsed() {
        let mut packet = [0, 1, 8, 0, 6, 4, 0, 2, 2, 0, 0, 0, 0, 1, 10, 0, 0, 1, 2, 0, 0, 0, 0, 2, 10, 0, 0, 2, 0xff];
        let expected = Arp {
            operation: Arp::REPLY,
            sender_mac: MacAddr([2, 0, 0, 0, 0, 1]),
            sender_ip: [10, 0, 0, 1],
            target_mac: MacAddr([2, 0, 0, 0, 0, 2]),
            target_ip: [10, 0, 0, 2],
        };
        assert_eq!(Arp::parse(&packet), Some(expected));
        assert!((0..28).all(|len| Arp::parse(&packet[..len]).is_none()));
        for at in 0..6 {
            packet[at] ^= 1;
            assert_eq!(Arp::parse(&packet), None, "byte {at}");
            packet[at] ^= 1;
        }
        packet[6] = 1;
        assert_eq!(Arp::parse(&packet), Some(Arp { operation: 0x0102, ..expected }));
    }
}
