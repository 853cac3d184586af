//! A device, completely described and checked.

use std::path::PathBuf;

use pvrdma_dev::DeviceConfig;
use pvrdma_rxe::{Congestion, PortRules};
use pvrdma_verbs::GidType;

use super::error::ConfigError;
use super::network::NetworkSpec;
use super::spec::{DeviceSpec, Mac};
use super::tunnel::TunnelKeys;
use super::words::{Forged, Pcp, Pin, Roce, Switch};

/// A device, completely described.
#[derive(Clone, Debug)]
pub struct Device {
    /// The device itself.
    pub config: DeviceConfig,
    /// Where the VMM connects.
    pub socket: PathBuf,
    /// Residency of guest memory.
    pub pin: Pin,
    /// How it is connected to the network, if it is.
    pub network: Option<NetworkSpec>,
}

impl Device {
    /// The encapsulation, as users write it.
    pub const fn roce(&self) -> Roce {
        match self.config.roce {
            GidType::RoceV1 => Roce::V1,
            GidType::RoceV2 => Roce::V2,
        }
    }
}

impl DeviceSpec {
    /// Fills in the defaults and checks.
    ///
    /// # Errors
    /// Something is missing, out of range, or does not go together.
    pub(super) fn resolve(self, congestion: Congestion) -> Result<Device, ConfigError> {
        let problem = |problem: String| ConfigError::Device { name: self.name.clone(), problem };
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if self.name.is_empty() || self.name.len() > 32 || !self.name.chars().all(plain) {
            return Err(problem("a name has 1 to 32 letters, digits, '-', '_' or '.'".to_owned()));
        }
        let socket = self.socket.clone().ok_or_else(|| problem("needs a socket (socket=PATH)".to_owned()))?;
        let Mac(mac) = self.mac.ok_or_else(|| problem("needs a MAC address (mac=MAC)".to_owned()))?;
        let mut config = DeviceConfig::new(self.name.clone(), mac);
        config.version = self.version.unwrap_or(config.version);
        if !(17..=20).contains(&config.version) {
            return Err(problem(format!("version {} is not one of 17 to 20", config.version)));
        }
        // Version 17 is older than RoCE v2.
        let default = if config.version < 18 { Roce::V1 } else { Roce::V2 };
        config.roce = match self.roce.unwrap_or(default) {
            Roce::V2 if config.version < 18 => {
                return Err(problem(format!("version {} does not know RoCE v2", config.version)));
            }
            Roce::V1 => GidType::RoceV1,
            Roce::V2 => GidType::RoceV2,
        };
        config.intx = self.intx == Some(Switch::On);
        config.limits = self.limits.unwrap_or_default();
        let tunnel = TunnelKeys { remotes: self.remotes.clone(), vni: self.vni, learn: self.learn };
        let mut network = NetworkSpec::new(self.uplink.clone(), tunnel, self.nic.clone(), self.mtu).map_err(problem)?;
        match &mut network {
            Some(network) => {
                network.fault = self.fault;
                network.rules = self.rules(congestion).map_err(problem)?;
            }
            None if self.fault.is_some() => {
                return Err(problem("fault is one of the uplink (uplink=LINK)".to_owned()));
            }
            None if self.has_rules() => {
                return Err(problem("vlan, pcp, forged and congestion are about the uplink (uplink=LINK)".to_owned()));
            }
            None => {}
        }
        Ok(Device { config, socket, pin: self.pin.unwrap_or(Pin::All), network })
    }

    /// What the device may do on its network.
    fn rules(&self, congestion: Congestion) -> Result<PortRules, String> {
        if let Some(vlan) = self.vlan.filter(|vlan| !(1..=4094).contains(vlan)) {
            return Err(format!("vlan {vlan} is not one of 1 to 4094"));
        }
        Ok(PortRules {
            vlan: self.vlan,
            priority_tags: self.pcp == Some(Pcp::Always),
            allow_forged: self.forged == Some(Forged::Allow),
            congestion: (self.congestion != Some(Switch::Off)).then_some(congestion),
        })
    }

    /// Returns `true` if a key about the network is given.
    const fn has_rules(&self) -> bool {
        self.vlan.is_some() || self.pcp.is_some() || self.forged.is_some() || self.congestion.is_some()
    }
}
