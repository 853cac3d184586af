//! Management datagrams in the format of the connection manager's queue pair.

use pvrdma_verbs_types::{Gid, GidType, UdDestination};

/// Size of the network header in front of each datagram, in bytes.
pub(crate) const HEADER: usize = 40;

/// A datagram in transit.
pub(crate) struct Datagram {
    pub(crate) from: Gid,
    pub(crate) to: UdDestination,
    pub(crate) kind: GidType,
    pub(crate) immediate: Option<[u8; 4]>,
    pub(crate) solicited: bool,
    pub(crate) payload: Vec<u8>,
}

/// Returns the network header that a receiver finds in front of the payload: 20 bytes followed by an IPv4 header, or an
/// IPv6 header of 40 bytes.
pub(crate) fn header(datagram: &Datagram) -> [u8; HEADER] {
    let mut out = [0; HEADER];
    let to = &datagram.to;
    let transport = u16::try_from(datagram.payload.len()).unwrap_or(u16::MAX).saturating_add(8 + 12 + 8 + 4);
    match (datagram.from.ipv4(), to.dgid.ipv4(), datagram.kind) {
        (Some(from), Some(dest), GidType::RoceV2) => {
            let ip = &mut out[20..];
            (ip[0], ip[1], ip[6], ip[8], ip[9]) = (0x45, to.traffic_class, 0x40, to.hop_limit, 17);
            ip[2..4].copy_from_slice(&transport.saturating_add(20).to_be_bytes());
            ip[12..16].copy_from_slice(&from);
            ip[16..20].copy_from_slice(&dest);
            let sum: u32 = ip.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
            // The sum of ten words needs at most two foldings.
            let folded = (sum & 0xffff) + (sum >> 16);
            let checksum = !((folded & 0xffff) + (folded >> 16));
            ip[10..12].copy_from_slice(&checksum.to_be_bytes()[2..]);
        }
        _ => {
            let first = 6 << 28 | u32::from(to.traffic_class) << 20 | to.flow_label & 0x000f_ffff;
            out[..4].copy_from_slice(&first.to_be_bytes());
            out[4..6].copy_from_slice(&transport.to_be_bytes());
            out[6] = if datagram.kind == GidType::RoceV1 { 0x1b } else { 17 };
            out[7] = to.hop_limit;
            out[8..24].copy_from_slice(&datagram.from.0);
            out[24..].copy_from_slice(&to.dgid.0);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_have_addresses_and_a_good_checksum() {
        let gid = |host| Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 168, 255, host]);
        let to = UdDestination { dgid: gid(254), hop_limit: 64, ..UdDestination::default() };
        let mut datagram = Datagram {
            from: gid(253),
            to,
            kind: GidType::RoceV2,
            immediate: None,
            solicited: false,
            payload: vec![0; 256],
        };
        let ip = header(&datagram)[20..].to_vec();
        assert_eq!(
            (ip[0], &ip[2..4], &ip[12..]),
            (0x45, &[1, 0x34][..], &[192, 168, 255, 253, 192, 168, 255, 254][..])
        );
        let sum: u32 = ip.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
        datagram.kind = GidType::RoceV1;
        let grh = header(&datagram);
        assert_eq!((grh[0], grh[6], &grh[24..]), (0x60, 0x1b, &gid(254).0[..]));
    }
}
