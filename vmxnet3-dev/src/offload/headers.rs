//! Header parser. Every offset lies inside the frame, whatever the frame contains.

use std::ops::Range;

use crate::abi::byte;

/// Size of an Ethernet header without tag, in bytes.
pub(crate) const ETHERNET_LEN: usize = 14;
/// Size of a VLAN tag, in bytes.
pub(crate) const TAG_LEN: usize = 4;

const TYPE_AT: usize = 12;
const TYPE_IPV4: u16 = 0x0800;
const TYPE_IPV6: u16 = 0x86dd;
const TYPE_VLAN: u16 = 0x8100;
const TYPE_SERVICE_VLAN: u16 = 0x88a8;
const MAX_TAGS: usize = 2;

const IPV6_LEN: usize = 40;
const PROTOCOL_HOP_BY_HOP: u8 = 0;
const PROTOCOL_TCP: u8 = 6;
const PROTOCOL_UDP: u8 = 17;
const PROTOCOL_ROUTING: u8 = 43;
const PROTOCOL_FRAGMENT: u8 = 44;
const PROTOCOL_DESTINATION: u8 = 60;
/// Maximum number of extension headers that are parsed.
const MAX_EXTENSIONS: usize = 8;

/// IP version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum IpVersion {
    V4,
    V6,
}

/// An IP packet. All numbers are byte offsets in the frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ip {
    pub(crate) version: IpVersion,
    /// Start of the header.
    pub(crate) offset: usize,
    /// End of the IPv4 header, or of the IPv6 extension headers.
    pub(crate) payload: usize,
    /// End of the packet. Padding may follow.
    pub(crate) end: usize,
    /// Protocol of the payload.
    pub(crate) protocol: u8,
    /// The packet is a fragment.
    pub(crate) fragment: bool,
}

impl Ip {
    /// Returns the range of source and destination address.
    pub(crate) const fn addresses(&self) -> Range<usize> {
        match self.version {
            IpVersion::V4 => self.offset + 12..self.offset + 20,
            IpVersion::V6 => self.offset + 8..self.offset + 40,
        }
    }
}

/// Transport header of an unfragmented packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Transport {
    /// TCP: its offset, and the size of its header including options, in bytes.
    Tcp { offset: usize, header_len: usize },
    /// UDP: its offset.
    Udp { offset: usize },
}

/// Headers of a frame, as far as they were recognised.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Headers {
    /// Size of the Ethernet header with tags, in bytes.
    pub(crate) link_len: usize,
    /// The tag after the addresses, if it is that of a customer VLAN.
    pub(crate) tag: Option<u16>,
    pub(crate) ip: Option<Ip>,
    pub(crate) transport: Option<Transport>,
}

/// Returns the 16-bit number at `at`, in network order.
fn be16(frame: &[u8], at: usize) -> u16 {
    frame.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |chunk| u16::from_be_bytes(*chunk))
}

/// Returns the size of the Ethernet header with tags, and the EtherType after them.
pub(crate) fn link_header(frame: &[u8]) -> (usize, u16) {
    let mut at = TYPE_AT;
    for _ in 0..MAX_TAGS {
        if !matches!(be16(frame, at), TYPE_VLAN | TYPE_SERVICE_VLAN) || frame.len() < at + TAG_LEN + 2 {
            break;
        }
        at += TAG_LEN;
    }
    (at + 2, be16(frame, at))
}

/// Returns the tag after the addresses, if it is that of a customer VLAN.
pub(crate) fn tag(frame: &[u8]) -> Option<u16> {
    (be16(frame, TYPE_AT) == TYPE_VLAN && frame.len() >= ETHERNET_LEN + TAG_LEN).then(|| be16(frame, ETHERNET_LEN))
}

/// Inserts a tag after the addresses. `frame` starts with [`TAG_LEN`] spare bytes, which the shifted addresses fill.
pub(crate) fn insert_tag(frame: &mut [u8], tag: u16) {
    if frame.len() < TAG_LEN + ETHERNET_LEN {
        return;
    }
    frame.copy_within(TAG_LEN..TAG_LEN + TYPE_AT, 0);
    if let Some(room) = frame.get_mut(TYPE_AT..TYPE_AT + TAG_LEN) {
        let ([a, b], [c, d]) = (TYPE_VLAN.to_be_bytes(), tag.to_be_bytes());
        room.copy_from_slice(&[a, b, c, d]);
    }
}

/// Sets the IP length fields to the length of the frame, because a driver that requests segmentation leaves them open.
/// Returns `true` if the length fits.
pub(crate) fn set_ip_length(frame: &mut [u8]) -> bool {
    let (link_len, kind) = link_header(frame);
    let (at, covered) = match kind {
        TYPE_IPV4 => (link_len + 2, link_len),
        TYPE_IPV6 => (link_len + 4, link_len + IPV6_LEN),
        _ => return false,
    };
    let len = frame.len().checked_sub(covered).and_then(|len| u16::try_from(len).ok());
    let (Some(len), Some(field)) = (len, frame.get_mut(at..at + 2)) else { return false };
    field.copy_from_slice(&len.to_be_bytes());
    true
}

impl Headers {
    /// Returns `true` if the IP header is where Linux's driver looks for it: after the Ethernet header, or after one
    /// tag of a customer VLAN. The driver panics if a frame with the header elsewhere is reported as TCP.
    pub(crate) const fn are_where_drivers_look(&self) -> bool {
        self.link_len == ETHERNET_LEN || self.link_len == ETHERNET_LEN + TAG_LEN && self.tag.is_some()
    }

    /// Parses a frame.
    pub(crate) fn parse(frame: &[u8]) -> Self {
        let (link_len, kind) = link_header(frame);
        let ip = match kind {
            TYPE_IPV4 => ipv4(frame, link_len),
            TYPE_IPV6 => ipv6(frame, link_len),
            _ => None,
        };
        let transport = ip.filter(|ip| !ip.fragment).and_then(|ip| transport(frame, &ip));
        Self { link_len, tag: tag(frame), ip, transport }
    }
}

fn ipv4(frame: &[u8], offset: usize) -> Option<Ip> {
    let first = byte(frame, offset);
    let (header_len, total) = (usize::from(first & 0xf) * 4, usize::from(be16(frame, offset + 2)));
    let end = offset.checked_add(total)?;
    if first >> 4 != 4 || header_len < 20 || total < header_len || end > frame.len() {
        return None;
    }
    // "More fragments" is set, or the fragment offset is not 0.
    let fragment = be16(frame, offset + 6) & 0x3fff != 0;
    let protocol = byte(frame, offset + 9);
    Some(Ip { version: IpVersion::V4, offset, payload: offset + header_len, end, protocol, fragment })
}

fn ipv6(frame: &[u8], offset: usize) -> Option<Ip> {
    let end = offset + IPV6_LEN + usize::from(be16(frame, offset + 4));
    if byte(frame, offset) >> 4 != 6 || end > frame.len() {
        return None;
    }
    let (mut protocol, mut at, mut fragment) = (byte(frame, offset + 6), offset + IPV6_LEN, false);
    for _ in 0..MAX_EXTENSIONS {
        let len = match protocol {
            PROTOCOL_HOP_BY_HOP | PROTOCOL_ROUTING | PROTOCOL_DESTINATION => (usize::from(byte(frame, at + 1)) + 1) * 8,
            PROTOCOL_FRAGMENT => {
                fragment = true;
                8
            }
            _ => break,
        };
        if at + len > end {
            return None;
        }
        protocol = byte(frame, at);
        at += len;
    }
    Some(Ip { version: IpVersion::V6, offset, payload: at, end, protocol, fragment })
}

fn transport(frame: &[u8], ip: &Ip) -> Option<Transport> {
    let (offset, room) = (ip.payload, ip.end.checked_sub(ip.payload)?);
    match ip.protocol {
        PROTOCOL_TCP => {
            let header_len = usize::from(byte(frame, offset + 12) >> 4) * 4;
            (header_len >= 20 && header_len <= room).then_some(Transport::Tcp { offset, header_len })
        }
        PROTOCOL_UDP => {
            let len = usize::from(be16(frame, offset + 4));
            (len >= 8 && len == room).then_some(Transport::Udp { offset })
        }
        _ => None,
    }
}
