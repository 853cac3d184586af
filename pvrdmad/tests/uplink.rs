//! Two daemons on separate hosts, each with a device, connected by each kind of uplink.

#![expect(clippy::unwrap_used, reason = "a test")]

mod common;

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use common::traffic::{Guest, transfer};
use pvrdma_dev::testing::wait_for;
use pvrdma_verbs::testing::skipped;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use serde_json::Value;
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_pvrdmad");
/// A daemon with one device, and the guest that uses it.
struct Site {
    guest: Guest,
    /// `None` for the second device of a daemon.
    daemon: Option<Child>,
    control: PathBuf,
    _folder: TempDir,
}

impl Site {
    /// Starts the daemon, in a network namespace if one is given.
    fn start(number: u8, namespace: Option<&Namespace>, options: &str) -> Self {
        Self::start_with(number, namespace, options, &[])
    }

    fn start_with(number: u8, namespace: Option<&Namespace>, options: &str, more: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (socket, control) = (folder.path().join("device"), folder.path().join("control"));
        let device = format!("name=vm{number},socket={},mac=52:54:00:00:03:{number:02x}", socket.display());
        let mut command = match namespace {
            Some(Namespace(name)) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", name, PROGRAM]);
                command
            }
            None => Command::new(PROGRAM),
        };
        // With `strict`, a system call outside the filter kills the process, and the test fails.
        command.args(["--sandbox", "strict"]);
        command
            .arg("--device")
            .arg(format!("{device},pin=off,address=any,{options}"))
            .arg("--control")
            .arg(&control)
            .args(more);
        let mut daemon = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let ready = BufReader::new(daemon.stdout.take().unwrap()).lines().next();
        assert!(ready.is_some_and(|line| line.unwrap().contains("ready")), "the daemon ended at its start");
        let guest = Guest::new(number, &socket);
        Self { guest, daemon: Some(daemon), control, _folder: folder }
    }

    /// Starts the daemon with two devices on one uplink.
    fn start_two([first, second]: [u8; 2], options: &str) -> [Self; 2] {
        let neighbour = tempfile::tempdir().unwrap();
        let socket = neighbour.path().join("device");
        let device = format!("name=vm{second},socket={},mac=52:54:00:00:03:{second:02x}", socket.display());
        let first =
            Self::start_with(first, None, options, &["--device", &format!("{device},pin=off,address=any,{options}")]);
        let guest = Guest::new(second, &socket);
        let second = Self { guest, daemon: None, control: first.control.clone(), _folder: neighbour };
        [first, second]
    }

    fn counters(&self) -> Value {
        self.report()["adapter"].clone()
    }

    fn status(&self) -> Value {
        let output = Command::new(PROGRAM).args(["status", "--json", "--control"]).arg(&self.control).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Returns `true` if frames can pass the uplink.
    fn is_up(&self) -> bool {
        self.status()["networks"][0]["uplink"]["up"] == true
    }

    /// Returns the device's part of the status.
    fn report(&self) -> Value {
        let status = self.status();
        let devices = status["devices"].as_array().unwrap().iter();
        let name = format!("vm{}", self.guest.number);
        devices.clone().find(|device| device["name"] == name.as_str()).unwrap().clone()
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        if let Some(daemon) = &mut self.daemon {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

/// A network namespace, removed when dropped.
struct Namespace(String);

impl Namespace {
    /// Creates two namespaces with a cable between their interfaces named `wire`. Returns `None`, and prints the
    /// reason, if that is not possible.
    fn pair(purpose: &str) -> Option<[Self; 2]> {
        let make = |end: &str| {
            let name = format!("pvrdmad-{purpose}-{}-{end}", std::process::id());
            ip(&format!("netns add {name}")).then_some(Self(name))
        };
        let (Some(a), Some(b)) = (make("a"), make("b")) else {
            skipped("network namespaces need root");
            return None;
        };
        a.do_ip(&format!("link add wire mtu 4500 type veth peer name wire mtu 4500 netns {}", b.0));
        for end in [&a, &b] {
            end.do_ip("link set wire up");
        }
        Some([a, b])
    }

    fn do_ip(&self, arguments: &str) {
        assert!(ip(&format!("-n {} {arguments}", self.0)), "ip {arguments}");
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        ip(&format!("netns delete {}", self.0));
    }
}

fn ip(arguments: &str) -> bool {
    Command::new("ip").args(arguments.split_whitespace()).status().is_ok_and(|status| status.success())
}

/// Transfers data in both directions, and checks that no frames were dropped.
fn talk(a: &Site, b: &Site, mtu: u32) {
    transfer(&a.guest, &b.guest, mtu);
    transfer(&b.guest, &a.guest, mtu);
    for site in [a, b] {
        let counters = site.counters();
        let count = |name: &str| counters[name].as_u64().expect(name);
        assert!(count("wire_frames_sent") > 200 && count("wire_frames_received") > 200, "{counters}");
        for name in ["wire_dropped_malformed", "wire_dropped_damaged", "wire_dropped_too_long", "wire_dropped_address"]
        {
            assert_eq!(count(name), 0, "{name}");
        }
    }
}

#[test]
fn a_tunnel_on_the_loopback() {
    // Addresses that no other process has.
    let [.., high, low] = std::process::id().to_be_bytes();
    let [a, b] = [1, 2].map(|number| format!("127.{}.{low}.{number}", 64 | high & 0x3f));
    let first = Site::start(1, None, &format!("uplink=vxlan:{a},remote={b},vni=77,mtu=9000"));
    let second = Site::start(2, None, &format!("uplink=vxlan:{b},remote={a},vni=77,mtu=9000"));
    talk(&first, &second, 5);
    for site in [&first, &second] {
        let counters = site.counters();
        assert!(counters["vxlan_trains_sent"].as_u64().unwrap() > 0, "{counters}");
        assert_eq!(counters["vxlan_dropped_malformed"], 0);
    }
}

/// Frames of one uplink are switched to its devices by MAC address, and directly between those devices.
#[test]
fn two_devices_on_one_uplink() {
    let [.., high, low] = std::process::id().to_be_bytes();
    let [a, b] = [3, 4].map(|number| format!("127.{}.{low}.{number}", 64 | high & 0x3f));
    let near = Site::start_two([1, 3], &format!("uplink=vxlan:{a},remote={b},vni=78,mtu=9000"));
    let far = Site::start(2, None, &format!("uplink=vxlan:{b},remote={a},vni=78,mtu=9000"));
    let [first, second] = &near;
    talk(first, &far, 5);
    transfer(&second.guest, &far.guest, 5);
    transfer(&far.guest, &second.guest, 5);
    transfer(&first.guest, &second.guest, 5);
}

#[test]
fn a_tunnel_through_a_network() {
    let Some([a, b]) = Namespace::pair("vxlan") else { return };
    a.do_ip("address add fd33::1/64 dev wire nodad");
    b.do_ip("address add fd33::2/64 dev wire nodad");
    let first = Site::start(1, Some(&a), "uplink=vxlan:fd33::1,remote=fd33::2,vni=5");
    let second = Site::start(2, Some(&b), "uplink=vxlan:fd33::2,remote=fd33::1,vni=5");
    talk(&first, &second, 3);
}

#[test]
fn interfaces_of_the_hosts() {
    let Some([a, b]) = Namespace::pair("packet") else { return };
    let first = Site::start(1, Some(&a), "uplink=af_packet:wire,mtu=4500");
    let second = Site::start(2, Some(&b), "uplink=af_packet:wire,mtu=4500");
    talk(&first, &second, 5);
}

/// The network function behind an access port is untagged, whatever tags the uplink has.
#[test]
fn a_network_card_on_an_interface_beside_a_vlan() {
    let Some([host, _other]) = Namespace::pair("card") else { return };
    host.do_ip("link add card type veth peer name guest");
    host.do_ip("link set guest address 52:54:00:00:03:01");
    let site = Site::start(1, Some(&host), "uplink=af_packet:wire,vlan=10,nic=af_packet:card");
    // The kernel at the other end looks for neighbours and routers as soon as its interface is up.
    for end in ["card", "guest"] {
        host.do_ip(&format!("link set {end} up"));
    }
    let passed = || site.report()["network"]["counters"]["passed_out"].as_u64().unwrap();
    wait_for("a frame of the card", || (passed() > 0).then_some(()));
}

#[test]
fn bridges_of_the_hosts() {
    let Some(ends) = Namespace::pair("tap") else { return };
    for end in &ends {
        end.do_ip("link add bridge type bridge forward_delay 0");
        end.do_ip("tuntap add dev tap0 mode tap");
        for command in
            ["set tap0 mtu 4500", "set tap0 master bridge", "set wire master bridge", "set tap0 up", "set bridge up"]
        {
            end.do_ip(&format!("link {command}"));
        }
    }
    let [a, b] = &ends;
    let first = Site::start(1, Some(a), "uplink=tap:tap0,mtu=4500");
    let second = Site::start(2, Some(b), "uplink=tap:tap0,mtu=4500");
    talk(&first, &second, 5);
}

/// A certificate authority for TLS links, with a folder for its files.
struct Authority(CertifiedIssuer<'static, KeyPair>, TempDir);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        Self(issuer, tempfile::tempdir().unwrap())
    }

    /// The network of a daemon with a certificate for `name`.
    fn network(&self, uplink: &str, name: &str) -> String {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new([name.to_owned()]).unwrap().signed_by(&key, &self.0).unwrap();
        let files = [("certificate", certificate.pem()), ("key", key.serialize_pem()), ("authority", self.0.pem())];
        let keys = files.map(|(what, text)| {
            let path = self.1.path().join(format!("{name}.{what}"));
            std::fs::write(&path, text).unwrap();
            format!("tls-{what}={}", path.display())
        });
        format!("name=n,uplink={uplink},mtu=9000,{}", keys.join(","))
    }
}

/// RDMA over a TLS connection between holders of certified keys. A client without such a key gets no connection, and
/// does not keep the others from theirs.
#[test]
fn a_connection_with_tls() {
    let [.., high, low] = std::process::id().to_be_bytes();
    let address = format!("127.{}.{low}.5", 64 | high & 0x3f);
    let (ours, other) = (Authority::new(), Authority::new());
    let start = |number, network: String| Site::start_with(number, None, "network=n", &["--network", &network]);
    let connects = format!("tls-connect:{address}:4790");
    let listening = start(1, ours.network(&format!("tls:{address}:4790"), &address));
    let stranger = start(3, other.network(&connects, &address));
    wait_for("a refusal", || (listening.counters()["tls_refused"].as_u64().unwrap() > 0).then_some(()));
    assert!(!listening.is_up() && !stranger.is_up());
    // The second time, the connecting daemon has been restarted.
    for time in 1..=2 {
        let connecting = start(2, ours.network(&connects, "host2"));
        wait_for("a connection", || (listening.is_up() && connecting.is_up()).then_some(()));
        talk(&listening, &connecting, 5);
        talk(&listening, &connecting, 5);
        for (site, connections) in [(&listening, time), (&connecting, 1)] {
            let counters = site.counters();
            assert_eq!((&counters["tls_connected"], &counters["tls_malformed"]), (&connections.into(), &0.into()));
        }
        drop(connecting);
        wait_for("the end of the connection", || (!listening.is_up()).then_some(()));
    }
    assert!(!stranger.is_up());
}
