//! Assigns devices to networks, and checks that networks and devices are consistent.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use pvrdma_ether_link::link_spec::LinkSpec;
use pvrdma_ether_link::vxlan::VxlanConfig;
use pvrdma_rxe::VlanMode;

use super::error::ConfigError;
use super::keys::similar;
use super::load::Config;
use super::metrics::MetricsAddress;
use super::network::Network;
use super::place::SocketPlace;
use super::spec::{DEFAULT_NETWORK, DeviceSpec, NetworkSpec};

impl Config {
    /// Adds a device, and its network if `network` describes it.
    ///
    /// # Errors
    /// A description is incomplete, or conflicts with the configuration. Nothing has changed in that case.
    pub fn add_device(&mut self, spec: DeviceSpec, network: Option<NetworkSpec>) -> Result<(), ConfigError> {
        let mut changed = self.clone();
        if let Some(network) = network {
            changed.describe(network, &spec)?;
        }
        changed.place(spec)?;
        changed.check()?;
        *self = changed;
        Ok(())
    }

    /// Adds the network of a device. A network that exists must have the same description.
    fn describe(&mut self, network: NetworkSpec, device: &DeviceSpec) -> Result<(), ConfigError> {
        let network = network.resolve()?;
        if device.network() != network.name {
            let problem = format!("it is not in the network that is described with it (network={})", network.name);
            return Err(ConfigError::Device { name: device.name.clone(), problem });
        }
        match self.networks.iter().find(|known| known.name == network.name) {
            None => self.networks.push(network),
            Some(known) if known.has_settings_of(&network) => {}
            Some(_) => {
                let problem = "it exists and is described differently".to_owned();
                return Err(ConfigError::Network { name: network.name, problem });
            }
        }
        Ok(())
    }

    /// Removes a device, and its network if that is now empty and `stays` does not keep it.
    pub fn remove_device(&mut self, name: &str, stays: impl Fn(&str) -> bool) {
        for network in &mut self.networks {
            network.devices.retain(|device| device.config.name != name);
        }
        self.networks.retain(|network| !network.devices.is_empty() || stays(&network.name));
    }

    /// Adds a device to its network.
    pub(super) fn place(&mut self, spec: DeviceSpec) -> Result<(), ConfigError> {
        let name = spec.name.clone();
        let (mut congestion, given) = (self.congestion, self.line_rate_given);
        let placed = self.network_of(&spec).and_then(|network| {
            if let Some(rate) = network.line_rate().filter(|_| !given) {
                congestion.line_rate = rate;
                congestion.min_rate = congestion.min_rate.min(rate);
            }
            let mut device = spec.resolve(network.uplink.as_ref(), congestion)?;
            device.config.rules.network_peers = network.peers.clone();
            network.devices.push(device);
            Ok(())
        });
        placed.map_err(|problem| ConfigError::Device { name, problem })
    }

    /// Returns the network of a device. The network `default` is created if it does not exist.
    fn network_of(&mut self, spec: &DeviceSpec) -> Result<&mut Network, String> {
        let name = spec.network();
        if name == DEFAULT_NETWORK && self.networks.iter().all(|known| known.name != name) {
            self.networks.push(NetworkSpec { name: name.to_owned(), ..NetworkSpec::default() }.connect()?);
        }
        self.named(name)
    }

    fn named(&mut self, name: &str) -> Result<&mut Network, String> {
        let names = self.networks.iter().map(|network| network.name.as_str());
        let hint = similar(name, names).map_or_else(String::new, |name| format!("; did you mean '{name}'?"));
        let unknown = format!("there is no network '{name}'{hint}");
        self.networks.iter_mut().find(|network| network.name == name).ok_or(unknown)
    }

    /// Checks rules that concern several devices or networks.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        self.check_names()?;
        self.backend.settings().check(&self.networks)?;
        for network in &self.networks {
            check_addresses(network)?;
            network.check_rates()?;
        }
        for (index, network) in self.networks.iter().enumerate() {
            for other in self.networks.iter().take(index) {
                let apart = network.is_apart_from(other);
                apart.map_err(|problem| ConfigError::Network { name: network.name.clone(), problem })?;
            }
        }
        self.check_sockets()
    }

    /// Checks that the names of devices are unique.
    fn check_names(&self) -> Result<(), ConfigError> {
        let mut seen = HashSet::new();
        match self.devices().find(|(_, device)| !seen.insert(&device.config.name)) {
            Some((_, device)) => {
                let (name, problem) = (device.config.name.clone(), "the name is taken".to_owned());
                Err(ConfigError::Device { name, problem })
            }
            None => Ok(()),
        }
    }

    /// Checks that each socket that the daemon creates has a path of its own.
    fn check_sockets(&self) -> Result<(), ConfigError> {
        let mut seen: HashMap<PathBuf, String> = HashMap::new();
        let mut take = |path: Option<&Path>, what: String| {
            let Some(path) = path else { return Ok(()) };
            match seen.insert(place(path), what) {
                Some(other) => Err(format!("{} is also {other}", path.display())),
                None => Ok(()),
            }
        };
        if let Some(control) = &self.control {
            // The first insertion cannot fail.
            let _ = take(Some(&control.path), "the control socket".to_owned());
        }
        if let Some(MetricsAddress::Unix(path)) = self.metrics.as_ref().map(|metrics| &metrics.address) {
            take(Some(path), "the socket of metrics".to_owned())
                .map_err(|problem| ConfigError::Metrics(format!("metrics: {problem}")))?;
        }
        for network in &self.networks {
            let uplink = network.uplink.as_ref().and_then(LinkSpec::socket);
            for device in &network.devices {
                let name = &device.config.name;
                let nic = device.nic.as_ref().and_then(LinkSpec::socket);
                let nic_socket = device.nic_socket.as_ref().map(made_at);
                let sockets = [
                    ("socket", Some(made_at(&device.socket))),
                    ("nic", nic.map(Path::to_owned)),
                    ("nic-socket", nic_socket),
                ];
                for (what, path) in sockets {
                    take(path.as_deref(), format!("the {what} of device {name}")).map_err(|problem| {
                        let problem = format!("{what} {problem}");
                        ConfigError::Device { name: name.clone(), problem }
                    })?;
                }
            }
            take(uplink, format!("the uplink of network {}", network.name)).map_err(|problem| {
                let problem = format!("uplink {problem}");
                ConfigError::Network { name: network.name.clone(), problem }
            })?;
        }
        Ok(())
    }
}

impl Network {
    /// Checks that each frame of the host's interfaces belongs to at most one of two networks.
    fn is_apart_from(&self, other: &Self) -> Result<(), String> {
        let (Some(ours), Some(theirs)) = (&self.uplink, &other.uplink) else { return Ok(()) };
        let place = ours;
        match (ours, theirs) {
            _ if share_interface(ours, theirs) => match (self.vlan, other.vlan) {
                (VlanMode::Trunk, _) | (_, VlanMode::Trunk) => Err(format!(
                    "{place} is also the uplink of network {}: vlan=trunk is for all of its VLANs",
                    other.name
                )),
                (our_vlan, their_vlan) if our_vlan == their_vlan => {
                    Err(format!("{place} is also the uplink of network {}, in the same VLAN", other.name))
                }
                _ => Ok(()),
            },
            (LinkSpec::Vxlan(ours), LinkSpec::Vxlan(theirs)) => overlap(ours, theirs).map_or(Ok(()), |problem| {
                Err(format!("{place} is also the uplink of network {}: {problem}", other.name))
            }),
            // Each endpoint has one connection.
            (LinkSpec::Tls(ours), LinkSpec::Tls(theirs))
                if (ours.role, ours.address) == (theirs.role, theirs.address) =>
            {
                Err(format!("{place} is also the uplink of network {}", other.name))
            }
            _ if ours == theirs => Err(format!("{place} is also the uplink of network {}", other.name)),
            _ => Ok(()),
        }
    }
}

/// Returns `true` if two links have an interface in common.
fn share_interface(a: &LinkSpec, b: &LinkSpec) -> bool {
    let interfaces = |link: &LinkSpec| match link {
        LinkSpec::AfPacket(name) => vec![name.clone()],
        LinkSpec::AfPacketPair(names) => names.to_vec(),
        _ => Vec::new(),
    };
    let theirs = interfaces(b);
    interfaces(a).iter().any(|name| theirs.contains(name))
}

/// Returns the reason why datagrams could belong to either of two tunnels.
fn overlap(a: &VxlanConfig, b: &VxlanConfig) -> Option<&'static str> {
    if a.local == b.local {
        return (a.vni == b.vni).then_some("tunnels with one local end differ in their VNI");
    }
    let any = a.local.ip().is_unspecified() || b.local.ip().is_unspecified();
    (any && a.local.port() == b.local.port()).then_some("an end at all addresses of the host needs a port of its own")
}

/// Checks that the addresses of the devices of a network are unique.
fn check_addresses(network: &Network) -> Result<(), ConfigError> {
    let mut seen = HashMap::new();
    for device in &network.devices {
        let (name, mac) = (&device.config.name, device.mac);
        if let Some(other) = seen.insert(mac, name) {
            let problem = format!("device {other} of the same network has the same MAC address {mac}");
            return Err(ConfigError::Device { name: name.clone(), problem });
        }
    }
    Ok(())
}

/// Returns the path of a socket. For a descriptor, returns a unique path at which no file exists.
fn made_at(socket: &SocketPlace) -> PathBuf {
    socket.path().map_or_else(|| PathBuf::from(socket.to_string()), Path::to_owned)
}

/// Returns a canonical path: all names of a location become the same, by resolving its directory if that exists.
fn place(path: &Path) -> PathBuf {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    match (folder.canonicalize(), path.file_name()) {
        (Ok(folder), Some(name)) => folder.join(name),
        _ => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::backend::BackendSpec;
    use super::super::load::ConfigSpec;
    use super::*;

    /// Loads networks and devices in the syntax of the command line; devices need no socket and no MAC address.
    fn load(networks: &[&str], devices: &[&str]) -> Result<Config, String> {
        let numbered = devices.iter().enumerate().map(|(number, text)| {
            let mac = if text.contains("mac=") { String::new() } else { format!(",mac=52:54:00:00:00:{number:02x}") };
            format!("{text},socket=/s/{number}{mac}").parse().unwrap()
        });
        let networks = networks.iter().map(|text| text.parse().unwrap()).collect();
        let spec = ConfigSpec { networks, devices: numbered.collect(), ..ConfigSpec::default() };
        Config::merge(spec, ConfigSpec::default()).map_err(|error| error.to_string())
    }

    /// Returns each network with its devices.
    fn layout(config: &Config) -> Vec<(&str, Vec<&str>)> {
        fn names(network: &Network) -> Vec<&str> {
            network.devices.iter().map(|device| device.config.name.as_str()).collect()
        }
        config.networks.iter().map(|network| (network.name.as_str(), names(network))).collect()
    }

    #[test]
    fn promised_rates_fit_into_the_network() {
        let fits = ["name=0,min-rate=6G", "name=1,min-rate=4G", "name=2"];
        assert!(load(&["name=default,link-rate=10G"], &fits).is_ok());
        let error = load(&["name=default,link-rate=9.9G"], &fits).unwrap_err();
        assert!(error.contains("promised 10Gbit/s together, and it carries 9900Mbit/s (link-rate)"), "{error}");
        let error = load(&[], &fits).unwrap_err();
        assert!(error.contains("min-rate needs the capacity of network default (link-rate=RATE)"), "{error}");
        assert!(load(&["name=n,uplink=tap:t,link-rate=1G"], &["name=0,network=n,min-rate=1G"]).is_ok());
    }

    #[test]
    fn devices_are_where_they_say() {
        let config = load(
            &["name=b,uplink=tap:t", "name=lonely"],
            &["name=0,network=b", "name=1", "name=2,network=b", "name=3,network=default", "name=4,network=lonely"],
        );
        assert_eq!(
            layout(&config.unwrap()),
            [("b", vec!["0", "2"]), ("lonely", vec!["4"]), ("default", vec!["1", "3"])]
        );
        // A network described as `default` contains the devices that name none.
        let config = load(&["name=default,uplink=tap:t"], &["name=0", "name=1,network=default"]).unwrap();
        assert_eq!(layout(&config), [("default", vec!["0", "1"])]);
        assert!(config.networks[0].uplink.is_some());
    }

    #[test]
    fn contradictory_keys_are_refused() {
        for (networks, devices, word) in [
            (&["name=red"][..], &["name=0,network=reed"][..], "no network 'reed'; did you mean 'red'?"),
            (&["name=a", "name=a"], &["name=0"], "network a: the name is taken"),
            (&["name=a"], &["name=0", "name=0"], "device 0: the name is taken"),
            (
                &["name=a"],
                &["name=0,network=a,mac=52:54:00:00:00:01", "name=1,network=a,mac=52:54:00:00:00:01"],
                "device 1: device 0 of the same network has the same MAC",
            ),
            (&["name=a"], &["name=0,network=a,forged-transmits=mac"], "about the uplink"),
            (
                &["name=a,uplink=tap:t", "name=b,uplink=tap:t,vlan=7"],
                &["name=0"],
                "network b: tap:t is also the uplink of network a",
            ),
            (
                &["name=a,uplink=af_packet:e,vlan=7", "name=b,uplink=af_packet:e,vlan=7"],
                &["name=0"],
                "in the same VLAN",
            ),
            (&["name=a,uplink=af_packet:e", "name=b,uplink=af_packet:e"], &["name=0"], "in the same VLAN"),
            (
                &["name=a,uplink=af_packet:e", "name=b,uplink=af_packet:e,vlan=trunk"],
                &["name=0"],
                "vlan=trunk is for all",
            ),
            (
                &["name=a,uplink=vxlan:::1,remote=::2", "name=b,uplink=vxlan:::1,remote=::3"],
                &["name=0"],
                "differ in their VNI",
            ),
            (
                &["name=a,uplink=vxlan:::1,remote=::2", "name=b,uplink=vxlan:::1,remote=::2,vlan=7"],
                &["name=0"],
                "differ in their VNI",
            ),
            (
                &["name=a,uplink=vxlan:::1,remote=::2", "name=b,uplink=vxlan:::,remote=::2,vni=1"],
                &["name=0"],
                "a port of its own",
            ),
            (&["name=a,uplink=unix:/u", "name=b,uplink=unix:/u,vlan=7"], &["name=0"], "network b: unix:/u is also"),
            (
                &[
                    "name=a,uplink=tls:[::1]:7,tls-certificate=/c,tls-key=/k,tls-authority=/a",
                    "name=b,uplink=tls:[::1]:7,tls-certificate=/d,tls-key=/l,tls-authority=/b",
                ],
                &["name=0"],
                "network b: tls:[::1]:7 is also the uplink of network a",
            ),
            (&["name=a,uplink=tap:t"], &["name=0,network=a,nic=tls:[::1]:7"], "a tunnel is an uplink and no nic"),
            (&["name=a,uplink=tls:[::1]:7"], &["name=0"], "needs tls-certificate=FILE"),
            (
                &["name=a,uplink=unix:/u", "name=b,uplink=unix-dgram:/u:/v"],
                &["name=0"],
                "network b: uplink /u is also the uplink of network a",
            ),
        ] {
            let error = load(networks, devices).unwrap_err();
            assert!(error.contains(word), "{networks:?} {devices:?}: {error}");
        }
    }

    #[test]
    fn interfaces_that_networks_share() {
        for networks in [
            ["name=a,uplink=af_packet:e", "name=b,uplink=af_packet:e,vlan=7"],
            ["name=a,uplink=af_packet:e,vlan=8", "name=b,uplink=af_packet:e,vlan=7"],
            ["name=a,uplink=af_packet:e,vlan=trunk", "name=b,uplink=af_packet:f,vlan=trunk"],
            ["name=a,uplink=vxlan:::1,remote=::2", "name=b,uplink=vxlan:::1,remote=::2,vni=1"],
            ["name=a,uplink=vxlan:::1,remote=::2", "name=b,uplink=vxlan:[::1]:9,remote=::2"],
        ] {
            assert_eq!(load(&networks, &["name=0"]).unwrap().networks.len(), 3);
        }
    }

    #[test]
    fn the_host_adapter_is_one_network() {
        let load = |networks: &[&str], devices: &[&str]| {
            let mut config = load(networks, devices).unwrap();
            config.backend = "ibverbs,device=a".parse().unwrap();
            config.check().map_err(|error| error.to_string())
        };
        load(&[], &["name=0", "name=1"]).unwrap();
        load(&["name=tenant"], &["name=0,network=tenant"]).unwrap();
        load(&["name=tenant,peers=10.0.0.0/8"], &["name=0,network=tenant,peers=10.1.0.0/16"]).unwrap();
        for (networks, devices, word) in [
            (&["name=a,uplink=tap:t"][..], &["name=0"][..], "network a: uplink and nic belong to the backend rxe"),
            (&["name=a,uplink=tap:t"], &["name=0,network=a"], "network a: uplink and nic belong to the backend rxe"),
            (&[], &["name=0,nic-socket=/n"], "device 0: uplink and nic-socket belong to the backend rxe"),
            (&["name=a", "name=b"], &["name=0,network=a", "name=1,network=b"], "network b: with ibverbs"),
            (&["name=a"], &["name=0"], "network default: with ibverbs"),
            (&["name=a,vlan=trunk"], &["name=0,network=a"], "vlan belongs"),
        ] {
            let error = load(networks, devices).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn ports_on_the_host_need_connections_that_it_makes() {
        assert!(
            load(&[], &["name=0,cm-listen=4420"]).unwrap_err().contains("cm-listen belongs to the backend ibverbs")
        );
        let mut config = load(&[], &["name=0"]).unwrap();
        config.networks[0].devices[0].config.rules.listen = vec![4420];
        for (backend, allowed) in [("rxe", false), ("ibverbs,device=a", false), ("ibverbs,device=a,cm=host", true)] {
            config.backend = backend.parse().unwrap();
            assert_eq!(config.check().is_ok(), allowed, "{backend}");
        }
        assert!("ibverbs,device=a,cm=umad,untested-infiniband=on".parse::<BackendSpec>().is_err());
    }

    #[test]
    fn devices_that_come_later() {
        let mut config = load(&["name=a"], &["name=0,network=a"]).unwrap();
        let before = config.clone();
        let add = |config: &mut Config, text: &str| {
            let device = format!("{text},socket=/later");
            config.add_device(device.parse().unwrap(), None).map_err(|error| error.to_string())
        };
        for (text, word) in [
            ("name=0,mac=52:54:00:00:00:09,network=a", "the name is taken"),
            ("name=1,mac=52:54:00:00:00:00,network=a", "MAC"),
            ("name=1,mac=52:54:00:00:00:01,network=b", "no network 'b'"),
        ] {
            let error = add(&mut config, text).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
        assert_eq!(config, before);
        add(&mut config, "name=1,mac=52:54:00:00:00:01,network=a").unwrap();
        add(&mut config, "name=2,mac=52:54:00:00:00:00").unwrap_err();
        assert_eq!(layout(&config), [("a", vec!["0", "1"])]);
    }

    #[test]
    fn networks_that_come_with_a_device() {
        let mut config = load(&["name=a", "name=wire,uplink=tap:w"], &["name=0,network=a"]).unwrap();
        let before = config.clone();
        let add = |config: &mut Config, network: &str, device: &str| {
            let device = format!("{device},socket=/{}", &device[5..6]).parse().unwrap();
            config.add_device(device, Some(network.parse().unwrap())).map_err(|error| error.to_string())
        };
        let (first, second) = ("name=1,mac=52:54:00:00:00:01", "name=2,mac=52:54:00:00:00:02");
        for (network, device, word) in [
            ("name=b,uplink=tap:t", first.to_owned(), "device 1: it is not in the network that is described with it"),
            ("name=b,mtu=9000", format!("{first},network=b"), "network b: mtu is that of the uplink"),
            ("name=a,uplink=tap:t", format!("{first},network=a"), "network a: it exists and is described differently"),
            // The settings of a running network stay, when a device is added to it.
            (
                "name=wire,uplink=tap:w,icrc=agreed",
                format!("{first},network=wire"),
                "network wire: it exists and is described differently",
            ),
        ] {
            let error = add(&mut config, network, &device).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
        assert_eq!(config, before);
        // A second device may bring the same description.
        for device in [first, second] {
            add(&mut config, "name=b,uplink=tap:t,mtu=9000", &format!("{device},network=b")).unwrap();
        }
        add(&mut config, "name=default,vlan=trunk", "name=3,mac=52:54:00:00:00:03").unwrap();
        let layout = layout(&config);
        assert_eq!(layout, [("a", vec!["0"]), ("wire", vec![]), ("b", vec!["1", "2"]), ("default", vec!["3"])]);
    }
}
