//! A new program takes all networks from a running daemon under running VMs.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use crate::common::daemon::{PROGRAM, Running, describe};
use crate::common::place::{DEVICES, one_network, two_networks};
use crate::common::process::Daemon;
use pvrdmad::testing::beside_traffic;
use serde_json::Value;

/// Region of the configuration space.
const CONFIG: u32 = 7;

/// Returns the workers, after a check that no VM has lost its device.
#[track_caller]
fn workers(place: &Running) -> Vec<Value> {
    let status = place.status();
    let networks = status["networks"].as_array().unwrap();
    for network in networks {
        assert_eq!((&network["state"], &network["restarts"]), (&"running".into(), &0.into()), "{network}");
        assert_eq!(network["lost_vms"], Value::Array(Vec::new()));
    }
    networks.iter().map(|network| network["pid"].clone()).collect()
}

/// Returns the process that serves the control socket.
fn pid(place: &Running) -> Value {
    place.status()["pid"].clone()
}

/// A new program, and the old one again, twice, under traffic between two networks and inside one of them.
#[test]
fn vms_and_changes_survive_the_daemon() {
    let mut place = two_networks().start();
    let mut pair = place.pair(DEVICES);
    let mut nic = place.client("nic1");
    let identity = nic.read(CONFIG, 0, 4);
    let [left, right] = ["c-left", "c-right"].map(|name| place.path(name).display().to_string());
    let device = describe(place.folder(), "c", 9, "network=c");
    let add = format!("add --network name=c,uplink=unix-dgram:{left}:{right} {device}");
    place.run(&add);
    place.run("limits --device a1 max_memory=123456789");
    place.run("share --device a2 weight=300");
    place.run("link down --device c");
    place.run("fault --network b loss:0.0001");
    let (mut daemons, mut before) = (vec![pid(&place)], workers(&place));
    beside_traffic(&mut pair, || {
        for round in 0..4 {
            let upgraded = place.replace_daemon();
            assert_eq!(upgraded.matches(": upgraded in ").count(), 3, "{upgraded}");
            if round == 0 {
                assert_eq!(place.exit(), Some(0));
            }
            daemons.push(pid(&place));
            let now = workers(&place);
            assert!(now.iter().all(|worker| !before.contains(worker)), "{now:?} {before:?}");
            before = now;
            assert_eq!(nic.read(CONFIG, 0, 4), identity);
        }
    });
    assert!(daemons.windows(2).all(|pair| pair[0] != pair[1]), "{daemons:?}");
    assert!(place.run("limits --device a1").contains("123456789"));
    assert!(place.run("share --device a2").contains("weight=300"));
    let status = place.status();
    assert!(status["networks"][1]["fault"].as_str().unwrap().starts_with("loss:0.0001"));
    let port = |name: &str| {
        let devices = status["devices"].as_array().unwrap();
        devices.iter().find(|device| device["name"] == name).unwrap()["port"].clone()
    };
    assert_eq!((port("c"), port("a1")), ("down".into(), "active".into()));
    // The sockets are the new daemon's own: it serves new clients, and removes the files of devices that go.
    drop(pair);
    drop(nic);
    place.pair(DEVICES).exchange();
    place.run("remove --device c");
    assert!(!place.path("c").exists());
    place.run(&add);
}

/// The file of a socket that has been taken over is not mistaken for that of a daemon that has ended.
#[test]
fn another_daemon_does_not_steal_the_sockets() {
    let mut place = one_network("").start();
    place.replace_daemon();
    assert_eq!(place.exit(), Some(0));
    let mut other = Command::new(PROGRAM);
    let device = format!("name=a1,socket={},mac=52:54:00:00:00:01,pin=off", place.path("a1").display());
    let output = other.arg("--device").arg(device).stdin(Stdio::null()).output().unwrap();
    assert!(!output.status.success());
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("is listening there"), "{error}");
    place.pair(DEVICES).exchange();
}

/// However the new program fails, the old daemon serves all networks, and says why for each.
#[test]
fn a_program_that_fails_takes_nothing() {
    let mut place = two_networks().env("PVRDMAD_PATIENCE_MS", "3000").start();
    let mut pair = place.pair(DEVICES);
    let (daemon, before) = (pid(&place), workers(&place));
    let fault = |fault: &str| format!("#!/bin/sh\nPVRDMAD_FAULT={fault} exec REAL \"$@\"\n");
    // The end of its connection may be noticed before its own end.
    let ends = "the new program ";
    beside_traffic(&mut pair, || {
        for (script, problem) in [
            ("#!/bin/sh\nexit 3\n".to_owned(), "the new program ended: exit status: 3"),
            ("no program".to_owned(), "Exec format error"),
            ("#!/bin/sh\nexec sleep 60\n".to_owned(), "does not continue"),
            (fault("connected:die"), ends),
            (fault("connected:hang"), "does not continue"),
            (fault("described:die"), ends),
            (fault("described:hang"), "does not continue"),
            (fault("prepared:die"), ends),
            (fault("prepared:hang"), "does not continue"),
            // The time for all networks to be ready may be over at that moment.
            (fault("ready:die"), ""),
            (fault("ready:hang"), ""),
            (fault("worker-start:die"), "network b: not upgraded: the new worker ended: exit status: 9"),
            (fault("worker-take-over:die"), "the next worker ended"),
            (fault("worker-restored:die"), "the next worker ended"),
            (fault("worker-ready:hang"), "not upgraded: not ready within 2500 ms"),
        ] {
            place.install(&script);
            let refused = place.try_run("upgrade --daemon").unwrap_err();
            assert!(refused.contains(problem), "{script}: {refused}");
            assert_eq!((pid(&place), workers(&place)), (daemon.clone(), before.clone()), "{script}");
        }
    });
    // Not even the files of the sockets have changed hands.
    drop(pair);
    place.pair(DEVICES).exchange();
    place.stop();
}

/// One network that cannot be handed over keeps all with the old daemon.
#[test]
fn all_networks_go_or_none() {
    let mut place = two_networks().start();
    let mut pair = place.pair(DEVICES);
    // A client of device a2 in the middle of a message.
    let waiting = place.client("nic2");
    waiting.send_raw(&[0; 7], &[]);
    let before = workers(&place);
    beside_traffic(&mut pair, || {
        let refused = place.try_run("upgrade --daemon").unwrap_err();
        let stays = "network a: not upgraded: it stays, because another network cannot be handed over";
        assert!(refused.contains("network b: not upgraded: device a2") && refused.contains(stays), "{refused}");
    });
    assert_eq!(workers(&place), before);
    drop(waiting);
    // By hand.
    let mut next = Command::new(PROGRAM);
    next.args(["--take-over", "--control"]).arg(place.path("control")).stderr(Stdio::piped());
    let next = next.arg("--device").arg("name=x,socket=/x,mac=52:54:00:00:00:01");
    beside_traffic(&mut pair, || {
        let _next = std::mem::ManuallyDrop::new(Daemon::start(next));
        assert_eq!(place.exit(), Some(0));
        let pid = pid(&place);
        assert_eq!(pid, _next.id());
    });
}

#[test]
fn networks_without_a_process_are_not_taken_over() {
    let mut place = one_network("").isolate("none").start();
    let mut pair = place.pair(DEVICES);
    let refused = place.try_run("upgrade --daemon").unwrap_err();
    assert!(refused.contains("isolate=none"), "{refused}");
    let mut next = Command::new(PROGRAM);
    next.args(["--take-over", "--control"]).arg(place.path("control"));
    let output = next.args(["--device", "name=x,socket=/x,mac=52:54:00:00:00:01"]).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("isolate=none"), "{error}");
    pair.exchange();
    place.stop();
}

/// Attack: a user who may send other requests asks for all sockets, and a daemon of another user lures a new one.
#[test]
fn only_root_and_the_same_user_take_over() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    const OTHER: u32 = 4242;
    let place = one_network("").control(&format!(",owner={OTHER}")).start();
    fs::set_permissions(place.folder(), fs::Permissions::from_mode(0o755)).unwrap();
    let as_other = |words: &[&str]| {
        let mut command = Command::new(place.path("pvrdmad"));
        let output = command.args(words).arg("--control").arg(place.path("control")).uid(OTHER).output().unwrap();
        (output.status.success(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    };
    let (answered, said) = as_other(&["status"]);
    assert!(answered, "{said}");
    let (taken, said) = as_other(&["--take-over", "--device", "name=x,socket=/x,mac=52:54:00:00:00:01"]);
    assert!(!taken && said.contains("only root and "), "{said}");
    assert_eq!(place.status()["control"]["control_replacements_refused"], 1);
}
