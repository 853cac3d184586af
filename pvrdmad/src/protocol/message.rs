//! What is asked of a daemon and of a network, and what is said to it.

use std::collections::BTreeMap;

use pvrdma_dev::{LimitStatus, ObjectKind};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::text::{is_printable_json, printable, printable_text};
use crate::config::{BackendSpec, Device, FaultWord, LinkState, Network, SandboxMode};
use crate::doorbells::DoorbellSetup;
use crate::logging::LogFilter;
use crate::status::WorkerStatus;

/// Version of the requests. A worker of another one refuses [`Request::Hello`]; a daemon of another one says so.
pub const VERSION: u32 = 2;

/// How the interface of an uplink is, as far as links of devices follow it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Carrier {
    /// Links are up only if this is.
    pub state: LinkState,
    /// Bytes of an IP packet that it carries. None: nobody sees it, or it is not there.
    pub mtu: Option<u32>,
}

/// Longest reply without content, in bytes.
const MAX_PLAIN: usize = 16 << 10;
/// Longest status of a network without devices: it may describe its counters.
const MAX_CATALOGUE: usize = 64 << 10;
/// Bytes that the status of a device may have.
const MAX_DEVICE_STATUS: usize = 64 << 10;
/// Bytes that the objects of a device may have.
const MAX_OBJECTS: usize = 64 << 20;

/// What is asked. Those marked *internal* are for workers alone; the control socket refuses them.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// What the daemon does, or the network.
    Status {
        /// Kind, unit and meaning of all counters as well.
        #[serde(default)]
        describe: bool,
    },
    /// The objects of a device.
    Show {
        /// Which device.
        device: String,
        /// Which objects.
        object: ObjectKind,
    },
    /// What goes over a device. To a worker the connection of whoever asks comes as a descriptor; the worker says
    /// [`Reply::Capturing`] to it by itself.
    Capture {
        /// Which device.
        device: String,
        /// Bytes of a frame that are kept.
        #[serde(default)]
        snaplen: Option<u32>,
    },
    /// One more device, for as long as the daemon runs. A worker gets [`Self::Serve`] for it.
    AddDevice {
        /// What `--device` takes: `key=value,key=value`.
        device: String,
    },
    /// A device ends: its client is disconnected, and its socket goes away.
    RemoveDevice {
        /// Which device.
        device: String,
    },
    /// Takes the link of a device up or down.
    Link {
        /// Which device.
        device: String,
        /// How it is from now on.
        state: LinkState,
    },
    /// Sets limits of a device, and says what they are.
    Limits {
        /// Which device.
        device: String,
        /// New values by name; the others stay.
        #[serde(default)]
        set: BTreeMap<String, u64>,
    },
    /// Sets what a device may use of what it shares with others, and says what that is.
    Share {
        /// Which device.
        device: String,
        /// New values by key, `off` for none; the others stay.
        #[serde(default)]
        set: BTreeMap<String, String>,
    },
    /// Has the uplink of a network suffer faults, or none any more.
    Fault {
        /// Which network.
        network: String,
        /// What `fault` of a network takes, or `off`.
        fault: FaultWord,
    },
    /// Sets what is logged.
    LogLevel {
        /// A level, or what `RUST_LOG` takes.
        level: LogFilter,
    },
    /// All that happens from now on. The connection is for that alone then.
    Events {},
    /// Internal: the first request. Descriptors: the socket of [`super::HostRequest`]s, then those of the uplink.
    Hello {
        /// [`VERSION`].
        version: u32,
        /// Which network.
        network: Box<NetworkSetup>,
    },
    /// Internal: how the interface of the uplink is. Links of devices are up only if that is.
    Carrier {
        /// How it is from now on.
        carrier: Carrier,
    },
    /// Internal: a device to serve. Descriptors: its listening socket; if its doorbell pages are mapped, the connection
    /// to the kernel, their file and, if somebody guards them, what ends with whoever serves them; then those of its
    /// `nic` or its `nic-socket`.
    Serve {
        /// Everything about it.
        device: Box<Device>,
        /// How the administrator has its link.
        link: LinkState,
        /// What becomes of its doorbells.
        #[serde(default)]
        doorbells: DoorbellSetup,
    },
}

/// What a worker is for.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NetworkSetup {
    /// What carries the traffic.
    pub backend: BackendSpec,
    /// How the worker confines itself.
    pub sandbox: SandboxMode,
    /// Each device has a process that receives its clients' descriptors.
    pub keepers: bool,
    /// Captures are answered.
    pub captures: bool,
    /// Threads of the software adapter's engine. The supervisor counts the processors that it may use: a worker in its
    /// sandbox cannot read the quota of its control group.
    pub engine_threads: usize,
    /// The network; its devices come one by one.
    pub network: Network,
}

impl Request {
    /// A request in a line of the control socket: an object with its members and, if it says so, the version that it is
    /// of.
    ///
    /// # Errors
    /// It is none, or one for workers alone.
    pub fn parse_line(line: &[u8]) -> Result<Self, String> {
        let wrong = |error: serde_json::Error| printable_text(&error.to_string());
        let mut members: Map<String, Value> = serde_json::from_slice(line).map_err(wrong)?;
        if let Some(version) = members.remove("version").filter(|version| *version != VERSION) {
            return Err(printable_text(&format!("this daemon speaks version {VERSION}, not {version}")));
        }
        let request: Self = serde_json::from_value(Value::Object(members)).map_err(wrong)?;
        if request.is_internal() { Err("not on this socket".to_owned()) } else { Ok(request) }
    }

    /// Returns `true` if only a supervisor may ask this.
    pub const fn is_internal(&self) -> bool {
        match self {
            Self::Status { .. }
            | Self::Show { .. }
            | Self::Capture { .. }
            | Self::AddDevice { .. }
            | Self::RemoveDevice { .. }
            | Self::Link { .. }
            | Self::Limits { .. }
            | Self::Share { .. }
            | Self::Fault { .. }
            | Self::LogLevel { .. }
            | Self::Events {} => false,
            Self::Hello { .. } | Self::Carrier { .. } | Self::Serve { .. } => true,
        }
    }

    /// Returns `true` if `reply` is one to this request. An error always is.
    pub const fn is_answered_by<S>(&self, reply: &Reply<S>) -> bool {
        match (self, reply) {
            (_, Reply::Error(_))
            | (Self::Status { .. }, Reply::Ok(_))
            | (Self::Show { .. }, Reply::Objects(_))
            | (Self::Capture { .. }, Reply::Capturing {})
            | (Self::Events {}, Reply::Events {})
            | (Self::Limits { .. }, Reply::Limits(_))
            | (Self::Share { .. }, Reply::Share(_)) => true,
            (
                Self::Status { .. }
                | Self::Show { .. }
                | Self::Capture { .. }
                | Self::Limits { .. }
                | Self::Share { .. }
                | Self::Events {},
                _,
            ) => false,
            (_, reply) => matches!(reply, Reply::Done {}),
        }
    }

    /// Returns `true` if a worker that does this has another number of devices afterwards.
    pub const fn changes_devices(&self) -> bool {
        matches!(self, Self::Serve { .. } | Self::RemoveDevice { .. })
    }

    /// Bytes of the longest reply that a worker with so many devices has to this.
    pub const fn max_reply(&self, devices: usize) -> usize {
        match self {
            Self::Status { .. } => MAX_CATALOGUE.saturating_add(MAX_DEVICE_STATUS.saturating_mul(devices)),
            Self::Show { .. } => MAX_OBJECTS,
            _ => MAX_PLAIN,
        }
    }
}

/// What is said to a request; `S` is the status, of a daemon or of a worker.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply<S = WorkerStatus> {
    /// The status.
    Ok(Box<S>),
    /// Objects as data. Nobody on the way takes them apart.
    Objects(Box<RawValue>),
    /// A capture follows.
    Capturing {},
    /// Events follow.
    Events {},
    /// Limits of a device.
    Limits(Vec<LimitStatus>),
    /// What a device may use, by key.
    Share(BTreeMap<String, String>),
    /// As asked.
    Done {},
    /// Not as asked.
    Error(String),
}

impl Reply {
    /// What a worker says, as it may be shown. Objects stay as they are: who asks for them makes them printable.
    ///
    /// # Errors
    /// It is no reply.
    pub fn parse(body: &RawValue) -> Result<Self, serde_json::Error> {
        let reply = serde_json::from_str(body.get())?;
        // Nearly all are.
        if is_printable_json(body.get()) {
            return Ok(reply);
        }
        Ok(match reply {
            Self::Ok(status) => Self::Ok(serde_json::from_value(printable(serde_json::to_value(status)?))?),
            Self::Error(problem) => Self::Error(printable_text(&problem)),
            Self::Limits(limits) => {
                let printed = |limit: LimitStatus| LimitStatus { name: printable_text(&limit.name), ..limit };
                Self::Limits(limits.into_iter().map(printed).collect())
            }
            Self::Share(words) => {
                let printed = words.iter().map(|(key, value)| (printable_text(key), printable_text(value)));
                Self::Share(printed.collect())
            }
            other => other,
        })
    }
}

/// A message that is sent, with the number by which its reply is found.
#[derive(Debug, Serialize)]
pub struct Outgoing<'a, T> {
    /// Of the request.
    pub id: u64,
    /// What is said.
    pub body: &'a T,
}

/// A message that came. Its body is looked at when it is known what it may be.
#[derive(Debug, Deserialize)]
pub struct Incoming<'a> {
    /// Of the request.
    pub id: u64,
    /// What is said.
    #[serde(borrow)]
    pub body: &'a RawValue,
}
