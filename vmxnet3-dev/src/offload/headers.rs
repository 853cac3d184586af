//! Headers of a frame that a network adapter acts on. Every offset lies inside the frame, whatever the frame contains.

use pvrdma_packet::{EtherType, Ethernet, IpPacket, Ipv6Header, Transport};

/// Size of an Ethernet header without tag, in bytes.
pub(crate) const ETHERNET_LEN: usize = Ethernet::UNTAGGED_LEN;
/// Size of a VLAN tag, in bytes.
pub(crate) const TAG_LEN: usize = Ethernet::TAG_LEN;

/// Headers of a frame, as far as they were recognised.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Headers {
    /// Size of the Ethernet header with tags, in bytes.
    pub(crate) link_len: usize,
    /// The tag after the addresses, if it is that of a customer VLAN.
    pub(crate) tag: Option<u16>,
    pub(crate) ip: Option<IpPacket>,
    pub(crate) transport: Option<Transport>,
}

/// Returns the tag after the addresses, if it is that of a customer VLAN.
pub(crate) fn tag(frame: &[u8]) -> Option<u16> {
    let (ethernet, ..) = Ethernet::parse(frame).ok()?;
    ethernet.vlan.map(|vlan| u16::from_be_bytes(vlan.tci()))
}

/// Inserts a tag after the addresses. `frame` starts with [`TAG_LEN`] spare bytes, which the shifted addresses fill.
pub(crate) fn insert_tag(frame: &mut [u8], tag: u16) {
    if frame.len() < TAG_LEN + ETHERNET_LEN {
        return;
    }
    frame.copy_within(TAG_LEN..TAG_LEN + Ethernet::TYPE_AT, 0);
    if let Some(room) = frame.get_mut(Ethernet::TYPE_AT..Ethernet::TYPE_AT + TAG_LEN) {
        let ([a, b], [c, d]) = (EtherType::VLAN.0.to_be_bytes(), tag.to_be_bytes());
        room.copy_from_slice(&[a, b, c, d]);
    }
}

/// Sets the IP length fields to the length of the frame, because a driver that requests segmentation leaves them open.
/// Returns `true` if the length fits.
pub(crate) fn set_ip_length(frame: &mut [u8]) -> bool {
    let (link_len, kind) = IpPacket::link_header(frame);
    let (at, covered) = match kind {
        Some(EtherType::IPV4) => (link_len + 2, link_len),
        Some(EtherType::IPV6) => (link_len + 4, link_len + Ipv6Header::LEN),
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
        let (link_len, kind) = IpPacket::link_header(frame);
        let ip = kind.and_then(|kind| IpPacket::at(frame, kind, link_len));
        let transport = ip.and_then(|ip| ip.transport(frame));
        Self { link_len, tag: tag(frame), ip, transport }
    }
}
