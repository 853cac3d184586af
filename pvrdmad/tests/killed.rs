//! The whole daemon is killed under running VMs. The next daemon finds their connections at the keepers.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Instant;

use crate::common::churn::beside_churn;
use crate::common::patient::PatientVmm;
use crate::common::process::{Daemon, children};
use crate::common::remote::probe;
use crate::common::{PATIENCE, Raw};
use pvrdma_dev::testing::{AsyncEntry, Driver};
use pvrdmad::testing::{Pair, beside_traffic};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::Value;
use tempfile::TempDir;

const MEMORY: u64 = 16 << 20;
/// DEVICE_FATAL.
const FATAL: AsyncEntry = AsyncEntry { kind: 8, info: 0 };
/// Region of configuration space.
const CONFIG: u32 = 7;
const PROGRAM: &str = env!("CARGO_BIN_EXE_pvrdmad");

/// A daemon with the network `a` and the devices `a1` and `a2`, which have network functions. It is started any number
/// of times.
struct Place {
    daemon: Option<Daemon>,
    devices: Vec<String>,
    /// Time for which a keeper holds its clients without a worker, in milliseconds.
    alone: u32,
    folder: TempDir,
}

impl Place {
    fn start() -> Self {
        let mut place = Self::new();
        place.again();
        place
    }

    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let device = |number: u8| {
            let path = |name: &str| folder.path().join(format!("{name}{number}")).display().to_string();
            let sockets = format!("socket={},nic-socket={}", path("a"), path("nic"));
            format!("name=a{number},network=a,{sockets},mac=52:54:00:00:07:0{number},pin=off,seed={number}")
        };
        Self { daemon: None, devices: vec![device(1), device(2)], alone: 60_000, folder }
    }

    fn command(&self) -> Command {
        let mut command = Command::new(PROGRAM);
        // With `strict`, a system call outside the filter kills the process, and the test fails.
        command.args(["--sandbox=strict", "--network=name=a", "--control"]).arg(self.path("control"));
        command.args(self.devices.iter().flat_map(|device| ["--device", device]));
        command.env("PVRDMAD_CRASHES", "10").env("PVRDMAD_ALONE_MS", self.alone.to_string());
        let log = std::env::var_os("CRASH_LOG").map_or_else(Stdio::null, |_| Stdio::inherit());
        command.stderr(log);
        command
    }

    /// Starts the daemon again.
    fn again(&mut self) {
        self.daemon = Some(Daemon::start(&mut self.command()));
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn keepers(&self) -> PathBuf {
        self.path("control.keepers")
    }

    fn run(&self, words: &[&str]) -> String {
        let output = Command::new(PROGRAM).args(words).arg("--control").arg(self.path("control")).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn status(&self) -> Value {
        serde_json::from_str(&self.run(&["status", "--json"])).unwrap()
    }

    /// Kills the daemon. Returns its processes.
    fn kill(&mut self) -> BTreeSet<String> {
        let mut daemon = self.daemon.take().unwrap();
        let children = children(daemon.id());
        daemon.kill();
        children
    }

    fn stop(&mut self) {
        self.daemon.take().unwrap().stop();
    }
}

/// Waits until these processes have ended.
#[track_caller]
fn wait_ends(processes: &BTreeSet<String>) {
    let start = Instant::now();
    let runs = |pid: &String| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
    };
    while processes.iter().any(runs) {
        assert!(start.elapsed() < PATIENCE, "{processes:?}");
        thread::yield_now();
    }
}

#[test]
fn vms_survive_the_daemon_and_reload_their_drivers() {
    let mut place = Place::start();
    let other = Place::start();
    let vms = ["a1", "a2"].map(|name| PatientVmm::connect(&place.path(name), MEMORY));
    let mut nic = Raw::connect(&place.path("nic1"));
    nic.negotiate();
    nic.write(CONFIG, 4, &[6, 0]);
    let mut others = Pair::new(["a1", "a2"].map(|name| probe(&other.path(name), MEMORY)));
    let mut processes = BTreeSet::new();
    for round in 0..3 {
        let drivers = vms.each_ref().map(|vm| vm.load().unwrap());
        let config = vms.each_ref().map(|vm| vm.config(0, 256));
        let events = vms.each_ref().map(|vm| vm.interrupts()[1]);
        beside_traffic(&mut others, || {
            beside_churn(drivers.each_ref(), || {
                processes.extend(place.kill());
                place.again();
            });
        });
        let status = place.status();
        assert_eq!(status["networks"][0]["lost_vms"], Value::Array(Vec::new()), "{status:#}");
        for (number, (vm, driver)) in vms.iter().zip(&drivers).enumerate() {
            let device = &status["devices"][number];
            assert_eq!(device["recovery"], serde_json::json!({"told": true, "problem": null}), "{device:#}");
            assert_eq!((&device["phase"], &device["client"]["connected"]), (&"reset".into(), &true.into()));
            // Once, with its interrupt, behind the events of before. Commands fail, and the rest is as it was.
            assert_eq!(driver.async_events().iter().filter(|&&event| event == FATAL).count(), 1, "{round}");
            assert_eq!(vm.interrupts()[1], events[number] + 1);
            assert_eq!(vm.config(0, 256), config[number]);
            assert!(driver.query_port().is_err());
        }
        assert_eq!(nic.read(CONFIG, 4, 2), [6, 0]);
        drivers.into_iter().for_each(Driver::remove);
        let mut pair = Pair::new(vms.each_ref().map(|vm| vm.load().unwrap()));
        (0..3).for_each(|_| pair.exchange());
        drop(pair);
        vms.iter().for_each(|vm| vm.memory.free_all());
    }
    assert_eq!(other.status()["networks"][0]["restarts"], 0);
    // A daemon that ends leaves nothing, not even the processes that it has not started itself.
    place.stop();
    wait_ends(&processes);
    assert!(!place.keepers().exists());
    assert_eq!(fs::read_dir(place.folder.path()).unwrap().count(), 0);
    vms[0].raw(|raw| assert!(raw.try_receive().is_none()));
}

/// The client may not have noticed anything, and crashes of the worker are survived after that of the daemon.
#[test]
fn a_worker_crashes_after_the_daemon() {
    let mut place = Place::start();
    let vm = PatientVmm::connect(&place.path("a1"), MEMORY);
    let mut processes = place.kill();
    place.again();
    let status = place.status();
    assert_eq!(status["networks"][0]["lost_vms"], Value::Array(Vec::new()), "{status:#}");
    let worker = i32::try_from(status["networks"][0]["pid"].as_i64().unwrap()).unwrap();
    let driver = vm.load().unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_raw(worker).unwrap(), rustix::process::Signal::KILL)
        .unwrap();
    let start = Instant::now();
    while place.status()["networks"][0]["restarts"] != 1 || place.status()["networks"][0]["state"] != "running" {
        assert!(start.elapsed() < PATIENCE);
    }
    assert_eq!(driver.async_events(), [FATAL]);
    driver.remove();
    processes.extend(place.kill());
    place.again();
    vm.load().unwrap().remove();
    place.stop();
    wait_ends(&processes);
}

/// A keeper that the next daemon does not find must not hold the VMM, which would wait for each answer in vain.
#[test]
fn keepers_without_a_daemon_end() {
    let mut place = Place::new();
    place.alone = 200;
    place.again();
    let vm = PatientVmm::connect(&place.path("a1"), MEMORY);
    let processes = place.kill();
    vm.raw(|raw| assert!(raw.try_receive().is_none()));
    wait_ends(&processes);
    // Also with their last client.
    place.alone = 3_600_000;
    place.again();
    let vm = PatientVmm::connect(&place.path("a1"), MEMORY);
    let processes = place.kill();
    drop(vm);
    wait_ends(&processes);
    place.again();
    PatientVmm::connect(&place.path("a1"), MEMORY).load().unwrap();
    place.stop();
    assert_eq!(fs::read_dir(place.folder.path()).unwrap().count(), 0);
}

/// The next daemon has another configuration, and finds files that are no keepers.
#[test]
fn keepers_of_unknown_devices_end() {
    let mut place = Place::start();
    let vms = ["a1", "a2"].map(|name| PatientVmm::connect(&place.path(name), MEMORY));
    let processes = place.kill();
    let _gone = place.devices.pop();
    let stale = ["1@a1@7-0", "1@a1", "2@a1@7-0", "1@a1@7-0@8", "plain"].map(|name| place.keepers().join(name));
    for path in &stale[..4] {
        listen(path);
    }
    fs::write(&stale[4], "not a socket").unwrap();
    place.again();
    let status = place.status();
    assert_eq!(status["networks"][0]["lost_vms"], Value::Array(Vec::new()), "{status:#}");
    vms[1].raw(|raw| assert!(raw.try_receive().is_none()));
    vms[0].load().unwrap();
    assert!(stale.iter().all(|path| !path.exists()));
    place.stop();
    wait_ends(&processes);
}

/// Makes a socket on which no process listens any more.
fn listen(path: &Path) {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    rustix::net::bind(socket.unwrap(), &SocketAddrUnix::new(path).unwrap()).unwrap();
}

/// A directory that others may enter is not trusted.
#[test]
fn an_open_directory_is_not_used() {
    let mut place = Place::start();
    let vm = PatientVmm::connect(&place.path("a1"), MEMORY);
    assert_eq!(fs::metadata(place.keepers()).unwrap().permissions().mode() & 0o7777, 0o700);
    for entry in fs::read_dir(place.keepers()).unwrap() {
        assert_eq!(entry.unwrap().metadata().unwrap().permissions().mode() & 0o7777, 0o600);
    }
    place.alone = 200;
    let processes = place.kill();
    fs::set_permissions(place.keepers(), fs::Permissions::from_mode(0o755)).unwrap();
    place.again();
    // The device serves its next client, whose keeper ends with the daemon.
    assert_eq!(place.status()["devices"][0]["client"]["connected"], false);
    drop(vm);
    wait_ends(&processes);
    let vm = PatientVmm::connect(&place.path("a1"), MEMORY);
    vm.load().unwrap();
    let processes = place.kill();
    vm.raw(|raw| assert!(raw.try_receive().is_none()));
    wait_ends(&processes);
}

/// A daemon that does not start leaves the VMs to the next one.
#[test]
fn a_daemon_that_fails_to_start_leaves_the_vms() {
    let mut place = Place::start();
    let vm = PatientVmm::connect(&place.path("a1"), MEMORY);
    place.kill();
    let mut command = place.command();
    command.args(["--network", "name=b", "--device"]);
    command.arg(format!("name=b1,network=b,mac=52:54:00:00:07:09,socket={}", place.path("no/b1").display()));
    assert_eq!(command.stdout(Stdio::null()).status().unwrap().code(), Some(1));
    place.again();
    // Answered only once the client is served again.
    vm.load().unwrap();
    let status = place.status();
    assert_eq!(status["devices"][0]["client"]["connected"], true, "{status:#}");
    place.stop();
}
