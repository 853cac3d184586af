//! Packets of Linux's rxe: all of them parse, verify, and are rebuilt to the same bytes.

use pvrdma_roce::wire::{CrcError, Header, Network, Packet, build, connected_source_port, datagram_source_port};

use crate::pcap;

#[test]
fn every_packet_of_every_capture() {
    let (mut packets, mut files, mut odd) = (0, 0, Vec::new());
    for (name, frames) in pcap::all() {
        files += 1;
        for (index, frame) in frames.iter().enumerate() {
            let at = || format!("{name} #{}", index + 1);
            let packet = Packet::parse(frame).unwrap_or_else(|e| panic!("{}: {e}", at()));
            assert_eq!(packet.computed_icrc(), packet.icrc, "{}: {packet}", at());
            match packet.verify() {
                Ok(()) => {}
                // One packet was sent with a wrong UDP checksum on purpose.
                Err(CrcError::UdpChecksum) => odd.push(format!("{} checksum", at())),
                Err(CrcError::Icrc) => panic!("{}: {packet}", at()),
            }
            assert_rebuilt(&packet, frame, &at());
            packets += 1;
        }
    }
    assert_eq!((files, packets), (57, 3157));
    assert_eq!(odd, ["inject.pcap #60 checksum"]);
}

fn assert_rebuilt(packet: &Packet<'_>, frame: &[u8], at: &str) {
    let built = build(&packet.header, packet.payload).unwrap();
    let header = packet.header.len();
    assert_eq!(built[..header], frame[..header], "{at}: {packet}");
    assert_eq!(built.len(), frame.len(), "{at}: {packet}");
    let (pad, whole) = (&frame[frame.len() - 4 - usize::from(packet.header.bth.pad)..frame.len() - 4], built == frame);
    // Pad bytes are sent as zero; one injected packet has others.
    assert!(whole || pad.iter().any(|&byte| byte != 0), "{at}: {packet}");
}

/// Prints one line per packet and compares them, so that changes of the format are noticed.
#[test]
fn packets_print() {
    let frames = pcap::load("ops_mix");
    let line = |i: usize| Packet::parse(&frames[i]).unwrap().to_string();
    assert_eq!(
        line(2),
        "::ffff:192.168.77.11 > ::ffff:192.168.77.12 v2 sport 56677: Rc ACKNOWLEDGE qp 0x00022c psn 0xb43513 ACK msn 1 len 0"
    );
}

/// The rules for source ports, checked on everything that rxe sent. Left out are `ops_mix_v6` and the connection
/// manager's connections, whose flow label is not on the wire, and injected requests, which rxe did not send.
#[test]
fn source_ports() {
    let mut checked = 0;
    for (name, frames) in pcap::all() {
        if ["inject", "ops_mix_v6", "ud_cases_v6", "rping", "ucmatose"].iter().any(|other| name.starts_with(other)) {
            continue;
        }
        let packets: Vec<Packet<'_>> = frames.iter().map(|frame| Packet::parse(frame).unwrap()).collect();
        for packet in &packets {
            let header = packet.header;
            let port = source_port(&header).unwrap();
            let expected = match header.extension.deth() {
                Some(deth) => datagram_source_port(deth.source),
                None => {
                    // The sender's own QPN is the destination of the packets that come back.
                    let back = packets.iter().find(|other| {
                        other.header.network.source() == header.network.destination()
                            && source_port(&other.header) == Some(port)
                    });
                    let Some(back) = back else { continue };
                    connected_source_port(0, back.header.bth.destination, header.bth.destination)
                }
            };
            assert_eq!(port, expected, "{name}: {packet}");
            checked += 1;
        }
    }
    assert!(checked > 2500, "{checked}");
}

fn source_port(header: &Header) -> Option<u16> {
    match header.network {
        Network::V1(_) => None,
        Network::V2Ipv4(_, udp) | Network::V2Ipv6(_, udp) => Some(udp.source_port),
    }
}
