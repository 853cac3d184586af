//! Completions, as written by the device. The generation goes into bit 31 of the last word when a completion is stored.

/// A completion without its generation.
pub(crate) type Completion = [u32; 4];

/// Builds the completion of a sent frame: the index of its *last* descriptor, below 4,096.
pub(crate) const fn tx_completion(last: u32) -> Completion {
    [last & 0xfff, 0, 0, 0]
}

/// Checksum state of a received frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct ChecksumReport {
    pub(crate) ipv4: bool,
    pub(crate) ipv6: bool,
    pub(crate) tcp: bool,
    pub(crate) udp: bool,
    pub(crate) fragment: bool,
    /// The checksums of the IPv4 header, if present, and of TCP or UDP are correct. Otherwise they were not calculated.
    pub(crate) verified: bool,
}

/// Type of a received frame's hash.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub(crate) enum HashType {
    #[default]
    None = 0,
    Ipv4 = 1,
    TcpIpv4 = 2,
    Ipv6 = 3,
    TcpIpv6 = 4,
}

/// Properties of a received frame that all its completions report.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct FrameReport {
    pub(crate) checksums: ChecksumReport,
    pub(crate) hash_type: HashType,
    pub(crate) hash: u32,
    /// VLAN tag that was stripped.
    pub(crate) tag: Option<u16>,
    /// Number and size of the TCP segments, if there is more than one.
    pub(crate) segments: Option<(u8, u16)>,
}

/// Location of a part of a received frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    /// Index of the descriptor, below 4,096.
    pub(crate) index: u32,
    /// Number of the ring among the rings of all queues, below 1,024.
    pub(crate) ring_id: u16,
    /// Length in bytes, below 16,384.
    pub(crate) len: u16,
    pub(crate) first: bool,
    pub(crate) last: bool,
}

/// Completion types, in bits 24 to 30 of the last word.
const TYPE_RX: u32 = 3 << 24;
const TYPE_RX_LRO: u32 = 4 << 24;

/// Builds the completion of a part of a received frame.
pub(crate) fn rx_completion(place: Place, report: &FrameReport) -> Completion {
    let bit = |set: bool, at: u32| u32::from(set) << at;
    let checksums = &report.checksums;
    // The LRO type changes the meaning of the hash and checksum fields, so only the first completion has it.
    let segments = report.segments.filter(|_| place.first);
    let hash_type = if segments.is_some() { HashType::None } else { report.hash_type };
    let l4 = checksums.tcp || checksums.udp;
    let verified = checksums.verified && l4 && !checksums.fragment;
    let head = place.index & 0xfff
        | bit(place.last, 14)
        | bit(place.first, 15)
        | u32::from(place.ring_id & 0x3ff) << 16
        | u32::from(hash_type as u8) << 26
        | bit(!verified, 30);
    let hash = match segments {
        Some((count, _)) => count.into(),
        None if hash_type == HashType::None => 0,
        None => report.hash,
    };
    let len = u32::from(place.len & 0x3fff) | bit(report.tag.is_some(), 15) | u32::from(report.tag.unwrap_or(0)) << 16;
    let flags = u32::from(segments.map_or(0, |(_, size)| size))
        | bit(verified, 16)
        | bit(checksums.udp, 17)
        | bit(checksums.tcp, 18)
        | bit(verified && checksums.ipv4, 19)
        | bit(checksums.ipv6, 20)
        | bit(checksums.ipv4, 21)
        | bit(checksums.fragment, 22)
        | bit(true, 23)
        | if segments.is_some() { TYPE_RX_LRO } else { TYPE_RX };
    [head, hash, len, flags]
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: Place = Place { index: 5, ring_id: 9, len: 60, first: true, last: true };
    const TCP: ChecksumReport =
        ChecksumReport { ipv4: true, ipv6: false, tcp: true, udp: false, fragment: false, verified: true };

    #[test]
    fn fields_are_where_the_interface_says() {
        let report = FrameReport {
            checksums: TCP,
            hash_type: HashType::TcpIpv4,
            hash: 0x1122_3344,
            tag: Some(0x2005),
            segments: None,
        };
        let expected = [5 | 3 << 14 | 9 << 16 | 2 << 26, 0x1122_3344, 60 | 1 << 15 | 0x2005 << 16];
        let [head, hash, len, flags] = rx_completion(WHOLE, &report);
        assert_eq!([head, hash, len], expected);
        assert_eq!(flags, 1 << 16 | 1 << 18 | 1 << 19 | 1 << 21 | 1 << 23 | 3 << 24);
    }

    /// Trap 11: the guest warns about correct checksums without TCP and UDP, or of a fragment.
    #[test]
    fn frames_without_a_checksum_are_not_verified() {
        for checksums in [ChecksumReport { tcp: false, ..TCP }, ChecksumReport { fragment: true, ..TCP }] {
            let [head, _, _, flags] = rx_completion(WHOLE, &FrameReport { checksums, ..FrameReport::default() });
            assert_eq!((head >> 30 & 1, flags >> 16 & 1, flags >> 19 & 1), (1, 0, 0), "{checksums:?}");
        }
    }

    #[test]
    fn the_first_completion_of_a_super_frame_has_its_segments() {
        let report = FrameReport { checksums: TCP, segments: Some((45, 1448)), hash: 7, ..FrameReport::default() };
        let [_, hash, _, flags] = rx_completion(Place { last: false, ..WHOLE }, &report);
        assert_eq!((hash, flags & 0xffff, flags >> 24), (45, 1448, 4));
        let [_, hash, _, flags] = rx_completion(Place { first: false, ..WHOLE }, &report);
        assert_eq!((hash, flags & 0xffff, flags >> 24), (0, 0, 3));
    }
}
