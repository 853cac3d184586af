//! The TCP or UDP header of a frame whose sender may not have computed the checksum.

use pvrdma_packet::{Checksum, EtherType, IPV6_LEN, PROTOCOL_TCP, PROTOCOL_UDP, UDP_LEN};

use super::headers::not_zero;

/// Offset of the ethertype, or of the first tag.
const TYPE_AT: usize = 12;
const TAG_LEN: usize = 4;
/// Highest number of tags in front of the IP header.
const MAX_TAGS: usize = 2;
/// Service tag of IEEE 802.1ad.
const SERVICE_TAG: EtherType = EtherType(0x88a8);

/// IPv4 flag "more fragments" and the fragment offset.
const FRAGMENT_BITS: u16 = 0x3fff;
/// IPv6 extension headers that may stand between the IPv6 header and TCP or UDP (RFC 8200, section 4). A fragment
/// header is not accepted: no sender leaves the checksum of a fragment unfinished.
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const DESTINATION_OPTIONS: u8 = 60;
const MAX_EXTENSIONS: usize = 8;

const TCP_LEN: usize = 20;
const TCP_CHECKSUM: usize = 16;
const UDP_CHECKSUM: usize = 6;

/// Whole TCP segment or UDP datagram in a frame. Its offsets follow from the headers of the frame alone, and lie in the
/// frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Transport {
    /// Offset of the TCP or UDP header in the frame.
    pub(crate) start: usize,
    /// End of the IP packet in the frame. Padding may follow.
    pub(crate) end: usize,
    /// Offset of the checksum in the frame.
    pub(crate) checksum: usize,
}

impl Transport {
    /// Parses a frame with up to two tags, IPv4 with options or IPv6 with extension headers, and TCP or UDP. `None` if
    /// it is anything else or a fragment, or if its lengths do not agree.
    #[inline]
    pub(crate) fn of(frame: &[u8]) -> Option<Self> {
        let mut at = TYPE_AT;
        let mut tags = 0;
        while matches!(EtherType(be16(frame, at)?), EtherType::VLAN | SERVICE_TAG) {
            if tags == MAX_TAGS {
                return None;
            }
            tags += 1;
            at += TAG_LEN;
        }
        let network = at + 2;
        let (protocol, start, end) = match EtherType(be16(frame, at)?) {
            EtherType::IPV4 => ipv4(frame, network)?,
            EtherType::IPV6 => ipv6(frame, network)?,
            _ => return None,
        };
        let room = end.checked_sub(start)?;
        let checksum = match protocol {
            PROTOCOL_TCP => {
                let length = usize::from(*frame.get(start + 12)? >> 4) * 4;
                (TCP_LEN..=room).contains(&length).then_some(TCP_CHECKSUM)
            }
            PROTOCOL_UDP => {
                let length = usize::from(be16(frame, start + 4)?);
                (length >= UDP_LEN && length == room).then_some(UDP_CHECKSUM)
            }
            _ => None,
        }?;
        // The offsets must fit into 16 bits, as in `virtio_net_hdr` and in descriptors.
        u16::try_from(start + checksum).ok()?;
        Some(Self { start, end, checksum: start + checksum })
    }

    /// Completes the checksum: replaces the sum of the pseudo header in its field. Changes nothing else.
    #[inline]
    pub(crate) fn complete(self, frame: &mut [u8]) -> Option<()> {
        let mut sum = Checksum::default();
        sum.add(frame.get(self.start..self.end)?);
        let field = frame.get_mut(self.checksum..).and_then(<[u8]>::first_chunk_mut)?;
        *field = not_zero(sum.finish()).to_be_bytes();
        Some(())
    }

    /// Returns the offsets of the header and of the checksum in the frame.
    #[inline]
    pub(crate) fn offsets(self) -> Option<(u16, u16)> {
        Some((u16::try_from(self.start).ok()?, u16::try_from(self.checksum).ok()?))
    }
}

/// Returns protocol, offset and end of the payload of an IPv4 packet.
#[inline]
fn ipv4(frame: &[u8], at: usize) -> Option<(u8, usize, usize)> {
    let header: &[u8; 20] = frame.get(at..)?.first_chunk()?;
    let length = usize::from(header[0] & 0xf) * 4;
    let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
    let is_whole = u16::from_be_bytes([header[6], header[7]]) & FRAGMENT_BITS == 0;
    let is_valid = header[0] >> 4 == 4 && is_whole && (20..=total).contains(&length) && at + total <= frame.len();
    is_valid.then_some((header[9], at + length, at + total))
}

/// Returns the same for an IPv6 packet, behind its extension headers.
#[inline]
fn ipv6(frame: &[u8], at: usize) -> Option<(u8, usize, usize)> {
    let header: &[u8; IPV6_LEN] = frame.get(at..)?.first_chunk()?;
    let mut start = at + IPV6_LEN;
    let end = start + usize::from(u16::from_be_bytes([header[4], header[5]]));
    if header[0] >> 4 != 6 || end > frame.len() {
        return None;
    }
    let mut protocol = header[6];
    for _ in 0..MAX_EXTENSIONS {
        if !matches!(protocol, HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS) {
            break;
        }
        let &[next, length] = frame.get(start..end)?.first_chunk()?;
        (protocol, start) = (next, start + (usize::from(length) + 1) * 8);
    }
    Some((protocol, start, end))
}

#[inline]
fn be16(frame: &[u8], at: usize) -> Option<u16> {
    frame.get(at..)?.first_chunk().map(|&bytes| u16::from_be_bytes(bytes))
}
