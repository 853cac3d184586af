//! Frames that probe for the owner of an address, and frames that announce the device. Probes do not claim
//! the address for the device: if a host does use it, the caches of other hosts must keep their entry.

use std::net::{IpAddr, Ipv6Addr};

use pvrdma_packet::{Arp, EtherType, MacAddr};
use pvrdma_verbs::link_local;

use super::address::Address;

/// Minimum length of a frame, without its check sequence.
const MIN_FRAME: usize = 60;

/// Builds a probe for an address: an ARP probe (RFC 5227, 2.1) or a neighbour solicitation from the link-local address
/// of the MAC (RFC 4861, 4.3). The source is never the unspecified address: if the network returned such a probe to a
/// guest in the middle of its own duplicate address detection, the guest would take the probe for a conflict and give
/// up its address.
pub(crate) fn build(mac: MacAddr, (gid, vlan): Address) -> Vec<u8> {
    match gid.ipv4() {
        Some(target) => frame(mac, [0xff; 6], vlan, [8, 6], &arp_request(mac, [0; 4], bytes(target))),
        None => {
            let [.., a, b, c] = gid.0;
            frame(mac, [0x33, 0x33, 0xff, a, b, c], vlan, [0x86, 0xdd], &solicitation(mac, gid.0))
        }
    }
}

/// Builds an announcement of an address: an ARP announcement (RFC 5227, 2.3) or an unsolicited neighbour advertisement
/// to all nodes (RFC 4861, 7.2.6). Switches learn the place of the MAC address from it, and hosts the MAC address.
pub(crate) fn announcement(mac: MacAddr, (gid, vlan): Address) -> Vec<u8> {
    match gid.ipv4() {
        Some(own) => frame(mac, [0xff; 6], vlan, [8, 6], &arp_request(mac, bytes(own), bytes(own))),
        None => frame(mac, [0x33, 0x33, 0, 0, 0, 1], vlan, [0x86, 0xdd], &advertisement(mac, gid.0)),
    }
}

/// Builds a RARP request of the device for its own address (RFC 903), by which VMMs teach switches the place of a MAC
/// address. It names no IP address, so hosts ignore it.
pub(crate) fn reverse_request(mac: MacAddr, vlan: Option<u16>) -> Vec<u8> {
    frame(mac, [0xff; 6], vlan, EtherType::RARP.0.to_be_bytes(), &arp(Arp::REVERSE_REQUEST, mac, [0; 4], mac, [0; 4]))
}

fn frame(mac: MacAddr, destination: [u8; 6], vlan: Option<u16>, kind: [u8; 2], body: &[u8]) -> Vec<u8> {
    let tag = vlan.map_or_else(Vec::new, |vlan| [[0x81, 0], vlan.to_be_bytes()].concat());
    let mut frame = [&destination[..], &mac.0, &tag, &kind, body].concat();
    frame.resize(frame.len().max(MIN_FRAME), 0);
    frame
}

fn bytes(address: impl Into<IpAddr>) -> [u8; 4] {
    match address.into() {
        IpAddr::V4(address) => address.octets(),
        IpAddr::V6(_) => [0; 4],
    }
}

/// Builds an ARP or RARP packet.
fn arp(operation: u16, mac: MacAddr, sender: [u8; 4], target_mac: MacAddr, target: [u8; 4]) -> Vec<u8> {
    [&[0, 1, 8, 0, 6, 4][..], &operation.to_be_bytes(), &mac.0, &sender, &target_mac.0, &target].concat()
}

/// Builds an ARP request.
fn arp_request(mac: MacAddr, sender: [u8; 4], target: [u8; 4]) -> Vec<u8> {
    arp(Arp::REQUEST, mac, sender, MacAddr([0; 6]), target)
}

/// Builds an IPv6 packet to the solicited-node group of the target.
fn solicitation(mac: MacAddr, target: [u8; 16]) -> Vec<u8> {
    let [.., a, b, c] = target;
    let group = Ipv6Addr::from([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c]).octets();
    let message = [&[135, 0, 0, 0, 0, 0, 0, 0][..], &target, &[SOURCE_OPTION, 1], &mac.0].concat();
    icmp(link_local(mac).0, group, message)
}

/// Builds an unsolicited neighbour advertisement to all nodes, which overrides their cache entries for the address.
fn advertisement(mac: MacAddr, address: [u8; 16]) -> Vec<u8> {
    let group = Ipv6Addr::from([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]).octets();
    let message = [&[136, 0, 0, 0, OVERRIDE, 0, 0, 0][..], &address, &[TARGET_OPTION, 1], &mac.0].concat();
    icmp(address, group, message)
}

/// Completes a message of [`LENGTH`] bytes.
fn icmp(source: [u8; 16], group: [u8; 16], mut message: Vec<u8>) -> Vec<u8> {
    // The pseudo-header (RFC 8200, 8.1): addresses, length, next header.
    let sum = sum(&source) + sum(&group) + sum(&message) + u32::from(LENGTH) + u32::from(ICMPV6);
    let [high, low] = fold(sum).to_be_bytes();
    if let [_, _, first, second, ..] = message.as_mut_slice() {
        (*first, *second) = (high, low);
    }
    let [high, low] = LENGTH.to_be_bytes();
    [&[0x60, 0, 0, 0, high, low, ICMPV6, 255][..], &source, &group, &message].concat()
}

/// Length of a message with one option for the link-layer address.
const LENGTH: u16 = 32;
const SOURCE_OPTION: u8 = 1;
const TARGET_OPTION: u8 = 2;
/// Flag of an advertisement, in its first byte of flags.
const OVERRIDE: u8 = 0x20;
const ICMPV6: u8 = 58;

/// Sums 16-bit words (RFC 1071). The inputs here are too short to overflow the sum.
fn sum(bytes: &[u8]) -> u32 {
    let (words, _) = bytes.as_chunks::<2>();
    words.iter().map(|word| u32::from(u16::from_be_bytes(*word))).sum()
}

const fn fold(sum: u32) -> u16 {
    let once = (sum & 0xffff) + (sum >> 16);
    let twice = (once & 0xffff) + (once >> 16);
    let [_, _, high, low] = twice.to_be_bytes();
    !u16::from_be_bytes([high, low])
}

#[cfg(test)]
mod tests {
    use pvrdma_verbs::testing::{gid, mac};
    use pvrdma_verbs_types::Gid;

    use super::*;

    #[test]
    fn an_arp_probe_names_no_sender() {
        let frame = build(mac(1), (gid(9), Some(7)));
        let expected: Vec<u8> = [
            &[0xff; 6][..],
            &mac(1).0,
            &[0x81, 0, 0, 7, 8, 6, 0, 1, 8, 0, 6, 4, 0, 1],
            &mac(1).0,
            &[0; 10],
            &[10, 0, 0, 9],
        ]
        .concat();
        assert!(frame.starts_with(&expected) && frame.len() == 60, "{frame:02x?}");
    }

    #[test]
    fn announcements_name_the_address_and_the_mac_address() {
        let frame = announcement(mac(1), (gid(9), None));
        let expected = [&[0xff; 6][..], &mac(1).0, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1], &mac(1).0, &[10, 0, 0, 9]].concat();
        assert!(frame.starts_with(&expected) && frame[32..42] == [0, 0, 0, 0, 0, 0, 10, 0, 0, 9], "{frame:02x?}");

        let own = "fd00::12:3456".parse::<Ipv6Addr>().unwrap().octets();
        let frame = announcement(mac(1), (Gid(own), Some(7)));
        assert_eq!(frame[..18], [0x33, 0x33, 0, 0, 0, 1, 2, 0, 0, 0, 0, 1, 0x81, 0, 0, 7, 0x86, 0xdd]);
        let (header, message) = frame[18..].split_at(40);
        assert_eq!((&header[8..24], &header[24..40]), (&own[..], &"ff02::1".parse::<Ipv6Addr>().unwrap().octets()[..]));
        assert_eq!((&message[..2], &message[4..8], &message[8..24]), (&[136, 0][..], &[0x20, 0, 0, 0][..], &own[..]));
        assert_eq!(message[24..], [2, 1, 2, 0, 0, 0, 0, 1]);
        assert_eq!(fold(sum(&header[8..40]) + 32 + 58 + sum(message)), 0);
    }

    #[test]
    fn a_solicitation_is_from_the_link_local_address() {
        let target = "fd00::12:3456".parse::<IpAddr>().unwrap();
        let frame = build(mac(1), (Gid::from(target), None));
        assert_eq!(frame[..14], [0x33, 0x33, 0xff, 0x12, 0x34, 0x56, 2, 0, 0, 0, 0, 1, 0x86, 0xdd]);
        let (header, message) = frame[14..].split_at(40);
        assert_eq!((&header[4..8], &header[8..24]), (&[0, 32, 58, 255][..], &link_local(mac(1)).0[..]));
        assert_eq!(message[24..], [1, 1, 2, 0, 0, 0, 0, 1]);
        assert_eq!(header[24..40], "ff02::1:ff12:3456".parse::<Ipv6Addr>().unwrap().octets());
        // The sum over all that the checksum covers is all ones.
        let all = sum(&header[8..40]) + 32 + 58 + sum(message);
        assert_eq!(fold(all), 0);
    }
}
