//! The whole daemon is killed under running VMs. The next daemon finds their connections at the keepers.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::Instant;

use crate::common::PATIENCE;
use crate::common::churn::beside_churn;
use crate::common::daemon::{Running, TestDaemon, describe};
use crate::common::patient::PatientVmm;
use crate::common::process::children;
use pvrdma_dev::testing::{AsyncEntry, Driver};
use pvrdmad::testing::{Pair, beside_traffic};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::Value;

const MEMORY: u64 = 16 << 20;
/// DEVICE_FATAL.
const FATAL: AsyncEntry = AsyncEntry { kind: 8, info: 0 };
/// Region of configuration space.
const CONFIG: u32 = 7;
/// Time for which a keeper holds its clients without a worker, in milliseconds.
const LONG: u32 = 60_000;
const BRIEF: u32 = 200;

/// Returns a daemon with the network `a` and these numbers of the devices `a1` and `a2`, which have network functions.
/// A keeper holds its clients without a worker for `alone` milliseconds.
fn described(numbers: &[u8], alone: u32) -> TestDaemon {
    let daemon = TestDaemon::new().network("a", "");
    let device = |daemon: TestDaemon, number: &u8| {
        daemon.device(&format!("a{number}"), *number, &format!("network=a,nic-socket=FOLDER/nic{number},seed={number}"))
    };
    let daemon = numbers.iter().fold(daemon, device);
    daemon.env("PVRDMAD_CRASHES", "10").env("PVRDMAD_ALONE_MS", &alone.to_string())
}

/// Starts a daemon with both devices.
fn start() -> Running {
    described(&[1, 2], LONG).start()
}

/// Kills a daemon. Returns its processes.
fn kill(daemon: &mut Running) -> BTreeSet<String> {
    let children = children(daemon.id());
    daemon.kill();
    children
}

fn keepers(daemon: &Running) -> PathBuf {
    daemon.path("control.keepers")
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
    let mut place = start();
    let other = start();
    let vms = ["a1", "a2"].map(|name| PatientVmm::connect(&place.path(name), MEMORY));
    let mut nic = place.client("nic1");
    nic.write(CONFIG, 4, &[6, 0]);
    let mut others = other.pair(["a1", "a2"]);
    let mut processes = BTreeSet::new();
    for round in 0..3 {
        let drivers = vms.each_ref().map(|vm| vm.load().unwrap());
        let config = vms.each_ref().map(|vm| vm.config(0, 256));
        let events = vms.each_ref().map(|vm| vm.interrupts()[1]);
        beside_traffic(&mut others, || {
            beside_churn(drivers.each_ref(), || {
                processes.extend(kill(&mut place));
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
    assert!(!keepers(&place).exists());
    assert_eq!(fs::read_dir(place.folder()).unwrap().count(), 0);
    vms[0].raw(|raw| assert!(raw.try_receive().is_none()));
}

/// The client may not have noticed anything, and crashes of the worker are survived after that of the daemon.
#[test]
fn a_worker_crashes_after_the_daemon() {
    let mut place = start();
    let vm = PatientVmm::connect(&place.path("a1"), MEMORY);
    let mut processes = kill(&mut place);
    place.again();
    let status = place.status();
    assert_eq!(status["networks"][0]["lost_vms"], Value::Array(Vec::new()), "{status:#}");
    let driver = vm.load().unwrap();
    place.crash("a");
    assert_eq!(driver.async_events(), [FATAL]);
    driver.remove();
    processes.extend(kill(&mut place));
    place.again();
    vm.load().unwrap().remove();
    place.stop();
    wait_ends(&processes);
}

/// A keeper that the next daemon does not find must not hold the VMM, which would wait for each answer in vain.
#[test]
fn keepers_without_a_daemon_end() {
    let mut place = described(&[1, 2], BRIEF).start();
    let vm = PatientVmm::connect(&place.path("a1"), MEMORY);
    let processes = kill(&mut place);
    vm.raw(|raw| assert!(raw.try_receive().is_none()));
    wait_ends(&processes);
    // Also with their last client.
    place.setup.set("PVRDMAD_ALONE_MS", "3600000");
    place.again();
    let vm = PatientVmm::connect(&place.path("a1"), MEMORY);
    let processes = kill(&mut place);
    drop(vm);
    wait_ends(&processes);
    place.again();
    PatientVmm::connect(&place.path("a1"), MEMORY).load().unwrap();
    place.stop();
    assert_eq!(fs::read_dir(place.folder()).unwrap().count(), 0);
}

/// The next daemon has another configuration, and finds files that are no keepers.
#[test]
fn keepers_of_unknown_devices_end() {
    let mut place = start();
    let vms = ["a1", "a2"].map(|name| PatientVmm::connect(&place.path(name), MEMORY));
    let processes = kill(&mut place);
    place.setup.remove("a2");
    let stale = ["1@a1@7-0", "1@a1", "2@a1@7-0", "1@a1@7-0@8", "plain"].map(|name| keepers(&place).join(name));
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
    let mut place = start();
    let vm = PatientVmm::connect(&place.path("a1"), MEMORY);
    assert_eq!(fs::metadata(keepers(&place)).unwrap().permissions().mode() & 0o7777, 0o700);
    for entry in fs::read_dir(keepers(&place)).unwrap() {
        assert_eq!(entry.unwrap().metadata().unwrap().permissions().mode() & 0o7777, 0o600);
    }
    place.setup.set("PVRDMAD_ALONE_MS", "200");
    let processes = kill(&mut place);
    fs::set_permissions(keepers(&place), fs::Permissions::from_mode(0o755)).unwrap();
    place.again();
    // The device serves its next client, whose keeper ends with the daemon.
    assert_eq!(place.status()["devices"][0]["client"]["connected"], false);
    drop(vm);
    wait_ends(&processes);
    let vm = PatientVmm::connect(&place.path("a1"), MEMORY);
    vm.load().unwrap();
    let processes = kill(&mut place);
    vm.raw(|raw| assert!(raw.try_receive().is_none()));
    wait_ends(&processes);
}

/// A daemon that does not start leaves the VMs to the next one.
#[test]
fn a_daemon_that_fails_to_start_leaves_the_vms() {
    let mut place = start();
    let vm = PatientVmm::connect(&place.path("a1"), MEMORY);
    kill(&mut place);
    let device = describe(&place.path("no"), "b1", 9, "network=b");
    let mut command = place.setup.command();
    command.arg("--network=name=b").arg(format!("--device={device}"));
    assert_eq!(command.stdout(Stdio::null()).status().unwrap().code(), Some(1));
    place.again();
    // Answered only once the client is served again.
    vm.load().unwrap();
    let status = place.status();
    assert_eq!(status["devices"][0]["client"]["connected"], true, "{status:#}");
    place.stop();
}
