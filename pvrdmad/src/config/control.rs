//! The control socket, as written on the command line and in the file.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use pvrdma_vfio_user_server::socket::SocketAccess;
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::access::{GroupId, Mode, UserId, access};
use super::keys::keys;
use super::pairs::{Syntax, from_pairs};

/// The control socket.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ControlSpec {
    /// Its path.
    pub path: PathBuf,
    /// Its permissions.
    pub access: SocketAccess,
}

keys! {
    /// The control socket.
    pub(crate) struct ControlKeys {
        /// Path of the socket.
        ["path", "PATH", "required"]
        path: PathBuf,
        /// User that owns the socket, by name or number.
        ["owner", "USER", ""]
        owner: Option<UserId>,
        /// Group that owns the socket, by name or number.
        ///
        /// Its members may connect.
        ["group", "GROUP", ""]
        group: Option<GroupId>,
        /// Permissions of the socket, in octal.
        ///
        /// A string in the file. The default is 600, or 660 with `group`.
        ["mode", "OCTAL", ""]
        mode: Option<Mode>,
    }
}

impl ControlKeys {
    fn resolve(self) -> ControlSpec {
        ControlSpec { path: self.path, access: access(self.owner, self.group, self.mode) }
    }
}

impl From<PathBuf> for ControlSpec {
    fn from(path: PathBuf) -> Self {
        Self { path, access: SocketAccess::default() }
    }
}

impl FromStr for ControlSpec {
    type Err = String;

    /// Parses `PATH,key=value`.
    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() || text.starts_with(',') {
            return Err(format!("'{text}' does not begin with a path"));
        }
        let syntax = Syntax { separator: ',', assign: '=', of: "the control socket" };
        from_pairs::<ControlKeys>(&format!("path={text}"), syntax).map(ControlKeys::resolve)
    }
}

/// Reads a path, or a table of keys.
pub(super) fn path_or_table<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<ControlSpec>, D::Error> {
    struct PathOrTable;

    impl<'de> Visitor<'de> for PathOrTable {
        type Value = ControlSpec;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a path, or a table with path, owner, group and mode")
        }

        fn visit_str<E: de::Error>(self, path: &str) -> Result<ControlSpec, E> {
            Ok(PathBuf::from(path).into())
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ControlSpec, A::Error> {
            ControlKeys::deserialize(MapAccessDeserializer::new(map)).map(ControlKeys::resolve)
        }
    }

    deserializer.deserialize_any(PathOrTable).map(Some)
}

#[cfg(test)]
mod tests {
    use super::super::ConfigSpec;
    use super::*;

    #[test]
    fn both_languages() {
        let access = SocketAccess { owner: None, group: Some(0), mode: Some(0o660) };
        let spec = ControlSpec { path: "/run/c".into(), access };
        assert_eq!("/run/c,group=root,mode=660".parse(), Ok(spec.clone()));
        assert_eq!("/run/c".parse(), Ok(ControlSpec::from(PathBuf::from("/run/c"))));
        let file = |text: &str| toml::from_str::<ConfigSpec>(text).map(|config| config.control);
        let table = "[control]\npath = \"/run/c\"\ngroup = 0\nmode = \"0660\"";
        assert_eq!(file(table).unwrap(), Some(spec));
        // A path with a comma can only be given in the file.
        let plain = file("control = \"/run/a,b\"").unwrap().unwrap();
        assert_eq!((plain.path, plain.access), ("/run/a,b".into(), SocketAccess::default()));
        for wrong in ["", ",group=root", "/c,mode=9", "/c,colour=red", "/c,path=/d"] {
            assert!(wrong.parse::<ControlSpec>().is_err(), "{wrong}");
        }
        for wrong in ["control = 3", "[control]\ngroup = 0", "[control]\npath = \"/c\"\nmode = 660"] {
            assert!(file(wrong).is_err(), "{wrong}");
        }
    }
}
