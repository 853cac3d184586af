//! The backend `ibverbs`: an RDMA adapter of the host.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use pvrdma_ibverbs::{CmMode, GidIndex, HostAddresses, IbverbsConfig};
use pvrdma_rxe::{ShareConfig, VlanMode};
use pvrdma_verbs::Network;
use serde::Deserialize;

use super::settings::{About, Feature, Settings};
use crate::config::error::ConfigError;
use crate::config::keys::{Keys, deserialize_from_str, keys};
use crate::config::network;
use crate::config::pairs::{Syntax, from_pairs};
use crate::config::words::Switch;
use crate::sandbox::Profile;

/// Description.
pub(super) const ABOUT: About = About {
    name: "ibverbs",
    syntax: "ibverbs,device=NAME",
    help: "an RDMA adapter of this host",
    section: "\
`ibverbs,KEY=VALUE,...` uses an RDMA adapter of the host, see [The host's adapter](host-adapter.md).
Its keys:
",
    keys: IbverbsSpec::KEYS,
};

/// Parses the keys.
///
/// # Errors
/// They are wrong, or there are none.
pub(super) fn parse(keys: Option<&str>) -> Result<IbverbsConfig, String> {
    let pairs = keys.ok_or("the backend ibverbs needs a device (device=NAME)")?;
    let syntax = Syntax { separator: ',', assign: '=', of: "the backend ibverbs" };
    from_pairs::<IbverbsSpec>(pairs, syntax)?.resolve()
}

impl Settings for IbverbsConfig {
    fn describe(&self) -> String {
        format!("ibverbs ({} port {})", self.device, self.port)
    }

    /// The host's adapter is used by a single network, whose settings belong to the host's administrator.
    fn check(&self, networks: &[network::Network]) -> Result<(), ConfigError> {
        let problem = "uplink and nic belong to the backend rxe; with ibverbs the host's adapter is the network";
        let devices = || networks.iter().flat_map(|network| &network.devices);
        if let Some(device) = devices().find(|device| device.nic_socket.is_some()) {
            let problem = problem.replace("nic", "nic-socket");
            return Err(ConfigError::Device { name: device.config.name.clone(), problem });
        }
        if let Some(network) = networks.iter().find(|network| network.uplink.is_some()) {
            return Err(ConfigError::Network { name: network.name.clone(), problem: problem.to_owned() });
        }
        if let [first, second, ..] = networks {
            let problem = format!(
                "with ibverbs the host's adapter is the one network, which cannot keep it apart from {}",
                first.name
            );
            return Err(ConfigError::Network { name: second.name.clone(), problem });
        }
        if let Some(device) = devices().find(|device| device.share != ShareConfig::default()) {
            let problem = "weight, rates and burst belong to the backend rxe".to_owned();
            return Err(ConfigError::Device { name: device.config.name.clone(), problem });
        }
        if let Some(device) = devices().find(|device| !device.config.rules.listen.is_empty())
            && self.cm != CmMode::Host
        {
            let problem = "cm-listen needs connections that the host makes (--backend ibverbs,cm=host)".to_owned();
            return Err(ConfigError::Device { name: device.config.name.clone(), problem });
        }
        if let Some(network) = networks.iter().find(|network| network.vlan != VlanMode::Untagged) {
            let problem = "vlan belongs to the backend rxe".to_owned();
            return Err(ConfigError::Network { name: network.name.clone(), problem });
        }
        Ok(())
    }

    fn has(&self, feature: Feature) -> Result<(), &'static str> {
        Err(match feature {
            Feature::Links => "the link is that of the host's adapter, which other devices use as well",
            Feature::Shares => "the host's adapter shares itself out",
            Feature::Faults => "the host's adapter has no faults on request",
            Feature::MeasuredDoorbells => "it has not been measured on the host's adapter",
        })
    }

    fn profile(&self, _: bool) -> Profile {
        Profile::Ibverbs
    }

    fn adapter(&self) -> Option<&str> {
        Some(&self.device)
    }

    fn host_addresses(&self) -> Result<Option<Arc<HostAddresses>>, String> {
        pvrdma_ibverbs::host_addresses(self).map_err(|problem| format!("{}: {problem}", self.device))
    }
}

keys! {
    /// The backend `ibverbs`: an RDMA adapter of the host.
    struct IbverbsSpec {
        /// RDMA device, by its name in `rdma link`.
        ["device", "NAME", "required"]
        device: String,
        /// Port of that device.
        ///
        /// RoCE only, except with `cm=host`.
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
        /// `host`: all peers, by connections that the host's rdma_cm makes; iWARP adapters need it. `umad`: all peers,
        /// through the host's `ib_umad`. `local`: guests of this daemon. `auto`: `umad` if possible, otherwise `local`
        /// with a warning.
        ["cm", "auto|umad|host|local", "auto"]
        cm: Option<Cm>,
        /// Allow an InfiniBand port, with `cm=host`.
        ///
        /// Guests on such a port have never been run.
        ["untested-infiniband", "on|off", "off"]
        untested_infiniband: Option<Switch>,
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
        let mut config = IbverbsConfig::new(self.device);
        config.port = self.port.map_or(config.port, |Port(port)| port);
        config.gid_index = self.gid_index.map_or(config.gid_index, |GidChoice(index)| index);
        config.add_addresses = self.addresses.map_or(config.add_addresses, |Addresses(networks)| networks);
        config.max_pinned = self.max_pinned.unwrap_or(config.max_pinned);
        config.max_mappings = self.max_mappings.unwrap_or(config.max_mappings);
        config.cm = self.cm.map_or(config.cm, Cm::into);
        config.untested_infiniband = self.untested_infiniband == Some(Switch::On);
        if config.untested_infiniband && config.cm != CmMode::Host {
            return Err("untested-infiniband needs connections that the host makes (cm=host)".to_owned());
        }
        config.poll = self.poll.map_or(config.poll, |us| Duration::from_micros(us.into()));
        Ok(config)
    }
}

/// A port number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Port(u8);

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
struct GidChoice(GidIndex);

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
struct Addresses(Vec<Network>);

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
enum Cm {
    /// As far as possible.
    Auto,
    /// All hosts.
    Umad,
    /// All hosts, by the host's own connection manager.
    Host,
    /// Guests of this daemon.
    Local,
}

impl From<Cm> for CmMode {
    fn from(cm: Cm) -> Self {
        match cm {
            Cm::Auto => Self::Auto,
            Cm::Umad => Self::Umad,
            Cm::Host => Self::Host,
            Cm::Local => Self::Local,
        }
    }
}
