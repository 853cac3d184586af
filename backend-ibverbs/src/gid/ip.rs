//! IP addresses of GIDs.

use std::net::IpAddr;

use pvrdma_verbs_types::Gid;

/// Returns the IP address of a GID.
pub(crate) fn ip(gid: Gid) -> IpAddr {
    gid.into()
}

/// Returns `true` if an address does not name the same single host everywhere: it is unspecified, loopback, link-local,
/// multicast or broadcast. A connection to it through the host would reach the host itself, or another peer than the
/// guest means.
pub(crate) fn is_confined(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(ip) => {
            ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || ip.is_broadcast() || ip.is_link_local()
        }
        IpAddr::V6(ip) => ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || ip.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn confined_addresses_are_those_that_are_not_one_host_everywhere() {
        for text in ["0.0.0.0", "127.0.0.1", "224.0.0.1", "255.255.255.255", "169.254.0.1", "::", "::1", "ff02::1"] {
            assert!(is_confined(text.parse().unwrap()), "{text}");
        }
        assert!(is_confined("fe80::1".parse().unwrap()));
        for text in ["10.0.0.1", "fd00::1", "2001:db8::1"] {
            let address: IpAddr = text.parse().unwrap();
            assert_eq!((is_confined(address), ip(address.into())), (false, address));
        }
    }
}
