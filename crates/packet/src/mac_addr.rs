//! MAC addresses.

use alloc::format;
use alloc::string::String;
use core::fmt;
use core::str::FromStr;

#[cfg(feature = "serde")]
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// MAC address (IEEE 802 EUI-48). The text form is six hexadecimal bytes separated by colons; parsing refuses a group
/// address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct MacAddr(pub [u8; 6]);

impl MacAddr {
    /// Returns the EUI-64 derived from this address, used as node GUID.
    pub const fn eui64(self) -> [u8; 8] {
        let [a, b, c, d, e, f] = self.0;
        [a ^ 2, b, c, 0xff, 0xfe, d, e, f]
    }
}

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

#[cfg(feature = "serde")]
impl Serialize for MacAddr {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(feature = "serde")]
impl<'de> Deserialize<'de> for MacAddr {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl FromStr for MacAddr {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let mut bytes = [0; 6];
        let mut parts = s.split(':');
        for byte in &mut bytes {
            *byte = parts
                .next()
                .filter(|p| p.len() == 2)
                .and_then(|p| u8::from_str_radix(p, 16).ok())
                .ok_or_else(|| format!("'{s}' is not a MAC address (six hexadecimal bytes with colons)"))?;
        }
        if parts.next().is_some() {
            return Err(format!("'{s}' has more than six bytes"));
        }
        if bytes[0] & 1 != 0 {
            return Err(format!("'{s}' is a multicast address"));
        }
        Ok(Self(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mac_addresses_parse_and_print() {
        let mac: MacAddr = "52:54:00:00:00:01".parse().unwrap();
        assert_eq!(mac.to_string(), "52:54:00:00:00:01");
        assert_eq!(mac.eui64(), [0x50, 0x54, 0, 0xff, 0xfe, 0, 0, 1]);
        for bad in ["", "52:54:00:00:00", "52:54:00:00:00:01:02", "5:54:00:00:00:01", "53:54:00:00:00:01"] {
            assert!(bad.parse::<MacAddr>().is_err(), "{bad}");
        }
    }
}
