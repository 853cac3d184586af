//! Separation of frames for the RDMA function from frames for the network function, which share a MAC address.

use std::net::IpAddr;

use pvrdma_roce::wire::{EtherType, Ethernet, PROTOCOL_UDP, ROCE_PORT};
use pvrdma_verbs::{Gid, MacAddr, Qpn};

use crate::addresses::Address;

/// Offset of the destination port in a UDP header.
const UDP_DESTINATION: usize = 2;
const UDP_LEN: usize = 8;
const IPV6_LEN: usize = 40;
const GRH_LEN: usize = 40;
/// Offset of the destination QP in a BTH.
const BTH_DESTINATION: usize = 5;

/// Returns the queue pair that a frame is for, if it is RoCE and addressed to `mac`. The frame need not be valid: the
/// network function has no use for a malformed RoCE frame either. A frame that is too short is for queue pair 0.
#[inline]
pub(super) fn rdma_destination(frame: &[u8], mac: MacAddr) -> Option<Qpn> {
    let (ethernet, kind, body) = Ethernet::parse(frame).ok()?;
    if ethernet.destination != mac { None } else { queue_pair(kind, body) }
}

/// Returns the queue pair and the address that a frame is for, if it is RoCE and its destination is a unicast MAC
/// address other than `mac`.
pub(super) fn foreign_destination(frame: &[u8], mac: MacAddr) -> Option<(Qpn, Address)> {
    let (ethernet, kind, body) = Ethernet::parse(frame).ok()?;
    if ethernet.destination == mac || ethernet.destination.0[0] & 1 != 0 {
        return None;
    }
    let qpn = queue_pair(kind, body)?;
    let gid = match kind {
        EtherType::IPV4 => IpAddr::from(*body.get(16..)?.first_chunk::<4>()?).into(),
        // GRH and IPv6 have the destination at the same offset.
        _ => Gid(*body.get(24..)?.first_chunk()?),
    };
    Some((qpn, (gid, ethernet.vlan_id())))
}

/// Returns the queue pair that a RoCE frame with this ethertype and body is for.
fn queue_pair(kind: EtherType, body: &[u8]) -> Option<Qpn> {
    let before = match kind {
        EtherType::ROCE => GRH_LEN,
        EtherType::IPV4 if is_ipv4_roce(body) => ipv4_len(*body.first()?) + UDP_LEN,
        EtherType::IPV6 if body.get(6) == Some(&PROTOCOL_UDP) && is_roce_port(body, IPV6_LEN) => IPV6_LEN + UDP_LEN,
        _ => return None,
    };
    let destination = body.get(before + BTH_DESTINATION..).and_then(<[u8]>::first_chunk);
    Some(Qpn::new(destination.map_or(0, |&[a, b, c]| u32::from_be_bytes([0, a, b, c]))))
}

/// Returns `true` if the ethertype is that of a VLAN tag: of IEEE 802.1Q, of 802.1ad, or of older bridges.
pub(super) const fn is_tag(kind: EtherType) -> bool {
    matches!(kind.0, 0x8100 | 0x88a8 | 0x9100)
}

/// Returns `true` if an IPv4 packet, or the first fragment of one, is RoCE.
pub(super) fn is_ipv4_roce(body: &[u8]) -> bool {
    let Some(&[version, .., flags, offset, _, protocol]) = body.first_chunk::<10>() else { return false };
    // Only the first fragment contains the ports.
    let first = flags & 0x1f == 0 && offset == 0;
    protocol == PROTOCOL_UDP && first && is_roce_port(body, ipv4_len(version))
}

/// Returns the length of an IPv4 header that begins with this byte.
const fn ipv4_len(first: u8) -> usize {
    (first & 0xf) as usize * 4
}

/// Returns `true` if the UDP header at offset `header` is that of RoCE.
pub(super) fn is_roce_port(body: &[u8], header: usize) -> bool {
    let port = body.get(header.saturating_add(UDP_DESTINATION)..).and_then(<[u8]>::first_chunk);
    port.is_some_and(|&port| u16::from_be_bytes(port) == ROCE_PORT)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);

    fn frame(mac: MacAddr, tag: &[u8], kind: u16, body: &[u8]) -> Vec<u8> {
        [&mac.0[..], &[2, 0, 0, 0, 0, 9], tag, &kind.to_be_bytes(), body].concat()
    }

    fn ipv4(protocol: u8, offset: u8, options: usize, port: u16) -> Vec<u8> {
        let mut body = vec![0; 20 + options + 8];
        body[0] = 0x45 + u8::try_from(options / 4).unwrap();
        (body[7], body[9]) = (offset, protocol);
        body[20 + options + 2..][..2].copy_from_slice(&port.to_be_bytes());
        body
    }

    #[test]
    fn only_roce_to_us_is_ours() {
        let ours = |frame: &[u8]| rdma_destination(frame, MAC).is_some();
        let udp = |port| {
            let mut body = vec![0; 48];
            body[6] = 17;
            body[42..44].copy_from_slice(&u16::to_be_bytes(port));
            body
        };
        assert!(ours(&frame(MAC, &[], 0x8915, &[])));
        assert!(ours(&frame(MAC, &[0x81, 0, 0, 5], 0x8915, &[])));
        assert!(ours(&frame(MAC, &[], 0x0800, &ipv4(17, 0, 0, 4791))));
        assert!(ours(&frame(MAC, &[0x81, 0, 0, 5], 0x0800, &ipv4(17, 0, 8, 4791))));
        assert!(ours(&frame(MAC, &[], 0x86dd, &udp(4791))));
        assert!(!ours(&frame(MacAddr([0xff; 6]), &[], 0x8915, &[])));
        assert!(!ours(&frame(MAC, &[], 0x0806, &[0; 28])));
        assert!(!ours(&frame(MAC, &[], 0x0800, &ipv4(6, 0, 0, 4791))));
        assert!(!ours(&frame(MAC, &[], 0x0800, &ipv4(17, 1, 0, 4791))));
        assert!(!ours(&frame(MAC, &[], 0x0800, &ipv4(17, 0, 0, 4790))));
        assert!(!ours(&frame(MAC, &[], 0x86dd, &udp(53))));
        let to =
            |kind, body: Vec<u8>, bth: &[u8]| rdma_destination(&frame(MAC, &[], kind, &[&body, bth].concat()), MAC);
        let bth = [0, 0, 0, 0, 0xff, 0x12, 0x34, 0x56];
        for (kind, body) in [(0x8915, vec![0; 40]), (0x0800, ipv4(17, 0, 8, 4791)), (0x86dd, udp(4791))] {
            assert_eq!(to(kind, body.clone(), &bth), Some(Qpn::new(0x12_3456)));
            assert_eq!(to(kind, body, &bth[..7]), Some(Qpn::new(0)), "it ends too soon");
        }
        let whole = frame(MAC, &[], 0x0800, &ipv4(17, 0, 0, 4791));
        assert!((0..whole.len() - 4).all(|len| !ours(&whole[..len])));
    }
}
