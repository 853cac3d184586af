//! Headers of TCP and UDP frames: those of a frame to be segmented, and those of each segment.

use pvrdma_packet::{Checksum, EtherType, Ethernet, Ipv4Header, Ipv6Header, TcpHeader, UdpHeader};
use pvrdma_packet::{PROTOCOL_TCP, PROTOCOL_UDP, ROCE_PORT};

/// Maximum length of the supported headers, in bytes: tagged, IPv4 and TCP with all options.
pub const MAX_HEADERS: usize = Ethernet::UNTAGGED_LEN + Ethernet::TAG_LEN + 2 * MAX_WITH_OPTIONS;
/// Maximum length of an IPv4 or TCP header with its options, in bytes.
const MAX_WITH_OPTIONS: usize = 60;

const TCP_FIN_PSH: u8 = 0x09;
const TCP_CWR: u8 = 0x80;

/// Completes the checksum that the kernel left out of a frame that it delivers, at the offsets that the kernel gives.
/// Must be used only for frames that no port has inspected yet, because these offsets are not compared with the
/// headers. Returns `false` if they lie outside the frame.
#[inline]
pub fn finish_checksum(frame: &mut [u8], (start, offset): (usize, usize)) -> bool {
    let Some(covered) = frame.get_mut(start..) else { return false };
    // The field contains the sum of the pseudo header, which thus enters the sum.
    let mut sum = Checksum::default();
    sum.add(covered);
    let Some(field) = covered.get_mut(offset..).and_then(<[u8]>::first_chunk_mut) else { return false };
    *field = not_zero(sum.finish()).to_be_bytes();
    true
}

/// Replaces a checksum of zero, which means "no checksum" in UDP.
#[inline]
pub(super) const fn not_zero(sum: u16) -> u16 {
    if sum == 0 { u16::MAX } else { sum }
}

/// Headers of a frame and the positions of their parts.
#[derive(Clone, Debug)]
pub struct Headers {
    /// Buffer, of which the first [`Self::len`] bytes are in use.
    pub bytes: [u8; MAX_HEADERS],
    /// Length of the headers, in bytes.
    pub len: usize,
    /// Offset of the IP header.
    pub network: usize,
    /// Offset of the TCP or UDP header.
    pub transport: usize,
    /// `true` for IPv6, `false` for IPv4.
    pub v6: bool,
    tcp: bool,
}

impl Headers {
    /// Parses the headers of a TCP or UDP frame. IPv6 extension headers are not supported. Unlike
    /// [`pvrdma_packet::IpPacket`], this accepts the first bytes of a frame alone, and fragments, because the headers
    /// of a super-frame of the kernel are parsed before its lengths are known. The caller checks the lengths that it
    /// depends on.
    #[inline]
    pub fn of(frame: &[u8]) -> Option<Self> {
        let (_, kind, body) = Ethernet::parse(frame).ok()?;
        let network = frame.len().checked_sub(body.len())?;
        let (v6, protocol, transport) = match kind {
            EtherType::IPV4 => {
                let ip = Ipv4Header::new(body);
                (false, ip.protocol()?, network + ip.header_len()?)
            }
            EtherType::IPV6 => (true, Ipv6Header::new(body).next_header()?, network + Ipv6Header::LEN),
            _ => return None,
        };
        let tcp = protocol == PROTOCOL_TCP;
        let len = match protocol {
            PROTOCOL_TCP => transport + TcpHeader::new(frame.get(transport..)?).header_len()?,
            PROTOCOL_UDP => transport + UdpHeader::LEN,
            _ => return None,
        };
        let shortest = transport + if tcp { TcpHeader::LEN } else { UdpHeader::LEN };
        if transport < network + Ipv4Header::LEN || len < shortest {
            return None;
        }
        let mut bytes = [0; MAX_HEADERS];
        bytes.get_mut(..len)?.copy_from_slice(frame.get(..len)?);
        Some(Self { bytes, len, network, transport, v6, tcp })
    }

    /// Returns the headers' bytes.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }

    /// Returns `true` for TCP.
    #[inline]
    pub const fn is_tcp(&self) -> bool {
        self.tcp
    }

    /// Returns `true` for RoCE v2 packets, which need no UDP checksum: the ICRC covers the same bytes.
    #[inline]
    pub fn are_roce(&self) -> bool {
        let transport = UdpHeader::new(self.bytes().get(self.transport..).unwrap_or_default());
        !self.tcp && transport.destination_port() == Some(ROCE_PORT)
    }

    /// Writes the headers of segment `index` into `frame`, which has room for them in front of the segment's payload.
    #[inline]
    pub fn write(&self, index: usize, segment: usize, last: bool, frame: &mut [u8]) -> Option<()> {
        frame.get_mut(..self.len)?.copy_from_slice(self.bytes());
        let total = frame.len();
        let small = |number: usize| u16::try_from(number).ok();
        let ip = frame.get_mut(self.network..self.transport)?;
        if self.v6 {
            put(ip, 4, small(total - self.network - Ipv6Header::LEN)?)?;
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

    /// Returns the sum of the pseudo header for `length` bytes, with the addresses in `frame`.
    #[inline]
    pub fn pseudo(&self, frame: &[u8], length: usize) -> Option<Checksum> {
        let addresses = if self.v6 { 8..40 } else { 12..20 };
        let mut sum = Checksum::default();
        sum.add(frame.get(self.network + addresses.start..self.network + addresses.end)?);
        sum.add(&[0, if self.tcp { PROTOCOL_TCP } else { PROTOCOL_UDP }]);
        sum.add(&u32::try_from(length).ok()?.to_be_bytes());
        Some(sum)
    }
}

/// Stores a big-endian number at an offset. `None` if the bytes end before it does.
#[inline]
pub fn put(bytes: &mut [u8], place: usize, value: u16) -> Option<()> {
    *bytes.get_mut(place..)?.first_chunk_mut()? = value.to_be_bytes();
    Some(())
}

/// Stores the checksum of an IPv4 header in it. `None` if there are too few bytes.
#[inline]
pub fn checksum_of_ipv4(ip: &mut [u8]) -> Option<()> {
    put(ip, 10, 0)?;
    let mut sum = Checksum::default();
    sum.add(ip);
    put(ip, 10, sum.finish())
}
