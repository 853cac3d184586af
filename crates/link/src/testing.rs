//! Test oracle: checks that a frame, in the form in which it finally leaves, obeys the rules of its network.
//!
//! It shares no code with the data path. It parses like the most liberal receiver, and stores checksums like a device
//! that follows any offset.

#![expect(clippy::indexing_slicing, reason = "for tests only")]

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Tags that the hosts of a network may send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tags {
    /// No tag, or one 802.1Q tag with a priority alone.
    Untagged,
    /// Exactly one tag, of this VLAN.
    Access(u16),
    /// Any tags.
    Trunk,
}

/// Rules for the frames of one device.
pub struct Rules<'a> {
    /// Source addresses that the device may use. Empty: any.
    pub sources: &'a [[u8; 6]],
    /// Tags that the device may send.
    pub tags: Tags,
    /// The device may send RoCE.
    pub roce: bool,
    /// Returns `true` if the device may announce this address in this VLAN.
    pub may_have: &'a dyn Fn(IpAddr, Option<u16>) -> bool,
}

/// Rule that a frame breaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Broken {
    /// The frame has no Ethernet header.
    Short,
    /// The frame has the source address of another host.
    Source,
    /// The frame is in another VLAN.
    Vlan,
    /// The frame is RoCE, or may be.
    Roce,
    /// The frame announces this address for its sender.
    Address(IpAddr),
    /// The frame announces an address for another host.
    Station,
    /// The frame is for the other end of the link, which may stop the link for all others because of it.
    Control,
}

impl fmt::Debug for Rules<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sources, tags, roce, may_have: _ } = self;
        f.debug_struct("Rules")
            .field("sources", sources)
            .field("tags", tags)
            .field("roce", roce)
            .finish_non_exhaustive()
    }
}

impl Rules<'_> {
    /// Checks a frame in its form on the wire.
    ///
    /// # Errors
    /// The first rule that the frame breaks.
    pub fn check(&self, frame: &[u8]) -> Result<(), Broken> {
        if frame.len() < 14 {
            return Err(Broken::Short);
        }
        if !self.sources.is_empty() && !self.sources.iter().any(|source| frame[6..12] == source[..]) {
            return Err(Broken::Source);
        }
        let (tags, kind, body) = behind_tags(frame);
        self.check_tags(&tags)?;
        if kind == 0x8808 || is_reserved(frame) && (frame[5] == 1 || !self.sources.is_empty()) {
            return Err(Broken::Control);
        }
        let is_roce = match kind {
            0x8915 => true,
            0x0800 => is_ipv4_roce(body),
            0x86dd => is_ipv6_roce(body),
            _ => false,
        };
        if is_roce && !self.roce {
            return Err(Broken::Roce);
        }
        let named: Vec<_> = tags.iter().map(|&(_, vid)| Some(vid)).filter(|&vid| vid != Some(0)).collect();
        let vlans = if named.is_empty() { vec![None] } else { named };
        vlans.into_iter().try_for_each(|vlan| match kind {
            0x0806 | 0x8035 => self.check_arp(&frame[6..12], body, vlan),
            0x86dd => self.check_discovery(body, vlan),
            _ => Ok(()),
        })
    }

    fn check_tags(&self, tags: &[(u16, u16)]) -> Result<(), Broken> {
        let is_good = match self.tags {
            Tags::Trunk => true,
            Tags::Untagged => matches!(tags, [] | [(0x8100, 0)]),
            Tags::Access(vlan) => tags == [(0x8100, vlan)],
        };
        if is_good { Ok(()) } else { Err(Broken::Vlan) }
    }

    /// Checks ARP and RARP for IPv4, for any hardware type, because receivers differ in the types that they treat as
    /// Ethernet.
    fn check_arp(&self, source: &[u8], body: &[u8], vlan: Option<u16>) -> Result<(), Broken> {
        if body.len() < 28 || body[2..6] != [8, 0, 6, 4] {
            return Ok(());
        }
        if &body[8..14] != source {
            return Err(Broken::Station);
        }
        let sender = Ipv4Addr::new(body[14], body[15], body[16], body[17]);
        self.check_address(IpAddr::V4(sender), vlan)
    }

    /// Checks messages of Neighbor Discovery (RFC 4861), which receivers accept behind any extension headers except a
    /// fragment header (RFC 6980).
    fn check_discovery(&self, body: &[u8], vlan: Option<u16>) -> Result<(), Broken> {
        let Some(Upper { protocol: 58, fragment: false, at, .. }) = upper(body) else { return Ok(()) };
        let message = body.get(at..).unwrap_or_default();
        let Some(kind @ 133..=137) = message.first().copied() else { return Ok(()) };
        let address = |bytes: &[u8], at: usize| {
            bytes.get(at..at + 16).map(|bytes| Ipv6Addr::from(<[u8; 16]>::try_from(bytes).unwrap_or_default()))
        };
        let target = address(message, 8).filter(|_| kind == 136);
        let claimed = [address(body, 8), target];
        claimed.into_iter().flatten().try_for_each(|address| self.check_address(IpAddr::V6(address), vlan))
    }

    fn check_address(&self, address: IpAddr, vlan: Option<u16>) -> Result<(), Broken> {
        let may = address.is_unspecified() || (self.may_have)(address, vlan);
        if may { Ok(()) } else { Err(Broken::Address(address)) }
    }
}

/// Returns `true` if the destination of a frame is one that bridges do not forward to (IEEE 802.1Q, table 8-1).
fn is_reserved(frame: &[u8]) -> bool {
    frame[..5] == [0x01, 0x80, 0xc2, 0x00, 0x00] && frame[5] < 16
}

/// Returns type and VLAN of each tag, the ethertype behind them, and the rest of the frame.
fn behind_tags(frame: &[u8]) -> (Vec<(u16, u16)>, u16, &[u8]) {
    let word = |at: usize| frame.get(at..at + 2).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]));
    let (mut tags, mut at) = (Vec::new(), 12);
    while let Some(kind @ (0x8100 | 0x88a8 | 0x9100 | 0x9200 | 0x9300)) = word(at) {
        let Some(control) = word(at + 2) else { break };
        tags.push((kind, control & 0xfff));
        at += 4;
    }
    let (kind, body) = (word(at).unwrap_or(0), frame.get(at + 2..).unwrap_or_default());
    // The ethertype field may be a length, followed by SNAP (RFC 1042). Some receivers accept any ethertype behind it.
    match body {
        [0xaa, 0xaa, 3, _, _, _, high, low, body @ ..] if kind < 1536 => {
            (tags, u16::from_be_bytes([*high, *low]), body)
        }
        _ => (tags, kind, body),
    }
}

fn is_ipv4_roce(body: &[u8]) -> bool {
    if body.len() < 20 || body[9] != 17 || u16::from_be_bytes([body[6], body[7]]) & 0x1fff != 0 {
        return false;
    }
    is_roce_port(body, usize::from(body[0] & 15) * 4)
}

fn is_roce_port(body: &[u8], at: usize) -> bool {
    body.get(at + 2..at + 4) == Some(&4791_u16.to_be_bytes()[..])
}

fn is_ipv6_roce(body: &[u8]) -> bool {
    match upper(body) {
        // The port is in this fragment, or may be in another one.
        Some(Upper { protocol: 17, fragment, at, direct }) => {
            let end = 40 + usize::from(u16::from_be_bytes([body[4], body[5]]));
            is_roce_port(body, at) || fragment && (!direct || body.len().min(end) < at + 4)
        }
        _ => false,
    }
}

/// Upper-layer header behind the extension headers of an IPv6 packet, or of its first fragment.
struct Upper {
    protocol: u8,
    at: usize,
    fragment: bool,
    /// The header follows the fragment header directly.
    direct: bool,
}

fn upper(body: &[u8]) -> Option<Upper> {
    let (mut protocol, mut at, mut fragment, mut direct) = (*body.get(6)?, 40, false, false);
    loop {
        let header = body.get(at..).unwrap_or_default();
        let length = match (protocol, header) {
            (0 | 43 | 60 | 135 | 139 | 140, [_, units, ..]) => 8 * (usize::from(*units) + 1),
            (51, [_, units, ..]) => 4 * (usize::from(*units) + 2),
            (44, [_, _, high, low, ..]) => {
                if u16::from_be_bytes([*high, *low]) & 0xfff8 != 0 {
                    return None;
                }
                fragment = true;
                8
            }
            _ => return Some(Upper { protocol, at, fragment, direct }),
        };
        direct = protocol == 44 && !direct;
        protocol = header[0];
        at += length;
    }
}

/// Computes the Internet checksum, word by word.
fn internet_checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
    !words.fold(0, add)
}

/// Adds in ones' complement.
fn add(a: u16, b: u16) -> u16 {
    let (sum, carry) = a.overflowing_add(b);
    sum + u16::from(carry)
}

/// Stores the sum of the bytes from `start` on at `at`, wherever that is, like a device that follows offsets without
/// checking them.
pub fn store_anywhere(frame: &[u8], start: usize, at: usize) -> Vec<u8> {
    let mut frame = frame.to_vec();
    let sum = internet_checksum(&frame[start..]);
    frame[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    frame
}

/// Chooses the last two bytes of a frame so that [`store_anywhere`] stores `value`. Leaves frames that are too short
/// unchanged.
pub fn forge(frame: &mut [u8], start: usize, at: usize, value: u16) {
    let Some(last) = frame.len().checked_sub(2).filter(|&last| start < last && at + 2 <= last) else { return };
    frame[last..].fill(0);
    let word = add(!value, internet_checksum(&frame[start..])).to_be_bytes();
    // The word may be split between two words of the sum.
    let [first, second] = if (last - start).is_multiple_of(2) { word } else { [word[1], word[0]] };
    frame[last..].copy_from_slice(&[first, second]);
}

/// A frame that obeys the rules until its checksum is stored at the place that its sender requests.
#[derive(Clone, Debug)]
pub struct Attack {
    /// Description of the resulting frame.
    pub name: &'static str,
    /// Rule that the resulting frame breaks.
    pub breaks: Broken,
    /// Bytes of the frame.
    pub frame: Vec<u8>,
    /// Offset of the first byte that is summed.
    pub start: u16,
    /// Offset at which the sum is stored.
    pub at: u16,
}

/// Returns attack frames between these hosts, with `mark` in each. The sender may announce `own` but not `other`, which
/// differ in their last two bytes at most.
pub fn attacks(to: [u8; 6], from: [u8; 6], mark: &[u8], [own, other]: [Ipv4Addr; 2]) -> Vec<Attack> {
    assert!(mark.len().is_multiple_of(2));
    let ethernet =
        |tag: &[u8], kind: u16, body: &[u8]| [&to[..], &from, tag, &kind.to_be_bytes(), body, mark, &[0; 12]].concat();
    let priority = [0x81, 0, 0, 0];
    let arp = |sender: Ipv4Addr| {
        [&[0, 1, 8, 0, 6, 4, 0, 2][..], &from, &sender.octets(), &to, &Ipv4Addr::BROADCAST.octets()].concat()
    };
    let length = u16::try_from(8 + mark.len() + 12).unwrap_or(0);
    let [total_high, total_low] = (20 + length).to_be_bytes();
    let [high, low] = length.to_be_bytes();
    let head = [0x45, 0, total_high, total_low, 0, 1, 0x40, 0, 64, 17, 0, 0];
    let udp = |port: u16| {
        let [port_high, port_low] = port.to_be_bytes();
        let ports = [0xc0, 0, port_high, port_low, high, low, 0, 0];
        [&head[..], &own.octets(), &other.octets(), &ports].concat()
    };
    let later = [&[0x60, 0, 0, 0, 0, 60, 44, 64][..], &[0xfd; 32], &[17, 0, 0, 8, 0, 0, 0, 7]].concat();
    let port_in_fragment = [&later[..], &[0xc0, 0, 0x12, 0xb7, 0, 40, 0, 0]].concat();
    let [_, _, c, d] = other.octets();
    let unlisted = IpAddr::V4(other);
    let all: [(_, _, _, u16, u16, u16); 8] = [
        ("VLAN 666", Broken::Vlan, ethernet(&priority, 0x88b5, &[]), 14, 14, 666),
        ("a tag behind that of the priority", Broken::Vlan, ethernet(&priority, 0x88b5, &[0, 5, 8, 0]), 14, 16, 0x8100),
        ("RoCE v2", Broken::Roce, ethernet(&[], 0x0800, &udp(53)), 34, 36, 4791),
        ("RoCE v2 behind a priority", Broken::Roce, ethernet(&priority, 0x0800, &udp(53)), 38, 40, 4791),
        ("RoCE v1", Broken::Roce, ethernet(&priority, 0x88b5, &[]), 14, 16, 0x8915),
        // The first fragment, made of one that was a later fragment.
        ("RoCE v2 in a fragment", Broken::Roce, ethernet(&[], 0x86dd, &port_in_fragment), 54, 56, 1),
        ("ARP", Broken::Address(unlisted), ethernet(&priority, 0x88b5, &arp(other)), 14, 16, 0x0806),
        (
            "ARP of another",
            Broken::Address(unlisted),
            ethernet(&[], 0x0806, &arp(own)),
            14,
            30,
            u16::from_be_bytes([c, d]),
        ),
    ];
    let forged = all.into_iter().map(|(name, breaks, mut frame, start, at, value)| {
        forge(&mut frame, start.into(), at.into(), value);
        Attack { name, breaks, frame, start, at }
    });
    forged.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FROM: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const OWN: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 5);
    const OTHER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);

    fn rules(tags: Tags) -> Rules<'static> {
        Rules { sources: &[FROM], tags, roce: false, may_have: &|address, _| address == OWN }
    }

    /// The oracle detects each attack when a checksum is stored where the guest requests it, and detects nothing
    /// before.
    #[test]
    fn frames_that_were_changed_after_they_were_inspected_are_seen() {
        let attacks = attacks([2, 0, 0, 0, 0, 2], FROM, b"a mark", [OWN, OTHER]);
        for Attack { name, breaks, frame, start, at } in attacks {
            assert_eq!(rules(Tags::Untagged).check(&frame), Ok(()), "{name}");
            let left = store_anywhere(&frame, start.into(), at.into());
            assert_eq!(rules(Tags::Untagged).check(&left), Err(breaks), "{name}: {left:x?}");
        }
    }

    #[test]
    fn each_rule_is_looked_at() {
        let frame =
            |tags: &[u8], kind: u16, body: &[u8]| [&[9; 6], &FROM[..], tags, &kind.to_be_bytes(), body].concat();
        let (plain, tag) = (frame(&[], 0x88b5, &[]), [0x81, 0, 0x20, 42]);
        let tagged = frame(&tag, 0x88b5, &[]);
        let twice = frame(&[0x81, 0, 0, 42, 0x88, 0xa8, 0, 7], 0x88b5, &[]);
        for (tags, results) in [
            (Tags::Untagged, [Ok(()), Err(Broken::Vlan), Err(Broken::Vlan)]),
            (Tags::Access(42), [Err(Broken::Vlan), Ok(()), Err(Broken::Vlan)]),
            (Tags::Access(43), [Err(Broken::Vlan); 3]),
            (Tags::Trunk, [Ok(()); 3]),
        ] {
            assert_eq!([&plain, &tagged, &twice].map(|frame| rules(tags).check(frame)), results, "{tags:?}");
        }
        let trunk = rules(Tags::Trunk);
        assert_eq!((trunk.check(&plain[..13]), trunk.check(&[0; 60])), (Err(Broken::Short), Err(Broken::Source)));
        let arp = |kind: u16, station: [u8; 6], sender: Ipv4Addr| {
            let body = [&[0, 6, 8, 0, 6, 4, 0, 1][..], &station, &sender.octets(), &[0; 10]].concat();
            trunk.check(&frame(&tag, kind, &body))
        };
        let other = Err(Broken::Address(IpAddr::V4(OTHER)));
        for kind in [0x0806, 0x8035] {
            let results = [OWN, Ipv4Addr::UNSPECIFIED, OTHER].map(|sender| arp(kind, FROM, sender));
            assert_eq!(results, [Ok(()), Ok(()), other]);
            assert_eq!(arp(kind, [9; 6], OWN), Err(Broken::Station));
        }
        let v6 = |headers: &[u8], kind: u8| {
            let body =
                [&[0x60, 0, 0, 0, 0, 0, headers[0], 64][..], &[0xfd; 32], &headers[1..], &[kind, 0, 0, 0]].concat();
            trunk.check(&frame(&[], 0x86dd, &[&body[..], &[0; 4], &[0xfc; 16]].concat()))
        };
        let source = Err(Broken::Address(IpAddr::V6(Ipv6Addr::from([0xfd; 16]))));
        assert_eq!((v6(&[58], 136), v6(&[58], 128)), (source, Ok(())));
        assert_eq!(v6(&[0, 58, 0, 0, 0, 0, 0, 0, 0], 135), source);
        assert_eq!(v6(&[44, 58, 0, 0, 0, 0, 0, 0, 0], 135), Ok(()), "in a fragment");
        let udp = [0xc0, 0, 0x12, 0xb7];
        let roce = |headers: &[u8]| {
            let body = [&[0x60, 0, 0, 0, 0, 0, headers[0], 64][..], &[0xfd; 32], &headers[1..]].concat();
            trunk.check(&frame(&[], 0x86dd, &body))
        };
        let first = [44, 17, 0, 0, 1, 0, 0, 0, 7];
        for headers in [&[&[17][..], &udp].concat(), &[&first[..], &udp].concat(), &first.to_vec()] {
            assert_eq!(roce(headers), Err(Broken::Roce), "{headers:?}");
        }
        assert_eq!(roce(&[&[44, 17, 0, 0, 9, 0, 0, 0, 7][..], &udp].concat()), Ok(()), "a later fragment");
    }
}
