//! Socket addresses in the layout of C.

use std::net::{IpAddr, SocketAddr};

use crate::sys::rdmacm::SocketAddress;

const INET: [u8; 2] = 2_u16.to_ne_bytes();
const INET6: [u8; 2] = 10_u16.to_ne_bytes();

impl From<SocketAddr> for SocketAddress {
    fn from(address: SocketAddr) -> Self {
        let mut bytes = [0; 128];
        bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
        match address.ip() {
            IpAddr::V4(ip) => {
                bytes[..2].copy_from_slice(&INET);
                bytes[4..8].copy_from_slice(&ip.octets());
            }
            IpAddr::V6(ip) => {
                bytes[..2].copy_from_slice(&INET6);
                bytes[8..24].copy_from_slice(&ip.octets());
            }
        }
        Self(bytes)
    }
}

impl SocketAddress {
    /// Returns the IP address and port, or `None` if the address is of another family.
    pub(crate) fn to_ip(self) -> Option<SocketAddr> {
        let [f0, f1, p0, p1, a, b, c, d, v6 @ ..] = self.0;
        let port = u16::from_be_bytes([p0, p1]);
        match [f0, f1] {
            INET => Some(SocketAddr::new([a, b, c, d].into(), port)),
            INET6 => v6.first_chunk::<16>().map(|ip| SocketAddr::new((*ip).into(), port)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_the_layout_of_c() {
        let v4 = SocketAddress::from("192.0.2.7:4791".parse::<SocketAddr>().unwrap());
        assert_eq!(v4.0[2..9], [0x12, 0xb7, 192, 0, 2, 7, 0]);
        for text in ["192.0.2.7:4791", "[2001:db8::7]:1"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(SocketAddress::from(address).to_ip(), Some(address));
        }
        assert_eq!(SocketAddress([1; 128]).to_ip(), None);
    }
}
