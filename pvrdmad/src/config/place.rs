//! Location of a device's socket.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Location of a device's socket. It is sent between processes of the daemon.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SocketPlace {
    /// A path in the file system, at which the daemon creates the socket.
    Path(PathBuf),
    /// `fd:NAME`: the process that started the daemon created the socket and passes it on as a descriptor with this
    /// number or name.
    Descriptor(String),
}

impl SocketPlace {
    /// Returns the path, if it has one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Path(path) => Some(path),
            Self::Descriptor(_) => None,
        }
    }
}

impl From<PathBuf> for SocketPlace {
    fn from(path: PathBuf) -> Self {
        Self::Path(path)
    }
}

impl FromStr for SocketPlace {
    type Err = String;

    /// Parses a path, or `fd:` followed by a name or a number of at least 3.
    fn from_str(text: &str) -> Result<Self, String> {
        let Some(name) = text.strip_prefix("fd:") else { return Ok(Self::Path(text.into())) };
        let wrong = || format!("'{text}' is neither a path nor fd: with a number from 3 on, or a name");
        if name.is_empty() || name.contains(['/', ':']) || name.parse::<u32>().is_ok_and(|number| number < 3) {
            return Err(wrong());
        }
        Ok(Self::Descriptor(name.to_owned()))
    }
}

impl fmt::Display for SocketPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => path.display().fmt(f),
            Self::Descriptor(name) => write!(f, "fd:{name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_descriptors() {
        for (text, place) in [
            ("/run/a", SocketPlace::Path("/run/a".into())),
            ("./fd:3", SocketPlace::Path("./fd:3".into())),
            ("fd:3", SocketPlace::Descriptor("3".to_owned())),
            ("fd:vm0.sock", SocketPlace::Descriptor("vm0.sock".to_owned())),
        ] {
            assert_eq!(text.parse(), Ok(place.clone()));
            assert_eq!(place.to_string(), text);
            assert_eq!(serde_json::from_str::<SocketPlace>(&serde_json::to_string(&place).unwrap()).unwrap(), place);
        }
        for wrong in ["fd:", "fd:0", "fd:2", "fd:a:b", "fd:/run/a"] {
            assert!(wrong.parse::<SocketPlace>().unwrap_err().contains("a number from 3 on"), "{wrong}");
        }
    }
}
