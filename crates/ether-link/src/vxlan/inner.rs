//! The fields of a carried frame that a tunnel uses.

use pvrdma_packet::{EtherType, Ethernet, Ipv4Header, Ipv6Header, MacAddr, UdpHeader};
use pvrdma_packet::{PROTOCOL_TCP, PROTOCOL_UDP, ROCE_PORT};

/// An address behind a remote: a MAC address, or the GID of an RDMA port.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Station {
    /// A MAC address.
    Mac(MacAddr),
    /// A GID, or an IPv4 address mapped into one.
    Gid([u8; 16]),
}

/// Fields of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Inner {
    /// Destination MAC address.
    pub(super) destination: MacAddr,
    /// Source MAC address.
    pub(super) source: MacAddr,
    /// Source and destination GID of a RoCE packet.
    pub(super) gids: Option<([u8; 16], [u8; 16])>,
    /// Traffic class: DSCP and ECN. 0 for frames other than IP.
    pub(super) class: u8,
    /// Flow hash: equal for all frames whose order matters.
    pub(super) flow: u32,
}

impl Inner {
    /// Parses a frame. `None` if it has no Ethernet header.
    pub(super) fn of(frame: &[u8]) -> Option<Self> {
        let (ethernet, kind, body) = Ethernet::parse(frame).ok()?;
        let mut hash = crc32fast::Hasher::new();
        hash.update(&ethernet.destination.0);
        hash.update(&ethernet.source.0);
        let mut inner =
            Self { destination: ethernet.destination, source: ethernet.source, gids: None, class: 0, flow: 0 };
        // A truncated header leaves its fields at the values from above.
        let _ = match kind {
            EtherType::IPV4 => inner.look_at_ipv4(body, &mut hash),
            EtherType::IPV6 => inner.look_at_ipv6(body, &mut hash, false),
            // The GRH is an IPv6 header.
            EtherType::ROCE => inner.look_at_ipv6(body, &mut hash, true),
            _ => None,
        };
        inner.flow = hash.finalize();
        Some(inner)
    }

    fn look_at_ipv4(&mut self, body: &[u8], hash: &mut crc32fast::Hasher) -> Option<()> {
        let ip = Ipv4Header::new(body);
        let addresses = ip.addresses()?;
        self.class = ip.traffic_class()?;
        hash.update(&addresses);
        // A later fragment has no ports and must not overtake the first one, so the flow of a fragment does not include
        // ports.
        let transport = body.get(ip.header_len()?..)?;
        if !ip.is_fragment()? && take_ports(ip.protocol()?, transport, hash) {
            let mapped = |[a, b, c, d]: [u8; 4]| [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d];
            self.gids = Some((mapped(ip.source()?), mapped(ip.destination()?)));
        }
        Some(())
    }

    fn look_at_ipv6(&mut self, body: &[u8], hash: &mut crc32fast::Hasher, roce: bool) -> Option<()> {
        let ip = Ipv6Header::new(body);
        let addresses = ip.addresses()?;
        self.class = ip.traffic_class()?;
        hash.update(&addresses);
        let rest = body.get(Ipv6Header::LEN..)?;
        if roce {
            // RoCE v1 has no ports; the destination QP distinguishes flows instead.
            hash.update(rest.get(5..8).unwrap_or_default());
        }
        if roce || take_ports(ip.next_header()?, rest, hash) {
            self.gids = Some((ip.source()?, ip.destination()?));
        }
        Some(())
    }
}

/// Adds the ports to the flow hash. Returns `true` if this is RoCE.
fn take_ports(protocol: u8, transport: &[u8], hash: &mut crc32fast::Hasher) -> bool {
    // TCP has its ports at the offsets of UDP.
    let Some(ports) = UdpHeader::new(transport).ports() else { return false };
    if !matches!(protocol, PROTOCOL_TCP | PROTOCOL_UDP) {
        return false;
    }
    hash.update(&ports);
    protocol == PROTOCOL_UDP && UdpHeader::new(&ports).destination_port() == Some(ROCE_PORT)
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    const A: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const B: [u8; 6] = [2, 0, 0, 0, 0, 2];

    /// Returns a frame with an IPv4 UDP packet.
    pub(in super::super) fn ipv4(to: [u8; 6], from: [u8; 6], class: u8, ports: [u16; 2], payload: &[u8]) -> Vec<u8> {
        let mut ip = [0_u8; 20];
        (ip[0], ip[1], ip[9]) = (0x45, class, 17);
        ip[12..16].copy_from_slice(&[10, 0, 0, from[5]]);
        ip[16..20].copy_from_slice(&[10, 0, 0, to[5]]);
        let udp = [ports[0].to_be_bytes(), ports[1].to_be_bytes(), [0; 2], [0; 2]].concat();
        [&to[..], &from, &[8, 0], &ip, &udp, payload].concat()
    }

    fn gid(last: u8) -> [u8; 16] {
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, last]
    }

    #[test]
    fn roce_has_gids_and_other_packets_have_none() {
        let inner = Inner::of(&ipv4(A, B, 0x6a, [0xc123, 4791], b"")).unwrap();
        assert_eq!((inner.destination, inner.source), (MacAddr(A), MacAddr(B)));
        assert_eq!((inner.class, inner.gids), (0x6a, Some((gid(2), gid(1)))));
        assert_eq!(Inner::of(&ipv4(A, B, 0, [0xc123, 53], b"")).unwrap().gids, None);
        let mut v1 = [0_u8; 14 + 40 + 12];
        (v1[12], v1[13], v1[14], v1[15]) = (0x89, 0x15, 0x66, 0xb0);
        (v1[14 + 8], v1[14 + 24]) = (0xfe, 0xfd);
        let inner = Inner::of(&v1).unwrap();
        let (source, destination) = inner.gids.unwrap();
        assert_eq!((inner.class, source[0], destination[0]), (0x6b, 0xfe, 0xfd));
        assert_eq!(Inner::of(&[0; 13]), None);
    }

    #[test]
    fn flows_differ_by_ports_and_fragments_have_none() {
        let flow = |frame: &[u8]| Inner::of(frame).unwrap().flow;
        let one = ipv4(A, B, 0, [1, 4791], b"x");
        assert_eq!(flow(&one), flow(&ipv4(A, B, 2, [1, 4791], b"other")));
        assert_ne!(flow(&one), flow(&ipv4(A, B, 0, [2, 4791], b"x")));
        let (mut first, mut second) = (one.clone(), ipv4(A, B, 0, [7, 8], b"y"));
        first[14 + 6] = 0x20;
        second[14 + 7] = 185;
        assert_eq!(flow(&first), flow(&second));
    }

    proptest! {
        #[test]
        fn any_bytes_are_looked_at(frame in prop::collection::vec(any::<u8>(), 0..128), kind in 0..4_usize) {
            let mut frame = frame;
            if let Some(field) = frame.get_mut(12..14) {
                field.copy_from_slice(&[[8, 0], [0x86, 0xdd], [0x89, 0x15], [0x81, 0]][kind]);
            }
            prop_assert_eq!(Inner::of(&frame).is_some(), frame.len() >= if kind == 3 { 18 } else { 14 });
        }
    }
}
