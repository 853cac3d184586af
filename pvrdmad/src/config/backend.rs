//! The backend, as written on the command line and in the file.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use pvrdma_ibverbs::{CmMode, GidIndex, IbverbsConfig};
use pvrdma_verbs::Network;
use serde::{Deserialize, Serialize};

use super::keys::{deserialize_from_str, keys};
use super::pairs::{Syntax, from_pairs};

/// The adapter that carries the traffic.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BackendSpec {
    /// The software adapter.
    #[default]
    Rxe,
    /// The host's adapter.
    Ibverbs(IbverbsConfig),
}

keys! {
    /// The backend `ibverbs`: an RDMA adapter of the host.
    pub(crate) struct IbverbsSpec {
        /// RDMA device, by its name in `rdma link`.
        ["device", "NAME", "required"]
        device: String,
        /// Port of that device; RoCE only.
        ["port", "1..255", "1"]
        port: Option<Port>,
        /// GID of the host that replaces those of guests.
        ///
        /// `auto`: the first RoCE v2 address that is not link-local.
        ["gid-index", "auto|NUMBER", "auto"]
        gid_index: Option<GidChoice>,
        /// Networks of guest addresses.
        ///
        /// A list separated by `+`: `192.0.2.0/24+fd00:1::/64`. The daemon adds an address of these networks to the
        /// host's interface while a guest has it. `given`: the daemon adds none.
        ["addresses", "given|NETWORKS", "given"]
        addresses: Option<Addresses>,
        /// Maximum registered memory of a device.
        ///
        /// Overlapping registrations each count. The default is 64 GiB.
        ["max-pinned", "BYTES", "68719476736"]
        max_pinned: Option<u64>,
        /// Maximum number of scattered pieces of memory.
        ///
        /// Each piece is a memory mapping of the process, of which Linux allows 65,530 (`vm.max_map_count`), or, on
        /// huge pages, a separate registration.
        ["max-mappings", "NUMBER", "16384"]
        max_mappings: Option<u64>,
        /// Reach of the guests' rdma_cm.
        ///
        /// `umad`: beyond this daemon, through the host's `ib_umad`. `local`: guests of this daemon. `auto`: `umad` if
        /// possible, otherwise `local` with a warning.
        ["cm", "auto|umad|local", "auto"]
        cm: Option<Cm>,
        /// Time of polling after a completion.
        ///
        /// After it, the thread sleeps until the next completion. 0 disables polling.
        ["poll", "MICROSECONDS", "50"]
        poll: Option<u32>,
    }
}

impl IbverbsSpec {
    fn resolve(self) -> Result<IbverbsConfig, String> {
        // The name becomes part of a path in /sys.
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        if self.device.is_empty() || !self.device.chars().all(plain) {
            return Err(format!(
                "'{}' is not the name of an RDMA device, as `rdma link` shows it (device=NAME)",
                self.device
            ));
        }
        let default = IbverbsConfig::new(self.device);
        Ok(IbverbsConfig {
            port: self.port.map_or(default.port, |Port(port)| port),
            gid_index: self.gid_index.map_or(default.gid_index, |GidChoice(index)| index),
            add_addresses: self.addresses.map_or(default.add_addresses, |Addresses(networks)| networks),
            max_pinned: self.max_pinned.unwrap_or(default.max_pinned),
            max_mappings: self.max_mappings.unwrap_or(default.max_mappings),
            cm: self.cm.map_or(default.cm, Cm::into),
            poll: self.poll.map_or(default.poll, |us| Duration::from_micros(us.into())),
            device: default.device,
        })
    }
}

/// A port number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Port(u8);

impl FromStr for Port {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let port = text.parse().ok().filter(|&port| port != 0);
        port.map(Self).ok_or_else(|| format!("'{text}' is not a number from 1 to 255"))
    }
}

deserialize_from_str!(Port);

/// `auto` or a number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct GidChoice(GidIndex);

impl FromStr for GidChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self(GidIndex::Auto)),
            _ => match text.parse() {
                Ok(index) => Ok(Self(GidIndex::Fixed(index))),
                Err(_) => Err(format!("'{text}' is neither auto nor a number")),
            },
        }
    }
}

deserialize_from_str!(GidChoice);

/// `given`, or networks with `+` between them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Addresses(Vec<Network>);

impl FromStr for Addresses {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "given" => Ok(Self(Vec::new())),
            networks => networks.split('+').map(str::parse).collect::<Result<_, _>>().map(Self),
        }
    }
}

deserialize_from_str!(Addresses);

/// Reach of the guests' connection managers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Cm {
    /// As far as possible.
    Auto,
    /// All hosts.
    Umad,
    /// Guests of this daemon.
    Local,
}

impl From<Cm> for CmMode {
    fn from(cm: Cm) -> Self {
        match cm {
            Cm::Auto => Self::Auto,
            Cm::Umad => Self::Umad,
            Cm::Local => Self::Local,
        }
    }
}

impl FromStr for BackendSpec {
    type Err = String;

    /// Parses `rxe` or `ibverbs,device=NAME,key=value…`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, rest) = text.split_once(',').map_or((text, None), |(kind, rest)| (kind, Some(rest)));
        match (kind, rest) {
            ("rxe", None) => Ok(Self::Rxe),
            ("rxe", Some(_)) => Err("the backend rxe has no options".to_owned()),
            ("ibverbs", None) => Err("the backend ibverbs needs a device (device=NAME)".to_owned()),
            ("ibverbs", Some(pairs)) => {
                let syntax = Syntax { separator: ',', assign: '=', of: "the backend ibverbs" };
                from_pairs::<IbverbsSpec>(pairs, syntax)?.resolve().map(Self::Ibverbs)
            }
            _ => Err(format!("'{kind}' is not one of rxe or ibverbs,device=NAME")),
        }
    }
}

impl fmt::Display for BackendSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rxe => f.write_str("rxe"),
            Self::Ibverbs(config) => write!(f, "ibverbs ({} port {})", config.device, config.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        assert_eq!("rxe".parse(), Ok(BackendSpec::Rxe));
        let text = "ibverbs,device=mlx5_0,port=2,gid-index=3,max-pinned=4096,poll=0,cm=umad";
        let Ok(BackendSpec::Ibverbs(config)) = text.parse() else { panic!("{text}") };
        assert_eq!((config.device.as_str(), config.port, config.gid_index), ("mlx5_0", 2, GidIndex::Fixed(3)));
        assert_eq!((config.max_pinned, config.poll, config.cm), (4096, Duration::ZERO, CmMode::Umad));
        let Ok(BackendSpec::Ibverbs(config)) = "ibverbs,device=a,addresses=10.0.0.0/8+fd00::/64".parse() else {
            panic!()
        };
        let networks: Vec<_> = config.add_addresses.iter().map(ToString::to_string).collect();
        assert_eq!(networks, ["10.0.0.0/8", "fd00::/64"]);
        let given = "ibverbs,device=rxe0,addresses=given";
        assert_eq!(given.parse(), Ok(BackendSpec::Ibverbs(IbverbsConfig::new("rxe0"))));
        assert_eq!("ibverbs,device=rxe0,gid-index=auto".parse(), Ok(BackendSpec::Ibverbs(IbverbsConfig::new("rxe0"))));
    }

    #[test]
    fn mistakes() {
        for (text, word) in [
            ("verbs", "rxe"),
            ("rxe,device=a", "no options"),
            ("ibverbs", "device=NAME"),
            ("ibverbs,device=../a", "device=NAME"),
            ("ibverbs,device", "KEY=VALUE"),
            ("ibverbs,device=a,port=0", "port"),
            ("ibverbs,device=a,port=999", "port"),
            ("ibverbs,device=a,gid-index=x", "gid-index"),
            ("ibverbs,device=a,cm=yes", "cm: 'yes' is not one of auto, umad, local"),
            ("ibverbs,device=a,device=b", "twice"),
            ("ibverbs,device=a,addresses=10.0.0.1", "network"),
            ("ibverbs,device=a,addresses=10.0.0.0/8+", "network"),
            ("ibverbs,device=a,speed=9", "speed"),
        ] {
            let error = text.parse::<BackendSpec>().unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
