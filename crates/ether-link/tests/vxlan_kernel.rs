//! A tunnel with the kernel's vxlan device at its other end, in network namespaces. Needs root.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::collections::BTreeSet;
use std::net::UdpSocket;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use nix::sched::{CloneFlags, setns, unshare};
use pvrdma_ether_link::vxlan::{Vni, VxlanConfig, VxlanLink};
use pvrdma_link::{Frames, Link, MonotonicClock};
use pvrdma_verbs::testing::skipped;
use rustix::event::{PollFd, PollFlags};

/// The link's address in the tunnel, and the kernel's.
const OURS: [u8; 6] = [2, 0, 0, 0, 0, 1];
const KERNELS: [u8; 6] = [2, 0, 0, 0, 0, 2];
const OUR_IP: [u8; 4] = [192, 168, 77, 1];
const KERNELS_IP: [u8; 4] = [192, 168, 77, 2];
const PORT: u16 = 5000;

fn ip(arguments: &str) -> bool {
    Command::new("ip").args(arguments.split_whitespace()).status().unwrap().success()
}

/// A named network namespace, removed when dropped.
struct Namespace(String);

impl Namespace {
    fn new(purpose: &str) -> Option<Self> {
        let name = format!("vxlan-{purpose}-{}", std::process::id());
        ip(&format!("netns add {name}")).then_some(Self(name))
    }

    /// Runs a function in the namespace, on a separate thread.
    fn run<T: Send + 'static>(&self, what: impl FnOnce() -> T + Send + 'static) -> T {
        let file = std::fs::File::open(format!("/run/netns/{}", self.0)).unwrap();
        let inside = move || {
            setns(&file, CloneFlags::CLONE_NEWNET).unwrap();
            what()
        };
        thread::spawn(inside).join().unwrap()
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        ip(&format!("netns delete {}", self.0));
    }
}

/// The kernel's end of a tunnel and the link's end, with a cable between them.
struct Tunnel {
    kernel: Namespace,
    link: VxlanLink,
}

impl Tunnel {
    /// Returns `None`, and prints the reason, if it cannot be created. The calling thread is moved to a namespace of
    /// its own.
    fn new(purpose: &str, outer: [&str; 2]) -> Option<Self> {
        if let Err(errno) = unshare(CloneFlags::CLONE_NEWNET) {
            skipped(&format_args!("no network namespace: {errno}"));
            return None;
        }
        let Some(kernel) = Namespace::new(purpose) else {
            skipped("no named network namespace");
            return None;
        };
        let [ours, theirs] = outer;
        let name = &kernel.0;
        // There are no other hosts, and duplicate address detection takes a second.
        let no_dad = if ours.contains(':') { "nodad" } else { "" };
        let device = format!("-n {name} link add vx7 address 02:00:00:00:00:02 type vxlan id 7 dstport 4789");
        assert!(ip(&format!("link add va type veth peer name vb netns {name}")));
        assert!(ip(&format!("address add {ours} dev va {no_dad}")) && ip("link set va up"));
        assert!(
            ip(&format!("-n {name} address add {theirs} dev vb {no_dad}")) && ip(&format!("-n {name} link set vb up"))
        );
        let [ours, theirs] = outer.map(|address| address.split('/').next().unwrap());
        if !ip(&format!("{device} local {theirs} remote {ours}")) {
            skipped("this kernel has no vxlan devices");
            return None;
        }
        for command in ["address add 192.168.77.2/24 dev vx7", "link set vx7 up"] {
            assert!(ip(&format!("-n {name} {command}")));
        }
        let config = VxlanConfig::new((ours.parse::<std::net::IpAddr>().unwrap(), 4789).into())
            .with_remotes(vec![(theirs.parse::<std::net::IpAddr>().unwrap(), 4789).into()])
            .with_vni(Vni::new(7).unwrap());
        let link = VxlanLink::bind(&config, Arc::new(MonotonicClock::default())).unwrap();
        Some(Self { kernel, link })
    }

    /// Waits for a frame that `wanted` accepts; the kernel's stack sends others, too.
    fn receive<T>(&self, wanted: impl Fn(&[u8]) -> Option<T>) -> T {
        let mut frames = Frames::default();
        loop {
            frames.clear();
            self.link.receive(&mut frames, 1);
            if let Some(found) = frames.get(0).and_then(&wanted) {
                return found;
            }
            let readiness = self.link.readiness();
            if frames.is_empty() && readiness.wait.is_none() {
                let fd = readiness.readable.unwrap();
                let timeout = Duration::from_secs(20).try_into().unwrap();
                let ready = rustix::event::poll(&mut [PollFd::new(&*fd, PollFlags::IN)], Some(&timeout)).unwrap();
                assert!(ready > 0, "no data arrives");
            }
        }
    }
}

/// A UDP packet from us to the kernel.
fn udp(payload: &[u8]) -> Vec<u8> {
    let word = |length: usize| u16::try_from(length).unwrap().to_be_bytes();
    let mut ip =
        [&[0x45, 0][..], &word(28 + payload.len()), &[0, 0, 0x40, 0, 64, 17, 0, 0], &OUR_IP, &KERNELS_IP].concat();
    let mut sum: u32 = ip.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    sum = (sum & 0xffff) + (sum >> 16);
    let sum = !u16::try_from((sum & 0xffff) + (sum >> 16)).unwrap();
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    let header = [PORT.to_be_bytes(), PORT.to_be_bytes(), word(8 + payload.len()), [0, 0]].concat();
    [&KERNELS[..], &OURS, &[8, 0], &ip, &header, payload].concat()
}

fn talk(purpose: &'static str, outer: [&'static str; 2]) {
    // On a separate thread, because a namespace is a property of a thread.
    let test = move || {
        let Some(tunnel) = Tunnel::new(purpose, outer) else { return };
        // The link sends a broadcast, and the kernel answers.
        let mut frames = Frames::default();
        let question = [&[0xff; 6][..], &OURS, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1], &OURS, &OUR_IP, &[0; 6], &KERNELS_IP];
        frames.push(&question.concat());
        assert_eq!(tunnel.link.send(&frames, 0), 1);
        let answer = tunnel.receive(|frame| {
            let is_answer = frame.get(12..14) == Some(&[8, 6]) && frame.get(20..22) == Some(&[0, 2]);
            is_answer.then(|| (frame[..6].to_vec(), frame[22..28].to_vec()))
        });
        assert_eq!(answer, (OURS.to_vec(), KERNELS.to_vec()));

        // A train reaches a socket behind the kernel's device as separate packets, and the answers return.
        let socket = tunnel.kernel.run(|| UdpSocket::bind(("192.168.77.2", PORT)).unwrap());
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        frames.clear();
        let payloads: Vec<Vec<u8>> = (0..100_u8).map(|n| vec![n; 1000]).collect();
        payloads.iter().for_each(|payload| frames.push(&udp(payload)));
        assert_eq!(tunnel.link.send(&frames, 0), payloads.len());
        let mut buffer = [0; 2000];
        for payload in &payloads {
            let (length, from) = socket.recv_from(&mut buffer).unwrap();
            assert!(buffer[..length] == payload[..]);
            socket.send_to(&buffer[..length], from).unwrap();
        }
        let mut missing: BTreeSet<_> = payloads.iter().cloned().collect();
        while !missing.is_empty() {
            let payload = tunnel.receive(|frame| {
                let ours = frame[..6] == OURS && frame.get(12..14) == Some(&[8, 0]);
                (ours && frame[36..38] == PORT.to_be_bytes()).then(|| frame[42..].to_vec())
            });
            assert!(missing.remove(&payload), "each payload arrives once and unchanged");
        }
        let counters = tunnel.link.counters();
        let figure = |name: &str| counters.iter().find(|counter| counter.name == name).unwrap().value;
        assert!(figure("vxlan_trains_sent") > 0, "{counters:?}");
        assert_eq!((tunnel.link.lost(), figure("vxlan_dropped_malformed")), (0, 0));
    };
    thread::spawn(test).join().unwrap();
}

#[test]
fn the_kernel_understands_us_over_ipv4() {
    talk("v4", ["10.77.0.1/24", "10.77.0.2/24"]);
}

#[test]
fn the_kernel_understands_us_over_ipv6() {
    talk("v6", ["fd77::1/64", "fd77::2/64"]);
}
