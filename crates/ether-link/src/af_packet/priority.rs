//! Traffic class of a frame.
//!
//! Linux selects the queue and the traffic class of an adapter by the priority of a packet (`skb->priority`), and not
//! by its headers. Without a priority, RDMA would leave in the default class: PFC for its own class would not pause it,
//! and it would not get its share of the bandwidth. Packets of RoCE therefore get the priority that a switch would
//! assign: that of their IEEE 802.1Q tag or, without a tag, the upper three bits of their DSCP. A VLAN interface
//! derives the tag from it (`egress-qos-map`).

use pvrdma_packet::{EtherType, Ethernet, Ipv4Header, Ipv6Header, PROTOCOL_UDP, ROCE_PORT, UdpHeader};

/// Highest priority that needs no privilege (`SO_PRIORITY`, socket(7)).
const HIGHEST: u8 = 6;

/// Returns the priority of a frame, 0 to 6. Frames other than RoCE have priority 0.
pub(super) fn priority(frame: &[u8]) -> u8 {
    marked(frame).unwrap_or(0).min(HIGHEST)
}

fn marked(frame: &[u8]) -> Option<u8> {
    let (ethernet, kind, body) = Ethernet::parse(frame).ok()?;
    let (v4, v6) = (Ipv4Header::new(body), Ipv6Header::new(body));
    let class = match kind {
        EtherType::ROCE => v6.traffic_class()?,
        // RoCE packets have neither IPv4 options nor extension headers. A packet with them gets the default priority.
        EtherType::IPV4 if is_roce(v4.protocol()?, body.get(Ipv4Header::LEN..)?) => v4.traffic_class()?,
        EtherType::IPV6 if is_roce(v6.next_header()?, body.get(Ipv6Header::LEN..)?) => v6.traffic_class()?,
        _ => return None,
    };
    Some(ethernet.vlan.map_or(class >> 5, |vlan| vlan.pcp))
}

fn is_roce(protocol: u8, transport: &[u8]) -> bool {
    protocol == PROTOCOL_UDP && UdpHeader::new(transport).destination_port() == Some(ROCE_PORT)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(tag: &[u8], kind: u16, body: &[u8]) -> Vec<u8> {
        [&[0; 12], tag, &kind.to_be_bytes(), body].concat()
    }

    #[test]
    fn tags_come_before_traffic_classes() {
        let port = ROCE_PORT.to_be_bytes();
        let v4 = |class: u8, protocol: u8| {
            let mut ip = [0_u8; 28];
            (ip[0], ip[1], ip[9]) = (0x45, class, protocol);
            ip[22..24].copy_from_slice(&port);
            ip
        };
        let mut v6 = [0_u8; 48];
        (v6[0], v6[1], v6[6]) = (0x66, 0x80, 17);
        v6[42..44].copy_from_slice(&port);
        let mut grh = [0_u8; 40];
        (grh[0], grh[1]) = (0x6a, 0x00);
        let tag = [0x81, 0, 0x60, 5];
        for (frame, expected) in [
            (frame(&[], 0x0800, &v4(0x68, 17)), 3),
            (frame(&[], 0x0800, &v4(0xc2, 17)), 6),
            (frame(&[], 0x0800, &v4(0xff, 17)), 6),
            (frame(&tag, 0x0800, &v4(0xc0, 17)), 3),
            (frame(&[], 0x86dd, &v6), 3),
            (frame(&[], 0x8915, &grh), 5),
            (frame(&tag, 0x8915, &grh), 3),
            // TCP, and frames that are too short.
            (frame(&[], 0x0800, &v4(0xc0, 6)), 0),
            (frame(&tag, 0x0806, &grh), 0),
            (frame(&[], 0x0800, &v4(0xc0, 17)[..20]), 0),
            (Vec::new(), 0),
        ] {
            assert_eq!(priority(&frame), expected, "{frame:02x?}");
        }
    }
}
