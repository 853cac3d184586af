//! IP networks.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// An IP network in the notation of administrators: `192.0.2.0/24`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Network {
    address: IpAddr,
    length: u8,
}

impl Network {
    /// Returns the network that consists of one address.
    pub(crate) const fn of(address: IpAddr) -> Self {
        Self { address, length: if address.is_ipv4() { 32 } else { 128 } }
    }

    /// Returns `true` if an address belongs to the network.
    pub fn contains(&self, address: IpAddr) -> bool {
        let (ours, theirs, width) = match (self.address, address) {
            (IpAddr::V4(ours), IpAddr::V4(theirs)) => (u128::from(ours.to_bits()), u128::from(theirs.to_bits()), 32),
            (IpAddr::V6(ours), IpAddr::V6(theirs)) => (ours.to_bits(), theirs.to_bits(), 128),
            _ => return false,
        };
        // A shift by the whole width yields `None`: a network of length 0 contains every address.
        (ours ^ theirs).checked_shr(width - u32::from(self.length)).unwrap_or(0) == 0
    }
}

impl TryFrom<String> for Network {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Network> for String {
    fn from(network: Network) -> Self {
        network.to_string()
    }
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is not a network such as 192.0.2.0/24");
        let (address, length) = text.split_once('/').ok_or_else(wrong)?;
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let width = if address.is_ipv4() { 32 } else { 128 };
        let length = length.parse().ok().filter(|&length| length <= width).ok_or_else(wrong)?;
        Ok(Self { address, length })
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contains(network: &str, address: &str) -> bool {
        network.parse::<Network>().unwrap().contains(address.parse().unwrap())
    }

    #[test]
    fn members() {
        assert!(contains("192.0.2.0/24", "192.0.2.255") && !contains("192.0.2.0/24", "192.0.3.0"));
        assert!(contains("192.0.2.7/32", "192.0.2.7") && !contains("192.0.2.7/32", "192.0.2.6"));
        assert!(contains("fd00:1::/64", "fd00:1::9") && !contains("fd00:1::/64", "fd00:2::9"));
        assert!(contains("0.0.0.0/0", "203.0.113.1") && contains("::/0", "fd00::1"));
        assert!(!contains("0.0.0.0/0", "fd00::1") && !contains("::/0", "192.0.2.1"));
    }

    #[test]
    fn mistakes() {
        for text in ["192.0.2.0", "192.0.2.0/33", "192.0.2.0/", "fd00::/129", "/8", "a/8", "10.0.0.0/-1"] {
            assert!(text.parse::<Network>().is_err(), "{text}");
        }
    }
}
