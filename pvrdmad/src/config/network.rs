//! A network: settings that its devices share.

use std::fs;
use std::path::Path;

use pvrdma_ether_link::InterfaceName;
use pvrdma_ether_link::link_spec::LinkSpec;
use pvrdma_ether_link::vxlan::{IPV4_OVERHEAD, IPV6_OVERHEAD};
use pvrdma_rxe::VlanMode;
use pvrdma_verbs::Peers;
use serde::{Deserialize, Serialize};

use super::congestion::MEGABIT;
use super::device::Device;
use super::error::ConfigError;
use super::fault::FaultSpec;
use super::rate::BitRate;
use super::spec::{NAME_RULE, NetworkSpec, is_name};
use super::tunnel::{TlsWords, TunnelKeys};
use super::vlan::VlanWord;
use super::words::{Icrc, Switch};

/// Default MTU of Ethernet.
const DEFAULT_MTU: u32 = 1500;
/// MTU between emulated network functions without an uplink. It is large because guests choose their own MTU.
const LOCAL_MTU: u32 = 9000;
/// Valid MTUs: from the smallest that every IPv4 network carries to about the largest possible.
const MTU_RANGE: std::ops::RangeInclusive<u32> = 576..=65_535;
/// Valid numbers of threads that receive frames of a device. Each thread has a packet queue of its own.
const PORT_THREADS: std::ops::RangeInclusive<usize> = 1..=16;

/// Reason why `follow-carrier=off` is refused.
const NO_CARRIER: &str = "follow-carrier is about an interface of the host (uplink=af_packet:INTERFACE or tap:NAME)";

/// Reason why `follow-carrier=off` is refused for two interfaces.
const PAIR_CARRIER: &str = "an uplink with two interfaces follows their carriers (follow-carrier=on)";

/// Directory in which the kernel lists network interfaces.
const INTERFACES: &str = "/sys/class/net";

/// A network, completely described. Devices of a network reach each other; nothing else connects two networks.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Network {
    /// Its name.
    pub name: String,
    /// The link to other hosts. Without one the network consists only of its devices.
    pub uplink: Option<LinkSpec>,
    /// Longest IP packet that it carries, in bytes.
    pub mtu: u32,
    /// Rate of the uplink, if it was given.
    pub link_rate: Option<BitRate>,
    /// The VLAN of its devices.
    pub vlan: VlanMode,
    /// Packets of a message leave the uplink as super-frames.
    pub offload: bool,
    /// Links of its devices are down while the interface of the uplink has no carrier.
    pub follow_carrier: bool,
    /// Its connections leave the ICRC out if the peer agrees. A plan of an older daemon has no such value.
    #[serde(default)]
    pub omit_icrc: bool,
    /// Faults injected into the uplink, for tests.
    pub fault: Option<FaultSpec>,
    /// Peers to which its devices may connect.
    pub peers: Peers,
    /// Its devices reach each other directly, without the uplink.
    pub local: bool,
    /// Threads of each device that receive frames from the uplink.
    pub port_threads: usize,
    /// Its devices.
    pub devices: Vec<Device>,
}

impl Network {
    /// Returns `true` if the networks differ at most in their devices.
    pub(crate) fn has_settings_of(&self, other: &Self) -> bool {
        Self { devices: other.devices.clone(), ..self.clone() } == *other
    }

    /// Returns the rate of its uplink in bytes per second, as configured or as reported by the interface, if known.
    pub(super) fn line_rate(&self) -> Option<u64> {
        let of = |name: &InterfaceName| speed(&Path::new(INTERFACES).join(name.as_str()).join("speed"));
        let said = || match &self.uplink {
            Some(LinkSpec::AfPacket(name)) => of(name),
            Some(LinkSpec::AfPacketPair(names)) => names.iter().filter_map(of).min(),
            // A tap always reports 10 Mb/s, and a tunnel may leave through any interface.
            _ => None,
        };
        self.link_rate.map(BitRate::bytes).or_else(said)
    }
}

/// Returns `true` if the uplink uses packet sockets.
const fn is_packet_socket(uplink: Option<&LinkSpec>) -> bool {
    matches!(uplink, Some(LinkSpec::AfPacket(_) | LinkSpec::AfPacketPair(_)))
}

/// Reads a file that contains Mb/s, and returns bytes per second. Returns `None` if the file does not exist (as for an
/// interface that does not exist yet), or if the driver does not know the speed, which it reports as -1 or an error.
fn speed(file: &Path) -> Option<u64> {
    let megabits: u64 = fs::read_to_string(file).ok()?.trim().parse().ok()?;
    (megabits > 0).then(|| megabits.saturating_mul(MEGABIT))
}

impl NetworkSpec {
    /// Fills in the defaults and checks the result.
    ///
    /// # Errors
    /// A value is out of range, or values contradict each other.
    pub(super) fn resolve(self) -> Result<Network, ConfigError> {
        let name = self.name.clone();
        let resolved = if is_name(&name) { self.connect() } else { Err(NAME_RULE.to_owned()) };
        resolved.map_err(|problem| ConfigError::Network { name, problem })
    }

    fn tls_words(&self) -> TlsWords {
        TlsWords {
            certificate: self.tls_certificate.clone(),
            key: self.tls_key.clone(),
            authority: self.tls_authority.clone(),
            peer: self.tls_peer.clone(),
        }
    }

    /// # Errors
    /// There is no interface that could have a carrier.
    fn check_carrier(&self) -> Result<(), String> {
        match self.uplink {
            Some(LinkSpec::AfPacket(_) | LinkSpec::Tap(_)) => Ok(()),
            Some(LinkSpec::AfPacketPair(_)) if self.follow_carrier == Some(Switch::Off) => Err(PAIR_CARRIER.to_owned()),
            _ if self.follow_carrier == Some(Switch::Off) => Err(NO_CARRIER.to_owned()),
            _ => Ok(()),
        }
    }

    /// Returns `true` if connections leave the ICRC out in agreement with the peer. TLS has an integrity check of its
    /// own, which is stronger. For any other link the administrator decides.
    ///
    /// # Errors
    /// There is no uplink, or its faults need the ICRC.
    fn omit_icrc(&self) -> Result<bool, String> {
        let omit = match (self.icrc, &self.uplink) {
            (Some(_), None) => return Err("icrc is about packets on the uplink (uplink=LINK)".to_owned()),
            (Some(icrc), Some(_)) => icrc == Icrc::Agreed,
            (None, uplink) => matches!(uplink, Some(LinkSpec::Tls(_))),
        };
        FaultSpec::check(self.fault.as_ref(), omit)?;
        Ok(omit)
    }

    /// Returns the number of threads per device that receive frames.
    ///
    /// # Errors
    /// The number is out of range.
    fn threads(&self) -> Result<usize, String> {
        let port_threads = self.port_threads.unwrap_or(1);
        let (least, most) = (PORT_THREADS.start(), PORT_THREADS.end());
        let problem = || format!("port-threads {port_threads} is not one of {least} to {most}");
        PORT_THREADS.contains(&port_threads).then_some(port_threads).ok_or_else(problem)
    }

    /// Resolves the network regardless of its name.
    ///
    /// # Errors
    /// Values contradict each other.
    pub(super) fn connect(self) -> Result<Network, String> {
        self.check_carrier()?;
        let (tls, port_threads, omit_icrc) = (self.tls_words(), self.threads()?, self.omit_icrc()?);
        let tunnel = TunnelKeys { remotes: self.remotes, vni: self.vni, learn: self.learn };
        if !matches!(self.uplink, Some(LinkSpec::Vxlan(_))) && !tunnel.is_empty() {
            return Err("remote, vni and learn are keys of a tunnel (uplink=vxlan:ADDRESS)".to_owned());
        }
        if !matches!(self.uplink, Some(LinkSpec::Tls(_))) && tls != TlsWords::default() {
            return Err("tls-certificate, tls-key, tls-authority and tls-peer are keys of a TLS link \
                        (uplink=tls:ADDRESS:PORT or tls-connect:ADDRESS:PORT)"
                .to_owned());
        }
        let vlan = self.vlan.map_or(VlanMode::Untagged, |VlanWord(mode)| mode);
        let (uplink, overhead) = match self.uplink {
            Some(LinkSpec::Vxlan(config)) => {
                let overhead = if config.local.is_ipv4() { IPV4_OVERHEAD } else { IPV6_OVERHEAD };
                (Some(LinkSpec::Vxlan(tunnel.complete(config)?)), overhead)
            }
            Some(LinkSpec::Tls(config)) if self.offload != Some(Switch::Off) => {
                (Some(LinkSpec::Tls(tls.complete(config)?)), 0)
            }
            None if self.mtu.is_some() => return Err("mtu is that of the uplink (uplink=LINK)".to_owned()),
            None if self.fault.is_some() => return Err("fault is one of the uplink (uplink=LINK)".to_owned()),
            other if self.offload == Some(Switch::Off) && !is_packet_socket(other.as_ref()) => {
                return Err("offload is about an interface of the host (uplink=af_packet:INTERFACE)".to_owned());
            }
            None if matches!(vlan, VlanMode::Access(_)) => {
                return Err("vlan is that of the uplink (uplink=LINK)".to_owned());
            }
            None if self.local == Some(Switch::Off) => {
                return Err("local=off sends everything through the uplink (uplink=LINK)".to_owned());
            }
            None if self.port_threads.is_some() => {
                return Err("port-threads take frames from the uplink (uplink=LINK)".to_owned());
            }
            other => (other, 0),
        };
        let local = self.local != Some(Switch::Off);
        let default = if uplink.is_some() { DEFAULT_MTU - overhead } else { LOCAL_MTU };
        let mtu = self.mtu.unwrap_or(default);
        if !MTU_RANGE.contains(&mtu) {
            return Err(format!("mtu {mtu} is not one of {} to {}", MTU_RANGE.start(), MTU_RANGE.end()));
        }
        let [offload, follow_carrier] = [self.offload, self.follow_carrier].map(|switch| switch != Some(Switch::Off));
        Ok(Network {
            name: self.name,
            uplink,
            mtu,
            link_rate: self.link_rate,
            vlan,
            offload,
            follow_carrier,
            omit_icrc,
            fault: self.fault,
            peers: Peers(self.peers),
            local,
            port_threads,
            devices: Vec::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression (C10): the line rate of congestion control was a constant.
    #[test]
    fn an_interface_reports_its_speed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (text, bytes) in [("25000\n", Some(3_125_000_000)), ("-1\n", None), ("0\n", None), ("", None)] {
            fs::write(file.path(), text).unwrap();
            assert_eq!(speed(file.path()), bytes, "{text:?}");
        }
        assert_eq!(speed(Path::new("/sys/class/net/lo/speed")), None, "the loopback interface has no speed");
        let rate = |text| resolve(text).unwrap().line_rate();
        assert_eq!(rate("name=a,uplink=af_packet:lo,link-rate=1G"), Some(125_000_000));
        assert_eq!((rate("name=a,uplink=af_packet:lo"), rate("name=a,uplink=unix:/n")), (None, None));
    }

    fn resolve(text: &str) -> Result<Network, String> {
        text.parse::<NetworkSpec>()?.resolve().map_err(|error| error.to_string())
    }

    #[test]
    fn compatible_keys_are_accepted() {
        let plain = resolve("name=n").unwrap();
        assert_eq!((plain.name.as_str(), plain.uplink, plain.vlan), ("n", None, VlanMode::Untagged));
        assert_eq!(plain.mtu, 9000, "the default without an uplink");
        let unix = resolve("name=n,uplink=unix-dgram:/a:/b,vlan=42").unwrap();
        assert_eq!((unix.mtu, unix.vlan), (1500, VlanMode::Access(42)));
        assert_eq!(resolve("name=n,vlan=trunk").unwrap().vlan, VlanMode::Trunk);
        assert_eq!(
            (unix.port_threads, resolve("name=n,uplink=unix:/a,port-threads=16").unwrap().port_threads),
            (1, 16)
        );
        assert!(resolve("name=n,uplink=af_packet:e").unwrap().offload);
        assert!(!resolve("name=n,uplink=af_packet:e,offload=off").unwrap().offload);
        assert!(resolve("name=n,uplink=tap:t").unwrap().follow_carrier);
        assert!(!resolve("name=n,uplink=tap:t,follow-carrier=off").unwrap().follow_carrier);
        for (text, word) in [
            ("name=a:b", "letters"),
            ("uplink=unix:/a", "needs a name"),
            ("name=n,mtu=9000", "mtu is that of the uplink"),
            ("name=n,fault=loss:0.1", "fault is one of the uplink"),
            ("name=n,offload=off", "offload is about an interface of the host"),
            ("name=n,uplink=tap:t,offload=off", "offload is about an interface of the host"),
            ("name=n,follow-carrier=off", "follow-carrier is about an interface of the host"),
            ("name=n,uplink=unix:/a,follow-carrier=off", "follow-carrier is about an interface of the host"),
            ("name=n,uplink=af_packet:a+b,follow-carrier=off", "an uplink with two interfaces follows"),
            ("name=n,vlan=7", "vlan is that of the uplink"),
            ("name=n,local=off", "local=off sends everything through the uplink"),
            ("name=n,port-threads=2", "port-threads take frames from the uplink"),
            ("name=n,uplink=unix:/a,port-threads=0", "port-threads 0 is not one of 1 to 16"),
            ("name=n,uplink=unix:/a,port-threads=17", "port-threads 17 is not one of 1 to 16"),
            ("name=n,peers=10.0.0.0/40", "peers: '10.0.0.0/40' is neither an address nor ADDRESS/BITS"),
            ("name=n,uplink=unix:/a,mtu=100", "576"),
            ("name=n,uplink=unix:/a,vlan=0", "vlan: '0' is neither trunk nor a VLAN (1 to 4094)"),
            ("name=n,uplink=unix:/a,vlan=4095", "1 to 4094"),
            ("name=n,uplink=unix:/a,socket=/s", "unknown key 'socket'"),
        ] {
            let error = resolve(text).unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }

    #[test]
    fn the_icrc_is_left_out_where_the_link_or_the_administrator_says_so() {
        let tls = "tls-certificate=/c,tls-key=/k,tls-authority=/a";
        for (text, omits) in [
            ("name=n", false),
            ("name=n,uplink=unix:/a", false),
            ("name=n,uplink=unix:/a,icrc=always", false),
            ("name=n,uplink=unix:/a,icrc=agreed", true),
            ("name=n,uplink=af_packet:e,icrc=agreed", true),
            ("name=n,uplink=vxlan:10.0.0.1,remote=10.0.0.2", false),
            ("name=n,uplink=vxlan:10.0.0.1,remote=10.0.0.2,icrc=agreed", true),
            (&format!("name=n,uplink=tls:10.0.0.1:7,{tls}"), true),
            (&format!("name=n,uplink=tls-connect:10.0.0.1:7,{tls}"), true),
            (&format!("name=n,uplink=tls:10.0.0.1:7,{tls},icrc=always"), false),
            // Receivers notice these faults without an ICRC.
            ("name=n,uplink=unix:/a,icrc=agreed,fault=loss:0.1/duplicate:0.1/reorder:0.1/delay:0.1", true),
            ("name=n,uplink=unix:/a,icrc=always,fault=corrupt:0.1", false),
            (&format!("name=n,uplink=tls:10.0.0.1:7,{tls},icrc=always,fault=corrupt:0.1"), false),
        ] {
            assert_eq!(resolve(text).map(|network| network.omit_icrc), Ok(omits), "{text}");
        }
        for (text, word) in [
            ("name=n,icrc=agreed", "icrc is about packets on the uplink"),
            ("name=n,uplink=unix:/a,icrc=off", "icrc: 'off' is not one of always, agreed"),
            ("name=n,uplink=unix:/a,icrc=agreed,fault=loss:0.1/corrupt:0.0001", "set icrc=always for the network"),
            (&format!("name=n,uplink=tls:10.0.0.1:7,{tls},fault=corrupt:0.1"), "set icrc=always for the network"),
        ] {
            let error = resolve(text).unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }

    /// A running network of a daemon without this setting keeps the ICRC after an upgrade.
    #[test]
    fn a_plan_without_the_setting_has_an_icrc() {
        let network = resolve("name=n,uplink=unix:/a,icrc=agreed").unwrap();
        let mut plan = serde_json::to_value(&network).unwrap();
        assert_eq!(plan.as_object_mut().unwrap().remove("omit_icrc"), Some(true.into()));
        let older: Network = serde_json::from_value(plan).unwrap();
        assert_eq!(older, Network { omit_icrc: false, ..network.clone() });
        assert!(!older.has_settings_of(&network));
    }

    #[test]
    fn tls_links_and_their_keys() {
        let files = "tls-certificate=/c,tls-key=/k,tls-authority=/a";
        let network = resolve(&format!("name=n,uplink=tls:[fd00::1]:7,{files},mtu=9000")).unwrap();
        let Some(LinkSpec::Tls(config)) = &network.uplink else { panic!("{network:?}") };
        assert_eq!(config.files.each().map(|(_, path)| path), ["/c", "/k", "/a"].map(Path::new));
        assert_eq!((config.peer.as_deref(), network.mtu), (None, 9000));
        let network = resolve(&format!("name=n,uplink=tls-connect:10.0.0.1:7,{files},tls-peer=there")).unwrap();
        let Some(LinkSpec::Tls(config)) = &network.uplink else { panic!("{network:?}") };
        assert_eq!((config.peer.as_deref(), network.mtu), (Some("there"), 1500));
        for (text, word) in [
            ("uplink=tls:10.0.0.1:7", "needs tls-certificate=FILE"),
            ("uplink=tls:10.0.0.1:7,tls-certificate=/c,tls-key=/k", "needs tls-authority=FILE"),
            ("uplink=tls:10.0.0.1:7,tls-certificate=/c,tls-authority=/a", "needs tls-key=FILE"),
            ("uplink=tls:10.0.0.1:7,tls-certificate=/c,tls-key=/k,tls-authority=/a,offload=off", "an interface"),
            ("uplink=tls:10.0.0.1:7,remote=10.0.0.2", "keys of a tunnel"),
            ("uplink=vxlan:10.0.0.1,remote=10.0.0.2,tls-key=/k", "keys of a TLS link"),
            ("tls-peer=there", "keys of a TLS link"),
            ("uplink=tls:10.0.0.1", "PORT"),
        ] {
            let error = resolve(&format!("name=n,{text}")).unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }

    #[test]
    fn tunnels_and_their_keys() {
        let network = resolve("name=n,uplink=vxlan:10.0.0.1,remote=10.0.0.2,remote=10.0.0.3:8472,vni=7").unwrap();
        let Some(LinkSpec::Vxlan(config)) = &network.uplink else { panic!("{network:?}") };
        assert_eq!(config.remotes, ["10.0.0.2:4789", "10.0.0.3:8472"].map(|text| text.parse().unwrap()));
        assert_eq!((config.vni.get(), config.open, network.mtu), (7, false, 1450));
        let network = resolve("name=n,uplink=vxlan:fd00::1,learn=remotes").unwrap();
        let Some(LinkSpec::Vxlan(config)) = &network.uplink else { panic!("{network:?}") };
        assert_eq!((config.vni.get(), config.open, network.mtu), (0, true, 1430));
        for (text, word) in [
            ("name=n,uplink=vxlan:10.0.0.1", "remote=ADDRESS"),
            ("name=n,uplink=vxlan:10.0.0.1,remote=10.0.0.2,vni=16777216", "16777215"),
            ("name=n,uplink=vxlan:10.0.0.1,remote=fd00::2", "IPv6"),
            ("name=n,uplink=unix:/a,remote=10.0.0.2", "keys of a tunnel"),
            ("name=n,uplink=tap:tap0,vni=1", "keys of a tunnel"),
            ("name=n,learn=remotes", "keys of a tunnel"),
        ] {
            let error = resolve(text).unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
