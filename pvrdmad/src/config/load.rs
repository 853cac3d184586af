//! Loads the configuration file, applies the command line, and checks the result.

use std::collections::HashSet;
use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::marker::PhantomData;
use std::path::Path;

use pvrdma_roce::Congestion;
use serde::de::{self, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use toml::Spanned;

use super::backend::BackendSpec;
use super::congestion::CongestionSpec;
use super::control::{ControlSpec, path_or_table};
use super::device::Device;
use super::error::ConfigError;
use super::keys::{Keys, similar, word};
use super::metrics::MetricsSpec;
use super::network::Network;
use super::spec::{DeviceSpec, NetworkSpec, is_of_networks};
use super::words::{Isolate, SandboxMode, Switch};

/// File name that means standard input.
pub const STANDARD_INPUT: &str = "-";

/// Maximum size in bytes of a configuration on standard input, whose length is not known in advance.
const MAX_FILE: u64 = 16 << 20;

/// Values from the file, or from the command line.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfigSpec {
    /// The adapter that carries the traffic.
    #[serde(default, deserialize_with = "word")]
    pub backend: Option<BackendSpec>,
    /// The control socket.
    #[serde(default, deserialize_with = "path_or_table")]
    pub control: Option<ControlSpec>,
    /// The metrics server.
    #[serde(default, deserialize_with = "word")]
    pub metrics: Option<MetricsSpec>,
    /// Units that get a process of their own.
    pub isolate: Option<Isolate>,
    /// Confinement of these processes.
    pub sandbox: Option<SandboxMode>,
    /// Permission to capture packets.
    pub captures: Option<Switch>,
    /// Parameters of congestion control, in the file only.
    #[serde(default)]
    pub congestion: CongestionSpec,
    /// Networks, possibly incomplete.
    #[serde(default, rename = "network", deserialize_with = "networks")]
    pub networks: Vec<NetworkSpec>,
    /// Devices, possibly incomplete.
    #[serde(default, rename = "device", deserialize_with = "devices")]
    pub devices: Vec<DeviceSpec>,
}

/// Complete configuration of the daemon. It is sent between processes of the daemon.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Config {
    /// The adapter that carries the traffic.
    pub backend: BackendSpec,
    /// The control socket.
    pub control: Option<ControlSpec>,
    /// The metrics server.
    pub metrics: Option<MetricsSpec>,
    /// Units that get a process of their own.
    pub isolate: Isolate,
    /// Confinement of these processes.
    pub sandbox: SandboxMode,
    /// Permits captures of packets.
    pub captures: Switch,
    /// Parameters of congestion control for devices that are added later.
    pub congestion: Congestion,
    /// The line rate among them was configured. Otherwise the line rate of each network is used where it is known.
    pub line_rate_given: bool,
    /// Networks with their devices. At the start, there is at least one device.
    pub networks: Vec<Network>,
}

impl Config {
    /// Reads the file, if there is one, and overrides it with the command line.
    ///
    /// # Errors
    /// The file, a network or a device is invalid.
    pub fn load(file: Option<&Path>, command_line: ConfigSpec) -> Result<Self, ConfigError> {
        let Some(path) = file else { return Self::merge(ConfigSpec::default(), command_line) };
        let text = read(path)?;
        let spec = parse(path, &text)?;
        let overridden: Vec<_> = command_line.devices.iter().map(|device| device.name.clone()).collect();
        Self::merge(spec, command_line).map_err(|error| match error {
            // The error may come from the command line, so it names no line of the file.
            ConfigError::Device { name, problem } if overridden.contains(&name) => {
                ConfigError::Device { name, problem }
            }
            error => match line(&text, &error) {
                Some(line) => ConfigError::Parse { path: path.to_owned(), problem: format!("line {line}: {error}") },
                None => error,
            },
        })
    }

    /// Adds a complete device to an existing network.
    ///
    /// # Errors
    /// The device conflicts with the configuration. Nothing has changed in that case.
    pub(crate) fn adopt_device(&mut self, network: &str, device: Device) -> Result<(), ConfigError> {
        let mut changed = self.clone();
        let found = changed.networks.iter_mut().find(|known| known.name == network);
        let Some(network) = found else {
            let problem = format!("there is no network '{network}'");
            return Err(ConfigError::Device { name: device.config.name, problem });
        };
        network.devices.push(device);
        changed.check()?;
        *self = changed;
        Ok(())
    }

    /// Adds a complete network without its devices.
    ///
    /// # Errors
    /// The network conflicts with the configuration. Nothing has changed in that case.
    pub(crate) fn adopt_network(&mut self, network: &Network) -> Result<(), ConfigError> {
        let mut changed = self.clone();
        changed.networks.push(Network { devices: Vec::new(), ..network.clone() });
        changed.check()?;
        *self = changed;
        Ok(())
    }

    /// Returns all devices, each with its network.
    pub fn devices(&self) -> impl Iterator<Item = (&Network, &Device)> {
        self.networks.iter().flat_map(|network| network.devices.iter().map(move |device| (network, device)))
    }

    pub(super) fn merge(file: ConfigSpec, command_line: ConfigSpec) -> Result<Self, ConfigError> {
        let taken = "the name is taken";
        let network = |name, problem: &str| ConfigError::Network { name, problem: problem.to_owned() };
        let networks = overlay(file.networks, command_line.networks, |network| &network.name)
            .map_err(|name| network(name, taken))?;
        let devices = overlay(file.devices, command_line.devices, |device| &device.name)
            .map_err(|name| ConfigError::Device { name, problem: taken.to_owned() })?;
        if devices.is_empty() {
            return Err(ConfigError::Nothing);
        }
        let mut config = Self {
            backend: command_line.backend.or(file.backend).unwrap_or_default(),
            control: command_line.control.or(file.control),
            metrics: command_line.metrics.or(file.metrics),
            isolate: command_line.isolate.or(file.isolate).unwrap_or_default(),
            sandbox: command_line.sandbox.or(file.sandbox).unwrap_or_default(),
            captures: command_line.captures.or(file.captures).unwrap_or(Switch::On),
            congestion: file.congestion.resolve().map_err(ConfigError::Congestion)?,
            line_rate_given: file.congestion.line_rate_mbps.is_some(),
            networks: networks.into_iter().map(NetworkSpec::resolve).collect::<Result<_, _>>()?,
        };
        for device in devices {
            config.place(device)?;
        }
        config.check()?;
        Ok(config)
    }
}

/// Overrides entries of the file with those of the command line that have the same name.
///
/// # Errors
/// One of the sources contains this name twice.
fn overlay<T: Keys>(file: Vec<T>, command_line: Vec<T>, name: fn(&T) -> &String) -> Result<Vec<T>, String> {
    let mut all: Vec<T> = Vec::new();
    for source in [file, command_line] {
        let mut seen = HashSet::new();
        for spec in source {
            if !seen.insert(name(&spec).clone()) {
                return Err(name(&spec).clone());
            }
            match all.iter_mut().find(|known| name(known) == name(&spec)) {
                Some(known) => known.override_with(spec),
                None => all.push(spec),
            }
        }
    }
    Ok(all)
}

/// Reads standard input to its end.
fn from_standard_input() -> io::Result<String> {
    let mut text = String::new();
    io::stdin().take(MAX_FILE.saturating_add(1)).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_FILE {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    Ok(text)
}

fn read(path: &Path) -> Result<String, ConfigError> {
    let text = if path == Path::new(STANDARD_INPUT) { from_standard_input() } else { fs::read_to_string(path) };
    text.map_err(|source| ConfigError::Read { path: path.to_owned(), source })
}

pub(super) fn parse(path: &Path, text: &str) -> Result<ConfigSpec, ConfigError> {
    toml::from_str(text).map_err(|error| {
        let hint = hint(error.message()).unwrap_or_default();
        ConfigError::Parse { path: path.to_owned(), problem: format!("{error}{hint}").trim_end().to_owned() }
    })
}

/// Positions of tables in the file.
#[derive(Deserialize)]
struct Places {
    #[serde(default)]
    network: Vec<Spanned<Named>>,
    #[serde(default)]
    device: Vec<Spanned<Named>>,
    congestion: Option<Spanned<IgnoredAny>>,
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

/// Returns the line at which the file describes the object of an error.
fn line(text: &str, error: &ConfigError) -> Option<usize> {
    let places: Places = toml::from_str(text).ok()?;
    // If two tables have the same name, the error refers to the second.
    let last = |tables: &[Spanned<Named>], name: &str| {
        tables.iter().rfind(|table| table.get_ref().name == name).map(Spanned::span)
    };
    let span = match error {
        ConfigError::Device { name, .. } => last(&places.device, name),
        ConfigError::Network { name, .. } => last(&places.network, name),
        ConfigError::Congestion(_) => places.congestion.as_ref().map(Spanned::span),
        _ => None,
    };
    let before = text.get(..span?.start)?;
    Some(before.matches('\n').count().saturating_add(1))
}

/// Returns advice about an unknown key, from serde's message: "unknown field `sock`, expected one of `name`, `socket`".
fn hint(message: &str) -> Option<String> {
    let mut words = message.strip_prefix("unknown field ")?.split('`').skip(1).step_by(2);
    let unknown = words.next()?;
    if is_of_networks(unknown) {
        return Some(format!(
            "`{unknown}` is a key of a network: write it in a [[network]] with a name, and network = \"NAME\" at the device"
        ));
    }
    similar(unknown, words).map(|word| format!("did you mean `{word}`?"))
}

fn networks<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<NetworkSpec>, D::Error> {
    deserializer.deserialize_any(Tables { written: "[[network]]", kind: PhantomData })
}

fn devices<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<DeviceSpec>, D::Error> {
    deserializer.deserialize_any(Tables { written: "[[device]]", kind: PhantomData })
}

/// An array of tables, with an explanation if it is written as a single table.
struct Tables<T> {
    written: &'static str,
    kind: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for Tables<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, with double brackets", self.written)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Self::Value, A::Error> {
        let mut tables = Vec::new();
        while let Some(table) = sequence.next_element()? {
            tables.push(table);
        }
        Ok(tables)
    }

    fn visit_map<A: MapAccess<'de>>(self, _map: A) -> Result<Self::Value, A::Error> {
        Err(de::Error::custom(format!("it is written as {}, with double brackets", self.written)))
    }
}
