//! The headers of TCP and UDP frames: of one that stands for many, and of each of the many.

use pvrdma_roce::wire::{Checksum, EtherType, Ethernet, PROTOCOL_UDP, ROCE_PORT, Udp};

/// Longest headers that we take apart: IPv6 and TCP with all its options, tagged.
pub(crate) const MAX_HEADERS: usize = Ethernet::UNTAGGED_LEN + Ethernet::TAG_LEN + 40 + 60;

/// The number of TCP in the protocol field of an IP header.
pub(crate) const PROTOCOL_TCP: u8 = 6;

const TCP_FIN_PSH: u8 = 0x09;
const TCP_CWR: u8 = 0x80;

/// Stores the checksum that the kernel left out of a frame it delivers, where the kernel says. Only for frames that no
/// port has inspected yet. Returns `false` if that is outside of the frame.
pub(crate) fn finish_checksum(frame: &mut [u8], (start, offset): (usize, usize)) -> bool {
    let Some(covered) = frame.get_mut(start..) else { return false };
    // The field holds the sum of the pseudo header.
    let mut sum = Checksum::default();
    sum.add(covered);
    let Some(field) = covered.get_mut(offset..).and_then(<[u8]>::first_chunk_mut) else { return false };
    *field = not_zero(sum.finish()).to_be_bytes();
    true
}

/// Zero would mean "no checksum" in UDP.
pub(super) const fn not_zero(sum: u16) -> u16 {
    if sum == 0 { u16::MAX } else { sum }
}

/// The headers of a frame and where in them what is.
#[derive(Clone, Debug)]
pub(crate) struct Headers {
    pub(crate) bytes: [u8; MAX_HEADERS],
    pub(crate) len: usize,
    pub(crate) network: usize,
    pub(crate) transport: usize,
    pub(crate) v6: bool,
    tcp: bool,
}

impl Headers {
    /// Finds the headers of a TCP or UDP frame. Not with extension headers of IPv6.
    pub(crate) fn of(frame: &[u8]) -> Option<Self> {
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

    /// Length in bytes.
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// The bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }

    /// Returns `true` for TCP.
    pub(crate) const fn is_tcp(&self) -> bool {
        self.tcp
    }

    /// Returns `true` for RoCE v2 packets, whose UDP checksum says nothing that the ICRC does
    /// not.
    pub(crate) fn are_roce(&self) -> bool {
        !self.tcp && self.bytes().get(self.transport + 2..self.transport + 4) == Some(&ROCE_PORT.to_be_bytes()[..])
    }

    /// Writes the headers of the packet `index` in front of its payload, which is in `frame` behind room for them.
    pub(crate) fn write(&self, index: usize, segment: usize, last: bool, frame: &mut [u8]) -> Option<()> {
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
    pub(crate) fn pseudo(&self, frame: &[u8], length: usize) -> Option<Checksum> {
        let addresses = if self.v6 { 8..40 } else { 12..20 };
        let mut sum = Checksum::default();
        sum.add(frame.get(self.network + addresses.start..self.network + addresses.end)?);
        sum.add(&[0, if self.tcp { PROTOCOL_TCP } else { PROTOCOL_UDP }]);
        sum.add(&u32::try_from(length).ok()?.to_be_bytes());
        Some(sum)
    }
}

pub(crate) fn put(bytes: &mut [u8], place: usize, value: u16) -> Option<()> {
    *bytes.get_mut(place..)?.first_chunk_mut()? = value.to_be_bytes();
    Some(())
}

pub(crate) fn checksum_of_ipv4(ip: &mut [u8]) -> Option<()> {
    put(ip, 10, 0)?;
    let mut sum = Checksum::default();
    sum.add(ip);
    put(ip, 10, sum.finish())
}
