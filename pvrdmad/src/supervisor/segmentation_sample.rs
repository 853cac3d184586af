//! RoCE packets with which an uplink finds out where super-frames are segmented.

use pvrdma_ether_link::af_packet::SegmentationSample;
use pvrdma_packet::{Ethernet, MacAddr};
use pvrdma_roce::wire::{Bth, Extension, Header, Ipv4, Network, Opcode, Packet, Position, Udp, build};
use pvrdma_verbs_types::{Psn, Qpn};

/// An address without a host (RFC 5737).
const NOWHERE: [u8; 4] = [192, 0, 2, 1];
const PAYLOAD: usize = 64;

/// Packets for QP 0, which accepts no such packet.
pub(super) const SAMPLE: SegmentationSample = SegmentationSample { packet, is_intact };

fn packet(mac: MacAddr, number: u16) -> Vec<u8> {
    let ip = Ipv4 {
        traffic_class: 0,
        identification: 0x7ffe_u16.wrapping_add(number),
        dont_fragment: true,
        hop_limit: 1,
        source: NOWHERE,
        destination: NOWHERE,
    };
    let network = Network::V2Ipv4(ip, Udp { source_port: 0xc001, checksum: 0 });
    let ethernet = Ethernet { destination: mac, source: mac, vlan: None };
    let bth = Bth::new(Opcode::send(Position::Middle), Qpn::new(0), Psn::new(number.into()));
    build(&Header { ethernet, network, bth, extension: Extension::None }, &[0; PAYLOAD]).unwrap_or_default()
}

/// Checks the ICRC, which covers the identification and the payload.
fn is_intact(frame: &[u8], number: u16) -> bool {
    Packet::parse(frame).is_ok_and(|packet| {
        packet.verify().is_ok() && packet.header.bth.psn == Psn::new(number.into()) && packet.payload.len() == PAYLOAD
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_of_the_sample_are_known_again() {
        let mac = MacAddr([2, 0, 0, 0, 0, 1]);
        let packets = [0, 1, 2].map(|number| packet(mac, number));
        for (number, packet) in (0..).zip(&packets) {
            assert_eq!(packet.len(), packets[0].len());
            assert!(is_intact(packet, number) && !is_intact(packet, number + 1));
            let mut damaged = packet.clone();
            damaged[14 + 20 + 8 + 12] ^= 1;
            assert!(!is_intact(&damaged, number));
        }
    }
}
