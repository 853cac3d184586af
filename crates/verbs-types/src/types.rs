//! Numbers and names of RDMA verbs, as types that cannot hold an invalid value.

use alloc::vec::Vec;
use core::fmt;
use core::net::IpAddr;

use bitflags::bitflags;
use serde::{Deserialize, Serialize, Serializer};
use thiserror::Error;

/// Error: a value from outside is not a known one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{value:#x} is not a valid {what}")]
pub struct InvalidValue {
    /// Kind of value that was parsed.
    pub what: &'static str,
    /// The number found.
    pub value: u64,
}

/// A 24-bit queue pair number. QPN 1 is the general services (connection manager) queue pair of a port.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize)]
pub struct Qpn(u32);

impl Qpn {
    /// The general services QP.
    pub const GSI: Self = Self(1);

    /// Creates a QPN from the low 24 bits.
    pub const fn new(value: u32) -> Self {
        Self(value & 0x00ff_ffff)
    }

    /// Returns the number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Debug for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#08x}", self.0)
    }
}

impl fmt::Display for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A 24-bit packet sequence number. Comparison is circular, so there is no `Ord`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize)]
pub struct Psn(u32);

impl Psn {
    /// Creates a PSN from the low 24 bits.
    pub const fn new(value: u32) -> Self {
        Self(value & 0x00ff_ffff)
    }

    /// Returns the number.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Returns the PSN `count` packets later.
    #[inline]
    #[must_use]
    pub const fn plus(self, count: u32) -> Self {
        Self::new(self.0.wrapping_add(count))
    }

    /// Returns the number of packets from `earlier` to `self`, negative if `self` comes first. Meaningful while fewer
    /// than 2^23 are outstanding (IBA 9.7.4.1.1).
    #[inline]
    pub const fn since(self, earlier: Self) -> i32 {
        (self.0.wrapping_sub(earlier.0) << 8).cast_signed() >> 8
    }

    /// Returns `true` if `self` comes before `other`.
    #[inline]
    pub const fn precedes(self, other: Self) -> bool {
        self.since(other) < 0
    }
}

/// A 128-bit RoCE address: an IPv6 address, or an IPv4 address mapped into one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// Returns the IPv4 address of an IPv4-mapped GID (`::ffff:a.b.c.d`).
    pub fn ipv4(&self) -> Option<[u8; 4]> {
        let std_addr = core::net::Ipv6Addr::from(self.0);
        std_addr.to_ipv4_mapped().map(|v4| v4.octets())
    }

    /// Returns `true` if all bytes are zero, which means that there is no address.
    pub fn is_zero(&self) -> bool {
        self.0 == [0; 16]
    }

    /// Returns `true` for a multicast address: `ff00::/8`, or 224.0.0.0/4 for IPv4.
    pub fn is_multicast(&self) -> bool {
        self.0[0] == 0xff || self.ipv4().is_some_and(|[first, ..]| first >> 4 == 0xe)
    }
}

/// Converts an IP address to a RoCE v2 GID; IPv4 addresses become IPv4-mapped ones (RFC 4291 2.5.5.2).
impl From<IpAddr> for Gid {
    fn from(address: IpAddr) -> Self {
        let address = match address {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        Self(address.octets())
    }
}

/// Converts the GID of a RoCE v2 address to the IP address: an IPv4-mapped one to an IPv4 address.
impl From<Gid> for IpAddr {
    fn from(gid: Gid) -> Self {
        gid.ipv4().map_or_else(|| Self::V6(gid.0.into()), Self::from)
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        core::net::Ipv6Addr::from(self.0).fmt(f)
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Gid {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// RoCE encapsulation of a GID.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum GidType {
    /// Ethertype 0x8915 with a global route header.
    #[serde(rename = "v1")]
    RoceV1,
    /// UDP port 4791 over IPv4 or IPv6.
    #[serde(rename = "v2")]
    RoceV2,
}

/// Type of the network header of a received datagram.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum NetworkType {
    /// RoCE v1: a global route header.
    RoceV1,
    /// RoCE v2 over IPv4.
    Ipv4,
    /// RoCE v2 over IPv6.
    Ipv6,
}

/// Path MTU: bytes of payload per packet.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Mtu {
    /// 256 bytes.
    M256 = 1,
    /// 512 bytes.
    M512 = 2,
    /// 1024 bytes.
    M1024 = 3,
    /// 2048 bytes.
    M2048 = 4,
    /// 4096 bytes.
    M4096 = 5,
}

impl Mtu {
    /// Returns the number of payload bytes per packet.
    pub const fn bytes(self) -> u32 {
        128 << (self as u8)
    }
}

impl Serialize for Mtu {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u32(self.bytes())
    }
}

impl TryFrom<u32> for Mtu {
    type Error = InvalidValue;

    fn try_from(value: u32) -> Result<Self, InvalidValue> {
        Ok(match value {
            1 => Self::M256,
            2 => Self::M512,
            3 => Self::M1024,
            4 => Self::M2048,
            5 => Self::M4096,
            _ => return Err(InvalidValue { what: "path MTU", value: value.into() }),
        })
    }
}

/// Transport service of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum QpType {
    /// General services (QPN 1): unreliable datagrams of the connection manager.
    Gsi,
    /// Reliable connection.
    Rc,
    /// Unreliable datagram.
    Ud,
}

impl QpType {
    /// Returns `true` if each request carries its own destination.
    pub const fn is_datagram(self) -> bool {
        matches!(self, Self::Gsi | Self::Ud)
    }
}

/// State of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "UPPERCASE")]
#[repr(u8)]
pub enum QpState {
    /// Initial state: nothing is processed.
    Reset = 0,
    /// Receives may be posted.
    Init = 1,
    /// Ready to receive.
    Rtr = 2,
    /// Ready to send.
    Rts = 3,
    /// Send queue drained: requests that were started are completed, and no others are started.
    Sqd = 4,
    /// Send queue error (datagram QPs only).
    Sqe = 5,
    /// All requests are flushed.
    Error = 6,
}

impl TryFrom<u32> for QpState {
    type Error = InvalidValue;

    fn try_from(value: u32) -> Result<Self, InvalidValue> {
        Ok(match value {
            0 => Self::Reset,
            1 => Self::Init,
            2 => Self::Rtr,
            3 => Self::Rts,
            4 => Self::Sqd,
            5 => Self::Sqe,
            6 => Self::Error,
            _ => return Err(InvalidValue { what: "QP state", value: value.into() }),
        })
    }
}

/// Logical state of the port.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PortState {
    /// No traffic is possible.
    Down,
    /// Traffic flows.
    Active,
}

bitflags! {
    /// Access rights of memory regions and queue pairs (`ibv_access_flags`).
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct Access: u32 {
        /// The owner may let the adapter write to this memory.
        const LOCAL_WRITE = 0x1;
        /// A peer may write.
        const REMOTE_WRITE = 0x2;
        /// A peer may read.
        const REMOTE_READ = 0x4;
        /// A peer may do atomic operations.
        const REMOTE_ATOMIC = 0x8;
    }
}

/// Serializes the names of the rights, for example `LOCAL_WRITE | REMOTE_READ`.
impl Serialize for Access {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let names: Vec<_> = self.iter_names().map(|(name, _)| name).collect();
        serializer.collect_str(&names.join(" | "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_of_addresses() {
        let gid = Gid::from(IpAddr::from([10, 0, 0, 9]));
        assert_eq!(gid.0, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 9]);
        assert_eq!(gid.ipv4(), Some([10, 0, 0, 9]));
        let gid = Gid::from("fd00:79::1".parse::<IpAddr>().unwrap());
        assert_eq!((gid.to_string().as_str(), gid.ipv4()), ("fd00:79::1", None));
    }

    #[test]
    fn psn_order_is_circular() {
        let (last, first) = (Psn::new(0x00ff_ffff), Psn::new(0));
        assert!(last.precedes(first) && !first.precedes(last));
        assert_eq!(first.since(last), 1);
        assert_eq!(last.since(first), -1);
        assert_eq!(last.plus(2), Psn::new(1));
        assert_eq!(Psn::new(0x7f_ffff).since(first), 0x7f_ffff);
        assert_eq!(Psn::new(0x80_0001).since(first), -0x7f_ffff);
    }

    /// Tests distances from PSNs at both ends and in the middle: the result is the shorter way around the circle, and
    /// adding it gives the same PSN again.
    #[test]
    fn every_distance_between_two_psns() {
        const ALL: u32 = 1 << 24;
        for from in [0, 1, ALL / 2 - 1, ALL / 2, ALL - 1] {
            for distance in 0..ALL {
                let (earlier, later) = (Psn::new(from), Psn::new((from + distance) % ALL));
                let since = if distance < ALL / 2 { i64::from(distance) } else { i64::from(distance) - i64::from(ALL) };
                assert_eq!(i64::from(later.since(earlier)), since, "{from} + {distance}");
                assert_eq!(
                    (earlier.plus(distance), later.precedes(earlier)),
                    (later, since < 0),
                    "{from} + {distance}"
                );
            }
        }
    }

    #[test]
    fn mtu_codes() {
        let sizes: Vec<u32> = (1..=5).map(|c| Mtu::try_from(c).unwrap().bytes()).collect();
        assert_eq!(sizes, [256, 512, 1024, 2048, 4096]);
        assert!(Mtu::try_from(0).is_err());
        assert!(Mtu::try_from(6).is_err());
    }

    #[test]
    fn ipv4_mapped_gids() {
        let mut gid = Gid::default();
        gid.0[10..12].fill(0xff);
        gid.0[12..].copy_from_slice(&[10, 0, 0, 1]);
        assert_eq!(gid.ipv4(), Some([10, 0, 0, 1]));
        gid.0[0] = 0xfe;
        assert_eq!(gid.ipv4(), None);
    }
}
