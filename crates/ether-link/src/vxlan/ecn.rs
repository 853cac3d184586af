//! Congestion marks across a tunnel (RFC 6040). The outer header starts with the inner traffic class, and marks that
//! routers set there are copied to the inner header. DCQCN needs this, because switches see only the outer header.

use pvrdma_packet::{EtherType, Ethernet, Ipv4Header, Ipv6Header};

/// The ECN field of a traffic class.
const ECN: u8 = 0b11;
const NOT_ECT: u8 = 0b00;
const ECT_1: u8 = 0b01;
const CE: u8 = 0b11;

/// Applies the mark of the outer traffic class to the frame. Returns `false` if the frame must be dropped, because a
/// congested router marked a packet whose sender would not understand the mark (RFC 6040, figure 4).
pub(super) fn decapsulate(outer: u8, frame: &mut [u8]) -> bool {
    let outer = outer & ECN;
    if !matches!(outer, CE | ECT_1) {
        return true;
    }
    let Some((at, kind)) = network_header(frame) else { return true };
    let Some(header) = frame.get_mut(at..) else { return true };
    let class = match kind {
        Kind::Ipv4 => Ipv4Header::new(header).traffic_class(),
        Kind::Ipv6 => Ipv6Header::new(header).traffic_class(),
    };
    let Some(class) = class else { return true };
    let merged = match (class & ECN, outer) {
        (NOT_ECT, CE) => return false,
        (NOT_ECT | CE, _) => return true,
        (_, CE) => CE,
        (ECT_1, _) => return true,
        (_, outer) => outer,
    };
    match kind {
        Kind::Ipv4 => set_ipv4(header, merged),
        Kind::Ipv6 => {
            if let Some(low) = header.get_mut(1) {
                *low = *low & !(ECN << 4) | merged << 4;
            }
        }
    }
    true
}

#[derive(Clone, Copy)]
enum Kind {
    Ipv4,
    /// IPv6, or the GRH of RoCE v1.
    Ipv6,
}

/// Returns offset and kind of the network header.
fn network_header(frame: &[u8]) -> Option<(usize, Kind)> {
    let (_, kind, body) = Ethernet::parse(frame).ok()?;
    let kind = match kind {
        EtherType::IPV4 => Kind::Ipv4,
        EtherType::IPV6 | EtherType::ROCE => Kind::Ipv6,
        _ => return None,
    };
    Some((frame.len() - body.len(), kind))
}

/// Sets the ECN field and updates the checksum (RFC 1624, equation 3).
fn set_ipv4(header: &mut [u8], ecn: u8) {
    let Some([version, class, _, _, _, _, _, _, _, _, high, low, ..]) = header.first_chunk_mut::<20>() else { return };
    let before = u16::from_be_bytes([*version, *class]);
    *class = *class & !ECN | ecn;
    let after = u16::from_be_bytes([*version, *class]);
    let mut sum = u32::from(!u16::from_be_bytes([*high, *low])) + u32::from(!before) + u32::from(after);
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    let [_, _, first, second] = (!sum).to_be_bytes();
    (*high, *low) = (first, second);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn checksum(header: &[u8]) -> u16 {
        let mut sum: u32 = header.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !u16::try_from(sum).unwrap()
    }

    #[test]
    fn the_table_of_the_rfc() {
        // Rows: inner Not-ECT, ECT(1), ECT(0), CE. Columns: outer Not-ECT, ECT(1), ECT(0), CE.
        let expected = [
            [Some(0), Some(0), Some(0), None],
            [Some(1), Some(1), Some(1), Some(3)],
            [Some(2), Some(1), Some(2), Some(3)],
            [Some(3), Some(3), Some(3), Some(3)],
        ];
        for (row, inner) in expected.iter().zip([0, 1, 2, 3_u8]) {
            for (expected, outer) in row.iter().zip([0, 1, 2, 3_u8]) {
                for tag in [&[][..], &[0x81, 0, 0, 1]] {
                    let mut v6 = [&[0; 12][..], tag, &[0x86, 0xdd, 0x60, inner << 4 | 0x0f], &[0; 38]].concat();
                    let passed = decapsulate(outer | 0xfc, &mut v6);
                    let at = 12 + tag.len() + 3;
                    assert_eq!(passed.then_some(v6[at] >> 4), *expected, "inner {inner}, outer {outer}");
                    assert_eq!(v6[at] & 0xf, 0xf);
                }
            }
        }
    }

    proptest! {
        #[test]
        fn the_checksum_stays_right(mut header: [u8; 20], outer: u8) {
            header[0] = 0x45;
            header[10..12].copy_from_slice(&[0, 0]);
            let sum = checksum(&header);
            header[10..12].copy_from_slice(&sum.to_be_bytes());
            let mut frame = [&[0; 12][..], &[8, 0], &header].concat();
            decapsulate(outer, &mut frame);
            prop_assert_eq!(checksum(&frame[14..]), 0);
            prop_assert_eq!(frame[15] & 0xfc, header[1] & 0xfc);
        }

        #[test]
        fn any_bytes(mut frame: Vec<u8>, outer: u8) {
            let length = frame.len();
            decapsulate(outer, &mut frame);
            prop_assert_eq!(frame.len(), length);
        }
    }
}
