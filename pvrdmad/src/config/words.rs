//! Values that are one of a few words.

use pvrdma_guest_memory::PinPolicy;
use serde::{Deserialize, Serialize};

/// Encapsulation of RDMA packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Roce {
    /// Directly in Ethernet frames.
    V1,
    /// In UDP.
    V2,
}

/// How guest memory is kept resident.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pin {
    /// All of it, always.
    All,
    /// What is registered, for as long as it is.
    Registered,
    /// Nothing.
    Off,
}

impl From<Pin> for PinPolicy {
    fn from(pin: Pin) -> Self {
        match pin {
            Pin::All => Self::All,
            Pin::Registered => Self::Registered,
            Pin::Off => Self::Off,
        }
    }
}

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
