//! The configuration file, the command line over it, and the checked result.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use serde::de::{self, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::backend::BackendSpec;
use super::congestion::CongestionSpec;
use super::device::Device;
use super::error::ConfigError;
use super::keys::{Keys, similar};
use super::spec::DeviceSpec;

/// What the file gives, or the command line.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfigSpec {
    /// What carries the traffic.
    pub backend: Option<BackendSpec>,
    /// Where to answer questions.
    pub control: Option<PathBuf>,
    /// Parameters of congestion control, in the file only.
    #[serde(default)]
    pub congestion: CongestionSpec,
    /// Devices, possibly incomplete.
    #[serde(default, rename = "device", deserialize_with = "devices")]
    pub devices: Vec<DeviceSpec>,
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
    pub fn load(file: Option<&Path>, command_line: ConfigSpec) -> Result<Self, ConfigError> {
        let file = file.map_or_else(|| Ok(ConfigSpec::default()), read)?;
        Self::merge(file, command_line)
    }

    pub(super) fn merge(file: ConfigSpec, command_line: ConfigSpec) -> Result<Self, ConfigError> {
        let congestion = file.congestion.resolve().map_err(ConfigError::Congestion)?;
        let control = command_line.control.or(file.control);
        let mut specs = file.devices;
        names(&specs)?;
        names(&command_line.devices)?;
        for spec in command_line.devices {
            match specs.iter_mut().find(|known| known.name == spec.name) {
                Some(known) => known.override_with(spec),
                None => specs.push(spec),
            }
        }
        let devices = specs.into_iter().map(|spec| spec.resolve(congestion)).collect::<Result<Vec<_>, _>>()?;
        let backend = command_line.backend.or(file.backend).unwrap_or_default();
        if let (BackendSpec::Ibverbs(_), Some(device)) =
            (&backend, devices.iter().find(|device| device.network.is_some()))
        {
            let problem = "uplink and nic belong to the backend rxe; with ibverbs the host's adapter is the network";
            return Err(ConfigError::Device { name: device.config.name.clone(), problem: problem.to_owned() });
        }
        if devices.is_empty() {
            return Err(ConfigError::Nothing);
        }
        addresses(&devices)?;
        sockets(&devices, control.as_deref())?;
        Ok(Self { backend, control, devices })
    }
}

fn read(path: &Path) -> Result<ConfigSpec, ConfigError> {
    let text = fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    toml::from_str(&text).map_err(|error| {
        let hint = hint(error.message()).map_or_else(String::new, |word| format!("did you mean `{word}`?"));
        ConfigError::Parse { path: path.to_owned(), problem: format!("{error}{hint}").trim_end().to_owned() }
    })
}

/// The key that was probably meant, from serde's words: "unknown field `sock`, expected one of `name`, `socket`".
fn hint(message: &str) -> Option<&str> {
    let mut words = message.strip_prefix("unknown field ")?.split('`').skip(1).step_by(2);
    similar(words.next()?, words)
}

/// Devices of one source have names of their own.
fn names(specs: &[DeviceSpec]) -> Result<(), ConfigError> {
    let mut seen = HashSet::new();
    match specs.iter().find(|spec| !seen.insert(&spec.name)) {
        Some(spec) => Err(ConfigError::Device { name: spec.name.clone(), problem: "the name is taken".to_owned() }),
        None => Ok(()),
    }
}

/// Each device has an address of its own.
fn addresses(devices: &[Device]) -> Result<(), ConfigError> {
    let mut seen = HashMap::new();
    for Device { config, .. } in devices {
        if let Some(other) = seen.insert(config.mac, &config.name) {
            let problem = format!("device {other} has the same MAC address {}", config.mac);
            return Err(ConfigError::Device { name: config.name.clone(), problem });
        }
    }
    Ok(())
}

/// Each socket that the daemon makes has a place of its own.
fn sockets(devices: &[Device], control: Option<&Path>) -> Result<(), ConfigError> {
    let mut seen: HashMap<PathBuf, String> =
        control.map(|path| (place(path), "the control socket".to_owned())).into_iter().collect();
    for device in devices {
        let name = &device.config.name;
        let network = device.network.as_ref();
        let uplink = network.and_then(|network| network.uplink.socket());
        let nic = network.and_then(|network| network.nic.as_ref()?.socket());
        for (what, path) in [("socket", Some(device.socket.as_path())), ("uplink", uplink), ("nic", nic)] {
            let Some(path) = path else { continue };
            if let Some(other) = seen.insert(place(path), format!("the {what} of device {name}")) {
                let problem = format!("{what} {} is also {other}", path.display());
                return Err(ConfigError::Device { name: name.clone(), problem });
            }
        }
    }
    Ok(())
}

/// The same for all names of a place: its folder without links and dots, if that exists.
fn place(path: &Path) -> PathBuf {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    match (folder.canonicalize(), path.file_name()) {
        (Ok(folder), Some(name)) => folder.join(name),
        _ => path.to_owned(),
    }
}

/// Devices, with a word for whoever writes them as one.
fn devices<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<DeviceSpec>, D::Error> {
    struct Devices;

    impl<'de> Visitor<'de> for Devices {
        type Value = Vec<DeviceSpec>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("[[device]], with double brackets")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Self::Value, A::Error> {
            let mut devices = Vec::new();
            while let Some(device) = sequence.next_element()? {
                devices.push(device);
            }
            Ok(devices)
        }

        fn visit_map<A: MapAccess<'de>>(self, _map: A) -> Result<Self::Value, A::Error> {
            Err(de::Error::custom("a device is written as [[device]], with double brackets"))
        }
    }

    deserializer.deserialize_any(Devices)
}
