//! What the daemon says about itself: as data.

use std::collections::BTreeMap;

use pvrdma_dev::Phase;
use pvrdma_verbs::{Counter, PortState};
use serde::{Deserialize, Serialize};

use crate::config::{Pin, Roce};

/// The daemon at one moment.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DaemonStatus {
    /// Version of the daemon.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Seconds since its start.
    pub uptime_s: u64,
    /// What carries the traffic.
    pub backend: String,
    /// Pages of guest memory that a client took away under us and that read as zero since.
    pub lost_pages: u64,
    /// Its devices.
    pub devices: Vec<DeviceReport>,
}

/// One device at one moment.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DeviceReport {
    /// Name.
    pub name: String,
    /// Where the VMM connects.
    pub socket: String,
    /// Ethernet address.
    pub mac: String,
    /// Encapsulation.
    pub roce: Roce,
    /// Interface version.
    pub version: u32,
    /// Life cycle: `reset`, `handshake` or `active`.
    pub phase: String,
    /// Whether the guest lets the device reach memory.
    pub bus_master: bool,
    /// The port: `active` or another state.
    pub port: String,
    /// Bytes in the port's MTU.
    pub mtu: u32,
    /// Who uses it.
    pub client: ClientReport,
    /// Guest memory.
    pub memory: MemoryReport,
    /// The connection to the network, if there is one.
    pub network: Option<NetworkReport>,
    /// Those who watch the device.
    pub capture: CaptureReport,
    /// Live objects by kind.
    pub objects: BTreeMap<String, u64>,
    /// Commands that came at all.
    pub commands: BTreeMap<String, CommandReport>,
    /// What the device counts, and its socket and interrupts.
    pub counters: BTreeMap<String, u64>,
    /// What the adapter counts.
    pub adapter: BTreeMap<String, u64>,
}

/// Guest memory of a device.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MemoryReport {
    /// What is kept resident.
    pub pin: Pin,
    /// Bytes mapped.
    pub mapped_bytes: u64,
    /// Bytes kept resident.
    pub pinned_bytes: u64,
    /// Why not all is resident that should be.
    pub pin_error: Option<String>,
}

/// The client of a device.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ClientReport {
    /// A client is there now.
    pub connected: bool,
}

/// A device's connection to the network.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NetworkReport {
    /// Bytes of an IP packet that the network carries.
    pub mtu: u32,
    /// The port's counters: what queue pairs sent and received (`wire_…`), what was passed on for the network function
    /// (`passed_…`).
    pub counters: BTreeMap<String, u64>,
}

/// Captures of a device.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct CaptureReport {
    /// Running now.
    pub active: u64,
    /// Frames that were captured since the device is in use.
    pub frames: u64,
    /// Frames that are missing in captures because their readers did not keep up.
    pub dropped: u64,
}

/// How often a command came.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CommandReport {
    /// All of them.
    pub executed: u64,
    /// Those that were refused.
    pub refused: u64,
}

/// Counters by name.
pub(crate) fn by_name(counters: &[Counter]) -> BTreeMap<String, u64> {
    counters.iter().map(|counter| (counter.name.to_owned(), counter.value)).collect()
}

/// A life cycle state in one word.
pub(crate) const fn phase_word(phase: Phase) -> &'static str {
    match phase {
        Phase::Reset => "reset",
        Phase::Handshake => "handshake",
        Phase::Active => "active",
    }
}

/// A port state in one word.
pub(crate) fn port_word(state: PortState) -> String {
    format!("{state:?}").to_lowercase()
}
