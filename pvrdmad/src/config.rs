//! What to serve: the configuration file, the command line over it, and the checked result.

mod congestion;
mod rules;

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use pvrdma_dev::{DeviceConfig, Limits};
use pvrdma_guest_memory::PinPolicy;
use pvrdma_rxe::Congestion;
use pvrdma_verbs::{GidType, MacAddr};
use serde::de::IntoDeserializer;
use serde::de::value::{Error as ValueError, StrDeserializer};
use serde::{Deserialize, Deserializer, Serialize};
use thiserror::Error;

pub use self::congestion::CongestionSpec;
pub use self::rules::{Forged, Pcp, Switch};
use crate::backend::BackendSpec;
use crate::cli::ServeArgs;
use crate::fault::FaultSpec;
use crate::network::{Learn, LinkSpec, NetworkSpec, TunnelAddress, TunnelKeys};

/// Why there is nothing sensible to serve.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{path}: {source}")]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not what it should be.
    #[error("{path}: {source}")]
    Parse {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: Box<toml::de::Error>,
    },
    /// A device is not described completely or not correctly.
    #[error("device {name}: {problem}")]
    Device {
        /// Which device.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// The parameters of congestion control make no sense.
    #[error("congestion: {0}")]
    Congestion(String),
    /// There is no device.
    #[error("no device: give --device name=NAME,socket=PATH,mac=MAC or a configuration file with [[device]]")]
    Nothing,
}

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

/// A device as the file or the command line describes it, possibly incompletely.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceSpec {
    /// Name in logs and status.
    pub name: String,
    /// Where the VMM connects.
    pub socket: Option<PathBuf>,
    /// Ethernet address of the paired network function.
    #[serde(default, deserialize_with = "mac")]
    pub mac: Option<MacAddr>,
    /// Encapsulation.
    pub roce: Option<Roce>,
    /// Residency of guest memory.
    pub pin: Option<Pin>,
    /// Interface version.
    pub version: Option<u32>,
    /// Whether there is a legacy interrupt.
    pub intx: Option<bool>,
    /// The way to other hosts: `unix:PATH`, `unix-connect:PATH`, `unix-dgram:LOCAL:REMOTE`, `tap:NAME`,
    /// `af_packet:INTERFACE` or
    /// `vxlan:ADDRESS[:PORT]`.
    pub uplink: Option<LinkSpec>,
    /// Other ends of a vxlan uplink, `ADDRESS[:PORT]`. A list in the file, a key that may come again on the command line.
    #[serde(default, rename = "remote")]
    pub remotes: Vec<TunnelAddress>,
    /// Network identifier of a vxlan uplink.
    pub vni: Option<u32>,
    /// What a vxlan uplink learns: `stations` behind the remotes, or also `remotes`.
    pub learn: Option<Learn>,
    /// The link to the paired network function.
    pub nic: Option<LinkSpec>,
    /// Bytes of an IP packet that the network carries.
    pub mtu: Option<u32>,
    /// VLAN of both functions.
    pub vlan: Option<u16>,
    /// Priorities of packets without a VLAN.
    pub pcp: Option<Pcp>,
    /// Forged transmits.
    pub forged: Option<Forged>,
    /// Congestion control, with the parameters of the file.
    pub congestion: Option<Switch>,
    /// What the uplink suffers from, for tests.
    pub fault: Option<FaultSpec>,
    /// Upper limits, in the file only.
    #[serde(default)]
    pub limits: LimitsSpec,
}

fn mac<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<MacAddr>, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

macro_rules! limits {
    ($($field:ident: $kind:ty,)*) => {
        /// Upper limits of a device; what is not given keeps its default.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
        #[serde(deny_unknown_fields)]
        #[expect(missing_docs, reason = "the fields are those of `pvrdma_dev::Limits`")]
        pub struct LimitsSpec {
            $(pub $field: Option<$kind>,)*
        }

        impl LimitsSpec {
            fn resolve(&self) -> Limits {
                let default = Limits::default();
                Limits { $($field: self.$field.unwrap_or(default.$field),)* }
            }
        }
    };
}

limits! {
    max_qp: u32,
    max_qp_wr: u32,
    max_sge: u32,
    max_cq: u32,
    max_cqe: u32,
    max_mr: u32,
    max_mr_size: u64,
    max_pd: u32,
    max_srq: u32,
    max_srq_wr: u32,
    max_uar: u32,
    max_ah: u32,
    gid_table: u32,
    max_extents: u64,
}

/// Keys of `--device`.
const KEYS: &str = "name, socket, mac, roce, pin, version, intx, uplink, remote, vni, learn, nic, mtu, vlan, pcp, forged, \
    congestion, fault";

impl FromStr for DeviceSpec {
    type Err = String;

    /// Parses `key=value,key=value`. Values hold no commas; a path that has one goes into the file.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut spec = Self::named(String::new());
        let mut seen = HashSet::new();
        for part in text.split(',') {
            let (key, value) = part.split_once('=').unwrap_or((part, if part == "intx" { "true" } else { "" }));
            if value.is_empty() {
                return Err(format!("'{part}': expected KEY=VALUE (the keys are {KEYS})"));
            }
            match key {
                "name" => value.clone_into(&mut spec.name),
                "socket" => spec.socket = Some(PathBuf::from(value)),
                "mac" => spec.mac = Some(value.parse()?),
                "roce" => spec.roce = Some(word(key, value)?),
                "pin" => spec.pin = Some(word(key, value)?),
                "version" => {
                    spec.version = Some(value.parse().map_err(|_| format!("version: '{value}' is not a number"))?);
                }
                "intx" => spec.intx = Some(value.parse().map_err(|_| format!("intx: '{value}' is not true or false"))?),
                "uplink" => spec.uplink = Some(value.parse().map_err(|error| format!("uplink: {error}"))?),
                "remote" => spec.remotes.push(value.parse().map_err(|error| format!("remote: {error}"))?),
                "vni" => spec.vni = Some(value.parse().map_err(|_| format!("vni: '{value}' is not a number"))?),
                "learn" => spec.learn = Some(word(key, value)?),
                "nic" => spec.nic = Some(value.parse().map_err(|error| format!("nic: {error}"))?),
                "mtu" => spec.mtu = Some(value.parse().map_err(|_| format!("mtu: '{value}' is not a number"))?),
                "vlan" => spec.vlan = Some(value.parse().map_err(|_| format!("vlan: '{value}' is not a number"))?),
                "pcp" => spec.pcp = Some(word(key, value)?),
                "forged" => spec.forged = Some(word(key, value)?),
                "congestion" => spec.congestion = Some(word(key, value)?),
                "fault" => spec.fault = Some(value.parse().map_err(|error| format!("fault: {error}"))?),
                _ => return Err(format!("unknown key '{key}' (the keys are {KEYS})")),
            }
            if !seen.insert(key) && key != "remote" {
                return Err(format!("'{key}' is given twice"));
            }
        }
        if spec.name.is_empty() {
            return Err("a device needs a name (name=NAME)".to_owned());
        }
        Ok(spec)
    }
}

/// One of a few words.
fn word<'de, T: Deserialize<'de>>(key: &str, value: &'de str) -> Result<T, String> {
    let deserializer: StrDeserializer<'_, ValueError> = value.into_deserializer();
    T::deserialize(deserializer).map_err(|error| format!("{key}: {error}"))
}

impl DeviceSpec {
    fn named(name: String) -> Self {
        Self {
            name,
            socket: None,
            mac: None,
            roce: None,
            pin: None,
            version: None,
            intx: None,
            uplink: None,
            remotes: Vec::new(),
            vni: None,
            learn: None,
            nic: None,
            mtu: None,
            vlan: None,
            pcp: None,
            forged: None,
            congestion: None,
            fault: None,
            limits: LimitsSpec::default(),
        }
    }

    /// Takes what the command line gives.
    fn override_with(&mut self, other: Self) {
        let Self {
            name: _,
            socket,
            mac,
            roce,
            pin,
            version,
            intx,
            uplink,
            remotes,
            vni,
            learn,
            nic,
            mtu,
            vlan,
            pcp,
            forged,
            congestion,
            fault,
            limits: _,
        } = other;
        self.socket = socket.or_else(|| self.socket.take());
        self.mac = mac.or(self.mac);
        self.roce = roce.or(self.roce);
        self.pin = pin.or(self.pin);
        self.version = version.or(self.version);
        self.intx = intx.or(self.intx);
        self.uplink = uplink.or_else(|| self.uplink.take());
        if !remotes.is_empty() {
            self.remotes = remotes;
        }
        self.vni = vni.or(self.vni);
        self.learn = learn.or(self.learn);
        self.nic = nic.or_else(|| self.nic.take());
        self.mtu = mtu.or(self.mtu);
        self.vlan = vlan.or(self.vlan);
        self.pcp = pcp.or(self.pcp);
        self.forged = forged.or(self.forged);
        self.congestion = congestion.or(self.congestion);
        self.fault = fault.or(self.fault);
    }

    fn resolve(self, congestion: Congestion) -> Result<Device, ConfigError> {
        let problem = |problem: String| ConfigError::Device { name: self.name.clone(), problem };
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if self.name.is_empty() || self.name.len() > 32 || !self.name.chars().all(plain) {
            return Err(problem("a name has 1 to 32 letters, digits, '-', '_' or '.'".to_owned()));
        }
        let socket = self.socket.clone().ok_or_else(|| problem("needs a socket (socket=PATH)".to_owned()))?;
        let mac = self.mac.ok_or_else(|| problem("needs an Ethernet address (mac=MAC)".to_owned()))?;
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
        config.intx = self.intx.unwrap_or(false);
        config.limits = self.limits.resolve();
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
}

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

impl From<Pin> for PinPolicy {
    fn from(pin: Pin) -> Self {
        match pin {
            Pin::All => Self::All,
            Pin::Registered => Self::Registered,
            Pin::Off => Self::Off,
        }
    }
}

/// The configuration file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    backend: Option<BackendSpec>,
    control: Option<PathBuf>,
    #[serde(default)]
    congestion: CongestionSpec,
    #[serde(default)]
    device: Vec<DeviceSpec>,
}

/// Everything the daemon needs to know.
#[derive(Clone, Debug)]
pub struct Config {
    /// What carries the traffic.
    pub backend: BackendSpec,
    /// Where to answer questions.
    pub control: Option<PathBuf>,
    /// At least one.
    pub devices: Vec<Device>,
}

impl Config {
    /// Reads the file, if there is one, and puts the command line over it.
    ///
    /// # Errors
    /// The file or a device is wrong.
    pub fn load(args: ServeArgs) -> Result<Self, ConfigError> {
        let file = args.config.as_deref().map_or_else(|| Ok(File::default()), read)?;
        Self::merge(file, args)
    }

    fn merge(file: File, args: ServeArgs) -> Result<Self, ConfigError> {
        let congestion = file.congestion.resolve().map_err(ConfigError::Congestion)?;
        let mut specs = file.device;
        unique(&specs, |spec| spec.name.clone(), "the name is taken")?;
        unique(&args.devices, |spec| spec.name.clone(), "the name is taken")?;
        for spec in args.devices {
            match specs.iter_mut().find(|known| known.name == spec.name) {
                Some(known) => known.override_with(spec),
                None => specs.push(spec),
            }
        }
        unique(&specs, |spec| spec.socket.clone(), "another device has the same socket")?;
        unique(&specs, |spec| spec.mac, "another device has the same MAC address")?;
        let devices = specs.into_iter().map(|spec| spec.resolve(congestion)).collect::<Result<Vec<_>, _>>()?;
        let backend = args.backend.or(file.backend).unwrap_or_default();
        if let (BackendSpec::Ibverbs(_), Some(device)) =
            (&backend, devices.iter().find(|device| device.network.is_some()))
        {
            let problem = "uplink and nic belong to the backend rxe; with ibverbs the host's adapter is the network";
            return Err(ConfigError::Device { name: device.config.name.clone(), problem: problem.to_owned() });
        }
        if devices.is_empty() {
            return Err(ConfigError::Nothing);
        }
        Ok(Self { backend, control: args.control.or(file.control), devices })
    }
}

fn read(path: &Path) -> Result<File, ConfigError> {
    let text = fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    toml::from_str(&text).map_err(|source| ConfigError::Parse { path: path.to_owned(), source: Box::new(source) })
}

fn unique<K: Eq + std::hash::Hash>(
    specs: &[DeviceSpec],
    key: impl Fn(&DeviceSpec) -> K,
    problem: &str,
) -> Result<(), ConfigError> {
    let mut seen = HashSet::new();
    match specs.iter().find(|spec| !seen.insert(key(spec))) {
        Some(spec) => Err(ConfigError::Device { name: spec.name.clone(), problem: problem.to_owned() }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
