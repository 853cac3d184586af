//! Receive side scaling: selects the queue of a frame.

use pvrdma_packet::{IpVersion, Transport};

use crate::abi::completion::HashType;
use crate::abi::rss_conf::{KEY_LEN, RssConf};
use crate::offload::headers::Headers;

/// Calculates the Toeplitz hash of `input`.
pub(crate) fn toeplitz(key: &[u8; KEY_LEN], input: &[u8]) -> u32 {
    let (first, rest) = key.split_first_chunk::<4>().map_or((0, &[][..]), |(a, b)| (u32::from_be_bytes(*a), b));
    let mut window = first;
    let mut hash = 0;
    for (&byte, next) in input.iter().zip(rest.iter().copied().chain(std::iter::repeat(0))) {
        for bit in (0..8).rev() {
            if byte >> bit & 1 == 1 {
                hash ^= window;
            }
            window = window << 1 | u32::from(next >> bit & 1);
        }
    }
    hash
}

/// Returns the type of a frame's hash, and the hash.
pub(crate) fn hash(conf: &RssConf, frame: &[u8], headers: &Headers) -> (HashType, u32) {
    let Some(ip) = &headers.ip else { return (HashType::None, 0) };
    let ports = match headers.transport {
        Some(Transport::Tcp { offset, .. }) => frame.get(offset..offset.saturating_add(4)),
        _ => None,
    };
    let kind = match (ip.version, ports) {
        (IpVersion::V4, Some(_)) if conf.tcp_ipv4 => HashType::TcpIpv4,
        (IpVersion::V4, _) if conf.ipv4 => HashType::Ipv4,
        (IpVersion::V6, Some(_)) if conf.tcp_ipv6 => HashType::TcpIpv6,
        (IpVersion::V6, _) if conf.ipv6 => HashType::Ipv6,
        _ => return (HashType::None, 0),
    };
    let ports = ports.filter(|_| matches!(kind, HashType::TcpIpv4 | HashType::TcpIpv6)).unwrap_or_default();
    let addresses = frame.get(ip.addresses()).unwrap_or_default();
    let mut input = [0; 36];
    let len = addresses.len() + ports.len();
    for (to, from) in input.iter_mut().zip(addresses.iter().chain(ports)) {
        *to = *from;
    }
    (kind, toeplitz(&conf.key, input.get(..len).unwrap_or_default()))
}

/// Returns the queue that the indirection table holds for a hash.
pub(crate) fn queue(conf: &RssConf, hash: u32) -> usize {
    let entry = usize::try_from(hash).unwrap_or(0).checked_rem(conf.table.len()).unwrap_or(0);
    conf.table.get(entry).copied().unwrap_or(0).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Key from Microsoft's "Verifying the RSS hash calculation".
    const KEY: [u8; KEY_LEN] = [
        0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0, 0xca,
        0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b,
        0xbe, 0xac, 0x01, 0xfa,
    ];

    /// Expected values from the same page.
    #[test]
    fn known_hashes() {
        let v4 = [66, 9, 149, 187, 161, 142, 100, 80];
        let ports = [0x0a, 0xea, 0x06, 0xe6];
        assert_eq!(toeplitz(&KEY, &v4), 0x323e_8fc2);
        assert_eq!(toeplitz(&KEY, &[&v4[..], &ports].concat()), 0x51cc_c178);
        let source = [0x3f, 0xfe, 0x25, 0x01, 0x02, 0x00, 0x1f, 0xff, 0, 0, 0, 0, 0, 0, 0, 7];
        let destination = [0x3f, 0xfe, 0x25, 0x01, 0x02, 0x00, 0x00, 0x03, 0, 0, 0, 0, 0, 0, 0, 1];
        let v6 = [source, destination].concat();
        assert_eq!(toeplitz(&KEY, &v6), 0x2cc1_8cd5);
        assert_eq!(toeplitz(&KEY, &[&v6[..], &ports].concat()), 0x4020_7d3d);
    }
}
