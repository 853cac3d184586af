//! A worker is killed under running VMs: they keep their connections, and RDMA works again once their drivers are
//! reloaded.

use std::thread;
use std::time::Instant;
use std::{fs, io};

use crate::common::churn::beside_churn;
use crate::common::daemon::{Running, TestDaemon};
use crate::common::patient::PatientVmm;
use crate::common::process::{children, role};
use crate::common::{PATIENCE, Raw, write_body};
use pvrdma_dev::testing::{AsyncEntry, Driver, wait_for};
use pvrdma_vfio_user_server::message;
use pvrdmad::testing::{Pair, beside_traffic};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const MEMORY: u64 = 16 << 20;
/// DEVICE_FATAL.
const FATAL: AsyncEntry = AsyncEntry { kind: 8, info: 0 };
/// Registers of BAR 1.
const BAR: u32 = 1;
const CONFIG: u32 = 7;

/// Starts a daemon with the networks `a` and `b` of two devices each. Those of `a` have network functions. The clients
/// of a network survive this number of crashes, which follow each other at once.
fn start(crashes: u32) -> Running {
    let mut daemon = TestDaemon::new().network("a", "").network("b", "").env("PVRDMAD_CRASHES", &crashes.to_string());
    for (number, name) in (1..).zip(["a1", "a2", "b1", "b2"]) {
        let nic = if number < 3 { format!(",nic-socket=FOLDER/nic{number}") } else { String::new() };
        daemon = daemon.device(name, number, &format!("network={},seed={number}{nic}", &name[..1]));
    }
    daemon.start()
}

#[test]
fn vms_keep_their_connections_and_reload_their_drivers() {
    let mut place = start(5);
    let vms = ["a1", "a2"].map(|name| PatientVmm::connect(&place.path(name), MEMORY));
    let mut nic = place.client("nic1");
    nic.write(CONFIG, 4, &[6, 0]);
    let mut other = place.pair(["b1", "b2"]);
    for round in 0..3 {
        let drivers = vms.each_ref().map(|vm| vm.load().unwrap());
        let config = vms.each_ref().map(|vm| vm.config(0, 256));
        let events = vms.each_ref().map(|vm| vm.interrupts()[1]);
        beside_traffic(&mut other, || {
            beside_churn(drivers.each_ref(), || {
                let status = place.crash("a");
                let network = &status["networks"][0];
                assert_eq!(network["lost_vms"], Value::Array(Vec::new()), "{network:#}");
            });
        });
        let status = place.status();
        assert_eq!(status["networks"][1]["restarts"], 0);
        let text = place.run("status");
        for (number, (vm, driver)) in vms.iter().zip(&drivers).enumerate() {
            let device = &status["devices"][number];
            assert_eq!(device["recovery"], serde_json::json!({"told": true, "problem": null}), "{device:#}");
            assert_eq!((&device["phase"], &device["client"]["connected"]), (&"reset".into(), &true.into()));
            assert!(text.contains(&format!("device a{}: in reset since", number + 1)), "{text}");
            // Once, with its interrupt, behind the events of before. Commands fail, and the rest is as it was.
            assert_eq!(driver.async_events().iter().filter(|&&event| event == FATAL).count(), 1, "{round}");
            assert_eq!(vm.interrupts()[1], events[number] + 1);
            assert_eq!(vm.config(0, 256), config[number]);
            assert_eq!(driver.version(), 20);
            assert!(driver.query_port().is_err());
        }
        assert_eq!(nic.read(CONFIG, 4, 2), [6, 0]);
        drivers.into_iter().for_each(Driver::remove);
        let mut pair = Pair::new(vms.each_ref().map(|vm| vm.load().unwrap()));
        (0..3).for_each(|_| pair.exchange());
        assert!(place.status()["devices"][0]["recovery"].is_null());
        // The guests' memory is small, so it is freed for the next round.
        drop(pair);
        for vm in &vms {
            vm.memory.free_all();
        }
    }
    place.stop();
}

/// Returns `true` if all threads of a process are stopped. A thread that runs when the signal is sent stops later.
fn is_stopped(pid: i32) -> bool {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let state = |task: io::Result<fs::DirEntry>| fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
    tasks.map(state).all(|stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T')))
}

/// A message that waits in the socket is answered. If half a message was received, the client is disconnected, and no
/// other one.
#[test]
fn messages_stay_in_step() {
    let mut place = start(5);
    let [vm, half] = ["a1", "a2"].map(|name| PatientVmm::connect(&place.path(name), MEMORY));
    for vm in [&vm, &half] {
        vm.raw(|raw| raw.stream.set_read_timeout(Some(PATIENCE)).unwrap());
    }
    // Part of a message that is longer than the socket's buffer: once it is sent, some of it has been received.
    let body = write_body(BAR, 0x100, &vec![0; 1 << 20]);
    let size = u32::try_from(message::HEADER_SIZE + body.len()).unwrap();
    let header = message::Header { id: 7, command: message::Command::REGION_WRITE, size, flags: 0, error: 0 };
    half.raw(|raw| raw.send_raw(&[&header.to_bytes()[..], &body[..700 << 10]].concat(), &[]));
    // The worker is stopped, so the message of the other client is not received before it is killed.
    let worker = i32::try_from(place.status()["networks"][0]["pid"].as_i64().unwrap()).unwrap();
    kill_process(Pid::from_raw(worker).unwrap(), Signal::STOP).unwrap();
    wait_for("a stopped worker", || is_stopped(worker).then_some(()));
    let waiting = vm.raw(|raw| raw.send(message::Command::REGION_READ, 0, &crate::common::access(CONFIG, 0, 4), &[]));
    kill_process(Pid::from_raw(worker).unwrap(), Signal::KILL).unwrap();
    let answer = vm.raw(Raw::receive);
    assert_eq!((answer.header.id, &answer.ok()[16..]), (waiting, &[0xad, 0x15, 0x20, 0x08][..]));
    half.raw(|raw| assert!(raw.try_receive().is_none()));
    // The supervisor learns of both clients from the worker, which may answer them before.
    let network = place.wait_network("a", |network| network["state"] == "running");
    assert_eq!(network["lost_vms"], serde_json::json!(["a2"]), "{network:#}");
    // The device serves its next client.
    drop(half);
    drop((vm.load().unwrap(), PatientVmm::connect(&place.path("a2"), MEMORY).load().unwrap()));
    place.stop();
}

/// The content of its memory must not prevent a guest from reloading its driver.
#[test]
fn guests_with_invalid_addresses_are_not_notified() {
    type Lie = fn(&PatientVmm, &Driver);

    let mut place = start(10);
    let vm = PatientVmm::connect(&place.path("a1"), MEMORY);
    let lies: [(&str, Lie); 3] = [
        ("full", |_, driver| {
            let ring = driver.async_ring();
            // All of its elements are in use.
            ring.set_cons_head(ring.prod_tail().wrapping_sub(512) & 1023);
        }),
        ("pages", |vm, driver| vm.memory.write(driver.dsr(), &[0xff; 72])),
        ("index", |_, driver| driver.async_ring().set_prod_tail(u32::MAX)),
    ];
    for (problem, lie) in lies {
        let driver = vm.load().unwrap();
        lie(&vm, &driver);
        let device = place.crash("a")["devices"][0].clone();
        assert_eq!((&device["recovery"]["told"], &device["phase"]), (&false.into(), &"reset".into()), "{device:#}");
        assert!(device["recovery"]["problem"].as_str().unwrap().contains(problem), "{device:#}");
        let text = place.run("status");
        assert!(text.contains("device a1: its driver could not be told"), "{text}");
        driver.remove();
        vm.load().unwrap().remove();
        assert!(place.status()["devices"][0]["recovery"].is_null());
    }
    place.stop();
}

/// Without a limit, a client that makes the worker crash would do so forever.
#[test]
fn after_many_crashes_clients_are_disconnected() {
    let mut place = start(3);
    let vm = PatientVmm::connect(&place.path("a1"), MEMORY);
    for _ in 0..3 {
        let status = place.crash("a");
        assert_eq!(status["networks"][0]["lost_vms"], Value::Array(Vec::new()));
        vm.config(0, 4);
    }
    let status = place.crash("a");
    assert_eq!(status["networks"][0]["lost_vms"], serde_json::json!(["a1"]), "{status:#}");
    vm.raw(|raw| assert!(raw.try_receive().is_none()));
    drop(vm);
    PatientVmm::connect(&place.path("a1"), MEMORY).load().unwrap();
    place.stop();
}

/// Returns the number of descriptors of each process of the daemon, and its private memory in KiB, by role.
fn resources(place: &Running) -> Vec<(String, usize, u64)> {
    let daemon = place.id();
    let mut found: Vec<_> = children(daemon)
        .into_iter()
        .chain([daemon.to_string()])
        .map(|pid| {
            let fds = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
            let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
            let dirty = rollup.lines().find_map(|line| line.strip_prefix("Private_Dirty:"));
            let dirty = dirty.and_then(|dirty| dirty.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0);
            (role(&pid), fds, dirty)
        })
        .collect();
    found.sort();
    found
}

#[test]
fn a_hundred_crashes_leave_nothing_behind() {
    let mut place = start(1000);
    let vm = PatientVmm::connect(&place.path("a1"), MEMORY);
    let cycle = || {
        let driver = vm.load().unwrap();
        place.crash("a");
        assert_eq!(driver.async_events(), [FATAL]);
        driver.remove();
    };
    (0..5).for_each(|_| cycle());
    let before = resources(&place);
    (0..95).for_each(|_| cycle());
    // Threads close the last descriptors when they end, at both moments: the first number may be too high, the second
    // one falls.
    let grows = |after: &[(String, usize, u64)]| before.iter().zip(after).any(|((_, old, _), (_, new, _))| new > old);
    let deadline = Instant::now() + PATIENCE;
    let mut after = resources(&place);
    while (grows(&after) || before.len() != after.len()) && Instant::now() < deadline {
        thread::yield_now();
        after = resources(&place);
    }
    let roles = |list: &[(String, usize, u64)]| list.iter().map(|(role, ..)| role.clone()).collect::<Vec<_>>();
    assert_eq!(roles(&before), roles(&after));
    for ((role, fds_before, kib_before), (_, fds, kib)) in before.iter().zip(&after) {
        assert!(fds <= fds_before, "{role}: {fds_before} descriptors, then {fds}");
        assert!(*kib <= kib_before + 1024, "{role}: {kib_before} KiB, then {kib} KiB");
    }
    place.stop();
}
