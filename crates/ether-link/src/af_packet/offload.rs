//! Super-frames: many packets of one flow that cross the kernel as one, with one set of headers in front.
//!
//! The kernel cuts them where they leave for a real wire, with consecutive IPv4 identifications; between local interfaces they
//! are handed over whole. So we make them out of our own runs of packets, and take apart what comes (`virtio_net_hdr`,
//! Linux `include/uapi/linux/virtio_net.h`).

use pvrdma_roce::wire::{Checksum, EtherType, Ethernet, PROTOCOL_UDP, ROCE_PORT, Udp};

use crate::PROTOCOL_TCP;

/// Bytes of a `virtio_net_hdr`.
pub(super) const OFFLOAD_LEN: usize = 10;
/// Longest super-frame: an IP packet of the greatest length.
pub(super) const MAX_SUPER: usize = 65_535 + Ethernet::UNTAGGED_LEN + Ethernet::TAG_LEN;
/// Packets in a super-frame that we make.
pub(super) const MAX_SEGMENTS: usize = 64;
/// Longest headers that we take apart: IPv6 and TCP with all its options, tagged.
pub(super) const MAX_HEADERS: usize = Ethernet::UNTAGGED_LEN + Ethernet::TAG_LEN + 40 + 60;

const NEEDS_CHECKSUM: u8 = 1;
const KIND_NONE: u8 = 0;
const KIND_UDP: u8 = 5;
/// Or'ed to a kind of TCP: only the first segment carries CWR, which we see to anyway.
const KIND_ECN: u8 = 0x80;

const TCP_FIN_PSH: u8 = 0x09;
const TCP_CWR: u8 = 0x80;

/// What the kernel is to do, or has left undone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Offload {
    /// Where the bytes begin whose checksum is missing, and where in them it belongs.
    pub(super) checksum: Option<(usize, usize)>,
    kind: u8,
    /// Payload bytes of each packet but the last, in a super-frame.
    segment: usize,
}

impl Offload {
    pub(super) fn from_bytes(bytes: &[u8; OFFLOAD_LEN]) -> Self {
        let &[flags, kind, _, _, s0, s1, c0, c1, o0, o1] = bytes;
        let word = |a, b| usize::from(u16::from_ne_bytes([a, b]));
        let checksum = (flags & NEEDS_CHECKSUM != 0).then(|| (word(c0, c1), word(o0, o1)));
        Self { checksum, kind: kind & !KIND_ECN, segment: word(s0, s1) }
    }

    /// Whether this is a super-frame, and the payload bytes of its packets.
    pub(super) const fn segment(self) -> Option<usize> {
        if self.kind == KIND_NONE || self.segment == 0 { None } else { Some(self.segment) }
    }
}

/// Puts the missing checksum into a frame. `false`: it is not where it is said to be.
pub(super) fn finish_checksum(frame: &mut [u8], (start, offset): (usize, usize)) -> bool {
    let Some(covered) = frame.get_mut(start..) else { return false };
    // The field holds the sum of the pseudo header.
    let mut sum = Checksum::default();
    sum.add(covered);
    let Some(field) = covered.get_mut(offset..).and_then(<[u8]>::first_chunk_mut) else { return false };
    *field = not_zero(sum.finish()).to_be_bytes();
    true
}

/// Zero would mean "no checksum" in UDP.
const fn not_zero(sum: u16) -> u16 {
    if sum == 0 { u16::MAX } else { sum }
}

/// The headers of a frame and where in them what is.
#[derive(Clone, Debug)]
pub(super) struct Headers {
    bytes: [u8; MAX_HEADERS],
    len: usize,
    network: usize,
    transport: usize,
    v6: bool,
    tcp: bool,
}

impl Headers {
    /// Finds the headers of a TCP or UDP frame. Not with extension headers of IPv6.
    pub(super) fn of(frame: &[u8]) -> Option<Self> {
        let (_, kind, body) = Ethernet::parse(frame).ok()?;
        let network = frame.len().checked_sub(body.len())?;
        let (v6, protocol, transport) = match kind {
            EtherType::IPV4 => {
                let &[version, .., protocol] = body.first_chunk::<10>()?;
                (false, protocol, network + usize::from(version & 0xf) * 4)
            }
            EtherType::IPV6 => (true, *body.get(6)?, network + 40),
            _ => return None,
        };
        let tcp = protocol == PROTOCOL_TCP;
        let len = match protocol {
            PROTOCOL_TCP => transport + usize::from(frame.get(transport + 12)? >> 4) * 4,
            PROTOCOL_UDP => transport + Udp::LEN,
            _ => return None,
        };
        let shortest = transport + if tcp { 20 } else { Udp::LEN };
        if transport < network + 20 || len < shortest {
            return None;
        }
        let mut bytes = [0; MAX_HEADERS];
        bytes.get_mut(..len)?.copy_from_slice(frame.get(..len)?);
        Some(Self { bytes, len, network, transport, v6, tcp })
    }

    /// Bytes.
    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// The bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }

    /// Whether these are the packets that this adapter is about, whose UDP checksum says nothing that the ICRC does not.
    pub(super) fn are_roce(&self) -> bool {
        !self.tcp && self.bytes().get(self.transport + 2..self.transport + 4) == Some(&ROCE_PORT.to_be_bytes()[..])
    }

    /// Writes the headers of the packet `index` in front of its payload, which is in `frame` behind room for them.
    pub(super) fn write(&self, index: usize, segment: usize, last: bool, frame: &mut [u8]) -> Option<()> {
        frame.get_mut(..self.len)?.copy_from_slice(self.bytes());
        let total = frame.len();
        let small = |number: usize| u16::try_from(number).ok();
        let ip = frame.get_mut(self.network..self.transport)?;
        if self.v6 {
            put(ip, 4, small(total - self.network - 40)?)?;
        } else {
            put(ip, 2, small(total - self.network)?)?;
            let ident = u16::from_be_bytes(*ip.get(4..)?.first_chunk()?);
            put(ip, 4, ident.wrapping_add(small(index)?))?;
            checksum_of_ipv4(ip)?;
        }
        let transport = frame.get_mut(self.transport..)?;
        if self.tcp {
            let sequence = u32::from_be_bytes(*transport.get(4..)?.first_chunk()?);
            let skipped = u32::try_from(index.checked_mul(segment)?).ok()?;
            *transport.get_mut(4..)?.first_chunk_mut()? = sequence.wrapping_add(skipped).to_be_bytes();
            let flags = transport.get_mut(13)?;
            *flags &= if last { u8::MAX } else { !TCP_FIN_PSH };
            *flags &= if index == 0 { u8::MAX } else { !TCP_CWR };
        } else {
            put(transport, 4, small(total - self.transport)?)?;
        }
        let place = if self.tcp { 16 } else { 6 };
        put(transport, place, 0)?;
        if !self.are_roce() {
            let mut sum = self.pseudo(frame, total - self.transport)?;
            sum.add(frame.get(self.transport..)?);
            put(frame.get_mut(self.transport..)?, place, not_zero(sum.finish()))?;
        }
        Some(())
    }

    /// The sum of the pseudo header.
    fn pseudo(&self, frame: &[u8], length: usize) -> Option<Checksum> {
        let addresses = if self.v6 { 8..40 } else { 12..20 };
        let mut sum = Checksum::default();
        sum.add(frame.get(self.network + addresses.start..self.network + addresses.end)?);
        sum.add(&[0, if self.tcp { PROTOCOL_TCP } else { PROTOCOL_UDP }]);
        sum.add(&u32::try_from(length).ok()?.to_be_bytes());
        Some(sum)
    }

    /// Turns the headers of the first packet into those of a super-frame with `payload` bytes, whose packets carry
    /// `segment`, and says so to the kernel.
    pub(super) fn widen(&mut self, payload: usize, segment: usize) -> Option<[u8; OFFLOAD_LEN]> {
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
}

fn put(bytes: &mut [u8], place: usize, value: u16) -> Option<()> {
    *bytes.get_mut(place..)?.first_chunk_mut()? = value.to_be_bytes();
    Some(())
}

fn checksum_of_ipv4(ip: &mut [u8]) -> Option<()> {
    put(ip, 10, 0)?;
    let mut sum = Checksum::default();
    sum.add(ip);
    put(ip, 10, sum.finish())
}

/// The RoCE v2 packets at the start of `frames` that can leave as one super-frame, if it is more than one: how many, and the
/// headers of the first.
///
/// They must not differ in anything in front of the BTH but the IPv4 identification, which must count up, and what follows
/// from the length; only the last may be shorter.
pub(super) fn run<'f>(frames: impl Iterator<Item = &'f [u8]>) -> Option<(usize, Headers)> {
    let mut frames = frames.take(MAX_SEGMENTS);
    let first = frames.next()?;
    let headers =
        Headers::of(first).filter(|headers| headers.are_roce() && headers.network == Ethernet::UNTAGGED_LEN)?;
    let udp_checksum = headers.transport + 6;
    if first.get(udp_checksum..udp_checksum + 2) != Some(&[0, 0]) {
        return None;
    }
    let mut total = first.len();
    let (mut count, mut open) = (1, true);
    for frame in frames {
        total += frame.len().checked_sub(headers.len)?;
        if !open || frame.len() > first.len() || total > MAX_SUPER - Ethernet::TAG_LEN || !headers.go_on(count, frame) {
            break;
        }
        open = frame.len() == first.len();
        count += 1;
    }
    (count > 1).then_some((count, headers))
}

impl Headers {
    /// Whether `frame` is the packet `index` of a run that these headers begin.
    fn go_on(&self, index: usize, frame: &[u8]) -> bool {
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
}
