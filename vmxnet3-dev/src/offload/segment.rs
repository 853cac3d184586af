//! TCP segmentation.

use std::num::NonZeroU16;

use pvrdma_packet::{IpPacket, IpVersion, Transport};

use super::checksum;
use super::headers::{self, Headers};

const TCP_SEQUENCE: usize = 4;
const TCP_FLAGS: usize = 13;
const FLAG_FIN: u8 = 1 << 0;
const FLAG_PSH: u8 = 1 << 3;
const FLAG_CWR: u8 = 1 << 7;
const IPV4_ID: usize = 4;

/// Converts a frame that a driver wants segmented into the form of [`crate::Frame::to_be_segmented`]: drivers omit the
/// length in the pseudo header, and the IPv4 checksum. Returns `false` if it is not TCP.
pub(crate) fn prepare(frame: &mut [u8]) -> bool {
    if !headers::set_ip_length(frame) {
        return false;
    }
    let headers = Headers::parse(frame);
    let Some((ip, Transport::Tcp { offset, .. })) = headers.ip.zip(headers.transport) else { return false };
    checksum::set_ipv4(frame, &ip);
    checksum::set_tcp_pseudo_header(frame, &ip, offset);
    true
}

/// Returns the number of segments of a frame with `data` bytes of data.
pub(crate) fn count(data: usize, mss: NonZeroU16) -> usize {
    data.div_ceil(usize::from(mss.get())).max(1)
}

/// Returns the number of header bytes and of data bytes of a TCP frame.
pub(crate) fn split(headers: &Headers) -> Option<(usize, usize)> {
    match headers.ip.zip(headers.transport) {
        Some((ip, Transport::Tcp { offset, header_len })) => {
            let start = offset.checked_add(header_len)?;
            Some((start, ip.end.checked_sub(start)?))
        }
        _ => None,
    }
}

/// A segment: the range of its data, and its place among the others.
struct Segment {
    number: u16,
    /// Offset of the first data byte.
    from: u32,
    last: bool,
}

/// Calls `take` with each segment, with all checksums complete, until it returns `false`. Returns the number of
/// segments that `take` accepted. `room` is a buffer that is reused between calls.
pub(crate) fn segments(
    frame: &[u8],
    mss: NonZeroU16,
    room: &mut Vec<u8>,
    mut take: impl FnMut(&[u8]) -> bool,
) -> usize {
    let headers = Headers::parse(frame);
    let Some((header_len, _)) = split(&headers) else { return 0 };
    let Some((ip, Transport::Tcp { offset, .. })) = headers.ip.zip(headers.transport) else { return 0 };
    let (Some(head), Some(data)) = (frame.get(..header_len), frame.get(header_len..ip.end)) else { return 0 };
    let total = count(data.len(), mss);
    let mut taken = 0;
    let mut from = 0_u32;
    for (number, part) in (0_u16..).zip(data.chunks(mss.get().into())) {
        room.clear();
        room.extend_from_slice(head);
        room.extend_from_slice(part);
        let last = usize::from(number) + 1 == total;
        finish(room, &ip, offset, &Segment { number, from, last });
        if !take(room) {
            break;
        }
        taken += 1;
        from = from.wrapping_add(mss.get().into());
    }
    taken
}

/// Turns the headers of the whole frame into those of a segment.
fn finish(bytes: &mut [u8], whole: &IpPacket, offset: usize, segment: &Segment) {
    headers::set_ip_length(bytes);
    let ip = IpPacket { end: bytes.len(), ..*whole };
    if ip.version == IpVersion::V4
        && let Some(id) = bytes.get_mut(ip.offset + IPV4_ID..).and_then(<[u8]>::first_chunk_mut::<2>)
    {
        *id = u16::from_be_bytes(*id).wrapping_add(segment.number).to_be_bytes();
    }
    if let Some(sequence) = bytes.get_mut(offset + TCP_SEQUENCE..).and_then(<[u8]>::first_chunk_mut::<4>) {
        *sequence = u32::from_be_bytes(*sequence).wrapping_add(segment.from).to_be_bytes();
    }
    if let Some(flags) = bytes.get_mut(offset + TCP_FLAGS) {
        if !segment.last {
            *flags &= !(FLAG_FIN | FLAG_PSH);
        }
        if segment.number > 0 {
            *flags &= !FLAG_CWR;
        }
    }
    checksum::set_ipv4(bytes, &ip);
    checksum::set_tcp(bytes, &ip, offset);
}
