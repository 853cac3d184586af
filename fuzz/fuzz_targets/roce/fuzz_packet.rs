//! Any bytes as a frame: parsing never panics, what is parsed is built again as it was, and what was built is parsed.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pvrdma_packet::{EtherType, ROCE_PORT};
use pvrdma_roce::wire::{Network, Packet, SackMap, build};

/// Looks at everything that can be asked of a frame.
fn look(frame: &[u8]) {
    let Ok(packet) = Packet::parse(frame) else { return };
    let _ = (packet.verify(), packet.to_string(), packet.grh_area());
    if let Some(map) = SackMap::parse(packet.payload) {
        assert!(map.wire_len() <= packet.payload.len());
        assert!(map.distances().all(|distance| (1..=SackMap::MAX_DISTANCE).contains(&distance)));
    }
    let again = build(&packet.header, packet.payload).expect("what was parsed can be built");
    let parsed = Packet::parse(&again).expect("what was built can be parsed");
    let mut header = packet.header;
    header.bth.pad = parsed.header.bth.pad;
    assert_eq!((parsed.header, parsed.payload), (header, packet.payload));
    assert!(parsed.pad_is_right());
    // The checksum of UDP is taken over as it was, and is right only by chance.
    if let Network::V2Ipv4(_, udp) | Network::V2Ipv6(_, udp) = &mut header.network {
        udp.checksum = 0;
    }
    let frame_of_ours = build(&header, packet.payload).expect("built before");
    assert_eq!(Packet::parse(&frame_of_ours).expect("parsed before").verify(), Ok(()));
}

/// Puts what hardly any input has where it must be, so that inputs get further: ethertype, protocol, port, lengths,
/// checksum.
fn helped(kind: u8, bytes: &[u8]) -> Vec<u8> {
    let mut frame = bytes.to_vec();
    let (at, tag) = if kind & 1 == 0 { (12, None) } else { (16, Some(EtherType::VLAN)) };
    let (ethertype, header) = match kind >> 1 & 3 {
        0 => (EtherType::ROCE, 40),
        1 => (EtherType::IPV4, 20),
        _ => (EtherType::IPV6, 40),
    };
    let mut put = |at: usize, value: &[u8]| {
        if let Some(to) = frame.get_mut(at..at + value.len()) {
            to.copy_from_slice(value);
        }
    };
    if let Some(tag) = tag {
        put(12, &tag.0.to_be_bytes());
    }
    put(at, &ethertype.0.to_be_bytes());
    let ip = at + 2;
    let length = |header: usize| u16::try_from(bytes.len().saturating_sub(ip + header)).unwrap_or(0);
    match ethertype {
        EtherType::ROCE => {
            put(ip, &[0x60]);
            put(ip + 4, &length(header).to_be_bytes());
            put(ip + 6, &[0x1b]);
        }
        EtherType::IPV4 => {
            put(ip, &[0x45]);
            put(ip + 2, &length(0).to_be_bytes());
            put(ip + 6, &[0x40, 0]);
            put(ip + 9, &[17, 0, 0]);
        }
        _ => {
            put(ip, &[0x60]);
            put(ip + 4, &length(header).to_be_bytes());
            put(ip + 6, &[17]);
        }
    }
    if ethertype != EtherType::ROCE {
        put(ip + header + 2, &ROCE_PORT.to_be_bytes());
        put(ip + header + 4, &length(header).to_be_bytes());
    }
    if let (EtherType::IPV4, Some(ip)) = (ethertype, frame.get_mut(ip..ip + 20)) {
        let sum: u32 = ip.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
        let folded = (sum & 0xffff) + (sum >> 16);
        let folded = (folded & 0xffff) + (folded >> 16);
        ip[10..12].copy_from_slice(&(!u16::try_from(folded).unwrap_or(0)).to_be_bytes());
    }
    frame
}

fuzz_target!(|input: &[u8]| {
    look(input);
    if let Some((&kind, bytes)) = input.split_first() {
        look(&helped(kind, bytes));
    }
});
