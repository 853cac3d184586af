//! Super-frames: several packets of one flow that cross the kernel as one, with a single set of headers.
//!
//! The kernel segments them where they leave through a physical interface, with consecutive IPv4 identifications;
//! between local interfaces they are delivered whole. This module therefore builds them from runs of packets, and
//! segments received ones (`virtio_net_hdr`, Linux `include/uapi/linux/virtio_net.h`).

pub(super) use pvrdma_link::offload::headers::{Headers, MAX_HEADERS, finish_checksum};
use pvrdma_link::offload::{
    headers::{checksum_of_ipv4, put},
    is_whole,
};
use pvrdma_packet::{Ethernet, UdpHeader};

use pvrdma_link::Offload;

/// Length of a `virtio_net_hdr`, in bytes.
pub(super) const OFFLOAD_LEN: usize = 10;
/// Maximum length of a super-frame: an IP packet of the maximum length, with a tagged Ethernet header.
pub(super) const MAX_SUPER: usize = 65_535 + Ethernet::UNTAGGED_LEN + Ethernet::TAG_LEN;
/// Highest number of packets in a super-frame that this module builds.
pub(super) const MAX_SEGMENTS: usize = 64;
/// Highest number of packets in a received super-frame. Hosts send no more, because the data of a segment are no fewer
/// than 64 bytes on any network, but a virtual machine on the same bridge can ask for segments of one byte.
pub(super) const MAX_RECEIVED: usize = 1024;

const NEEDS_CHECKSUM: u8 = 1;
const KIND_NONE: u8 = 0;
const KIND_TCP4: u8 = 1;
const KIND_TCP6: u8 = 4;
const KIND_UDP: u8 = 5;
/// Flag in addition to a TCP kind: only the first segment carries CWR, which [`Headers::write`] ensures anyway.
const KIND_ECN: u8 = 0x80;

/// Work that is left to the kernel, or that the kernel has left to this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct VirtioNetHeader {
    /// Offset of the first byte that the missing checksum covers, and of the checksum relative to that byte.
    pub(super) checksum: Option<(usize, usize)>,
    kind: u8,
    /// Payload bytes of each packet except the last, in a super-frame.
    segment: usize,
}

impl VirtioNetHeader {
    pub(super) fn from_bytes(bytes: &[u8; OFFLOAD_LEN]) -> Self {
        let &[flags, kind, _, _, s0, s1, c0, c1, o0, o1] = bytes;
        let word = |a, b| usize::from(u16::from_ne_bytes([a, b]));
        let checksum = (flags & NEEDS_CHECKSUM != 0).then(|| (word(c0, c1), word(o0, o1)));
        Self { checksum, kind: kind & !KIND_ECN, segment: word(s0, s1) }
    }

    /// Returns the payload bytes of each packet, if this is a super-frame.
    pub(super) const fn segment(self) -> Option<usize> {
        if self.kind == KIND_NONE || self.segment == 0 { None } else { Some(self.segment) }
    }
}

/// Conversion between the headers of a packet and those of a super-frame.
pub(super) trait SuperFrameHeaders: Sized {
    /// Turns the headers of the first packet into those of a super-frame with `payload` bytes, whose packets carry
    /// `segment` bytes each. Returns the offload header for the kernel.
    fn widen(&mut self, payload: usize, segment: usize) -> Option<[u8; OFFLOAD_LEN]>;

    /// Returns the headers with the tag that the kernel removed. `None` if there is no room for it.
    fn tagged(&self, tag: [u8; Ethernet::TAG_LEN]) -> Option<Self>;

    /// Returns `true` if the headers contain a tag.
    fn are_tagged(&self) -> bool;

    /// Returns `true` if `frame` is packet `index` of a run that begins with these headers.
    fn is_continued_by(&self, index: usize, frame: &[u8]) -> bool;

    /// Returns the `virtio_net_hdr` of a frame whose checksum or segmentation is left to the kernel. Its offsets are
    /// derived from the frame's headers. `None` if the kernel does not accept such a frame.
    fn left_open(frame: &[u8], offload: Offload) -> Option<[u8; OFFLOAD_LEN]>;
}

impl SuperFrameHeaders for Headers {
    fn widen(&mut self, payload: usize, segment: usize) -> Option<[u8; OFFLOAD_LEN]> {
        let small = |number: usize| u16::try_from(number).ok();
        let (network, transport, total) = (self.network, self.transport, self.len.checked_add(payload)?);
        let mut bytes = self.bytes;
        let ip = bytes.get_mut(network..transport)?;
        if self.v6 {
            put(ip, 4, small(total - network - 40)?)?;
        } else {
            put(ip, 2, small(total - network)?)?;
            checksum_of_ipv4(ip)?;
        }
        let partial = !self.pseudo(&bytes, total - transport)?.finish();
        let udp = bytes.get_mut(transport..)?;
        put(udp, 4, small(total - transport)?)?;
        put(udp, 6, partial)?;
        self.bytes = bytes;
        let mut offload = [NEEDS_CHECKSUM, KIND_UDP, 0, 0, 0, 0, 0, 0, 0, 0];
        for (place, value) in [(2, self.len), (4, segment), (6, transport), (8, 6)] {
            *offload.get_mut(place..)?.first_chunk_mut()? = small(value)?.to_ne_bytes();
        }
        Some(offload)
    }

    fn tagged(&self, tag: [u8; Ethernet::TAG_LEN]) -> Option<Self> {
        const ADDRESSES: usize = 12;
        let mut tagged = self.clone();
        tagged.len = self.len + tag.len();
        tagged.bytes.get_mut(..tagged.len)?.copy_within(ADDRESSES..self.len, ADDRESSES + tag.len());
        *tagged.bytes.get_mut(ADDRESSES..)?.first_chunk_mut()? = tag;
        tagged.network += tag.len();
        tagged.transport += tag.len();
        Some(tagged)
    }

    fn are_tagged(&self) -> bool {
        self.network > Ethernet::UNTAGGED_LEN
    }

    fn is_continued_by(&self, index: usize, frame: &[u8]) -> bool {
        let Some(theirs) = frame.get(..self.len) else { return false };
        let ours = self.bytes();
        let equal = |from: usize, to: usize| ours.get(from..to) == theirs.get(from..to);
        let (ip, udp) = (self.network, self.transport);
        let network = if self.v6 {
            equal(ip, ip + 4) && equal(ip + 6, udp)
        } else {
            let ident = |bytes: &[u8]| bytes.get(ip + 4..)?.first_chunk().map(|&ident| u16::from_be_bytes(ident));
            let expected = ident(ours).zip(u16::try_from(index).ok()).map(|(first, index)| first.wrapping_add(index));
            equal(ip, ip + 2) && expected == ident(theirs) && equal(ip + 6, ip + 10) && equal(ip + 12, udp)
        };
        network && equal(0, ip) && equal(udp, udp + 4) && equal(udp + 6, udp + 8)
    }

    fn left_open(frame: &[u8], offload: Offload) -> Option<[u8; OFFLOAD_LEN]> {
        let (start, at) = offload.missing_checksum(frame)?;
        let mut open = [NEEDS_CHECKSUM, KIND_NONE, 0, 0, 0, 0, 0, 0, 0, 0];
        let mut say = |place: usize, value: u16| -> Option<()> {
            *open.get_mut(place..)?.first_chunk_mut()? = value.to_ne_bytes();
            Some(())
        };
        say(6, start)?;
        say(8, at.checked_sub(start)?)?;
        if let Some(mss) = offload.mss() {
            // The kernel expects TCP directly behind an Ethernet header without tags.
            let headers = Self::of(frame).filter(|it| it.is_tcp() && it.network == Ethernet::UNTAGGED_LEN)?;
            say(2, u16::try_from(headers.len).ok()?)?;
            say(4, mss.get())?;
            open[1] = if headers.v6 { KIND_TCP6 } else { KIND_TCP4 };
        }
        Some(open)
    }
}

/// Returns `true` if a UDP packet with headers at these offsets has payload, and no padding, which the kernel would
/// take for payload.
fn has_payload_alone(headers: &Headers, frame: &[u8]) -> bool {
    let length = frame.get(headers.transport..).and_then(|udp| UdpHeader::new(udp).length());
    frame.len() > headers.len && length.is_some_and(|length| headers.transport + usize::from(length) == frame.len())
}

/// Finds the RoCE v2 packets at the start of `frames` that can leave as one super-frame. Returns their number, if it is
/// more than one, and the headers of the first.
///
/// Everything in front of the BTH must be equal, except the IPv4 identification, which must count up, and fields that
/// depend on the length. Only the last packet may be shorter.
pub(super) fn run<'f>(frames: impl Iterator<Item = &'f [u8]>) -> Option<(usize, Headers)> {
    let mut frames = frames.take(MAX_SEGMENTS);
    let first = frames.next()?;
    // The kernel rejects a super-frame with inconsistent headers, and the caller would conclude that it rejects all
    // super-frames. So such a packet must not begin one.
    let headers = Headers::of(first).filter(Headers::are_roce).filter(|_| is_whole(first))?;
    if !has_payload_alone(&headers, first) {
        return None;
    }
    let udp_checksum = headers.transport + 6;
    if first.get(udp_checksum..udp_checksum + 2) != Some(&[0, 0]) {
        return None;
    }
    let mut total = first.len();
    let (mut count, mut open) = (1, true);
    for frame in frames {
        total += frame.len().saturating_sub(headers.len);
        if !open
            || frame.len() > first.len()
            || total > MAX_SUPER - Ethernet::TAG_LEN
            || !has_payload_alone(&headers, frame)
            || !headers.is_continued_by(count, frame)
        {
            break;
        }
        open = frame.len() == first.len();
        count += 1;
    }
    (count > 1).then_some((count, headers))
}
