//! TCP frames for tests.

#![expect(clippy::indexing_slicing, clippy::unwrap_used, reason = "for tests only")]

use std::num::NonZeroU16;

use pvrdma_packet::Checksum;

use crate::Offload;

/// Returns a TCP frame over IPv4 with `data`, in the form in which a sender leaves it to be cut into segments of `mss`
/// bytes.
pub fn long_tcp(to: [u8; 6], from: [u8; 6], data: &[u8], mss: u16) -> (Vec<u8>, Offload) {
    let total = u16::try_from(40 + data.len()).unwrap();
    let mut frame = [&to[..], &from, &[8, 0, 0x45, 0], &total.to_be_bytes()].concat();
    frame.extend([0xff, 0xff, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    let mut sum = Checksum::default();
    sum.add(&frame[14..]);
    frame[24..26].copy_from_slice(&sum.finish().to_be_bytes());
    let mut pseudo = Checksum::default();
    pseudo.add(&frame[26..34]);
    pseudo.add(&[0, 6]);
    pseudo.add(&(total - 20).to_be_bytes());
    // Sequence number 2^32 - 1000, flags ACK and PSH.
    frame.extend([0, 80, 1, 0, 0xff, 0xff, 0xfc, 0x18, 0, 0, 0, 1, 0x50, 0x18, 1, 0]);
    frame.extend((!pseudo.finish()).to_be_bytes());
    frame.extend([0, 0]);
    frame.extend(data);
    let offload = Offload::segmentation(&frame, NonZeroU16::new(mss).unwrap()).unwrap();
    (frame, offload)
}

/// Returns the checksum offload of such a frame.
pub fn open_checksum(frame: &[u8]) -> Offload {
    Offload::checksum(frame, 34, 50).unwrap()
}

/// Returns test data whose bytes depend on their position.
pub fn data(length: usize) -> Vec<u8> {
    (0..length).map(|at| at.to_le_bytes()[0] ^ at.to_le_bytes()[1].wrapping_mul(31)).collect()
}

/// Returns the data that segments on a wire carry, after checking their headers and checksums.
pub fn carried(segments: &[Vec<u8>]) -> Vec<u8> {
    let mut all = Vec::new();
    for segment in segments {
        let sum = |parts: &[&[u8]]| {
            let mut sum = Checksum::default();
            parts.iter().for_each(|part| sum.add(part));
            sum.finish()
        };
        assert_eq!(usize::from(u16::from_be_bytes([segment[16], segment[17]])), segment.len() - 14);
        assert_eq!(sum(&[&segment[14..34]]), 0);
        let length = u16::try_from(segment.len() - 34).unwrap().to_be_bytes();
        assert_eq!(sum(&[&segment[26..34], &[0, 6], &length, &segment[34..]]), 0);
        let sequence = u32::from_be_bytes(*segment[38..].first_chunk().unwrap());
        assert_eq!(sequence.wrapping_add(1000), u32::try_from(all.len()).unwrap());
        all.extend(&segment[54..]);
    }
    all
}
