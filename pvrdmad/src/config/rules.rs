//! What a device may do on its network, in the words of the configuration.

use pvrdma_rxe::{Congestion, PortRules};
use serde::Deserialize;

use super::DeviceSpec;

/// When the service level of a packet becomes the priority in a tag.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pcp {
    /// In packets that have a tag for their VLAN.
    Tagged,
    /// Always: packets of no VLAN get a tag for VLAN 0.
    Always,
}

/// What becomes of frames of the network function from other addresses than the device's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Forged {
    /// They are dropped.
    Refuse,
    /// They pass.
    Allow,
}

/// Something that is on or off.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Switch {
    /// On.
    On,
    /// Off.
    Off,
}

impl DeviceSpec {
    /// What the device may do on its network.
    pub(super) fn rules(&self, congestion: Congestion) -> Result<PortRules, String> {
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

    /// Whether something is said about the network.
    pub(super) const fn has_rules(&self) -> bool {
        self.vlan.is_some() || self.pcp.is_some() || self.forged.is_some() || self.congestion.is_some()
    }
}
