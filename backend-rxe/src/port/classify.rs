//! Separation of frames for the RDMA function from frames for the network function, which share a MAC address.

use std::net::IpAddr;

use pvrdma_packet::{EtherType, Ethernet, Ipv4Header, Ipv6Header, MacAddr, PROTOCOL_UDP, ROCE_PORT, UdpHeader};
use pvrdma_roce::wire::Grh;
use pvrdma_verbs_types::{Gid, Qpn};

use crate::addresses::Address;

/// Offset of the destination QP in a BTH.
const BTH_DESTINATION: usize = 5;

/// Returns the queue pair that a frame is for, if it is RoCE and addressed to `mac`. The frame need not be valid,
/// because the network function has no use for a malformed RoCE frame either. A frame that is too short counts as one
/// for queue pair 0.
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
        EtherType::IPV4 => IpAddr::from(Ipv4Header::new(body).destination()?).into(),
        // GRH and IPv6 have the destination at the same offset.
        _ => Gid(Ipv6Header::new(body).destination()?),
    };
    Some((qpn, (gid, ethernet.vlan_id())))
}

/// Returns the queue pair that a RoCE frame with this ethertype and body is for.
fn queue_pair(kind: EtherType, body: &[u8]) -> Option<Qpn> {
    let before = match kind {
        EtherType::ROCE => Grh::LEN,
        EtherType::IPV4 => ipv4_roce(body)? + UdpHeader::LEN,
        EtherType::IPV6 if is_ipv6_roce(body) => Ipv6Header::LEN + UdpHeader::LEN,
        _ => return None,
    };
    let destination = body.get(before + BTH_DESTINATION..).and_then(<[u8]>::first_chunk);
    Some(Qpn::new(destination.map_or(0, |&[a, b, c]| u32::from_be_bytes([0, a, b, c]))))
}

/// Returns the offset of the UDP header if an IPv4 packet, or the first fragment of one, is RoCE. Version, lengths and
/// checksum are not checked: a receiver that is equally lenient must not get a malformed RoCE packet past this filter.
#[inline]
pub(super) fn ipv4_roce(body: &[u8]) -> Option<usize> {
    let ip = Ipv4Header::new(body);
    let udp = ip.header_len()?;
    // Only the first fragment contains the ports.
    (ip.protocol()? == PROTOCOL_UDP && ip.has_first_byte()? && is_roce_port(body, udp)).then_some(udp)
}

/// Returns `true` if an IPv6 packet without extension headers is RoCE: peers of a queue pair send none. Guards look
/// behind them ([`super::outgoing`]).
#[inline]
fn is_ipv6_roce(body: &[u8]) -> bool {
    Ipv6Header::new(body).next_header() == Some(PROTOCOL_UDP) && is_roce_port(body, Ipv6Header::LEN)
}

/// Returns `true` if the UDP header at offset `header` is that of RoCE.
#[inline]
pub(super) fn is_roce_port(body: &[u8], header: usize) -> bool {
    body.get(header..).and_then(|udp| UdpHeader::new(udp).destination_port()) == Some(ROCE_PORT)
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
