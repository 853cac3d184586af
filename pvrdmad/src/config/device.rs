//! A device, completely described and checked.

use std::fs;

use pvrdma_base::Random;
use pvrdma_dev::DeviceConfig;
use pvrdma_ether_link::link_spec::LinkSpec;
use pvrdma_packet::MacAddr;
use pvrdma_roce::Congestion;
use pvrdma_rxe::{PortRules, ShareConfig, faults::FaultRule};
use pvrdma_verbs::{AddressRule, OtherAddresses, Peers, Rules};
use pvrdma_verbs_types::GidType;
use pvrdma_vfio_user_server::{FileRules, socket::SocketAccess};
use serde::{Deserialize, Serialize};

use super::access::access;
use super::address;
use super::place::SocketPlace;
use super::ports::Ports;
use super::spec::{DeviceSpec, Mac, NAME_RULE, is_name};
use super::words::{DoorbellMode, MemoryFiles, Pcp, Pin, Roce, Switch};

/// A device, completely described.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Device {
    /// The device itself.
    pub config: DeviceConfig,
    /// Ethernet address of both functions.
    pub mac: MacAddr,
    /// The socket to which the VMM connects.
    pub socket: SocketPlace,
    /// Permissions of the sockets.
    pub access: SocketAccess,
    /// Residency of guest memory.
    pub pin: Pin,
    /// Limits of guest memory.
    pub memory: MemoryRules,
    /// Implementation of the doorbells of guest processes.
    #[serde(default)]
    pub doorbells: DoorbellMode,
    /// The link to the paired network function, if the VMM emulates that.
    pub nic: Option<LinkSpec>,
    /// The socket for the paired network function, if this daemon emulates that.
    pub nic_socket: Option<SocketPlace>,
    /// Permissions of the device on its network.
    pub rules: PortRules,
    /// Its share of common resources.
    pub share: ShareConfig,
    /// Faults of its connections, for tests. They are set while it runs.
    #[serde(default)]
    pub faults: Vec<FaultRule>,
}

impl Device {
    /// Returns the encapsulation as a value of the configuration.
    pub const fn roce(&self) -> Roce {
        match self.config.roce {
            GidType::RoceV1 => Roce::V1,
            GidType::RoceV2 => Roce::V2,
        }
    }
}

/// Limits of a guest's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MemoryRules {
    /// Kinds of files that may back it.
    pub files: MemoryFiles,
    /// Most bytes that may be mapped.
    pub max_mapped: u64,
    /// Most bytes that may be locked.
    pub max_locked: u64,
}

impl From<MemoryRules> for FileRules {
    fn from(rules: MemoryRules) -> Self {
        let sealed = rules.files == MemoryFiles::Sealed;
        Self::default().with_sealed(sealed).with_mapped_bytes(rules.max_mapped)
    }
}

/// Returns seven eighths of the host's memory in bytes.
fn most_of_the_host() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse().ok());
    total.map_or(u64::MAX, |kibibytes: u64| kibibytes.saturating_mul(1024) / 8 * 7)
}

impl DeviceSpec {
    /// Fills in the defaults and checks the result. `uplink` is that of the device's network.
    ///
    /// # Errors
    /// A value is missing or out of range, or values contradict each other.
    pub(super) fn resolve(self, uplink: Option<&LinkSpec>, congestion: Congestion) -> Result<Device, String> {
        if !is_name(&self.name) {
            return Err(NAME_RULE.to_owned());
        }
        let Some(socket) = self.socket.clone() else { return Err("needs a socket (socket=PATH)".to_owned()) };
        let Some(Mac(mac)) = self.mac else { return Err("needs a MAC address (mac=MAC)".to_owned()) };
        let mut config = DeviceConfig::new(self.name.clone());
        config.version = self.version.unwrap_or(config.version);
        if !(17..=20).contains(&config.version) {
            return Err(format!("version {} is not one of 17 to 20", config.version));
        }
        // Version 17 of the device interface is older than RoCE v2.
        let default = if config.version < 18 { Roce::V1 } else { Roce::V2 };
        config.roce = match self.roce.unwrap_or(default) {
            Roce::V2 if config.version < 18 => return Err(format!("version {} does not know RoCE v2", config.version)),
            Roce::V1 => GidType::RoceV1,
            Roce::V2 => GidType::RoceV2,
        };
        config.intx = self.intx == Some(Switch::On);
        config.limits = self.limits.unwrap_or_default();
        config.random = self.seed.map_or(Random::System, Random::Seed);
        let peers = Peers(self.peers.clone());
        let listen = self.cm_listen.clone().map_or_else(Vec::new, |Ports(ports)| ports);
        let addresses = address::rule(&self.addresses)?;
        config.rules = Rules::default().with_addresses(addresses).with_peers(peers).with_listen(listen);
        self.check_links(uplink)?;
        let listed = config.rules.addresses.others == OtherAddresses::Refuse;
        if self.source_guard == Some(Switch::On) && !listed {
            return Err("source-guard needs a list of all addresses (address=ADDRESS, without own or any)".to_owned());
        }
        let addresses = config.rules.addresses.clone();
        let (rules, share) = (self.rules(congestion, addresses, uplink.is_none()), self.share()?);
        let memory = self.memory_rules();
        Ok(Device {
            config,
            mac,
            socket,
            access: access(self.owner, self.group, self.mode),
            pin: self.pin.unwrap_or(Pin::Registered),
            memory,
            doorbells: self.doorbells.unwrap_or_default(),
            nic: self.nic,
            nic_socket: self.nic_socket,
            rules,
            share,
            faults: Vec::new(),
        })
    }

    /// Checks that the device's links and the rules about them are consistent.
    fn check_links(&self, uplink: Option<&LinkSpec>) -> Result<(), String> {
        match (&self.nic, uplink) {
            (Some(_), None) => {
                Err("nic needs an uplink, to which its frames are passed (uplink=LINK of the network)".to_owned())
            }
            (Some(nic), Some(uplink)) if nic == uplink => Err("nic and uplink are the same".to_owned()),
            (Some(LinkSpec::Vxlan(_) | LinkSpec::Tls(_)), _) => Err("a tunnel is an uplink and no nic".to_owned()),
            (Some(LinkSpec::AfPacketPair(_)), _) => Err("a nic has one interface".to_owned()),
            (Some(_), _) if self.nic_socket.is_some() => {
                Err("nic and nic-socket are two ways to connect one network function".to_owned())
            }
            (None, None) if self.has_rules() && self.nic_socket.is_none() => Err(
                "pcp, forged-transmits, source-guard, ra-guard, dhcp-guard, congestion, negotiate, multipath and hold \
                     are about the uplink (uplink=LINK of the network)"
                    .to_owned(),
            ),
            _ => Ok(()),
        }
    }

    fn memory_rules(&self) -> MemoryRules {
        MemoryRules {
            files: self.memory.unwrap_or(MemoryFiles::Any),
            max_mapped: self.max_memory.unwrap_or(1 << 40),
            max_locked: self.max_locked.unwrap_or_else(most_of_the_host),
        }
    }

    /// Returns the permissions of the device on its network.
    fn rules(&self, congestion: Congestion, addresses: AddressRule, alone: bool) -> PortRules {
        let listed = addresses.others == OtherAddresses::Refuse;
        let guard = |switch: Option<Switch>| switch.map_or(listed, |switch| switch == Switch::On);
        PortRules::default()
            .with_addresses(Some(addresses))
            .with_source_guard(guard(self.source_guard))
            .with_ra_guard(guard(self.ra_guard))
            .with_dhcp_guard(guard(self.dhcp_guard))
            .with_alone(alone)
            .with_priority_tags(self.pcp == Some(Pcp::Always))
            .with_forged(self.forged.unwrap_or_default())
            .with_congestion((self.congestion != Some(Switch::Off)).then_some(congestion))
            .with_negotiate(self.negotiate != Some(Switch::Off))
            .with_multipath(self.multipath != Some(Switch::Off))
            .with_held(self.held.unwrap_or_default())
    }

    /// Returns `true` if a key about the port is given.
    const fn has_rules(&self) -> bool {
        self.pcp.is_some()
            || self.forged.is_some()
            || self.source_guard.is_some()
            || self.ra_guard.is_some()
            || self.dhcp_guard.is_some()
            || self.congestion.is_some()
            || self.negotiate.is_some()
            || self.multipath.is_some()
            || self.held.is_some()
    }
}
