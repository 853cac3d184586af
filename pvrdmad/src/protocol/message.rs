//! Requests to the daemon and to a network, and their replies.

use std::collections::BTreeMap;
use std::iter;

use pvrdma_dev::{LimitStatus, ObjectKind};
use pvrdma_rxe::faults::FaultRule;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::config::{BackendSpec, Device, FaultWord, LinkState, Network, SandboxMode};
use crate::doorbells::DoorbellSetup;
use crate::failures::Failures;
use crate::logging::LogFilter;
use crate::status::WorkerStatus;
use crate::text::{is_printable_json, printable, printable_text};

/// Version of the requests. A worker of another version refuses [`Request::Hello`]; a daemon of another version reports
/// it.
pub const VERSION: u32 = 5;

/// Version of the replacement protocol, which follows [`Request::Replace`]: of the order of its messages. A reader
/// refuses a message that lacks a field, and ignores unknown fields.
pub const REPLACE_VERSION: u32 = 1;

/// State of an uplink's interface, as far as links of devices follow it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Carrier {
    /// Links of devices are up only if this is up.
    pub state: LinkState,
    /// Maximum size of an IP packet on the interface, in bytes. `None` if the interface is absent or cannot be read.
    pub mtu: Option<u32>,
    /// The second interface of the uplink is the active one.
    #[serde(default)]
    pub second: bool,
}

/// Longest reply without content, in bytes.
const MAX_PLAIN: usize = 16 << 10;
/// Maximum length in bytes of the status of a network without devices. It may include descriptions of its counters.
const MAX_CATALOGUE: usize = 64 << 10;
/// Most bytes of a device's status.
const MAX_DEVICE_STATUS: usize = 64 << 10;
/// Longest list of failed queue pairs of a network, in bytes.
const MAX_FAILURES: usize = 4 << 20;
/// Most bytes of a device's objects.
const MAX_OBJECTS: usize = 64 << 20;

/// A request. Requests marked *internal* are only for workers; the control socket refuses them.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Returns the status of the daemon or the network.
    Status {
        /// Includes type, unit and description of all counters.
        #[serde(default)]
        describe: bool,
    },
    /// Returns the objects of a device.
    Show {
        /// Name of the device.
        device: String,
        /// Kind of the objects.
        object: ObjectKind,
    },
    /// Returns the last failed queue pairs.
    Failures {
        /// Name of the device. Absent: all devices, including those that were removed.
        #[serde(default)]
        device: Option<String>,
        /// Earliest time, in milliseconds since 1970.
        #[serde(default)]
        since: Option<i64>,
    },
    /// Captures the traffic of a device: the connection carries a capture in pcapng afterwards. The worker gets
    /// [`Self::StartCapture`] for it.
    Capture {
        /// Name of the device.
        device: String,
        /// Bytes of each frame that are kept.
        #[serde(default)]
        snaplen: Option<u32>,
    },
    /// Adds a device, for as long as the daemon runs. The worker gets [`Self::Serve`] for it.
    AddDevice {
        /// The value of a `--device` option: `key=value,key=value`.
        device: String,
        /// The value of a `--network` option that describes the network of the device, if that does not exist yet.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        network: Option<String>,
    },
    /// Removes a device: its client is disconnected, and its socket is removed.
    RemoveDevice {
        /// Name of the device.
        device: String,
    },
    /// Sets the link of a device up or down.
    Link {
        /// Name of the device.
        device: String,
        /// The new link state.
        state: LinkState,
    },
    /// Sets limits of a device and returns all of its limits.
    Limits {
        /// Name of the device.
        device: String,
        /// New values by name. Other limits stay.
        #[serde(default)]
        set: BTreeMap<String, u64>,
    },
    /// Sets a device's share of common resources and returns the resulting share.
    Share {
        /// Name of the device.
        device: String,
        /// New values by key, `off` for none. Other values stay.
        #[serde(default)]
        set: BTreeMap<String, String>,
    },
    /// Injects faults into the uplink of a network, or stops injecting them.
    Fault {
        /// Name of the network.
        network: String,
        /// The value of the key `fault` of a network, or `off`.
        fault: FaultWord,
    },
    /// Sets the faults of devices, which replace those before. Nothing changes if one of the devices cannot have them.
    DeviceFaults {
        /// The faults by device. None: the faults of the device end.
        faults: BTreeMap<String, Vec<FaultRule>>,
    },
    /// Sets the log filter.
    LogLevel {
        /// A level, or a filter in the syntax of `RUST_LOG`.
        level: LogFilter,
    },
    /// Replaces the workers of networks by new ones of the installed program, which take over the devices with their
    /// clients.
    Upgrade {
        /// Name of the network. Absent: all networks, one after the other.
        #[serde(default)]
        network: Option<String>,
        /// Starts the installed program, which replaces the whole daemon and takes all networks at once.
        #[serde(default)]
        daemon: bool,
        /// Only checks for obstacles.
        #[serde(default)]
        check: bool,
    },
    /// Gives all networks, and all sockets of the daemon, to the calling process, which is the next daemon. The
    /// connection carries them afterwards. Only root and the user of this daemon may call this.
    Replace {
        /// [`REPLACE_VERSION`].
        version: u32,
    },
    /// Subscribes to all events from now on. After the reply, the connection carries only events.
    Events {},
    /// Returns the last events.
    PastEvents {
        /// Earliest time, in milliseconds since 1970.
        #[serde(default)]
        since: Option<i64>,
        /// Most events: the last ones.
        #[serde(default)]
        last: Option<u32>,
    },
    /// Internal: the first request. Descriptors: the socket of [`super::HostRequest`]s, then those of the uplink.
    Hello {
        /// [`VERSION`].
        version: u32,
        /// The network.
        network: Box<NetworkSetup>,
    },
    /// Internal: the state of the uplink's interface. Links of devices are up only if it is up.
    Carrier {
        /// The new state.
        carrier: Carrier,
    },
    /// Internal: captures the traffic of a device. The descriptor is the client's connection, to which the worker sends
    /// the response and then the capture.
    StartCapture {
        /// Name of the device.
        device: String,
        /// Bytes of each frame that are kept.
        snaplen: Option<u32>,
        /// Identifier of the client's call, or `None` if it is not answered.
        id: Option<Value>,
    },
    /// Internal: serves a device. Descriptors: its listening socket; with `kept`, the connection to its keeper; if its
    /// doorbell pages are mapped, the connection to the kernel, their file and, with a fallback server, the pipe end
    /// whose closing tells it that the worker has ended; then those of its `nic` or its `nic-socket`.
    Serve {
        /// Complete description of the device.
        device: Box<Device>,
        /// Administrative state of its link.
        link: LinkState,
        /// The way in which its doorbells are implemented.
        #[serde(default)]
        doorbells: DoorbellSetup,
        /// A worker that has crashed has left its clients with the keeper.
        #[serde(default)]
        kept: bool,
    },
    /// Internal: as [`Self::Serve`], but the device arrives with [`Self::TakeOver`].
    Expect {
        /// Complete description of the device.
        device: Box<Device>,
        /// Administrative state of its link.
        link: LinkState,
        /// The way in which its doorbells are implemented.
        #[serde(default)]
        doorbells: DoorbellSetup,
    },
    /// Internal: returns the obstacles to a hand-over to a new worker.
    CheckHandOver {
        /// Bytes that the new worker may lock in memory. `None` without a limit.
        lockable: Option<u64>,
    },
    /// Internal: gives all devices to the worker at the other end of the socket that comes with the request. With a
    /// second socket, the giver writes a byte to it once the other worker is ready, and continues when it reads one.
    /// The process ends after the reply, unless that is an error.
    HandOver {},
    /// Internal: takes over all expected devices from the worker at the other end of the socket that comes with the
    /// request.
    TakeOver {},
}

/// Configuration of a worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NetworkSetup {
    /// The adapter that carries the traffic.
    pub backend: BackendSpec,
    /// Sandbox mode of the worker.
    pub sandbox: SandboxMode,
    /// Each device has a keeper: a process that receives its clients' descriptors.
    pub keepers: bool,
    /// Captures are permitted.
    pub captures: bool,
    /// Number of threads of the software adapter's engine. The supervisor derives it from the available processors,
    /// because a sandboxed worker cannot read the quota of its control group.
    pub engine_threads: usize,
    /// The network. Its devices follow one by one.
    pub network: Network,
}

impl Request {
    /// Returns `true` if only a supervisor may send this request.
    pub const fn is_internal(&self) -> bool {
        match self {
            Self::Status { .. }
            | Self::Show { .. }
            | Self::Failures { .. }
            | Self::PastEvents { .. }
            | Self::Capture { .. }
            | Self::AddDevice { .. }
            | Self::RemoveDevice { .. }
            | Self::Link { .. }
            | Self::Limits { .. }
            | Self::Share { .. }
            | Self::Fault { .. }
            | Self::DeviceFaults { .. }
            | Self::LogLevel { .. }
            | Self::Upgrade { .. }
            | Self::Replace { .. }
            | Self::Events {} => false,
            Self::Hello { .. }
            | Self::Carrier { .. }
            | Self::StartCapture { .. }
            | Self::Serve { .. }
            | Self::Expect { .. }
            | Self::CheckHandOver { .. }
            | Self::HandOver {}
            | Self::TakeOver {} => true,
        }
    }

    /// Returns `true` if `reply` is of the kind that answers this request. An error answers any request.
    pub const fn is_answered_by<S>(&self, reply: &Reply<S>) -> bool {
        match (self, reply) {
            (_, Reply::Error(_))
            | (Self::Status { .. }, Reply::Ok(_))
            | (Self::Show { .. }, Reply::Objects(_))
            | (Self::Failures { .. }, Reply::Failures(_))
            | (Self::PastEvents { .. }, Reply::PastEvents(_))
            | (Self::StartCapture { .. }, Reply::Capturing {})
            | (Self::Events {}, Reply::Events {})
            | (Self::Limits { .. }, Reply::Limits(_))
            | (Self::Share { .. }, Reply::Share(_))
            | (Self::CheckHandOver { .. }, Reply::Obstacles(_))
            | (Self::HandOver {}, Reply::Given { .. })
            | (Self::Upgrade { .. }, Reply::Upgraded(_)) => true,
            (
                Self::Status { .. }
                | Self::Show { .. }
                | Self::Failures { .. }
                | Self::PastEvents { .. }
                | Self::StartCapture { .. }
                | Self::Limits { .. }
                | Self::Share { .. }
                | Self::CheckHandOver { .. }
                | Self::Upgrade { .. }
                | Self::Events {},
                _,
            ) => false,
            (_, reply) => matches!(reply, Reply::Done {}),
        }
    }

    /// Returns `true` if performing this request changes a worker's number of devices.
    pub const fn changes_devices(&self) -> bool {
        matches!(self, Self::Serve { .. } | Self::RemoveDevice { .. } | Self::TakeOver {})
    }

    /// Returns the maximum length in bytes of a reply of a worker with `devices` devices.
    pub const fn max_reply(&self, devices: usize) -> usize {
        match self {
            Self::Status { .. } => MAX_CATALOGUE.saturating_add(MAX_DEVICE_STATUS.saturating_mul(devices)),
            Self::Show { .. } => MAX_OBJECTS,
            Self::Failures { .. } => MAX_FAILURES,
            _ => MAX_PLAIN,
        }
    }
}

/// Reply to a request. `S` is the status of a daemon or of a worker.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply<S = WorkerStatus> {
    /// The status.
    Ok(Box<S>),
    /// Objects as raw JSON, which is passed on without being parsed.
    Objects(Box<RawValue>),
    /// Failed queue pairs.
    Failures(Failures),
    /// Events that have happened.
    PastEvents(Vec<Box<RawValue>>),
    /// A capture follows.
    Capturing {},
    /// Events follow.
    Events {},
    /// Limits of a device.
    Limits(Vec<LimitStatus>),
    /// Share of a device by key.
    Share(BTreeMap<String, String>),
    /// Internal: reasons that prevent a hand-over.
    Obstacles(Vec<String>),
    /// Internal: the devices were handed over.
    Given {
        /// Parts of the old worker's work that end with it, for people.
        ended: Vec<String>,
    },
    /// Result of an upgrade or of its check, by network.
    Upgraded(Vec<Upgraded>),
    /// The request was performed.
    Done {},
    /// The request failed.
    Error(String),
}

/// Result of a network's upgrade: the time during which its guests were not served, or the reason why it was not
/// upgraded. A check has only a reason.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Upgraded {
    /// Name of the network.
    pub network: String,
    /// Time in milliseconds during which its guests were not served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub millis: Option<u64>,
    /// Parts of the old worker's work that have ended with it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ended: Vec<String>,
    /// Reason why the network was not upgraded. Its guests are served as before, unless its worker has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

impl Upgraded {
    /// Returns the result of a network that was not upgraded.
    pub(crate) fn refused(network: &str, problem: &str) -> Self {
        Self { network: network.to_owned(), millis: None, ended: Vec::new(), problem: Some(problem.to_owned()) }
    }
}

/// Prints the results of an upgrade, a line for each network.
pub fn upgraded_lines(upgraded: &[Upgraded]) -> String {
    let lines = |Upgraded { network, millis, ended, problem }: &Upgraded| {
        let result = match problem {
            Some(problem) => format!("network {network}: not upgraded: {}\n", printable_text(problem)),
            None => format!("network {network}: upgraded in {} ms\n", millis.unwrap_or_default()),
        };
        let ended = ended.iter().map(|ended| format!("network {network}: ended: {}\n", printable_text(ended)));
        iter::once(result).chain(ended).collect::<String>()
    };
    upgraded.iter().map(lines).collect()
}

/// Prints the results of an upgrade's check, a line for each network.
pub fn checked_lines(checked: &[Upgraded]) -> String {
    let line = |Upgraded { network, problem, .. }: &Upgraded| match problem {
        Some(problem) => format!("network {network}: cannot be upgraded: {}\n", printable_text(problem)),
        None => format!("network {network}: can be upgraded\n"),
    };
    checked.iter().map(line).collect()
}

impl Reply {
    /// Parses a worker's reply and makes its text printable. Objects are passed through; the client that requested them
    /// makes them printable.
    ///
    /// # Errors
    /// The text is not a reply.
    pub fn parse(body: &RawValue) -> Result<Self, serde_json::Error> {
        let reply = serde_json::from_str(body.get())?;
        // Nearly all replies are printable, so this check avoids a copy.
        if is_printable_json(body.get()) {
            return Ok(reply);
        }
        Ok(match reply {
            Self::Ok(status) => Self::Ok(serde_json::from_value(printable(serde_json::to_value(status)?))?),
            Self::Failures(failures) => {
                Self::Failures(serde_json::from_value(printable(serde_json::to_value(failures)?))?)
            }
            Self::Error(problem) => Self::Error(printable_text(&problem)),
            Self::Limits(limits) => {
                let printed = |limit: LimitStatus| LimitStatus { name: printable_text(&limit.name), ..limit };
                Self::Limits(limits.into_iter().map(printed).collect())
            }
            Self::Share(words) => {
                let printed = words.iter().map(|(key, value)| (printable_text(key), printable_text(value)));
                Self::Share(printed.collect())
            }
            Self::Obstacles(obstacles) => Self::Obstacles(obstacles.iter().map(|text| printable_text(text)).collect()),
            other => other,
        })
    }
}

/// An outgoing message, with the number that links request and reply.
#[derive(Debug, Serialize)]
pub struct Outgoing<'a, T> {
    /// Number of the request.
    pub id: u64,
    /// The content.
    pub body: &'a T,
}

/// A received message. The body is parsed once its type is known.
#[derive(Debug, Deserialize)]
pub struct Incoming<'a> {
    /// Number of the request.
    pub id: u64,
    /// The content.
    #[serde(borrow)]
    pub body: &'a RawValue,
}
