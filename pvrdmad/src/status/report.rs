//! Status of the daemon as data.

use std::collections::BTreeMap;
use std::net::IpAddr;

use pvrdma_base::Counter;
use pvrdma_dev::MemoryStatus;
use pvrdma_ether_link::link_spec::LinkSpec;
use pvrdma_link::Link;
use pvrdma_rxe::{FailureCause, FlowCount, Road, ShareConfig, ShareUsage, faults::FaultStatus};
use pvrdma_verbs_types::{Gid, PortState};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::catalogue::Catalogue;
use crate::config::{MemoryFiles, Pin};
use crate::doorbells::DoorbellReport;
use crate::sandbox::SandboxReport;

/// Snapshot of the daemon.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DaemonStatus {
    /// Version of the daemon.
    pub version: String,
    /// Its process ID.
    pub pid: u32,
    /// Seconds since its start.
    pub uptime_s: u64,
    /// The adapter that carries the traffic.
    pub backend: String,
    /// Mappings of guest memory that clients truncated while they were in use. `client_memory_lost` of the devices
    /// tells which clients did.
    pub lost_mappings: u64,
    /// Counters of the control socket by name.
    pub control: BTreeMap<String, u64>,
    /// Descriptions of all counters. Empty unless requested.
    #[serde(default, skip_serializing_if = "Catalogue::is_empty")]
    pub counters: Catalogue,
    /// Processes of networks that were killed and have not ended.
    #[serde(default)]
    pub wedged: Vec<WedgedProcess>,
    /// Its networks.
    pub networks: Vec<NetworkStatus>,
    /// Devices of the networks that are running.
    pub devices: Vec<DeviceReport>,
}

/// A process of a network that was killed and has not ended, because one of its threads is in uninterruptible sleep in
/// the kernel. Until it ends, it keeps memory and descriptors, and serves nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WedgedProcess {
    /// Its process ID.
    pub pid: u32,
    /// The network that it served. Another process has replaced it.
    pub network: String,
    /// The device whose clients' descriptors it received, or `None` if it served the network.
    #[serde(default)]
    pub device: Option<String>,
    /// Seconds since it was given up.
    pub since_s: u64,
    /// Names of its remaining threads. The thread of a client's connection has the name of the device, cut to 15 bytes.
    pub threads: Vec<String>,
}

/// Snapshot of a network, as seen by the supervisor.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NetworkStatus {
    /// Its name.
    pub name: String,
    /// Its state.
    pub state: NetworkState,
    /// Process ID of its worker, or `None` while there is none.
    pub pid: Option<u32>,
    /// Number of workers that ended unexpectedly and were or will be replaced.
    pub restarts: u64,
    /// Reason of the last such end.
    pub last_end: Option<String>,
    /// Devices whose VM lost its connection by such an end and has not reconnected. These VMs must be restarted.
    pub lost_vms: Vec<String>,
    /// Removed devices with a client thread that does not return from a system call.
    #[serde(default)]
    pub stuck_clients: Vec<String>,
    /// Paths of sockets whose files were removed: no client can connect there.
    #[serde(default)]
    pub lost_sockets: Vec<String>,
    /// The interface of its uplink, if links of its devices follow it.
    #[serde(default)]
    pub interface: Option<InterfaceReport>,
    /// Its uplink. `None` without an uplink, or while the worker does not respond.
    #[serde(default)]
    pub uplink: Option<LinkReport>,
    /// Sandbox of the worker. `None` without a sandbox, or while the worker does not respond.
    pub sandbox: Option<SandboxReport>,
    /// Each of its devices has a keeper, which receives the descriptors of clients.
    #[serde(default)]
    pub keepers: bool,
    /// Faults injected into its uplink.
    #[serde(default)]
    pub fault: Option<String>,
    /// Names of its devices.
    pub devices: Vec<String>,
}

/// State of a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NetworkState {
    /// The network is served.
    Running,
    /// Its worker ended, and the next one does not serve yet.
    Restarting,
    /// Its worker does not reply in time.
    Unresponsive,
}

impl NetworkState {
    /// Returns the state as one word.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Restarting => "restarting",
            Self::Unresponsive => "unresponsive",
        }
    }
}

/// A worker's status of its network.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WorkerStatus {
    /// Mappings of guest memory that clients truncated while they were in use. `client_memory_lost` of the devices
    /// tells which clients did.
    pub lost_mappings: u64,
    /// Removed devices with a client thread that does not return from a system call.
    #[serde(default)]
    pub stuck_clients: Vec<String>,
    /// Sandbox of the process.
    pub sandbox: Option<SandboxReport>,
    /// The uplink.
    #[serde(default)]
    pub uplink: Option<LinkReport>,
    /// Descriptions of its devices' counters. Empty unless requested.
    #[serde(default, skip_serializing_if = "Catalogue::is_empty")]
    pub counters: Catalogue,
    /// Its devices.
    pub devices: Vec<DeviceReport>,
}

/// Snapshot of a device.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DeviceReport {
    /// Status of the device as [`pvrdma_dev::DeviceStatus`] declares it, except `port` and `memory`. Counters of its
    /// socket and interrupts are added to its counters.
    #[serde(flatten)]
    pub status: Map<String, Value>,
    /// The socket to which the VMM connects.
    pub socket: String,
    /// State of the port: `active` or another state.
    pub port: String,
    /// The administrator has set its link down.
    #[serde(default)]
    pub link_down: bool,
    /// MTU of the port in bytes.
    pub mtu: u32,
    /// Its client.
    pub client: ClientReport,
    /// Guest memory.
    pub memory: MemoryReport,
    /// Implementation of the doorbells of guest processes.
    pub doorbells: DoorbellReport,
    /// Its addresses.
    pub addresses: AddressReport,
    /// Permitted peers by the device's rule and by the network's rule. Empty if the rule permits all peers.
    pub peers: [Vec<String>; 2],
    /// The network that it belongs to.
    pub network: NetworkReport,
    /// Its share of common resources, and its use of them. `None` on the host's adapter.
    pub share: Option<ShareReport>,
    /// Traffic of its requests by peer and route, largest first. Empty on the host's adapter.
    #[serde(default)]
    pub flows: Vec<FlowReport>,
    /// Queue pairs that failed, by cause. Empty on the host's adapter.
    #[serde(default)]
    pub failed: BTreeMap<FailureCause, u64>,
    /// Faults that a test has requested.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<FaultStatus>,
    /// Captures of the device.
    pub capture: CaptureReport,
    /// The network function beside it, if this daemon emulates it.
    #[serde(default)]
    pub nic: Option<NicReport>,
}

impl DeviceReport {
    /// Returns its MAC address.
    pub fn mac(&self) -> &str {
        self.word("mac")
    }

    fn word(&self, member: &str) -> &str {
        self.status.get(member).and_then(Value::as_str).unwrap_or_default()
    }

    /// Returns its name.
    pub fn name(&self) -> &str {
        self.word("name")
    }

    /// Returns the phase of its life cycle: `reset`, `handshake` or `active`.
    pub fn phase(&self) -> &str {
        self.word("phase")
    }

    /// Returns `Some` if the device is in reset since the process that served it crashed, with the reason if its driver
    /// could not be told.
    pub fn recovery(&self) -> Option<Option<&str>> {
        let recovery = self.status.get("recovery")?.as_object()?;
        Some(recovery.get("problem").and_then(Value::as_str))
    }

    /// Returns the numbers of a group by name: of `objects`, `counters` or `adapter`.
    pub fn numbers(&self, group: &str) -> impl Iterator<Item = (&str, u64)> {
        let members = self.status.get(group).and_then(Value::as_object).into_iter().flatten();
        members.filter_map(|(name, value)| Some((name.as_str(), value.as_u64()?)))
    }
}

/// Guest memory of a device.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MemoryReport {
    /// The part that is pinned.
    pub pin: Pin,
    /// Mapped and pinned bytes.
    #[serde(flatten)]
    pub status: MemoryStatus,
    /// Kinds of files that may back it.
    pub files: MemoryFiles,
    /// Most bytes that may be mapped.
    pub max_mapped_bytes: u64,
    /// Most bytes that may be locked.
    pub max_locked_bytes: u64,
    /// Files that are open for it.
    pub open_files: usize,
    /// Mappings of these files.
    pub mappings: usize,
    /// Reason why some memory is not pinned although it should be.
    pub pin_error: Option<String>,
}

/// Addresses of a device.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AddressReport {
    /// Addresses that its guest may bind: `own`, `any`, or only those that are `listed`.
    pub rule: String,
    /// Addresses that are listed for it.
    pub listed: Vec<String>,
    /// The rule also applies to addresses that its network function announces. Otherwise an address belongs to the
    /// guest that binds it first.
    pub guarded: bool,
}

/// A link.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LinkReport {
    /// Its configuration.
    pub link: String,
    /// Frames can pass: the interface is up, or a peer is connected. `None` if this cannot be determined now.
    pub up: Option<bool>,
}

impl LinkReport {
    /// Makes the report of a link from its configuration and the link itself.
    pub(crate) fn new(spec: &LinkSpec, link: &dyn Link) -> Self {
        // Only sending a datagram shows if its peer receives, so such a link is never known to be down.
        let seen = |up: &bool| *up || !matches!(spec, LinkSpec::Datagrams { .. });
        Self { link: spec.to_string(), up: link.inspect().up.taken().filter(seen) }
    }
}

/// An interface of the host that links of devices follow.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct InterfaceReport {
    /// Its name.
    pub name: String,
    /// `up`, `down`, `no carrier` or `absent`.
    pub state: String,
    /// Frames can pass.
    pub up: bool,
    /// Maximum size of an IP packet on the interface, in bytes. `None` while the interface is absent.
    #[serde(default)]
    pub mtu: Option<u32>,
    /// Longest IP packet that the network should carry, in bytes.
    #[serde(default)]
    pub wanted: Option<u32>,
    /// Name of the active interface, if the uplink has two.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active: Option<String>,
    /// State of the other interface: `up`, `down`, `no carrier` or `absent`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup: Option<String>,
    /// MTUs of both interfaces in bytes, if they differ.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub different_mtus: Option<[u32; 2]>,
}

impl InterfaceReport {
    /// Returns its MTU and the required one, if its MTU is too small.
    pub(crate) fn too_short(&self) -> Option<(u32, u32)> {
        self.mtu.zip(self.wanted).filter(|(mtu, wanted)| mtu < wanted)
    }

    /// Describes the different MTUs of both interfaces, if they differ.
    pub(crate) fn mtu_difference(&self) -> Option<String> {
        let [first, second] = self.different_mtus?;
        Some(format!("{} carry packets of {first} and {second} bytes", self.name))
    }
}

/// The client of a device.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ClientReport {
    /// A client is connected.
    pub connected: bool,
    /// Process of the client, if the system reports it.
    #[serde(default)]
    pub process: Option<u32>,
}

/// A device's connection to its network.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NetworkReport {
    /// Name of the network.
    pub name: String,
    /// Longest IP packet that the network carries, in bytes.
    pub mtu: u32,
    /// The link to its network function, if QEMU emulates that (`nic=`).
    #[serde(default)]
    pub nic: Option<LinkReport>,
    /// Counters of the port: traffic of queue pairs (`wire_…`), and frames forwarded for the network function
    /// (`passed_…`). Empty if the network has no uplink.
    pub counters: BTreeMap<String, u64>,
}

/// A device's share of its network.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ShareReport {
    /// Its weight relative to the other devices.
    pub weight: u32,
    /// Its maximum rate in bits per second.
    pub max_rate: Option<u64>,
    /// Maximum rate of one queue pair's requests in bits per second.
    pub qp_max_rate: Option<u64>,
    /// Its guaranteed rate in bits per second.
    pub min_rate: Option<u64>,
    /// Processor time in nanoseconds that the network's workers, shared by its devices, have spent on this device.
    pub worker_ns: u64,
    /// Processor time in nanoseconds that the thread of its port has spent.
    pub port_ns: u64,
    /// Number of times that `max_rate` delayed it.
    pub throttled: u64,
}

impl ShareReport {
    /// Makes the report from the configuration and the use of a share.
    pub fn new(config: ShareConfig, usage: ShareUsage) -> Self {
        let bits = |rate: Option<u64>| rate.map(|bytes| bytes.saturating_mul(8));
        Self {
            weight: config.weight,
            max_rate: bits(config.max_rate),
            qp_max_rate: bits(config.qp_max_rate),
            min_rate: bits(config.min_rate),
            worker_ns: usage.worker_ns,
            port_ns: usage.port_ns,
            throttled: usage.throttled,
        }
    }
}

/// Traffic between a device and a peer, caused by requests of the device.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FlowReport {
    /// Address of the peer, or `None` for all peers that are not counted separately.
    pub peer: Option<IpAddr>,
    /// `local`: copied to a device of this process; `wire`: in packets.
    pub road: Road,
    /// Requests that completed successfully, and datagrams.
    pub requests: u64,
    /// Bytes in sends, writes and datagrams.
    pub bytes_out: u64,
    /// Bytes in reads.
    pub bytes_in: u64,
}

impl FlowReport {
    /// Returns the peer as a word.
    pub fn peer(&self) -> String {
        self.peer.map_or_else(|| "others".to_owned(), |peer| peer.to_string())
    }
}

impl From<FlowCount> for FlowReport {
    fn from(count: FlowCount) -> Self {
        let FlowCount { peer, road, requests, bytes_out, bytes_in } = count;
        let peer = peer.map(|Gid(bytes)| IpAddr::from(bytes).to_canonical());
        Self { peer, road, requests, bytes_out, bytes_in }
    }
}

/// A network function that this daemon emulates.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NicReport {
    /// The socket to which the VMM connects.
    pub socket: String,
    /// Its client.
    pub client: ClientReport,
    /// A driver has activated it.
    pub active: bool,
    /// `up` or `down`.
    pub link: String,
    /// The MAC address that the guest has chosen.
    pub mac: String,
    /// Its counters and those of its socket.
    pub counters: BTreeMap<String, u64>,
}

/// Captures of a device.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct CaptureReport {
    /// Running captures.
    pub active: u64,
    /// Captured frames since the device was created.
    pub frames: u64,
    /// Frames that are missing from captures because their readers were too slow.
    pub dropped: u64,
}

/// Returns counters by name.
pub(crate) fn by_name(counters: &[Counter]) -> BTreeMap<String, u64> {
    counters.iter().map(|counter| (counter.name.to_owned(), counter.value)).collect()
}

/// Returns a port state as one word.
pub(crate) fn port_word(state: PortState) -> String {
    format!("{state:?}").to_lowercase()
}
