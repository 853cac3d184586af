//! Two daemons on separate hosts, each with a device, connected by each kind of uplink.

use std::process::Command;
use std::rc::Rc;

use crate::common::daemon::{Running, TestDaemon};
use crate::common::traffic::{Guest, gid, mac, transfer};
use pvrdma_dev::testing::{Path, QpInit, SendWr, access, status, wait_for};
use pvrdma_verbs::testing::skipped;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use serde_json::Value;
use tempfile::TempDir;

/// A daemon with one device, and the guest that uses it.
struct Site {
    guest: Guest,
    /// Shared by the devices of one daemon.
    daemon: Rc<Running>,
}

impl Site {
    /// Starts the daemon, in a network namespace if one is given. `network` has the keys of its network.
    fn start(number: u8, namespace: Option<&Namespace>, network: &str) -> Self {
        Self::start_with(number, namespace, network, "address=any")
    }

    /// Same as [`Self::start`], with these keys of the device.
    fn start_with(number: u8, namespace: Option<&Namespace>, network: &str, keys: &str) -> Self {
        let daemon = TestDaemon::new().network("default", network);
        let daemon = namespace.into_iter().fold(daemon, |daemon, Namespace(name)| daemon.inside(name));
        Self::of(&Rc::new(daemon.device(&format!("vm{number}"), number, keys).start()), number)
    }

    /// Starts the daemon with two devices on one uplink.
    fn start_two(numbers: [u8; 2], network: &str) -> [Self; 2] {
        let daemon = TestDaemon::new().network("default", network);
        let daemon = numbers
            .into_iter()
            .fold(daemon, |daemon, number| daemon.device(&format!("vm{number}"), number, "address=any"));
        let daemon = Rc::new(daemon.start());
        numbers.map(|number| Self::of(&daemon, number))
    }

    fn of(daemon: &Rc<Running>, number: u8) -> Self {
        Self { guest: daemon.guest(&format!("vm{number}"), number), daemon: Rc::clone(daemon) }
    }

    fn counters(&self) -> Value {
        self.report()["adapter"].clone()
    }

    /// Returns `true` if frames can pass the uplink.
    fn is_up(&self) -> bool {
        self.daemon.network("default")["uplink"]["up"] == true
    }

    /// Returns the device's part of the status.
    fn report(&self) -> Value {
        self.daemon.report(&format!("vm{}", self.guest.number))
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

/// Connects a host by two interfaces to a bridge of the other host, which has the interface `tap0`.
fn two_cables() -> Option<[Namespace; 2]> {
    let [a, b] = Namespace::pair("backup")?;
    a.do_ip(&format!("link add spare mtu 4500 type veth peer name spare mtu 4500 netns {}", b.0));
    b.do_ip("link add bridge type bridge forward_delay 0");
    b.do_ip("tuntap add dev tap0 mode tap");
    b.do_ip("link set tap0 mtu 4500");
    for port in ["tap0", "wire", "spare"] {
        b.do_ip(&format!("link set {port} master bridge"));
        b.do_ip(&format!("link set {port} up"));
    }
    b.do_ip("link set bridge up");
    a.do_ip("link set spare up");
    Some([a, b])
}

/// A connection continues when the active interface of an uplink with two goes down, loses its carrier or is deleted.
#[test]
fn an_uplink_fails_over() {
    const LENGTH: usize = 300_001;

    let Some([a, b]) = two_cables() else { return };
    let near = Site::start(1, Some(&a), "uplink=af_packet:wire+spare,mtu=4500");
    let far = Site::start(2, Some(&b), "uplink=tap:tap0,mtu=4500");
    let interface = || near.daemon.status()["networks"][0]["interface"].clone();
    let active = |name: &str| wait_for("a fail-over", || (interface()["active"] == name).then_some(()));
    active("wire");

    let [(from, from_pd, mut done), (to, to_pd, to_cq)] = [&near.guest, &far.guest].map(|guest| {
        let driver = &guest.driver;
        (driver, driver.create_pd(None).unwrap(), driver.create_cq(None, 64).unwrap())
    });
    let mut left = from.create_qp(&QpInit::rc(&from_pd, &done)).unwrap();
    let mut right = to.create_qp(&QpInit::rc(&to_pd, &to_cq)).unwrap();
    left.connect(&Path { dmac: mac(2), timeout: 18, ..Path::to(gid(2), right.qpn) }).unwrap();
    right.connect(&Path { dmac: mac(1), timeout: 18, ..Path::to(gid(1), left.qpn) }).unwrap();
    let all = access::LOCAL_WRITE | access::REMOTE_WRITE;
    let (mine, mine_mr) = from.registered_buffer(&from_pd, LENGTH, all).unwrap();
    let (theirs, theirs_mr) = to.registered_buffer(&to_pd, LENGTH, all).unwrap();
    let remote = theirs.sge(&theirs_mr, 0, LENGTH).addr;
    // Requests are outstanding when the interface fails, and others are posted while none is there.
    let mut carry = |pattern, change: &dyn Fn()| {
        mine.fill_pattern(pattern);
        let whole = [mine.sge(&mine_mr, 0, LENGTH)];
        let write = |id| SendWr::write(id, &whole, remote, theirs_mr.rkey);
        left.post_send(&[write(1), write(2)]).unwrap();
        change();
        left.post_send(&[write(3), write(4)]).unwrap();
        let done = done.wait_many(4);
        assert!(done.iter().map(|cqe| (cqe.wr_id, cqe.status)).eq((1..=4).map(|id| (id, status::SUCCESS))));
        assert!(theirs.read(0, LENGTH) == mine.read(0, LENGTH));
    };
    carry(1, &|| {});
    carry(2, &|| a.do_ip("link set wire down"));
    active("spare");
    a.do_ip("link set wire up");
    wait_for("the backup", || (interface()["backup"] == "up").then_some(()));
    carry(3, &|| b.do_ip("link set spare down"));
    active("wire");
    b.do_ip("link set spare up");
    wait_for("the backup", || (interface()["backup"] == "up").then_some(()));

    // The kernel activates the queue of an interface, and the port of a bridge, some time after the carrier is back.
    let shows = |arguments: &str, word| {
        let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
        String::from_utf8(output.stdout).unwrap().contains(word)
    };
    let (queue, port) =
        (format!("-n {} link show dev spare", a.0), format!("netns exec {} bridge link show dev spare", b.0));
    wait_for("the interface", || (shows(&queue, "state UP") && shows(&port, "state forwarding")).then_some(()));

    // Without traffic, the bridge learns the new place from an announcement.
    a.do_ip("link delete wire");
    active("spare");
    let known = || {
        let command = ["netns", "exec", &b.0, "bridge", "fdb", "show", "brport", "spare"];
        let output = Command::new("ip").args(command).output().unwrap();
        String::from_utf8(output.stdout).unwrap().contains("52:54:00:00:03:01")
    };
    wait_for("an announcement", || known().then_some(()));
    carry(4, &|| {});
    assert_eq!(near.counters()["uplink_failovers"], 3);
    assert_eq!(interface()["backup"], "absent");

    // An interface of the name comes back, with a smaller MTU, and is used again.
    a.do_ip(&format!("link add wire mtu 1500 type veth peer name wire mtu 4500 netns {}", b.0));
    b.do_ip("link set wire master bridge");
    for end in [&a, &b] {
        end.do_ip("link set wire up");
    }
    wait_for("the smaller MTU", || (interface()["mtu"] == 1500 && interface()["backup"] == "up").then_some(()));
    assert_eq!(interface()["different_mtus"], serde_json::json!([1500, 4500]));
    a.do_ip("link set wire mtu 4500");
    wait_for("equal MTUs", || (interface()["mtu"] == 4500).then_some(()));
    carry(5, &|| a.do_ip("link set spare down"));
    active("wire");
}

/// The network function behind an access port is untagged, whatever tags the uplink has.
#[test]
fn a_network_card_on_an_interface_beside_a_vlan() {
    let Some([host, _other]) = Namespace::pair("card") else { return };
    host.do_ip("link add card type veth peer name guest");
    host.do_ip("link set guest address 52:54:00:00:03:01");
    let site = Site::start_with(1, Some(&host), "uplink=af_packet:wire,vlan=10", "nic=af_packet:card,address=any");
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

    /// Keys of the network of a daemon with a certificate for `name`.
    fn network(&self, uplink: &str, name: &str) -> String {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new([name.to_owned()]).unwrap().signed_by(&key, &self.0).unwrap();
        let files = [("certificate", certificate.pem()), ("key", key.serialize_pem()), ("authority", self.0.pem())];
        let keys = files.map(|(what, text)| {
            let path = self.1.path().join(format!("{name}.{what}"));
            std::fs::write(&path, text).unwrap();
            format!("tls-{what}={}", path.display())
        });
        format!("uplink={uplink},mtu=9000,{}", keys.join(","))
    }
}

/// RDMA over a TLS connection between holders of certified keys. A client without such a key gets no connection, and
/// does not keep the others from theirs.
#[test]
fn a_connection_with_tls() {
    let [.., high, low] = std::process::id().to_be_bytes();
    let address = format!("127.{}.{low}.5", 64 | high & 0x3f);
    let (ours, other) = (Authority::new(), Authority::new());
    let start = |number, network: String| Site::start(number, None, &network);
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
            // TLS has an integrity check of its own.
            let without_icrc =
                ["wire_sent_without_icrc", "wire_received_without_icrc"].map(|name| counters[name].as_u64());
            assert!(without_icrc.iter().all(|count| count.unwrap() > 0), "{counters}");
        }
        drop(connecting);
        wait_for("the end of the connection", || (!listening.is_up()).then_some(()));
    }
    assert!(!stranger.is_up());
}
