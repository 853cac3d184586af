//! The Internet checksum (RFC 1071).

use std::ops::Range;

use super::headers::{Headers, Ip, IpVersion, Transport};
use crate::abi::byte;
use crate::abi::completion::ChecksumReport;

/// Where the checksum is in a TCP header, in bytes.
pub(crate) const TCP_CHECKSUM: u16 = 16;
/// Where it is in a UDP header.
pub(crate) const UDP_CHECKSUM: u16 = 6;
/// Where it is in an IPv4 header.
const IPV4_CHECKSUM: usize = 10;

/// The same in a GRE header, which has one if this bit of its first byte is set.
const GRE_CHECKSUM: usize = 4;
const GRE_HAS_CHECKSUM: u8 = 0x80;
/// Bytes of a GRE header with a checksum.
const GRE_LEN: usize = 8;
const PROTOCOL_GRE: u8 = 47;

/// The sum of 16-bit words in network order, added to `sum`. A last odd byte counts as the high half of a word. No
/// frame is long enough for the sum to overflow.
pub(crate) fn add(mut sum: u64, bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<4>();
    for word in words {
        sum += u64::from(u32::from_be_bytes(*word));
    }
    let mut last = [0; 4];
    for (to, from) in last.iter_mut().zip(rest) {
        *to = *from;
    }
    sum + u64::from(u32::from_be_bytes(last))
}

/// The sum in 16 bits.
pub(crate) const fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    #[expect(clippy::cast_possible_truncation, reason = "folded to 16 bits")]
    let folded = sum as u16;
    folded
}

fn slice(frame: &[u8], from: usize, to: usize) -> &[u8] {
    frame.get(from..to).unwrap_or_default()
}

fn store(frame: &mut [u8], at: usize, value: u16) {
    if let Some(field) = frame.get_mut(at..).and_then(<[u8]>::first_chunk_mut) {
        *field = value.to_be_bytes();
    }
}

/// The sum of the pseudo header for a transport that starts at `offset`.
pub(crate) fn pseudo_header(frame: &[u8], ip: &Ip, offset: usize) -> u64 {
    let len = ip.end.saturating_sub(offset) as u64;
    add(len + u64::from(ip.protocol), frame.get(ip.addresses()).unwrap_or_default())
}

/// Stores the complement of the sum of the bytes in `covered` at `at`. What is there already (the sum of the pseudo
/// header) is part of it. A result of 0 is stored as its other representation: in UDP 0 would mean that there is no
/// checksum.
pub(crate) fn complete(frame: &mut [u8], covered: Range<usize>, at: usize) {
    let sum = !fold(add(0, frame.get(covered).unwrap_or_default()));
    store(frame, at, if sum == 0 { 0xffff } else { sum });
}

/// Calculates the checksum of a GRE header (RFC 2784) in a packet that is no fragment. Linux leaves it to devices that
/// calculate any checksum. Returns `false`, and changes nothing, if `start` and `at` are not that header and its
/// checksum.
pub(crate) fn complete_gre(frame: &mut [u8], headers: &Headers, (start, at): (u16, u16)) -> bool {
    let (start, at) = (usize::from(start), usize::from(at));
    let Some(ip) = headers.ip.filter(|ip| ip.protocol == PROTOCOL_GRE && !ip.fragment) else { return false };
    let has_checksum = ip.payload + GRE_LEN <= ip.end && byte(frame, ip.payload) & GRE_HAS_CHECKSUM != 0;
    let is_there = has_checksum && (start, at) == (ip.payload, ip.payload + GRE_CHECKSUM);
    if is_there {
        complete(frame, start..ip.end, at);
    }
    is_there
}

/// Calculates the checksum of the IPv4 header, if there is one.
pub(crate) fn set_ipv4(frame: &mut [u8], ip: &Ip) {
    if ip.version == IpVersion::V4 {
        store(frame, ip.offset + IPV4_CHECKSUM, 0);
        let sum = !fold(add(0, slice(frame, ip.offset, ip.payload)));
        store(frame, ip.offset + IPV4_CHECKSUM, sum);
    }
}

/// Stores the sum of the pseudo header where the checksum of TCP belongs, for the rest to be added.
pub(crate) fn set_tcp_pseudo_header(frame: &mut [u8], ip: &Ip, offset: usize) {
    let sum = fold(pseudo_header(frame, ip, offset));
    store(frame, offset + usize::from(TCP_CHECKSUM), sum);
}

/// Calculates the checksum of TCP.
pub(crate) fn set_tcp(frame: &mut [u8], ip: &Ip, offset: usize) {
    set_tcp_pseudo_header(frame, ip, offset);
    let sum = !fold(add(0, slice(frame, offset, ip.end)));
    store(frame, offset + usize::from(TCP_CHECKSUM), sum);
}

/// What can be said of the checksums of a frame. `trusted`: TCP and UDP need not be looked at.
pub(crate) fn report(frame: &[u8], headers: &Headers, trusted: bool) -> ChecksumReport {
    let Some(ip) = &headers.ip else { return ChecksumReport::default() };
    let (tcp, udp) = match headers.transport {
        Some(Transport::Tcp { .. }) => (true, false),
        Some(Transport::Udp { .. }) => (false, true),
        None => (false, false),
    };
    let header_is_right = ip.version == IpVersion::V6 || fold(add(0, slice(frame, ip.offset, ip.payload))) == 0xffff;
    let verified = header_is_right && (tcp || udp) && (trusted || transport_is_right(frame, ip, headers.transport));
    let ipv4 = ip.version == IpVersion::V4;
    ChecksumReport { ipv4, ipv6: !ipv4, tcp, udp, fragment: ip.fragment, verified }
}

/// Returns `true` if there is a checksum and it is right.
fn transport_is_right(frame: &[u8], ip: &Ip, transport: Option<Transport>) -> bool {
    let offset = match transport {
        None => return false,
        Some(Transport::Udp { offset }) => {
            let field = offset + usize::from(UDP_CHECKSUM);
            if slice(frame, field, field + 2) == [0, 0] {
                return false;
            }
            offset
        }
        Some(Transport::Tcp { offset, .. }) => offset,
    };
    fold(add(pseudo_header(frame, ip, offset), slice(frame, offset, ip.end))) == 0xffff
}
