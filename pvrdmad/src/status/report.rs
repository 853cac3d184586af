//! What the daemon says about itself: as data.

use std::collections::BTreeMap;
use std::net::IpAddr;

use pvrdma_dev::MemoryStatus;
use pvrdma_ether_link::Link;
use pvrdma_rxe::{FlowCount, Road, ShareConfig, ShareUsage};
use pvrdma_verbs::{Counter, Gid, PortState};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::catalogue::Catalogue;
use crate::config::{LinkSpec, MemoryFiles, Pin};
use crate::doorbells::DoorbellReport;
use crate::sandbox::SandboxReport;

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
    /// Mappings of guest memory that clients took away under us; `client_memory_lost` of devices tells whose.
    pub lost_mappings: u64,
    /// Counters of the control socket by name.
    pub control: BTreeMap<String, u64>,
    /// What all counters mean. Empty unless that was asked for.
    #[serde(default, skip_serializing_if = "Catalogue::is_empty")]
    pub counters: Catalogue,
    /// Processes of networks that were killed and have not ended.
    #[serde(default)]
    pub wedged: Vec<WedgedProcess>,
    /// Its networks.
    pub networks: Vec<NetworkStatus>,
    /// The devices of those networks that are running.
    pub devices: Vec<DeviceReport>,
}

/// A process of a network that was killed and has not ended: a thread of it waits in the kernel, where no signal
/// interrupts it. It keeps memory and descriptors until then, and serves nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WedgedProcess {
    /// Its number.
    pub pid: u32,
    /// The network that it served. Another process does now.
    pub network: String,
    /// The device whose clients' descriptors it received; none: it served the network.
    #[serde(default)]
    pub device: Option<String>,
    /// Seconds since it was given up.
    pub since_s: u64,
    /// Names of its threads that are left. That of a client's connection has the name of the device, cut to 15 bytes.
    pub threads: Vec<String>,
}

/// One network at one moment, as the supervisor knows it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NetworkStatus {
    /// Its name.
    pub name: String,
    /// How it is.
    pub state: NetworkState,
    /// The process that serves it; none while there is none.
    pub pid: Option<u32>,
    /// Processes that ended and were replaced, or will be.
    pub restarts: u64,
    /// How the last one of these ended.
    pub last_end: Option<String>,
    /// Devices that such an end took from their VM, which has not come back since. It has to be restarted for that.
    pub lost_vms: Vec<String>,
    /// Devices that were removed and whose client's thread does not return from a system call.
    #[serde(default)]
    pub stuck_clients: Vec<String>,
    /// Paths where somebody has removed a socket of ours: nobody can connect there.
    #[serde(default)]
    pub lost_sockets: Vec<String>,
    /// The interface of its uplink, if links of its devices follow that.
    #[serde(default)]
    pub interface: Option<InterfaceReport>,
    /// What connects it with others; none without an uplink, or while the process does not say.
    #[serde(default)]
    pub uplink: Option<LinkReport>,
    /// What confines the process; none without a sandbox, or while the process does not say.
    pub sandbox: Option<SandboxReport>,
    /// Faults injected on its uplink.
    #[serde(default)]
    pub fault: Option<String>,
    /// Names of its devices.
    pub devices: Vec<String>,
}

/// How a network is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NetworkState {
    /// It serves.
    Running,
    /// Its process ended, and the next one does not serve yet.
    Restarting,
    /// Its process does not say in time how it is.
    Unresponsive,
}

impl NetworkState {
    /// One word.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Restarting => "restarting",
            Self::Unresponsive => "unresponsive",
        }
    }
}

/// What a worker says of its network.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WorkerStatus {
    /// Mappings of guest memory that clients took away under us; `client_memory_lost` of devices tells whose.
    pub lost_mappings: u64,
    /// Devices that were removed and whose client's thread does not return from a system call.
    #[serde(default)]
    pub stuck_clients: Vec<String>,
    /// What confines the process.
    pub sandbox: Option<SandboxReport>,
    /// What connects it with others.
    #[serde(default)]
    pub uplink: Option<LinkReport>,
    /// What its devices' counters mean. Empty unless that was asked for.
    #[serde(default, skip_serializing_if = "Catalogue::is_empty")]
    pub counters: Catalogue,
    /// Its devices.
    pub devices: Vec<DeviceReport>,
}

/// One device at one moment.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DeviceReport {
    /// What the device says of itself, as [`pvrdma_dev::DeviceStatus`] declares it, except `port` and `memory`. Its
    /// counters are joined by those of its socket and interrupts.
    #[serde(flatten)]
    pub status: Map<String, Value>,
    /// Where the VMM connects.
    pub socket: String,
    /// The port: `active` or another state.
    pub port: String,
    /// The administrator has its link down.
    #[serde(default)]
    pub link_down: bool,
    /// Bytes in the port's MTU.
    pub mtu: u32,
    /// Who uses it.
    pub client: ClientReport,
    /// Guest memory.
    pub memory: MemoryReport,
    /// What becomes of the doorbells of its guest's processes.
    pub doorbells: DoorbellReport,
    /// Its addresses.
    pub addresses: AddressReport,
    /// Those with whom it may talk, by the device's rule and by the network's: none if that allows everybody.
    pub peers: [Vec<String>; 2],
    /// The network that it is in.
    pub network: NetworkReport,
    /// What it may use of what it shares with others, and has used. None on the host's adapter.
    pub share: Option<ShareReport>,
    /// What its requests moved, by peer and road: those first that moved most. Empty on the host's adapter.
    #[serde(default)]
    pub flows: Vec<FlowReport>,
    /// Those who watch the device.
    pub capture: CaptureReport,
    /// The network function beside it, if that is ours.
    #[serde(default)]
    pub nic: Option<NicReport>,
}

impl DeviceReport {
    /// Its MAC address.
    pub fn mac(&self) -> &str {
        self.word("mac")
    }

    fn word(&self, member: &str) -> &str {
        self.status.get(member).and_then(Value::as_str).unwrap_or_default()
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.word("name")
    }

    /// Life cycle: `reset`, `handshake` or `active`.
    pub fn phase(&self) -> &str {
        self.word("phase")
    }

    /// Numbers of a group by name: of `objects`, `counters` or `adapter`.
    pub fn numbers(&self, group: &str) -> impl Iterator<Item = (&str, u64)> {
        let members = self.status.get(group).and_then(Value::as_object).into_iter().flatten();
        members.filter_map(|(name, value)| Some((name.as_str(), value.as_u64()?)))
    }
}

/// Guest memory of a device.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MemoryReport {
    /// What is kept resident.
    pub pin: Pin,
    /// Bytes mapped and kept resident.
    #[serde(flatten)]
    pub status: MemoryStatus,
    /// Which files it may be in.
    pub files: MemoryFiles,
    /// Most bytes that may be mapped.
    pub max_mapped_bytes: u64,
    /// Most bytes that may be locked.
    pub max_locked_bytes: u64,
    /// Files that are open for it.
    pub open_files: usize,
    /// Mappings of these.
    pub mappings: usize,
    /// Why not all is resident that should be.
    pub pin_error: Option<String>,
}

/// Addresses of a device.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AddressReport {
    /// What its guest may bind: `own`, `any`, or what is `listed` alone.
    pub rule: String,
    /// Addresses that are listed for it.
    pub listed: Vec<String>,
    /// What its network card says that it has is held to the rule as well. If not, an address belongs to the guest
    /// that binds it first.
    pub guarded: bool,
}

/// A link.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LinkReport {
    /// As it is configured.
    pub link: String,
    /// Frames can pass: the interface is there, or somebody is connected. None: that cannot be seen now.
    pub up: Option<bool>,
}

impl LinkReport {
    /// From its configuration, and from the link itself.
    pub(crate) fn new(spec: &LinkSpec, link: &dyn Link) -> Self {
        // Whether anybody takes datagrams shows when one is sent.
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
    /// Bytes of an IP packet that it carries; none while it is not there.
    #[serde(default)]
    pub mtu: Option<u32>,
    /// Bytes of an IP packet that the network is to carry.
    #[serde(default)]
    pub wanted: Option<u32>,
}

impl InterfaceReport {
    /// What it carries and what it should, if it carries less.
    pub(crate) fn too_short(&self) -> Option<(u32, u32)> {
        self.mtu.zip(self.wanted).filter(|(mtu, wanted)| mtu < wanted)
    }
}

/// The client of a device.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ClientReport {
    /// A client is there now.
    pub connected: bool,
    /// The process that it is of, if the system tells.
    #[serde(default)]
    pub process: Option<u32>,
}

/// A device's connection to its network.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NetworkReport {
    /// Name of the network.
    pub name: String,
    /// Bytes of an IP packet that the network carries.
    pub mtu: u32,
    /// The link to its network card, if that is QEMU's (`nic=`).
    #[serde(default)]
    pub nic: Option<LinkReport>,
    /// The port's counters: what queue pairs sent and received (`wire_…`), what was passed on for the network function
    /// (`passed_…`). None if the network has no uplink.
    pub counters: BTreeMap<String, u64>,
}

/// A device's share of its network.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ShareReport {
    /// Its weight against those of the others.
    pub weight: u32,
    /// What it moves at most, in bits per second.
    pub max_rate: Option<u64>,
    /// What the requests of one queue pair move at most, in bits per second.
    pub qp_max_rate: Option<u64>,
    /// What it is promised, in bits per second.
    pub min_rate: Option<u64>,
    /// Nanoseconds that the workers of the network, which its devices share, have worked for it.
    pub worker_ns: u64,
    /// Nanoseconds that the thread of its port has worked.
    pub port_ns: u64,
    /// Times that `max_rate` had it wait.
    pub throttled: u64,
}

impl ShareReport {
    /// From the configuration of a device, and from what it has used.
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

/// What requests of a device moved to a peer and from it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FlowReport {
    /// Address of the peer; none for all those that are not told apart.
    pub peer: Option<IpAddr>,
    /// `local`: copied to a device of this process; `wire`: in packets.
    pub road: Road,
    /// Requests that ended with success, and datagrams.
    pub requests: u64,
    /// Bytes in sends, writes and datagrams.
    pub bytes_out: u64,
    /// Bytes that were read.
    pub bytes_in: u64,
}

impl FlowReport {
    /// The peer in a word.
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

/// A network function of ours.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NicReport {
    /// Where the VMM connects.
    pub socket: String,
    /// Who uses it.
    pub client: ClientReport,
    /// A driver has started it.
    pub active: bool,
    /// `up` or `down`.
    pub link: String,
    /// The address that the guest has chosen.
    pub mac: String,
    /// Its counters and those of its socket.
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

/// Counters by name.
pub(crate) fn by_name(counters: &[Counter]) -> BTreeMap<String, u64> {
    counters.iter().map(|counter| (counter.name.to_owned(), counter.value)).collect()
}

/// A port state in one word.
pub(crate) fn port_word(state: PortState) -> String {
    format!("{state:?}").to_lowercase()
}
