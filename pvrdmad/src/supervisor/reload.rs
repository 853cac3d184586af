//! Applies a configuration file that was read again.
//!
//! Additions come first, since only they can fail: after a failure they are undone, and nothing has changed. Removals
//! come last. A different description of a running device or network is refused, since applying it would take the
//! device away from its VM. Settings of the whole daemon cannot change either. Devices that were added at run time
//! stay.

use super::{Changes, Supervisor};
use crate::config::{Config, Device, Network};

/// Changes to be made.
#[derive(Debug, Default)]
struct Difference<'a> {
    networks: Vec<&'a Network>,
    devices: Vec<(&'a Network, &'a Device)>,
    gone_devices: Vec<&'a str>,
    gone_networks: Vec<&'a str>,
}

impl Supervisor {
    /// Replaces the devices and networks of the configuration that was loaded last with those of `new`.
    ///
    /// # Errors
    /// Resources are unavailable, or a setting changed that is fixed while the daemon runs. Nothing has changed in that
    /// case.
    pub(crate) fn reload(&self, new: &Config) -> Result<Changes, String> {
        let _change = self.change()?;
        let mut loaded = self.loaded.lock();
        let changes = self.change_to(&loaded, new)?;
        *loaded = new.clone();
        Ok(changes)
    }

    fn change_to(&self, old: &Config, new: &Config) -> Result<Changes, String> {
        let running = self.config.lock().clone();
        let difference = Difference::between(old, &running, new)?;
        let mut changes = Changes::default();
        let mut networks = Vec::new();
        if let Err(problem) = self.add_new(&difference, &mut changes, &mut networks) {
            // Undone in reverse order.
            for name in changes.added.iter().rev() {
                // If the worker does not confirm this, its part of the device ends when it resumes or exits.
                let _ = self.remove(name);
            }
            networks.iter().for_each(|name| self.end_empty(name));
            return Err(problem);
        }
        for name in &difference.gone_devices {
            changes.problems.extend(self.remove(name).err());
            changes.removed.push((*name).to_owned());
        }
        difference.gone_networks.iter().for_each(|name| self.end_empty(name));
        Ok(changes)
    }

    fn add_new(
        &self,
        difference: &Difference<'_>,
        changes: &mut Changes,
        networks: &mut Vec<String>,
    ) -> Result<(), String> {
        for network in &difference.networks {
            let empty = Network { devices: Vec::new(), ..(*network).clone() };
            let config = {
                let mut config = self.config.lock();
                config.adopt_network(&empty).map_err(|error| error.to_string())?;
                config.clone()
            };
            networks.push(network.name.clone());
            self.begin(&config, &empty, false).map_err(|problem| format!("network {}: {problem}", network.name))?;
        }
        for (network, device) in &difference.devices {
            let name = &device.config.name;
            let adopt = |config: &mut Config| {
                config.adopt_device(&network.name, (*device).clone()).map_err(|error| error.to_string())
            };
            self.serve(self.reserve(name, false, adopt)?)?;
            changes.added.push(name.clone());
        }
        Ok(())
    }

    /// Ends a network if it has no devices.
    fn end_empty(&self, name: &str) {
        let mut config = self.config.lock();
        let mut networks = self.networks.write();
        let is_empty = |network: &super::Network| network.name() == name && network.devices().is_empty();
        // The worker ends when the last reference to its network is dropped.
        let ended: Vec<_> = networks.extract_if(.., |network| is_empty(network)).collect();
        let runs = networks.iter().any(|network| network.name() == name);
        config.networks.retain(|network| network.name != name || runs || !network.devices.is_empty());
        drop((networks, config));
        drop(ended);
    }
}

impl<'a> Difference<'a> {
    /// # Errors
    /// A running network or device is described differently.
    fn between(old: &'a Config, running: &Config, new: &'a Config) -> Result<Self, String> {
        check_fixed(old, new)?;
        let mut difference = Self::default();
        for network in &new.networks {
            match running.networks.iter().find(|known| known.name == network.name) {
                None => difference.networks.push(network),
                Some(known) if known.has_settings_of(network) => {}
                Some(_) => return Err(format!("network {}: {LATER}", network.name)),
            }
        }
        for (network, device) in new.devices() {
            let name = &device.config.name;
            match running.devices().find(|(_, known)| known.config.name == *name) {
                None => difference.devices.push((network, device)),
                Some((of, known)) if of.name == network.name && is_same(known, device) => {}
                Some(_) => return Err(format!("device {name}: {LATER}")),
            }
        }
        let runs = |name: &str| running.devices().any(|(_, known)| known.config.name == name);
        let stays = |name: &str| new.devices().any(|(_, device)| device.config.name == name);
        let devices = old.devices().map(|(_, device)| device.config.name.as_str());
        difference.gone_devices = devices.filter(|name| runs(name) && !stays(name)).collect();
        let networks = old.networks.iter().map(|network| network.name.as_str());
        let stays = |name: &str| new.networks.iter().any(|network| network.name == name);
        difference.gone_networks = networks.filter(|name| !stays(name)).collect();
        Ok(difference)
    }
}

/// Advice about running networks and devices that are described differently.
const LATER: &str = "it runs and is described differently: take it out of the file, reload, and put it in again, or \
                     restart the daemon";

/// Returns `true` if two devices are described alike. The line rate is not compared: it may have been read from an
/// interface when the device was added, and a configured one is fixed ([`check_fixed`]).
fn is_same(running: &Device, new: &Device) -> bool {
    let mut new = new.clone();
    if let (Some(old), Some(new)) = (&running.rules.congestion, &mut new.rules.congestion) {
        (new.line_rate, new.min_rate) = (old.line_rate, old.min_rate);
    }
    *running == new
}

/// # Errors
/// A setting differs that is fixed while the daemon runs.
fn check_fixed(old: &Config, new: &Config) -> Result<(), String> {
    let differs = [
        ("backend", old.backend != new.backend),
        ("control", old.control != new.control),
        ("metrics", old.metrics != new.metrics),
        ("isolate", old.isolate != new.isolate),
        ("sandbox", old.sandbox != new.sandbox),
        ("captures", old.captures != new.captures),
        ("congestion", (old.congestion, old.line_rate_given) != (new.congestion, new.line_rate_given)),
    ];
    match differs.into_iter().find(|(_, differs)| *differs) {
        Some((key, _)) => Err(format!("{key}: it cannot change while the daemon runs: restart it")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ConfigSpec;

    /// An interface that has become faster since the start is no reason to refuse an unchanged file.
    #[test]
    fn another_line_rate_is_no_difference() {
        let config = |keys: &str| {
            let device = format!("name=a,socket=/a,mac=52:54:00:00:00:01{keys}").parse().unwrap();
            let network = "name=default,uplink=unix:/n".parse().unwrap();
            let spec = ConfigSpec { networks: vec![network], devices: vec![device], ..ConfigSpec::default() };
            Config::load(None, spec).unwrap()
        };
        let (old, mut new) = (config(""), config(""));
        for congestion in new.networks[0].devices[0].rules.congestion.iter_mut() {
            congestion.line_rate *= 2;
        }
        assert_ne!(old, new);
        assert!(Difference::between(&old, &old, &new).is_ok_and(|difference| difference.devices.is_empty()));
        assert!(Difference::between(&old, &old, &config(",congestion=off")).is_err());
    }
}
