//! The configuration file, the command line over it, and the checked result.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::backend::BackendSpec;
use super::congestion::CongestionSpec;
use super::device::Device;
use super::error::ConfigError;
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
    #[serde(default, rename = "device")]
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
        let mut specs = file.devices;
        unique(&specs, |spec| spec.name.clone(), "the name is taken")?;
        unique(&command_line.devices, |spec| spec.name.clone(), "the name is taken")?;
        for spec in command_line.devices {
            match specs.iter_mut().find(|known| known.name == spec.name) {
                Some(known) => known.override_with(spec),
                None => specs.push(spec),
            }
        }
        unique(&specs, |spec| spec.socket.clone(), "another device has the same socket")?;
        unique(&specs, |spec| spec.mac, "another device has the same MAC address")?;
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
        Ok(Self { backend, control: command_line.control.or(file.control), devices })
    }
}

fn read(path: &Path) -> Result<ConfigSpec, ConfigError> {
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
