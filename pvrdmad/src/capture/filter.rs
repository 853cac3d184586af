//! Selection of captured frames by peer and queue pair, on the client's side.

use std::net::IpAddr;

use anyhow::{Context, Result};
use pvrdma_packet::field::{peek, u24};
use pvrdma_packet::{EtherType, IpPacket, Ipv4Header, Ipv6Header, PROTOCOL_UDP, ROCE_PORT, UdpHeader};

use crate::status::QueuePairTraffic;

/// Ethertype of RoCE v1.
const ROCE_V1: EtherType = EtherType(0x8915);
/// Opcodes of datagrams: SEND only, without and with immediate data (IBA 9.2.1).
const UD_OPCODES: [u8; 2] = [0x64, 0x65];
/// Offset of the source queue pair in a datagram: in the DETH behind the BTH (IBA 9.3.2).
const SOURCE_QP: usize = 17;
/// Offset of the destination queue pair in the BTH (IBA 9.2).
const DESTINATION_QP: usize = 5;

/// Frames to keep. Without conditions, all are kept.
#[derive(Clone, Debug, Default)]
pub(super) struct Filter {
    peer: Option<IpAddr>,
    queue_pair: Option<QueuePair>,
}

#[derive(Clone, Copy, Debug)]
struct QueuePair {
    number: u32,
    /// Address and number of the peer's queue pair, if it is connected.
    peer: Option<(IpAddr, u32)>,
}

impl Filter {
    /// Returns the filter for a peer, and for a queue pair among those that the device has.
    ///
    /// # Errors
    /// The device has no such queue pair.
    pub(super) fn new(
        peer: Option<IpAddr>,
        number: Option<u32>,
        list: impl FnOnce() -> Result<Vec<QueuePairTraffic>>,
    ) -> Result<Self> {
        let peer = peer.map(|peer| peer.to_canonical());
        let Some(number) = number else { return Ok(Self { peer, queue_pair: None }) };
        let list = list()?;
        let found = list.iter().find(|qp| qp.qpn == number).with_context(|| format!("there is no QP {number:#x}"))?;
        let address = |gid: &str| gid.parse::<IpAddr>().ok().map(|address| address.to_canonical());
        let connected = found.peer.as_ref().and_then(|peer| Some((address(&peer.gid)?, peer.qpn)));
        Ok(Self { peer, queue_pair: Some(QueuePair { number, peer: connected }) })
    }

    /// Returns `true` if a frame, which may be cut, meets all conditions.
    pub(super) fn keeps(&self, frame: &[u8]) -> bool {
        if self.peer.is_none() && self.queue_pair.is_none() {
            return true;
        }
        let Some((packet, transport)) = Packet::parse(frame) else { return false };
        let with_peer = self.peer.is_none_or(|peer| [packet.source, packet.destination].contains(&peer));
        with_peer && self.queue_pair.is_none_or(|qp| transport.is_some_and(|bth| qp.has(packet, bth)))
    }
}

impl QueuePair {
    /// Returns `true` if the packet goes to or comes from the queue pair.
    fn has(&self, packet: Packet, bth: &[u8]) -> bool {
        let Some(to) = peek::<DESTINATION_QP, 3>(bth).map(u24) else { return false };
        match self.peer {
            Some((address, number)) => {
                (to == self.number && packet.source == address) || (to == number && packet.destination == address)
            }
            None => {
                let is_datagram = bth.first().is_some_and(|opcode| UD_OPCODES.contains(opcode));
                let from = peek::<SOURCE_QP, 3>(bth).map(u24).filter(|_| is_datagram);
                to == self.number || from == Some(self.number)
            }
        }
    }
}

/// Addresses of an IP packet or of a packet of RoCE v1.
#[derive(Clone, Copy, Debug)]
struct Packet {
    source: IpAddr,
    destination: IpAddr,
}

impl Packet {
    /// Parses a frame. Returns the bytes from the BTH on, too, if it is a RoCE packet.
    fn parse(frame: &[u8]) -> Option<(Self, Option<&[u8]>)> {
        let (offset, kind) = IpPacket::link_header(frame);
        let bytes = frame.get(offset..)?;
        let roce = |payload: &'_ [u8]| UdpHeader::new(payload).destination_port() == Some(ROCE_PORT);
        match kind? {
            EtherType::IPV4 => {
                let header = Ipv4Header::new(bytes);
                let packet = Self { source: header.source()?.into(), destination: header.destination()?.into() };
                let payload = bytes.get(header.header_len()?..)?;
                let is_udp = header.protocol()? == PROTOCOL_UDP;
                Some((packet, payload.get(UdpHeader::LEN..).filter(|_| is_udp && roce(payload))))
            }
            EtherType::IPV6 => {
                let payload = bytes.get(Ipv6Header::LEN..)?;
                let is_udp = Ipv6Header::new(bytes).next_header()? == PROTOCOL_UDP;
                Some((Self::v6(bytes)?, payload.get(UdpHeader::LEN..).filter(|_| is_udp && roce(payload))))
            }
            // The GRH has the layout of an IPv6 header (IBA 8.3).
            ROCE_V1 => Some((Self::v6(bytes)?, bytes.get(Ipv6Header::LEN..))),
            _ => None,
        }
    }

    fn v6(bytes: &[u8]) -> Option<Self> {
        let header = Ipv6Header::new(bytes);
        let address = |bytes: [u8; 16]| IpAddr::from(bytes).to_canonical();
        Some(Self { source: address(header.source()?), destination: address(header.destination()?) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::QueuePairPeer;

    const A: [u8; 4] = [10, 0, 0, 1];
    const B: [u8; 4] = [10, 0, 0, 2];

    /// A frame of RoCE v2 over IPv4.
    fn v2(from: [u8; 4], to: [u8; 4], opcode: u8, to_qp: u8, from_qp: u8) -> Vec<u8> {
        let ethernet = [&[0; 12][..], &[8, 0]].concat();
        let ip = [&[0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0][..], &from, &to].concat();
        let bth = [opcode, 0, 0, 0, 0, 0, 0, to_qp, 0, 0, 0, 0];
        let deth = [0, 0, 0, 0, 0, 0, 0, from_qp];
        [&ethernet[..], &ip, &[0xc0, 0, 0x12, 0xb7, 0, 0, 0, 0], &bth, &deth].concat()
    }

    /// A frame of RoCE v1 with these addresses, which are IPv4-mapped.
    fn v1(from: [u8; 4], to: [u8; 4], to_qp: u8) -> Vec<u8> {
        let mapped = |address: [u8; 4]| [&[0; 10][..], &[0xff; 2], &address].concat();
        let grh = [&[0x60, 0, 0, 0, 0, 0, 0x1b, 64][..], &mapped(from), &mapped(to)].concat();
        [&[0; 12][..], &[0x89, 0x15], &grh, &[4, 0, 0, 0, 0, 0, 0, to_qp, 0, 0, 0, 0]].concat()
    }

    fn queue_pair(number: u32, peer: Option<(&str, u32)>) -> Result<Filter> {
        let peer = peer.map(|(gid, qpn)| QueuePairPeer { qpn, gid: gid.to_owned() });
        let qp_type = String::new();
        let qp = QueuePairTraffic {
            qpn: 7,
            qp_type,
            state: None,
            peer,
            send_ring_used: None,
            send_ring_size: 0,
            progress: None,
        };
        Filter::new(None, Some(number), || Ok(vec![qp]))
    }

    #[test]
    fn frames_of_a_peer() {
        let filter = Filter::new(Some(B.into()), None, || panic!("no queue pair is asked for")).unwrap();
        assert!(filter.keeps(&v2(A, B, 4, 7, 0)) && filter.keeps(&v2(B, A, 4, 7, 0)) && filter.keeps(&v1(B, A, 7)));
        assert!(!filter.keeps(&v2(A, A, 4, 7, 0)));
        assert!(Filter::default().keeps(&[]), "without conditions all frames are kept");
    }

    #[test]
    fn frames_of_a_queue_pair() {
        let connected = queue_pair(7, Some(("::ffff:10.0.0.2", 9))).unwrap();
        for (frame, kept) in [
            (v2(B, A, 4, 7, 0), true),
            (v2(A, B, 17, 9, 0), true),
            (v1(A, B, 9), true),
            // Another queue pair, and the same numbers with the other roles.
            (v2(B, A, 4, 8, 0), false),
            (v2(A, B, 4, 7, 0), false),
        ] {
            assert_eq!(connected.keeps(&frame), kept, "{frame:x?}");
        }
        let datagrams = queue_pair(7, None).unwrap();
        assert!(datagrams.keeps(&v2(A, B, 0x64, 3, 7)) && datagrams.keeps(&v2(B, A, 0x64, 7, 3)));
        assert!(!datagrams.keeps(&v2(A, B, 4, 3, 7)), "no datagram has a source there");
        assert!(queue_pair(8, None).is_err());
    }

    /// Attack: frames that end anywhere.
    #[test]
    fn cut_frames_are_no_problem() {
        let filter = queue_pair(7, Some(("10.0.0.2", 9))).unwrap();
        for frame in [v2(B, A, 4, 7, 0), v1(B, A, 7)] {
            for length in 0..frame.len() {
                filter.keeps(&frame[..length]);
            }
        }
    }
}
