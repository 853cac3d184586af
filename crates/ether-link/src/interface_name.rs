//! Names of network interfaces.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The name of a network interface.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct InterfaceName(String);

impl InterfaceName {
    /// Maximum number of bytes in a name: IFNAMSIZ without the terminating zero.
    const MAX: usize = 15;

    /// Returns the name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for InterfaceName {
    type Err = String;

    /// Accepts the names that Linux accepts, except those with a `%`, for which Linux would choose another name.
    fn from_str(text: &str) -> Result<Self, String> {
        let plain = |c: char| c.is_ascii_graphic() && !matches!(c, '/' | ':' | '%');
        if text.is_empty() || text.len() > Self::MAX || matches!(text, "." | "..") || !text.chars().all(plain) {
            return Err(format!("'{text}' is not the name of a network interface"));
        }
        Ok(Self(text.to_owned()))
    }
}

impl TryFrom<String> for InterfaceName {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<InterfaceName> for String {
    fn from(name: InterfaceName) -> Self {
        name.0
    }
}

impl fmt::Display for InterfaceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_interfaces() {
        for right in ["tap0", "a", "br-lan.5", "exactly15bytes"] {
            assert_eq!(right.parse::<InterfaceName>().unwrap().as_str(), right);
        }
        for wrong in ["", ".", "..", "a/b", "tap%d", "with space", "a:1", "sixteen bytes..", "tapé"] {
            assert!(wrong.parse::<InterfaceName>().unwrap_err().contains("network interface"), "{wrong}");
        }
    }
}
