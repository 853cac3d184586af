//! IP addresses in the private data of a REQ (IBA annex A11), by which `rdma_cm` connects.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use pvrdma_packet::field::{field, put};

/// Service IDs of the TCP port space. The lower 16 bits are the port.
pub const PORT_SPACE_TCP: u64 = 0x0000_0000_0106_0000;

/// Addresses of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct IpAddresses {
    /// Address of the sender.
    pub source: IpAddr,
    /// Port of the sender.
    pub source_port: u16,
    /// Address of the receiver.
    pub destination: IpAddr,
}

impl IpAddresses {
    /// Length in bytes, in front of the program's private data.
    pub const LEN: usize = 36;

    /// Decodes the addresses. Returns `None` if their version is unknown.
    pub fn from_bytes(bytes: &[u8; Self::LEN]) -> Option<Self> {
        let [version, ip_version] = field::<0, _, _>(bytes);
        if version != 0 {
            return None;
        }
        let address = |bytes: [u8; 16]| match ip_version >> 4 {
            4 => Some(IpAddr::V4(Ipv4Addr::from(field::<12, 4, _>(&bytes)))),
            6 => Some(IpAddr::V6(Ipv6Addr::from(bytes))),
            _ => None,
        };
        Some(Self {
            source: address(field::<4, _, _>(bytes))?,
            source_port: u16::from_be_bytes(field::<2, _, _>(bytes)),
            destination: address(field::<20, _, _>(bytes))?,
        })
    }

    /// Encodes the addresses. Returns `None` if one is IPv4 and the other IPv6.
    pub fn to_bytes(self) -> Option<[u8; Self::LEN]> {
        let mut bytes = [0; Self::LEN];
        put::<2, _, _>(&mut bytes, self.source_port.to_be_bytes());
        match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                put::<1, _, _>(&mut bytes, [4 << 4]);
                put::<16, _, _>(&mut bytes, source.octets());
                put::<32, _, _>(&mut bytes, destination.octets());
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                put::<1, _, _>(&mut bytes, [6 << 4]);
                put::<4, _, _>(&mut bytes, source.octets());
                put::<20, _, _>(&mut bytes, destination.octets());
            }
            _ => return None,
        }
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_beyond_the_annex_are_refused() {
        let v4 = IpAddresses { source: [10, 0, 0, 1].into(), source_port: 0x1234, destination: [10, 0, 0, 2].into() };
        let bytes = v4.to_bytes().unwrap();
        assert_eq!(IpAddresses::from_bytes(&bytes), Some(v4));
        assert_eq!(IpAddresses { source: Ipv6Addr::LOCALHOST.into(), ..v4 }.to_bytes(), None);
        for (at, value) in [(0, 1), (0, 0x10), (1, 0), (1, 0x50)] {
            let mut bytes = bytes;
            bytes[at] = value;
            assert_eq!(IpAddresses::from_bytes(&bytes), None);
        }
    }
}
