//! The backend `rxe`: the software adapter.

use super::settings::{About, Settings};
use crate::config::error::ConfigError;
use crate::config::network::Network;
use crate::sandbox::Profile;

/// Description.
pub(super) const ABOUT: About = About {
    name: "rxe",
    syntax: "rxe",
    help: "the software adapter, which is the default",
    section: "\
`rxe` is the software adapter: it copies data between guests of one daemon, and sends RoCE packets
over an uplink. It has no keys.
",
    keys: &[],
};

/// The software adapter, which has no settings.
pub(super) struct Software;

/// Checks that there are no keys.
///
/// # Errors
/// There are.
pub(super) fn parse(keys: Option<&str>) -> Result<(), String> {
    match keys {
        None => Ok(()),
        Some(_) => Err("the backend rxe has no options".to_owned()),
    }
}

impl Settings for Software {
    fn describe(&self) -> String {
        "rxe".to_owned()
    }

    fn check(&self, networks: &[Network]) -> Result<(), ConfigError> {
        let mut devices = networks.iter().flat_map(|network| &network.devices);
        match devices.find(|device| !device.config.rules.listen.is_empty()) {
            Some(device) => Err(ConfigError::Device {
                name: device.config.name.clone(),
                problem: "cm-listen belongs to the backend ibverbs with cm=host; here peers reach all ports".to_owned(),
            }),
            None => Ok(()),
        }
    }

    fn profile(&self, addressed: bool) -> Profile {
        if addressed { Profile::RxeAddressed } else { Profile::Rxe }
    }
}
