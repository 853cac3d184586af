//! The Internet checksum (RFC 1071).

use std::ops::Range;

use pvrdma_packet::checksum::{self, fold};
use pvrdma_packet::{Checksum, IpPacket, IpVersion, Transport};

use super::headers::Headers;
use crate::abi::byte;
use crate::abi::completion::ChecksumReport;

/// Offset of the checksum in a TCP header, in bytes.
pub(crate) const TCP_CHECKSUM: u16 = 16;
/// Offset of the checksum in a UDP header, in bytes.
pub(crate) const UDP_CHECKSUM: u16 = 6;
/// Offset of the checksum in an IPv4 header, in bytes.
const IPV4_CHECKSUM: usize = 10;

/// Bit in the first byte of a GRE header that says that it has a checksum, and the offset of that checksum, in bytes.
const GRE_CHECKSUM: usize = 4;
const GRE_HAS_CHECKSUM: u8 = 0x80;
/// Size of a GRE header with a checksum, in bytes.
const GRE_LEN: usize = 8;
const PROTOCOL_GRE: u8 = 47;

/// Returns a checksum, in a form that is also valid for UDP.
pub(crate) const fn finish(sum: Checksum) -> [u8; 2] {
    not_zero(sum.finish()).to_be_bytes()
}

/// Adds the sum of 16-bit words in network order to `sum`. A trailing odd byte counts as the high half of a word. No
/// frame is long enough for the sum to overflow.
fn add(sum: u64, bytes: &[u8]) -> u64 {
    sum + u64::from(checksum::sum(bytes))
}

/// Replaces 0 by 0xffff. In UDP, 0 means that there is no checksum (RFC 768); in a ones' complement sum both are equal.
const fn not_zero(sum: u16) -> u16 {
    if sum == 0 { u16::MAX } else { sum }
}

fn slice(frame: &[u8], from: usize, to: usize) -> &[u8] {
    frame.get(from..to).unwrap_or_default()
}

fn store(frame: &mut [u8], at: usize, value: u16) {
    if let Some(field) = frame.get_mut(at..).and_then(<[u8]>::first_chunk_mut) {
        *field = value.to_be_bytes();
    }
}

/// Returns the sum of the pseudo header for a transport header at `offset`.
pub(crate) fn pseudo_header(frame: &[u8], ip: &IpPacket, offset: usize) -> u64 {
    let len = ip.end.saturating_sub(offset) as u64;
    add(len + u64::from(ip.protocol), frame.get(ip.addresses()).unwrap_or_default())
}

/// Stores the complement of the sum of the bytes in `covered` at `at`. The value that is already there (the sum of the
/// pseudo header) is included in the sum.
pub(crate) fn complete(frame: &mut [u8], covered: Range<usize>, at: usize) {
    let sum = !fold(add(0, frame.get(covered).unwrap_or_default()));
    store(frame, at, not_zero(sum));
}

/// Calculates the checksum of a GRE header (RFC 2784) in a packet that is not a fragment. Linux leaves it to devices
/// that can calculate any checksum. Returns `false`, and changes nothing, if `start` and `at` are not that header and
/// its checksum.
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
pub(crate) fn set_ipv4(frame: &mut [u8], ip: &IpPacket) {
    if ip.version == IpVersion::V4 {
        store(frame, ip.offset + IPV4_CHECKSUM, 0);
        let sum = !fold(add(0, slice(frame, ip.offset, ip.payload)));
        store(frame, ip.offset + IPV4_CHECKSUM, sum);
    }
}

/// Stores the sum of the pseudo header in the checksum field of TCP, so that the other bytes can be added later.
pub(crate) fn set_tcp_pseudo_header(frame: &mut [u8], ip: &IpPacket, offset: usize) {
    let sum = fold(pseudo_header(frame, ip, offset));
    store(frame, offset + usize::from(TCP_CHECKSUM), sum);
}

/// Calculates the TCP checksum.
pub(crate) fn set_tcp(frame: &mut [u8], ip: &IpPacket, offset: usize) {
    set_tcp_pseudo_header(frame, ip, offset);
    let sum = !fold(add(0, slice(frame, offset, ip.end)));
    store(frame, offset + usize::from(TCP_CHECKSUM), sum);
}

/// Location of a missing checksum, in bytes from the start of the frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Missing {
    /// Range of bytes that the checksum covers.
    pub(crate) covered: Range<usize>,
    /// Offset of the checksum.
    pub(crate) at: usize,
    /// The checksum field holds the sum of the pseudo header, so that the calculated checksum is correct.
    pub(crate) is_correct: bool,
}

impl Missing {
    /// Returns the checksum at byte `at` of the TCP segment or UDP datagram that begins at byte `start`.
    pub(crate) fn new(frame: &[u8], ip: &IpPacket, start: usize, at: usize) -> Self {
        let open = frame.get(at..).and_then(<[u8]>::first_chunk).map(|&field| u16::from_be_bytes(field));
        let is_correct = open == Some(fold(pseudo_header(frame, ip, start)));
        Self { covered: start..ip.end, at, is_correct }
    }

    /// Returns the checksum for the frame after `bytes` bytes in front of it were removed.
    pub(crate) fn moved_back(self, bytes: usize) -> Self {
        let Self { covered, at, is_correct } = self;
        let covered = covered.start.saturating_sub(bytes)..covered.end.saturating_sub(bytes);
        Self { covered, at: at.saturating_sub(bytes), is_correct }
    }
}

/// Returns the checksum state of a frame. `trusted`: the checksums of TCP and UDP need not be verified.
pub(crate) fn report(frame: &[u8], headers: &Headers, trusted: bool) -> ChecksumReport {
    let found = headers.ip.as_ref().filter(|_| headers.are_where_drivers_look());
    let Some(ip) = found else { return ChecksumReport::default() };
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

/// Returns `true` if there is a transport checksum and it is correct.
fn transport_is_right(frame: &[u8], ip: &IpPacket, transport: Option<Transport>) -> bool {
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
