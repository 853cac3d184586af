//! The TCP or UDP header of a frame whose sender may not have computed the checksum.

use pvrdma_packet::{Checksum, IpPacket, Transport};

use super::headers::not_zero;

const TCP_CHECKSUM: usize = 16;
const UDP_CHECKSUM: usize = 6;

/// Complete TCP segment or UDP datagram in a frame. Its offsets are derived from the headers of the frame alone, and
/// lie within the frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Covered {
    /// Offset of the TCP or UDP header in the frame.
    pub(crate) start: usize,
    /// End of the IP packet in the frame. Padding may follow.
    pub(crate) end: usize,
    /// Offset of the checksum in the frame.
    pub(crate) checksum: usize,
}

impl Covered {
    /// Parses a frame with up to two tags, IPv4 with options or IPv6 with extension headers, and TCP or UDP. `None` if
    /// it is anything else or a fragment, or if its lengths disagree: senders never leave the checksum of a fragment
    /// unfinished.
    #[inline]
    pub(crate) fn of(frame: &[u8]) -> Option<Self> {
        let ip = IpPacket::of(frame)?;
        let (start, field) = match ip.transport(frame)? {
            Transport::Tcp { offset, .. } => (offset, TCP_CHECKSUM),
            Transport::Udp { offset } => (offset, UDP_CHECKSUM),
        };
        let checksum = start + field;
        // The offsets must fit into 16 bits, as in `virtio_net_hdr` and in descriptors.
        u16::try_from(checksum).ok()?;
        Some(Self { start, end: ip.end, checksum })
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
