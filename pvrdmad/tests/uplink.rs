//! Two daemons on hosts of their own, each with a device: what they reach each other by.

#![expect(clippy::unwrap_used, reason = "a test")]

mod common;

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use common::remote::probe;
use pvrdma_dev::testing::{
    AddressHandle, Driver, Path, QpInit, RecvWr, SendWr, access, opcode, status, wc_flag, wc_opcode,
};
use pvrdma_verbs::Gid;
use serde_json::Value;
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_pvrdmad");
const QKEY: u32 = 0x1234;
/// Bytes of a transfer: many packets, and not a multiple of one.
const LENGTH: usize = 300_001;

fn mac(number: u8) -> [u8; 6] {
    [0x52, 0x54, 0, 0, 3, number]
}

fn gid(number: u8) -> Gid {
    let mut gid = Gid::default();
    gid.0[10..12].fill(0xff);
    gid.0[12..].copy_from_slice(&[10, 33, 0, number]);
    gid
}

/// A daemon with one device, and the guest that uses it.
struct Site {
    number: u8,
    driver: Driver,
    /// None: that of a neighbour.
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
        // A system call that the sandbox does not know ends the process, and the test.
        command.args(["--sandbox", "strict"]);
        command.arg("--device").arg(format!("{device},pin=off,{options}")).arg("--control").arg(&control).args(more);
        let mut daemon = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let ready = BufReader::new(daemon.stdout.take().unwrap()).lines().next();
        assert!(ready.is_some_and(|line| line.unwrap().contains("ready")), "the daemon ended at its start");
        let driver = probe(&socket, 16 << 20);
        driver.bind_gid(0, gid(number)).unwrap();
        Self { number, driver, daemon: Some(daemon), control, _folder: folder }
    }

    /// Starts the daemon with two devices on one uplink.
    fn start_two([first, second]: [u8; 2], options: &str) -> [Self; 2] {
        let neighbour = tempfile::tempdir().unwrap();
        let socket = neighbour.path().join("device");
        let device = format!("name=vm{second},socket={},mac=52:54:00:00:03:{second:02x}", socket.display());
        let first = Self::start_with(first, None, options, &["--device", &format!("{device},pin=off,{options}")]);
        let driver = probe(&socket, 16 << 20);
        driver.bind_gid(0, gid(second)).unwrap();
        let second = Self { number: second, driver, daemon: None, control: first.control.clone(), _folder: neighbour };
        [first, second]
    }

    fn counters(&self) -> Value {
        let output = Command::new(PROGRAM).args(["status", "--json", "--control"]).arg(&self.control).output().unwrap();
        let status: Value = serde_json::from_slice(&output.stdout).unwrap();
        let devices = status["devices"].as_array().unwrap().iter();
        let name = format!("vm{}", self.number);
        devices.clone().find(|device| device["name"] == name.as_str()).unwrap()["adapter"].clone()
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

/// A network namespace, gone with the value.
struct Namespace(String);

impl Namespace {
    /// Two with a cable between their interfaces `wire`. `None`: they cannot be made here, and that was printed.
    fn pair(purpose: &str) -> Option<[Self; 2]> {
        let make = |end: &str| {
            let name = format!("pvrdmad-{purpose}-{}-{end}", std::process::id());
            ip(&format!("netns add {name}")).then_some(Self(name))
        };
        let (Some(a), Some(b)) = (make("a"), make("b")) else {
            println!("skipped: network namespaces need root");
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

/// Connected requests of each kind, and a datagram, from one site to the other. Path MTU as the numbering of verbs has
/// it.
fn transfer(from: &Site, to: &Site, mtu: u32) {
    let [(a, a_pd, mut a_cq), (b, b_pd, mut b_cq)] = [from, to].map(|site| {
        let driver = &site.driver;
        (driver, driver.create_pd(None).unwrap(), driver.create_cq(None, 64).unwrap())
    });
    let mut left = a.create_qp(&QpInit::rc(&a_pd, &a_cq)).unwrap();
    let mut right = b.create_qp(&QpInit::rc(&b_pd, &b_cq)).unwrap();
    left.connect(&Path { dmac: mac(to.number), mtu, ..Path::to(gid(to.number), right.qpn) }).unwrap();
    right.connect(&Path { dmac: mac(from.number), mtu, ..Path::to(gid(from.number), left.qpn) }).unwrap();
    let all = access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_READ;
    let (mine, mine_mr) = a.registered_buffer(&a_pd, LENGTH, all).unwrap();
    let (theirs, theirs_mr) = b.registered_buffer(&b_pd, LENGTH, all).unwrap();
    let whole = [mine.sge(&mine_mr, 0, LENGTH)];
    let remote = theirs.sge(&theirs_mr, 0, LENGTH);

    // Write, and look at the far memory once a send has come behind it.
    mine.fill_pattern(1);
    right.post_recv(&[RecvWr::new(7, &[])]).unwrap();
    left.post_send(&[SendWr::write(1, &whole, remote.addr, theirs_mr.rkey), SendWr::send(2, &[])]).unwrap();
    let done = a_cq.wait_many(2);
    assert!(done.iter().map(|cqe| (cqe.wr_id, cqe.status)).eq([(1, status::SUCCESS), (2, status::SUCCESS)]));
    assert_eq!((b_cq.wait().wr_id, theirs.read(0, LENGTH) == mine.read(0, LENGTH)), (7, true));
    // Send into a receive.
    mine.fill_pattern(2);
    right.post_recv(&[RecvWr::new(8, &[remote])]).unwrap();
    left.post_send(&[SendWr::send(3, &whole)]).unwrap();
    assert_eq!(a_cq.wait().status, status::SUCCESS);
    let received = b_cq.wait();
    assert_eq!((received.wr_id, received.opcode, received.byte_len as usize), (8, wc_opcode::RECV, LENGTH));
    assert!(theirs.read(0, LENGTH) == mine.read(0, LENGTH));
    // Read.
    theirs.fill_pattern(3);
    left.post_send(&[SendWr::read(4, &whole, remote.addr, theirs_mr.rkey)]).unwrap();
    assert_eq!(a_cq.wait().status, status::SUCCESS);
    assert!(mine.read(0, LENGTH) == theirs.read(0, LENGTH));

    let mut sender = a.create_qp(&QpInit::ud(&a_pd, &a_cq)).unwrap();
    let mut receiver = b.create_qp(&QpInit::ud(&b_pd, &b_cq)).unwrap();
    sender.start_datagrams(QKEY).unwrap();
    receiver.start_datagrams(QKEY).unwrap();
    receiver.post_recv(&[RecvWr::new(9, &[theirs.sge(&theirs_mr, 0, 40 + 1000)])]).unwrap();
    let handle = AddressHandle { dmac: mac(to.number), ..AddressHandle::new(a_pd.handle, gid(to.number)) };
    let datagram = SendWr::datagram(5, &[mine.sge(&mine_mr, 0, 1000)], &handle, receiver.qpn, QKEY);
    assert_eq!(datagram.opcode, opcode::SEND);
    sender.post_send(&[datagram.immediate([1, 2, 3, 4])]).unwrap();
    assert_eq!(a_cq.wait().status, status::SUCCESS);
    let received = b_cq.wait();
    assert_eq!((received.wr_id, received.byte_len, received.src_qp), (9, 1040, sender.qpn));
    assert_eq!((received.imm_data, received.wc_flags & wc_flag::WITH_IMM), ([1, 2, 3, 4], wc_flag::WITH_IMM));
    assert!(theirs.read(40, 1000) == mine.read(0, 1000));
}

/// Both ways, and then nothing was thrown away.
fn talk(a: &Site, b: &Site, mtu: u32) {
    transfer(a, b, mtu);
    transfer(b, a, mtu);
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

/// Frames of one uplink go to devices by their address, and between these directly.
#[test]
fn two_devices_on_one_uplink() {
    let [.., high, low] = std::process::id().to_be_bytes();
    let [a, b] = [3, 4].map(|number| format!("127.{}.{low}.{number}", 64 | high & 0x3f));
    let near = Site::start_two([1, 3], &format!("uplink=vxlan:{a},remote={b},vni=78,mtu=9000"));
    let far = Site::start(2, None, &format!("uplink=vxlan:{b},remote={a},vni=78,mtu=9000"));
    let [first, second] = &near;
    talk(first, &far, 5);
    transfer(second, &far, 5);
    transfer(&far, second, 5);
    transfer(first, second, 5);
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
