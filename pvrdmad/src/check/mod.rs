//! Checks that the resources of a configuration are available on this host, without opening them.

mod bridge;
mod finding;
mod report;
pub mod vms;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::Error;
use pvrdma_ether_link::InterfaceName;
use pvrdma_ether_link::link_spec::LinkSpec;
use pvrdma_ether_link::tls::{TlsKeys, TlsRole};
use pvrdma_verbs::OtherAddresses;
use pvrdma_vfio_user_server::socket::SocketAccess;

use self::finding::DAEMON;
pub use self::finding::{Finding, Findings, Severity};
pub use self::report::Report;
use self::report::{INTERFACES, Subject};
use crate::config::{Config, Device, Isolate, MetricsAddress, Network, Pin, SocketPlace};
use crate::rlimits::{self, Shortage};

/// Directory in which the kernel lists RDMA adapters.
const ADAPTERS: &str = "/sys/class/infiniband";

/// Checks the configuration against this host.
pub fn report(config: &Config) -> Report {
    let mut report = Report::default();
    let isolate = if config.isolate == Isolate::Network { "a process each" } else { "in one process" };
    report.say(format!("backend {}; networks: {}, {isolate}", config.backend, config.networks.len()));
    if let Some(control) = &config.control {
        report.say(format!("control socket {}", shown(&control.path.display().to_string(), control.access)));
        report.socket(&Subject { name: DAEMON, key: "control" }, &control.path, control.access);
    }
    if let Some(metrics) = &config.metrics {
        let subject = Subject { name: DAEMON, key: "metrics" };
        report.say(format!("metrics at {}", shown(&metrics.address.to_string(), metrics.access)));
        match &metrics.address {
            MetricsAddress::Unix(path) => report.socket(&subject, path, metrics.access),
            MetricsAddress::Tcp(address) => report.own_address(&subject, *address),
        }
    }
    if let Some(adapter) = config.backend.settings().adapter()
        && !Path::new(ADAPTERS).join(adapter).exists()
    {
        let problem = format!("there is no adapter {adapter} in {ADAPTERS}");
        let subject = Subject { name: DAEMON, key: "backend" };
        report.error(&subject, problem, "use an adapter that `rdma link` lists, or load its driver");
    }
    for network in &config.networks {
        look_at_network(network, &mut report);
    }
    report_pin_default(config, &mut report);
    if let Some(shortage) = rlimits::shortage(config) {
        let name = format!("device {}", shortage.device);
        report.warning(&Subject { name: &name, key: "pin" }, shortage.problem(), Shortage::REMEDY);
    }
    report
}

/// Warns about a changed default: earlier versions locked all guest memory unless `pin` said otherwise.
fn report_pin_default(config: &Config, report: &mut Report) {
    let names = config.devices().filter(|(_, device)| device.pin == Pin::Registered);
    let names: Vec<_> = names.map(|(_, device)| device.config.name.as_str()).collect();
    if !names.is_empty() {
        report.say(format!(
            "memory that guests register stays resident, no other (pin=registered, the default): {}; add pin=all to a \
             device to keep all memory of its guest resident, as the default was before",
            names.join(", ")
        ));
    }
}

fn look_at_network(network: &Network, report: &mut Report) {
    let name = format!("network {}", network.name);
    let uplink = network.uplink.as_ref().map_or_else(|| "none".to_owned(), ToString::to_string);
    report.say(format!("{name}: uplink {uplink}, mtu {}", network.mtu));
    if let Some(link) = &network.uplink {
        let subject = Subject { name: &name, key: "uplink" };
        look_at_link(&subject, link, report);
        if let LinkSpec::Tap(interface) | LinkSpec::AfPacket(interface) = link {
            bridge::look(&subject, Path::new(INTERFACES), interface.as_str(), network.mtu, report);
        }
    }
    for device in &network.devices {
        look_at_device(device, report);
        if network.uplink.is_some() && device.config.rules.addresses.others == OtherAddresses::Own {
            let name = format!("device {}", device.config.name);
            report.warning(
                &Subject { name: &name, key: "address" },
                "own on a network with an uplink: the guest may use every address that no host there answers for",
                "list its addresses (address=ADDRESS)",
            );
        }
    }
}

fn look_at_device(device: &Device, report: &mut Report) {
    let name = format!("device {}", device.config.name);
    let nic = match (&device.nic, &device.nic_socket) {
        (Some(link), _) => format!("nic {link}"),
        (None, Some(place)) => format!("nic-socket {place}"),
        (None, None) => "network function of the VMM alone".to_owned(),
    };
    let socket = shown(&device.socket.to_string(), device.access);
    report.say(format!("  {name}: socket {socket}, mac {}, {nic}", device.mac));
    let sockets = [("socket", Some(&device.socket)), ("nic-socket", device.nic_socket.as_ref())];
    for (key, place) in sockets {
        if let Some(path) = place.and_then(SocketPlace::path) {
            report.socket(&Subject { name: &name, key }, path, device.access);
        }
    }
    if let Some(link) = &device.nic {
        look_at_link(&Subject { name: &name, key: "nic" }, link, report);
    }
}

fn look_at_link(subject: &Subject<'_>, link: &LinkSpec, report: &mut Report) {
    match link {
        LinkSpec::Listen(path) | LinkSpec::Datagrams { local: path, .. } => {
            report.socket(subject, path, SocketAccess::default());
        }
        // The daemon connects once the peer exists, and creates a tap that does not exist.
        LinkSpec::Connect(_) | LinkSpec::Tap(_) => {}
        LinkSpec::Vxlan(config) => report.own_address(subject, config.local),
        LinkSpec::Tls(config) => {
            if let Err(error) = TlsKeys::read(config) {
                report.push(Severity::Error, subject, format!("{:#}", Error::new(error)), None);
            }
            let key = &config.files.key;
            if fs::metadata(key).is_ok_and(|file| file.mode() & 0o004 != 0) {
                let subject = Subject { key: "tls-key", ..*subject };
                let problem = format!("all users of this host can read {}", key.display());
                report.warning(&subject, problem, format!("chmod o= {}", key.display()));
            }
            if config.role == TlsRole::Listen {
                report.own_address(subject, config.address);
            }
        }
        LinkSpec::AfPacket(name) => report.interface(subject, name),
        LinkSpec::AfPacketPair(names) => look_at_pair(subject, names, report),
    }
}

/// Looks at the two interfaces of an uplink.
fn look_at_pair(subject: &Subject<'_>, names: &[InterfaceName; 2], report: &mut Report) {
    names.iter().for_each(|name| report.interface(subject, name));
    let mtu = |name: &InterfaceName| {
        let text = fs::read_to_string(Path::new(INTERFACES).join(name.as_str()).join("mtu")).ok()?;
        text.trim().parse::<u32>().ok()
    };
    if let [Some(first), Some(second)] = names.each_ref().map(mtu)
        && first != second
    {
        let [one, other] = names;
        let problem = format!("{one} carries packets of {first} bytes, {other} of {second}: the smaller MTU counts");
        report.warning(subject, problem, "give both interfaces the same MTU, with `ip link set`");
    }
}

/// Describes a socket and its permissions.
fn shown(place: &str, access: SocketAccess) -> String {
    format!("{place} (mode {:o})", access.permissions())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::config::ConfigSpec;

    fn check(devices: &[&str], networks: &[&str]) -> Report {
        let spec = ConfigSpec {
            devices: devices.iter().map(|text| text.parse().unwrap()).collect(),
            networks: networks.iter().map(|text| text.parse().unwrap()).collect(),
            ..ConfigSpec::default()
        };
        report(&Config::load(None, spec).unwrap())
    }

    /// The advice for configurations that were written when all memory was locked by default.
    #[test]
    fn the_line_that_keeps_all_memory_resident_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let device = |name: &str, last: u8, keys: &str| {
            let path = folder.path().join(name);
            format!("name={name},socket={},mac=52:54:00:00:00:0{last}{keys}", path.display())
        };
        let text =
            check(&[&device("vm0", 1, ""), &device("vm1", 2, ",pin=all"), &device("vm2", 3, ",pin=off")], &[]).text();
        let line = text.lines().find(|line| line.contains("add pin=all")).unwrap();
        assert!(line.contains(": vm0;"), "{line}");
        assert!(!check(&[&device("vm1", 2, ",pin=all")], &[]).text().contains("add pin=all"));
    }

    #[test]
    fn addresses_that_a_guest_takes_itself_are_warned_of_on_an_uplink() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().display();
        let device = format!("name=vm0,socket={path}/a,mac=52:54:00:00:00:01,pin=off");
        for (network, more, warned) in [
            ("", "", false),
            (",uplink=unix-connect:/nowhere", "", true),
            (",uplink=unix-connect:/nowhere", ",address=10.0.0.5,address=own", true),
            (",uplink=unix-connect:/nowhere", ",address=10.0.0.5", false),
            (",uplink=unix-connect:/nowhere", ",address=any", false),
        ] {
            let text = check(&[&format!("{device}{more}")], &[&format!("name=default{network}")]).text();
            assert_eq!(text.contains("warning: device vm0: address: own"), warned, "{text}");
        }
    }

    #[test]
    fn nothing_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().display();
        let device = format!("name=vm0,socket={path}/a,nic-socket={path}/n,mac=52:54:00:00:00:01,pin=off,mode=620");
        let report = check(&[&device], &["name=red"]);
        report.result().unwrap();
        let text = report.text();
        for part in [&format!("device vm0: socket {path}/a (mode 620)"), "network red: uplink none, mtu 9000"] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn problems_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().display();
        fs::write(folder.path().join("plain"), "").unwrap();
        let mac = "mac=52:54:00:00:00:01,pin=off";
        let long = "x".repeat(110);
        for (socket, network, words) in [
            ("none/a", "", "device vm0: socket: "),
            ("none/a", "", "/none does not exist"),
            ("plain", "", "exists and is not a socket"),
            (&long, "", "too long for a socket"),
            ("a", ",uplink=af_packet:nope0", "uplink: there is no interface nope0"),
            ("a", ",uplink=vxlan:192.0.2.1,remote=192.0.2.2", "192.0.2.1 is no address of this host"),
        ] {
            let device = format!("name=vm0,socket={path}/{socket},{mac}");
            let report = check(&[&device], &[&format!("name=default{network}")]);
            assert!(report.text().contains(words), "{device}{network}: {}", report.text());
            assert!(report.result().unwrap_err().to_string().ends_with("1 error"), "{device}{network}");
        }
    }

    /// An error about a key file names the line, but reveals nothing of the key.
    #[test]
    fn keys_of_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().display();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        let device = format!("name=vm0,network=n,socket={path}/a,mac=52:54:00:00:00:01,pin=off");
        let tls = |address: &str| {
            let files = format!("tls-certificate={path}/c,tls-key={path}/k,tls-authority={path}/a");
            check(&[&device], &[&format!("name=n,uplink={address},{files}")])
        };
        let report = tls("tls-connect:192.0.2.1:7");
        assert!(
            report.text().contains(&format!("error: network n: uplink: {path}/c: No such file")),
            "{}",
            report.text()
        );
        for (name, text) in [("c", "\n-----BEGIN CERTIFICATE-----\nno base64\n"), ("k", "secret"), ("a", "")] {
            write(name, text);
        }
        fs::set_permissions(folder.path().join("k"), fs::Permissions::from_mode(0o644)).unwrap();
        let text = tls("tls:192.0.2.1:7").text();
        for part in [
            "/c: line 2: the line with END is missing",
            "all users of this host can read",
            "192.0.2.1 is no address of",
        ] {
            assert!(text.contains(part), "{text}");
        }
        assert!(!text.contains("secret"));
    }

    /// The configuration of a running daemon can be checked.
    #[test]
    fn a_socket_in_use_is_a_warning() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let _listener = UnixListener::bind(&path).unwrap();
        let report = check(&[&format!("name=vm0,socket={},mac=52:54:00:00:00:01,pin=off", path.display())], &[]);
        assert!(report.text().contains("warning: device vm0: socket: "), "{}", report.text());
        report.result().unwrap();
        assert!(path.exists());
    }
}
