//! The metrics server, as written on the command line and in the file.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use pvrdma_vfio_user_server::socket::SocketAccess;
use serde::{Deserialize, Serialize, Serializer};

use super::access::{GroupId, Mode, UserId, access};
use super::keys::{deserialize_from_str, keys};
use super::pairs::{Syntax, from_pairs};

/// The metrics server.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MetricsSpec {
    /// The address at which it listens.
    pub address: MetricsAddress,
    /// Permissions of a Unix socket.
    pub access: SocketAccess,
}

/// An address at which a server listens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MetricsAddress {
    /// A Unix socket.
    Unix(PathBuf),
    /// A TCP port of an address of this host.
    Tcp(SocketAddr),
}

impl FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("unix:") {
            Some("") => Err("a path follows unix:".to_owned()),
            Some(path) => Ok(Self::Unix(path.into())),
            None => match text.parse() {
                Ok(address) => Ok(Self::Tcp(address)),
                Err(_) => Err(format!("'{text}' is not unix:PATH, nor ADDRESS:PORT with the number of an address")),
            },
        }
    }
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => address.fmt(f),
        }
    }
}

deserialize_from_str!(MetricsAddress);

impl Serialize for MetricsAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

keys! {
    /// Address of the metrics server.
    pub(crate) struct MetricsKeys {
        /// Address to listen on.
        ["address", "unix:PATH|ADDRESS:PORT", "required"]
        address: Option<MetricsAddress>,
        /// User that owns a Unix socket.
        ["owner", "USER", ""]
        owner: Option<UserId>,
        /// Group that owns a Unix socket; its members may connect.
        ["group", "GROUP", ""]
        group: Option<GroupId>,
        /// Permissions of a Unix socket, in octal.
        ///
        /// A string in the file. The default is 600, or 660 with `group`.
        ["mode", "OCTAL", ""]
        mode: Option<Mode>,
    }
}

impl FromStr for MetricsSpec {
    type Err = String;

    /// Parses `ADDRESS,key=value`.
    fn from_str(text: &str) -> Result<Self, String> {
        let syntax = Syntax { separator: ',', assign: '=', of: "the metrics" };
        let keys = from_pairs::<MetricsKeys>(&format!("address={text}"), syntax)?;
        let Some(address) = keys.address else { return Err("there is no address".to_owned()) };
        let access = access(keys.owner, keys.group, keys.mode);
        if matches!(address, MetricsAddress::Tcp(_)) && access != SocketAccess::default() {
            return Err("owner, group and mode are for a Unix socket".to_owned());
        }
        Ok(Self { address, access })
    }
}

#[cfg(test)]
mod tests {
    use super::super::ConfigSpec;
    use super::*;

    #[test]
    fn both_kinds_of_places() {
        let parse = |text: &str| text.parse::<MetricsSpec>();
        let tcp = parse("127.0.0.1:9841").unwrap();
        assert_eq!(tcp.address, MetricsAddress::Tcp("127.0.0.1:9841".parse().unwrap()));
        assert_eq!(parse("[::1]:9841").unwrap().address.to_string(), "[::1]:9841");
        let unix = parse("unix:/run/m,group=root").unwrap();
        let access = SocketAccess { group: Some(0), ..SocketAccess::default() };
        assert_eq!((unix.address.to_string().as_str(), unix.access), ("unix:/run/m", access));
        let file = toml::from_str::<ConfigSpec>("metrics = \"unix:/run/m,group=root\"").unwrap();
        assert_eq!(file.metrics, Some(unix));
        for wrong in
            ["", "unix:", "9841", "localhost:9841", "127.0.0.1", "127.0.0.1:9841,group=root", "unix:/m,colour=red"]
        {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
