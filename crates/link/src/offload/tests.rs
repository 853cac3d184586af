use proptest::prelude::*;
use pvrdma_packet::Checksum;

use super::sample::{long_tcp, open_checksum};
use super::*;

const ADDRESSES: [u8; 12] = [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];

/// Returns a TCP or UDP header with data, whose checksum field contains `open`.
fn transport(protocol: u8, open: u16) -> Vec<u8> {
    let [high, low] = open.to_be_bytes();
    if protocol == 6 {
        [&[0, 80, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x18, 1, 0, high, low, 0, 0][..], b"data"].concat()
    } else {
        [&[0xc0, 0, 0, 53, 0, 12, high, low][..], b"data"].concat()
    }
}

fn v4(protocol: u8, options: usize, payload: &[u8]) -> Vec<u8> {
    let length = 20 + options;
    let total = u16::try_from(length + payload.len()).unwrap().to_be_bytes();
    let first = 0x40 | u8::try_from(length / 4).unwrap();
    let header = [first, 0, total[0], total[1], 0, 1, 0x40, 0, 64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
    [&[8, 0][..], &header, &vec![1; options], payload].concat()
}

/// Returns an IPv6 packet with a chain of extension headers.
fn v6(protocol: u8, extensions: &[(u8, usize)], payload: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    for (index, &(_, units)) in extensions.iter().enumerate() {
        let next = extensions.get(index + 1).map_or(protocol, |&(kind, _)| kind);
        body.extend([next, u8::try_from(units - 1).unwrap()]);
        body.resize(body.len() + units * 8 - 2, 0);
    }
    body.extend(payload);
    let length = u16::try_from(body.len()).unwrap().to_be_bytes();
    let first = extensions.first().map_or(protocol, |&(kind, _)| kind);
    let header = [&[0x60, 0, 0, 0, length[0], length[1], first, 64][..], &[0xfd; 32]].concat();
    [&[0x86, 0xdd][..], &header, &body].concat()
}

fn frame(tags: &[u8], rest: &[u8]) -> Vec<u8> {
    [&ADDRESSES[..], tags, rest].concat()
}

/// Returns all pairs of offsets at which a checksum is accepted.
fn accepted(frame: &[u8]) -> Vec<(u16, u16)> {
    let end = u16::try_from(frame.len()).unwrap() + 2;
    let all = (0..end).flat_map(|start| (0..end).map(move |at| (start, at)));
    all.filter(|&(start, at)| Offload::checksum(frame, start, at).is_some()).collect()
}

#[test]
fn the_only_place_of_a_checksum_is_that_of_tcp_or_udp() {
    let tags: [&[u8]; 4] = [&[], &[0x81, 0, 0, 0], &[0x81, 0, 0x20, 5], &[0x88, 0xa8, 0, 5, 0x81, 0, 0, 6]];
    for (protocol, field) in [(6, 16), (17, 6)] {
        let payload = transport(protocol, 0x1234);
        for tag in tags {
            for (rest, header) in [
                (v4(protocol, 0, &payload), 20),
                (v4(protocol, 40, &payload), 60),
                (v6(protocol, &[], &payload), 40),
                (v6(protocol, &[(0, 1), (43, 3), (60, 2)], &payload), 40 + 48),
            ] {
                let start = u16::try_from(14 + tag.len() + header).unwrap();
                let frame = frame(tag, &rest);
                assert_eq!(accepted(&frame), [(start, start + field)], "{frame:x?}");
                // Padding behind the packet must not be part of the sum.
                let padded = [&frame[..], &[0xff; 9]].concat();
                let offload = Offload::checksum(&padded, start, start + field).unwrap();
                let (mut room, mut sums) = (Vec::new(), Vec::new());
                for frame in [&frame, &padded] {
                    let at = usize::from(start + field);
                    assert!(offload.finish(frame, &mut room, |done| sums.push(done[at..at + 2].to_vec())));
                }
                assert_eq!(sums[0], sums[1]);
            }
        }
    }
}

/// A port adds a tag to a frame whose offload it has accepted without one.
#[test]
fn the_longest_headers_are_segmented_with_a_tag() {
    let tcp = [&[0, 80, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0xf0, 0x18, 1, 0, 0, 0, 0, 0][..], &[1; 40], b"data"].concat();
    let mss = NonZeroU16::new(3).unwrap();
    for tag in [&[][..], &[0x81, 0, 0, 5]] {
        let frame = frame(tag, &v4(6, 40, &tcp));
        let offload = Offload::segmentation(&frame, mss).unwrap();
        let mut lengths = Vec::new();
        assert!(offload.finish(&frame, &mut Vec::new(), |part| lengths.push(part.len() - tag.len())));
        assert_eq!(lengths, [14 + 120 + 3, 14 + 120 + 1]);
    }
}

#[test]
fn incomplete_segments_and_datagrams_have_no_checksum_to_calculate() {
    let tcp = frame(&[], &v4(6, 0, &transport(6, 0)));
    let udp = frame(&[], &v6(17, &[], &transport(17, 0)));
    assert!(!accepted(&tcp).is_empty() && !accepted(&udp).is_empty());
    let spoiled = |frame: &[u8], at: usize, value: u8| {
        let mut frame = frame.to_vec();
        frame[at] = value;
        frame
    };
    let three = [0x81, 0, 0, 1].repeat(3);
    for (what, frame) in [
        ("ARP", spoiled(&tcp, 13, 6)),
        ("a tag of before 802.1Q", frame(&[0x91, 0, 0, 1], &v4(6, 0, &transport(6, 0)))),
        ("three tags", frame(&three, &v4(6, 0, &transport(6, 0)))),
        ("version 6 in IPv4", spoiled(&tcp, 14, 0x65)),
        ("a header of 16 bytes", spoiled(&tcp, 14, 0x44)),
        ("options longer than the packet", spoiled(&tcp, 14, 0x4f)),
        ("longer than the frame", spoiled(&tcp, 17, 45)),
        ("shorter than its header", spoiled(&tcp, 17, 39)),
        ("more fragments", spoiled(&tcp, 20, 0x20)),
        ("a later fragment", spoiled(&tcp, 21, 1)),
        ("ICMP", spoiled(&tcp, 23, 1)),
        ("SCTP", spoiled(&tcp, 23, 132)),
        ("a TCP header of 16 bytes", spoiled(&tcp, 46, 0x40)),
        ("a TCP header longer than the packet", spoiled(&tcp, 46, 0x70)),
        ("version 4 in IPv6", spoiled(&udp, 14, 0x40)),
        ("an IPv6 packet longer than the frame", spoiled(&udp, 19, 13)),
        ("an IPv6 packet shorter than UDP says", spoiled(&udp, 19, 11)),
        ("UDP of 7 bytes", spoiled(&udp, 59, 7)),
        ("UDP shorter than the packet", spoiled(&udp, 59, 11)),
        ("a fragment header", frame(&[], &v6(6, &[(44, 1)], &transport(6, 0)))),
        ("authentication", frame(&[], &v6(6, &[(51, 1)], &transport(6, 0)))),
        ("nine extension headers", frame(&[], &v6(6, &[(60, 1); 9], &transport(6, 0)))),
    ] {
        assert_eq!(accepted(&frame), [], "{what}");
    }
    for whole in [&tcp, &udp] {
        assert!((0..whole.len()).all(|length| accepted(&whole[..length]).is_empty()), "cut off");
    }
    // An offload that was created for another frame does not fit any of these either.
    assert!(!open_checksum(&long_tcp([2; 6], [4; 6], b"data", 2).0).fits(&spoiled(&tcp, 23, 1)));
    assert!(Offload::NONE.fits(&[]));
}

/// Zero means "no checksum" in UDP (RFC 768).
#[test]
fn a_sum_of_zero_is_sent_as_its_other_form() {
    let mut udp = frame(&[], &v4(17, 0, &transport(17, 0)));
    let mut sum = Checksum::default();
    sum.add(&udp[34..]);
    // With this pseudo header the computed checksum is 0.
    udp[40..42].copy_from_slice(&sum.finish().to_be_bytes());
    let mut field = [0; 2];
    let offload = Offload::checksum(&udp, 34, 40).unwrap();
    assert!(offload.finish(&udp, &mut Vec::new(), |done| field.copy_from_slice(&done[40..42])));
    assert_eq!(field, [0xff, 0xff]);
}

#[test]
fn only_tcp_that_fills_its_frame_can_be_cut() {
    let mss = NonZeroU16::new(2).unwrap();
    let whole = |frame: &[u8]| Offload::segmentation(frame, mss).is_some();
    let tcp = long_tcp([2; 6], [4; 6], b"data", 2).0;
    assert!(whole(&tcp) && !whole(&[&tcp[..], &[0; 6]].concat()), "bytes behind the packet would become data");
    assert!(!whole(&tcp[..54]) && !whole(&frame(&[], &v4(17, 0, &transport(17, 0)))));
    let mut fragment = tcp;
    fragment[20] = 0x20;
    assert!(!whole(&fragment));
}

proptest! {
    /// A port that has inspected a frame knows every byte of the frames that leave, except the fields that TCP, UDP and
    /// IP define.
    #[test]
    fn work_changes_no_byte_that_a_rule_is_about(
        bytes in prop::collection::vec(any::<u8>(), 0..120), tag in 0_usize..4, kind in 0_usize..5,
        cuts in any::<bool>(), mss in 1_u16..50,
    ) {
        let tags: [&[u8]; 4] = [&[], &[0x81, 0, 0, 0], &[0x88, 0xa8, 0, 5, 0x81, 0, 0, 6], &[0x91, 0, 0, 1]];
        let rest = match kind {
            0 => v4(6, 0, &[&transport(6, 9)[..], &bytes].concat()),
            1 => v6(17, &[(60, 1)], &transport(17, 9)),
            2 => v4(6, 8, &bytes),
            3 => v6(6, &[], &[&transport(6, 9)[..], &bytes].concat()),
            _ => bytes,
        };
        let frame = frame(tags[tag], &rest);
        let (sample, segmentation) = long_tcp([2; 6], [4; 6], b"data", mss);
        // Any offload may be combined with any frame.
        let offload = if cuts { segmentation } else { open_checksum(&sample) };
        let (mut room, mut all) = (Vec::new(), Vec::new());
        let done = offload.finish(&frame, &mut room, |part| all.push(part.to_vec()));
        prop_assert_eq!(done, offload.fits(&frame));
        prop_assert_eq!(done, !all.is_empty());
        for part in &all {
            let covered = Covered::of(part).unwrap();
            let network = 14 + if tag == 0 { 0 } else { tags[tag].len() };
            let v6 = part[network] >> 4 == 6;
            let mut changes: Vec<usize> = vec![covered.checksum, covered.checksum + 1];
            if cuts {
                let ip: &[usize] = if v6 { &[4, 5] } else { &[2, 3, 4, 5, 10, 11] };
                changes.extend(ip.iter().map(|at| network + at));
                changes.extend([4, 5, 6, 7, 13].map(|at| covered.start + at));
            }
            let headers = if cuts { Headers::of(&frame).unwrap().len } else { part.len() };
            for at in (0..headers).filter(|at| !changes.contains(at)) {
                prop_assert_eq!(part[at], frame[at], "byte {}", at);
            }
        }
    }
}
