//! Checks every packet up to a size, against short reference functions that share no code with the parser.

use pvrdma_packet::EtherType;
use pvrdma_roce::wire::{Bth, Extension, Opcode, Packet, SackMap, Shape};
use pvrdma_verbs_types::Psn;

const BTH: usize = 12;
const ICRC: usize = 4;

/// Bytes of the extension headers by opcode, as IBA table 38 and annexes A17 and A19 list them.
const fn extension_bytes(opcode: u8) -> usize {
    match opcode {
        // RC: SEND and WRITE with their immediates, READ, ACK, atomics, invalidations, FLUSH and ATOMIC WRITE.
        0x03 | 0x05 | 0x09 | 0x16 | 0x17 | 0x0d | 0x0f | 0x10 | 0x11 => 4,
        0x06 | 0x0a | 0x0c | 0x1d => 16,
        0x0b | 0x1c => 20,
        0x12 => 12,
        0x13 | 0x14 => 28,
        // UC.
        0x23 | 0x25 | 0x29 => 4,
        0x26 | 0x2a => 16,
        0x2b => 20,
        // UD.
        0x64 => 8,
        0x65 => 12,
        // All others have none, or are not defined.
        _ => 0,
    }
}

/// A RoCE v1 frame whose BTH is `bth` and behind whose BTH there are `len` bytes, each its own number.
fn frame(bth: [u8; BTH], len: usize) -> Vec<u8> {
    let [high, low] = u16::try_from(BTH + len).unwrap_or(u16::MAX).to_be_bytes();
    let EtherType(kind) = EtherType::ROCE;
    let mut frame = [[2; 12].as_slice(), &kind.to_be_bytes(), &[0x60, 0, 0, 0, high, low, 0x1b, 64], &[9; 32]].concat();
    frame.extend(bth);
    frame.extend((0..=u8::MAX).cycle().take(len));
    frame
}

fn numbers(bytes: std::ops::Range<usize>) -> Vec<u8> {
    (0..=u8::MAX).cycle().take(bytes.end).skip(bytes.start).collect()
}

/// Every opcode, with every pad count and 0 to 80 bytes behind the BTH: the packet is refused exactly when its headers,
/// pad bytes and ICRC do not fit; otherwise each byte is where it belongs.
#[test]
fn every_opcode_pad_and_length() {
    for opcode in 0..=u8::MAX {
        for pad in 0..4_u8 {
            for len in 0..=80 {
                let frame = frame([opcode, pad << 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], len);
                let begin = extension_bytes(opcode);
                let end = len.checked_sub(ICRC + usize::from(pad)).filter(|&end| end >= begin);
                let parsed = Packet::parse(&frame);
                let Some(end) = end else {
                    assert!(parsed.is_err(), "opcode {opcode:#x}, pad {pad}, {len} bytes");
                    continue;
                };
                let packet =
                    parsed.unwrap_or_else(|error| panic!("opcode {opcode:#x}, pad {pad}, {len} bytes: {error}"));
                assert_eq!(packet.payload, numbers(begin..end), "opcode {opcode:#x}, pad {pad}, {len} bytes");
                assert_eq!(packet.icrc[..], numbers(len - ICRC..len));
                assert_eq!(packet.header.extension.shape() == Shape::None, begin == 0, "opcode {opcode:#x}");
                assert_eq!(usize::from(packet.header.bth.pad), usize::from(pad));
            }
        }
    }
}

/// Each bit of the BTH is one bit of one field: with one bit set, one field has one bit set, at the place that IBA 9.2
/// gives it.
#[test]
fn every_bit_of_the_bth_alone() {
    let fields = |bth: &Bth| -> [(u32, u32); 12] {
        [
            (8, u32::from(bth.opcode.0)),
            (1, u32::from(bth.solicited)),
            (1, u32::from(bth.migration)),
            (2, u32::from(bth.pad)),
            (4, u32::from(bth.version)),
            (16, u32::from(bth.pkey)),
            (1, u32::from(bth.fecn)),
            (1, u32::from(bth.becn)),
            (6, u32::from(bth.reserved6)),
            (24, bth.destination.get()),
            (1, u32::from(bth.ack_request)),
            (7, u32::from(bth.reserved7)),
        ]
    };
    for bit in 0..96_u32 {
        let word: u128 = 1 << (95 - bit);
        let [_, _, _, _, bytes @ ..] = word.to_be_bytes();
        // Enough bytes behind it for the extension headers of any opcode.
        let packet_frame = frame(bytes, 60);
        let Ok(packet) = Packet::parse(&packet_frame) else { panic!("bit {bit}") };
        let bth = packet.header.bth;
        let mut read: u128 = 0;
        for (width, value) in fields(&bth) {
            read = read << width | u128::from(value);
        }
        assert_eq!(read << 24 | u128::from(bth.psn.get()), word, "bit {bit}: {bth:?}");
    }
}

/// Every opcode's service and direction. They alone make a QP of another service drop the packet.
#[test]
fn every_opcode_has_the_service_of_its_upper_bits() {
    use pvrdma_roce::wire::Service;
    for opcode in 0..=u8::MAX {
        let Some(info) = Opcode(opcode).info() else { continue };
        let service = match opcode >> 5 {
            0 => Service::Rc,
            1 => Service::Uc,
            3 => Service::Ud,
            4 => Service::Congestion,
            other => panic!("opcode {opcode:#x} of service {other}"),
        };
        assert_eq!(info.service, service, "opcode {opcode:#x}");
        assert_eq!(info.operation.is_response(), (0x0d..=0x12).contains(&opcode), "opcode {opcode:#x}");
    }
}

/// Every map of two bytes at every word boundary, and every length: parsing returns what was written.
#[test]
fn every_small_selective_acknowledgement() {
    for at in [0, 30, 31, 32, 33, 1022, 1023] {
        for bits in 0..1_u32 << 8 {
            let missing = Psn::new(0x00ff_fe00);
            let reference: Vec<u32> =
                (0..8).filter(|bit| bits >> bit & 1 == 1).map(|bit| at + bit + 1).filter(|&far| far <= 1024).collect();
            let mut map = SackMap::default();
            for bit in (0..8).filter(|bit| bits >> bit & 1 == 1) {
                map.insert(missing, missing.plus(at + bit + 1));
            }
            assert_eq!(map.distances().collect::<Vec<_>>(), reference, "{bits:#x} from {at} on");
            let last = reference.last().map_or(0, |last| last.div_ceil(32) as usize * 4);
            assert_eq!(map.wire_len(), last);
        }
    }
    for len in 0..=SackMap::MAX_LEN + 8 {
        let map = SackMap::parse(&vec![0x80; len]);
        assert_eq!(map.is_some(), len.is_multiple_of(4) && len <= SackMap::MAX_LEN, "{len} bytes");
        let distances = map.map(|map| map.distances().count());
        assert!(distances.is_none_or(|count| count == len), "one bit of each byte");
    }
}

/// The first byte of an AETH has three kinds and a reserve (IBA 9.7.5.1).
#[test]
fn every_syndrome() {
    use pvrdma_roce::wire::Syndrome;
    for byte in 0..=u8::MAX {
        let mut packet = frame([0x11, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], 8);
        let at = packet.len() - 8;
        packet[at] = byte;
        let Ok(parsed) = Packet::parse(&packet) else { panic!("{byte:#x}") };
        let Extension::Aeth(aeth) = parsed.header.extension else { panic!("{byte:#x}") };
        let kind = match aeth.syndrome {
            Syndrome::Ack { .. } => 0,
            Syndrome::RnrNak { .. } => 1,
            Syndrome::Reserved(_) => 2,
            Syndrome::Nak(_) => 3,
        };
        let expected = [0, 1, 2, 3, 2, 2, 2, 2][usize::from(byte >> 5)];
        assert_eq!((kind, aeth.syndrome.byte(), aeth.msn), (expected, byte, 0x01_0203), "{byte:#x}");
    }
}
