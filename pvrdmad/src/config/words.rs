//! Values that are words from a short list.

use std::fmt;

use clap::ValueEnum;
use pvrdma_guest_memory::PinPolicy;
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// Encapsulation of RDMA packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Roce {
    /// Directly in Ethernet frames.
    V1,
    /// In UDP.
    V2,
}

/// Extent to which guest memory is pinned.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pin {
    /// All memory, always.
    All,
    /// Registered memory, while it is registered.
    Registered,
    /// None.
    Off,
}

/// Files that may back guest memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryFiles {
    /// Files that cannot block: memfd, tmpfs, hugetlbfs.
    Any,
    /// Such files that are also sealed against shrinking.
    Sealed,
}

/// Implementation of the doorbells of guest processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DoorbellMode {
    /// The better mode for this host, judged by its processors.
    Auto,
    /// Each doorbell traps and is sent by the VMM as a message.
    #[default]
    Trapped,
    /// Doorbells are stores to memory that the VMM has mapped.
    Mapped,
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

/// Rule for using the service level of a packet as the priority in its tag.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pcp {
    /// Only in packets that have a tag for their VLAN.
    Tagged,
    /// Always: packets outside of any VLAN get a tag for VLAN 0.
    Always,
}

/// Use of the ICRC by connections over an uplink.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Icrc {
    /// Each packet has an ICRC.
    Always,
    /// Connections leave it out if the peer's network has this value, too.
    Agreed,
}

/// Unit that has a process of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Isolate {
    /// Each network.
    #[default]
    Network,
    /// Nothing: one process serves all networks.
    None,
}

/// Confinement of the processes that serve networks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum SandboxMode {
    /// All restrictions that the kernel supports. An unexpected system call fails.
    #[default]
    On,
    /// Nothing.
    Off,
    /// As `on`, but an unexpected system call ends the process. For tests.
    Strict,
}

impl SandboxMode {
    /// Returns the word.
    pub const fn word(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::Off => "off",
            Self::Strict => "strict",
        }
    }
}

/// The link of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LinkState {
    /// It carries traffic.
    #[default]
    Up,
    /// It carries nothing, in neither direction.
    Down,
}

/// Something that is on or off: `on`, `off`, or a boolean.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Switch {
    /// On.
    On,
    /// Off.
    Off,
}

impl Switch {
    /// Returns `true` if it is on.
    pub const fn is_on(self) -> bool {
        matches!(self, Self::On)
    }
}

impl<'de> Deserialize<'de> for Switch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(SwitchVisitor)
    }
}

struct SwitchVisitor;

impl Visitor<'_> for SwitchVisitor {
    type Value = Switch;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("on or off")
    }

    fn visit_bool<E: de::Error>(self, on: bool) -> Result<Switch, E> {
        Ok(if on { Switch::On } else { Switch::Off })
    }

    fn visit_str<E: de::Error>(self, word: &str) -> Result<Switch, E> {
        match word {
            "on" | "true" | "yes" => Ok(Switch::On),
            "off" | "false" | "no" => Ok(Switch::Off),
            _ => Err(E::custom(format!("'{word}' is neither on nor off"))),
        }
    }
}
