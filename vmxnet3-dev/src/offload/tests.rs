use proptest::prelude::*;
use pvrdma_link::Offload;

use super::headers::{Headers, insert_tag, tag};
use super::{checksum, segment};
use crate::Frame;
use crate::testing::frames::{Flow, checksums_are_right, pattern, reference_checksum, tagged};

const FIN: u8 = 1;
const PSH: u8 = 8;
const ACK: u8 = 16;
const CWR: u8 = 128;

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// Reference implementation of segmentation: builds each segment anew from its data.
fn reference(flow: Flow, sequence: u32, flags: u8, options: usize, data: &[u8], mss: usize) -> Vec<Vec<u8>> {
    let count = data.len().div_ceil(mss);
    let parts = data.chunks(mss).enumerate().map(|(number, part)| {
        let mut own = flags;
        if number + 1 < count {
            own &= !(FIN | PSH);
        }
        if number > 0 {
            own &= !CWR;
        }
        let mut frame = flow.tcp(sequence.wrapping_add(u32::try_from(number * mss).unwrap()), own, options, part);
        if !flow.ipv6 {
            let id = 0x1234_u16.wrapping_add(u16::try_from(number).unwrap());
            frame[18..20].copy_from_slice(&id.to_be_bytes());
            frame[24..26].fill(0);
            let sum = reference_checksum(&frame[14..34]);
            frame[24..26].copy_from_slice(&sum.to_be_bytes());
        }
        frame
    });
    parts.collect()
}

/// Returns a frame whose transport checksum the device has completed.
fn completed(flow: Flow, whole: &[u8], at: usize) -> Vec<u8> {
    let open = flow.left_open(whole.to_vec(), at, false);
    let start = u16::try_from(flow.transport_at()).unwrap();
    let frame = Frame::with_partial_checksum(&open, start, start + u16::try_from(at).unwrap()).unwrap();
    let mut got = Vec::new();
    frame.for_each_wire_frame(&mut Vec::new(), |part| {
        got = part.bytes().to_vec();
        true
    });
    got
}

/// A checksum of 0 is stored as 0xffff, because 0 stands for none in UDP.
#[test]
fn a_checksum_of_zero_has_its_other_form() {
    type Build = fn(&[u8]) -> Vec<u8>;
    let flow = Flow::TO_PEER;
    let builds: [(usize, Build); 2] =
        [(6, |data| Flow::TO_PEER.udp(data)), (16, |data| Flow::TO_PEER.tcp(7, ACK, 0, data))];
    for (at, build) in builds {
        let field = flow.transport_at() + at..flow.transport_at() + at + 2;
        // The checksum becomes 0 if the data add its complement to the sum.
        let data = build(&[0, 0])[field.clone()].to_vec();
        let got = completed(flow, &build(&data), at);
        assert_eq!(got[field], [0xff, 0xff]);
        assert!(checksums_are_right(&got));
    }
}

proptest! {
    #[test]
    fn segments_are_those_of_the_reference(ipv6 in any::<bool>(), sequence in any::<u32>(), flags in any::<u8>(),
        options in 0_usize..=10, len in 1_usize..20_000, mss in 64_u16..3000, vlan in any::<Option<u16>>()) {
        let flow = Flow { ipv6, ..Flow::TO_PEER };
        let data = pattern(len);
        let whole = flow.tcp(sequence, flags | ACK, options * 4, &data);
        let mut open = flow.left_open(whole, 16, true);
        if let Some(vlan) = vlan {
            open = tagged(&open, vlan);
        }
        prop_assert!(segment::prepare(&mut open));
        let frame = Frame::to_be_segmented(&open, mss).unwrap();
        let mut got = Vec::new();
        let count = frame.for_each_wire_frame(&mut Vec::new(), |part| {
            got.push(part.bytes().to_vec());
            true
        });
        let mut expected = reference(flow, sequence, flags | ACK, options * 4, &data, mss.into());
        if let Some(vlan) = vlan {
            expected.iter_mut().for_each(|part| *part = tagged(part, vlan));
        }
        prop_assert_eq!(count, expected.len());
        prop_assert!(got == expected);
    }

    /// A prepared frame is a whole frame whose checksum only needs to be completed.
    #[test]
    fn a_prepared_frame_can_be_completed(ipv6 in any::<bool>(), len in 1_usize..60_000) {
        let flow = Flow { ipv6, ..Flow::TO_PEER };
        let whole = flow.tcp(1, ACK, 0, &pattern(len));
        let mut open = flow.left_open(whole.clone(), 16, true);
        prop_assert!(segment::prepare(&mut open));
        let all = flow.transport_at()..open.len();
        checksum::complete(&mut open, all, flow.transport_at() + 16);
        prop_assert!(open == whole);
    }

    #[test]
    fn open_checksums_are_completed(ipv6 in any::<bool>(), udp in any::<bool>(), data in prop::collection::vec(any::<u8>(), 0..1400)) {
        let flow = Flow { ipv6, ..Flow::TO_PEER };
        let (mut whole, at) = if udp { (flow.udp(&data), 6) } else { (flow.tcp(7, ACK, 8, &data), 16) };
        let got = completed(flow, &whole, at);
        prop_assert!(checksums_are_right(&got));
        // The device stores the form of 0 that is valid in UDP for all protocols.
        let sum = &mut whole[flow.transport_at() + at..][..2];
        if sum == [0, 0] {
            sum.fill(0xff);
        }
        prop_assert!(got == whole);
        let report = checksum::report(&got, &Headers::parse(&got), false);
        prop_assert!(report.verified && report.udp == udp && report.tcp != udp && report.ipv6 == ipv6);
    }

    /// Every offset lies inside the frame, whatever its bytes are.
    #[test]
    fn headers_lie_in_the_frame(mut bytes in prop::collection::vec(any::<u8>(), 0..200), kind in 0_usize..4, ihl in any::<u8>()) {
        let types: [&[u8]; 4] = [&[8, 0], &[0x86, 0xdd], &[0x81, 0, 0, 1, 8, 0], &[0x88, 0xa8, 0, 1, 0x81, 0, 0, 2, 0x86, 0xdd]];
        if bytes.len() > 40 {
            bytes[12..12 + types[kind].len()].copy_from_slice(types[kind]);
            bytes[12 + types[kind].len()] = if kind % 2 == 0 { 0x40 | ihl & 15 } else { 0x60 };
        }
        let headers = Headers::parse(&bytes);
        if let Some(ip) = headers.ip {
            prop_assert!(ip.offset <= ip.payload && ip.payload <= ip.end && ip.end <= bytes.len());
            prop_assert!(ip.addresses().end <= bytes.len());
        }
        if let Some((header, data)) = segment::split(&headers) {
            prop_assert!(header + data <= bytes.len());
        }
        let _ = Frame::to_be_segmented(&bytes, 100);
        // The link's parser agrees on the location of a checksum, and refuses all other offsets.
        for start in 14..100 {
            for at in start..start + 18 {
                prop_assert_eq!(Frame::with_partial_checksum(&bytes, start, at).is_ok(), Offload::checksum(&bytes, start, at).is_some());
            }
        }
        let mut spoiled = bytes.clone();
        let _ = segment::prepare(&mut spoiled);
        let report = checksum::report(&bytes, &headers, true);
        prop_assert!(!report.verified || report.tcp || report.udp);
    }

    #[test]
    fn tags_go_in_and_out(data in prop::collection::vec(any::<u8>(), 14..100), vlan in any::<u16>()) {
        let mut room = [&[0; 4][..], &data].concat();
        insert_tag(&mut room, vlan);
        prop_assert_eq!(&room, &tagged(&data, vlan));
        prop_assert_eq!(tag(&room), Some(vlan));
    }
}

#[test]
fn extension_headers_and_fragments() {
    let mut frame = Flow { ipv6: true, ..Flow::TO_PEER }.udp(b"data");
    // A destination options header of eight bytes in front of UDP.
    frame[20] = 60;
    let len = u16::from_be_bytes([frame[18], frame[19]]) + 8;
    frame[18..20].copy_from_slice(&len.to_be_bytes());
    frame.splice(54..54, [17, 0, 1, 4, 0, 0, 0, 0]);
    let headers = Headers::parse(&frame);
    assert_eq!(headers.ip.map(|ip| (ip.payload, ip.protocol, ip.fragment)), Some((62, 17, false)));
    assert!(headers.transport.is_some());
    frame[20] = 44;
    let headers = Headers::parse(&frame);
    assert!(headers.ip.is_some_and(|ip| ip.fragment) && headers.transport.is_none());
    assert_eq!(be32(&frame, 54) >> 24, 17);
}

#[test]
fn invalid_segmentation_is_refused() {
    let tcp = Flow::TO_PEER.tcp(1, ACK, 0, &pattern(3000));
    assert!(Frame::to_be_segmented(&tcp, 1000).is_ok());
    assert!(Frame::to_be_segmented(&tcp, 0).is_err(), "no size");
    assert!(Frame::to_be_segmented(&tcp, 1).is_err(), "too many");
    assert!(Frame::to_be_segmented(&tcp, 9000).is_err(), "a segment longer than a frame");
    assert!(Frame::to_be_segmented(&Flow::TO_PEER.tcp(1, ACK, 0, b""), 1000).is_err(), "no data");
    assert!(Frame::to_be_segmented(&Flow::TO_PEER.udp(&pattern(3000)), 1000).is_err(), "UDP");
    assert!(Frame::to_be_segmented(&[&tcp[..], &[0; 4]].concat(), 1000).is_err(), "bytes behind the packet");
    let mut fragment = tcp;
    fragment[20] = 0x20;
    assert!(Frame::to_be_segmented(&fragment, 1000).is_err(), "a fragment");
    assert!(Frame::with_partial_checksum(&[0; 60], 34, 50).is_err());
    assert!(Frame::new(&[0; 13], false).is_err() && Frame::new(&[0; 9023], false).is_err());
}
