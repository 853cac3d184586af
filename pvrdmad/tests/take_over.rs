//! A new program takes all networks from a running daemon under running VMs.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::Raw;
use crate::common::place::Place;
use crate::common::process::Daemon;
use pvrdmad::testing::beside_traffic;
use serde_json::Value;

/// Region of the configuration space.
const CONFIG: u32 = 7;

/// Networks `a` and `b`, whose uplinks are connected, with a device each.
fn linked(folder: &Path) -> Vec<String> {
    let [left, right] = ["left", "right"].map(|name| folder.join(name).display().to_string());
    let links = [("a", &left, &right), ("b", &right, &left)];
    links.map(|(name, own, other)| format!("name={name},uplink=unix-dgram:{own}:{other},mtu=9000")).to_vec()
}

fn network_of(number: usize) -> String {
    format!("network={}", if number == 1 { "a" } else { "b" })
}

fn status(place: &Place) -> Value {
    serde_json::from_str(&place.run(&["status", "--json"]).unwrap()).unwrap()
}

/// Returns the workers, after a check that no VM has lost its device.
#[track_caller]
fn workers(place: &Place) -> Vec<Value> {
    let networks = place.networks();
    for network in &networks {
        assert_eq!((&network["state"], &network["restarts"]), (&"running".into(), &0.into()), "{network}");
        assert_eq!(network["lost_vms"], Value::Array(Vec::new()));
    }
    networks.iter().map(|network| network["pid"].clone()).collect()
}

/// A new program, and the old one again, twice, under traffic between two networks and inside one of them.
#[test]
fn vms_and_changes_survive_the_daemon() {
    let mut place = Place::start_with("network", linked, network_of);
    let mut pair = place.pair();
    let mut nic = Raw::connect(&place.path("nic1"));
    nic.negotiate();
    let identity = nic.read(CONFIG, 0, 4);
    let [socket, left, right] = ["c", "c-left", "c-right"].map(|name| place.path(name).display().to_string());
    let network = format!("name=c,uplink=unix-dgram:{left}:{right}");
    let device = format!("name=c,network=c,socket={socket},mac=52:54:00:00:00:09,pin=off");
    let add = ["add", "--network", &network, &device];
    place.run(&add).unwrap();
    place.run(&["limits", "--device", "a1", "max_memory=123456789"]).unwrap();
    place.run(&["share", "--device", "a2", "weight=300"]).unwrap();
    place.run(&["link", "down", "--device", "c"]).unwrap();
    place.run(&["fault", "--network", "b", "loss:0.0001"]).unwrap();
    let (mut daemons, mut before) = (vec![place.pid()], workers(&place));
    beside_traffic(&mut pair, || {
        for round in 0..4 {
            let upgraded = place.replace_daemon();
            assert_eq!(upgraded.matches(": upgraded in ").count(), 3, "{upgraded}");
            if round == 0 {
                assert_eq!(place.daemon.wait(), Some(0));
            }
            daemons.push(place.pid());
            let now = workers(&place);
            assert!(now.iter().all(|worker| !before.contains(worker)), "{now:?} {before:?}");
            before = now;
            assert_eq!(nic.read(CONFIG, 0, 4), identity);
        }
    });
    assert!(daemons.windows(2).all(|pair| pair[0] != pair[1]), "{daemons:?}");
    assert!(place.run(&["limits", "--device", "a1"]).unwrap().contains("123456789"));
    assert!(place.run(&["share", "--device", "a2"]).unwrap().contains("weight=300"));
    let status = status(&place);
    assert!(status["networks"][1]["fault"].as_str().unwrap().starts_with("loss:0.0001"));
    let port = |name: &str| {
        let devices = status["devices"].as_array().unwrap();
        devices.iter().find(|device| device["name"] == name).unwrap()["port"].clone()
    };
    assert_eq!((port("c"), port("a1")), ("down".into(), "active".into()));
    // The sockets are the new daemon's own: it serves new clients, and removes the files of devices that go.
    drop(pair);
    drop(nic);
    place.pair().exchange();
    place.run(&["remove", "--device", "c"]).unwrap();
    assert!(!place.path("c").exists());
    place.run(&add).unwrap();
}

/// The file of a socket that has been taken over is not mistaken for that of a daemon that has ended.
#[test]
fn another_daemon_does_not_steal_the_sockets() {
    let mut place = Place::start("network");
    place.replace_daemon();
    assert_eq!(place.daemon.wait(), Some(0));
    let mut other = Command::new(env!("CARGO_BIN_EXE_pvrdmad"));
    let device = format!("name=a1,socket={},mac=52:54:00:00:00:01,pin=off", place.path("a1").display());
    let output = other.arg("--device").arg(device).stdin(Stdio::null()).output().unwrap();
    assert!(!output.status.success());
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("is listening there"), "{error}");
    place.pair().exchange();
}

/// However the new program fails, the old daemon serves all networks, and says why for each.
#[test]
fn a_program_that_fails_takes_nothing() {
    let patience = |command: &mut Command| {
        command.env("PVRDMAD_PATIENCE_MS", "3000");
    };
    let mut place = Place::start_changed("network", linked, network_of, "", patience);
    let mut pair = place.pair();
    let (daemon, before) = (place.pid(), workers(&place));
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
            let refused = place.run(&["upgrade", "--daemon"]).unwrap_err();
            assert!(refused.contains(problem), "{script}: {refused}");
            assert_eq!((place.pid(), workers(&place)), (daemon, before.clone()), "{script}");
        }
    });
    // Not even the files of the sockets have changed hands.
    drop(pair);
    place.pair().exchange();
    place.daemon.stop();
}

/// One network that cannot be handed over keeps all with the old daemon.
#[test]
fn all_networks_go_or_none() {
    let mut place = Place::start_with("network", linked, network_of);
    let mut pair = place.pair();
    // A client of device a2 in the middle of a message.
    let mut waiting = Raw::connect(&place.path("nic2"));
    waiting.negotiate();
    waiting.send_raw(&[0; 7], &[]);
    let before = workers(&place);
    beside_traffic(&mut pair, || {
        let refused = place.run(&["upgrade", "--daemon"]).unwrap_err();
        let stays = "network a: not upgraded: it stays, because another network cannot be handed over";
        assert!(refused.contains("network b: not upgraded: device a2") && refused.contains(stays), "{refused}");
    });
    assert_eq!(workers(&place), before);
    drop(waiting);
    // By hand.
    let mut next = Command::new(env!("CARGO_BIN_EXE_pvrdmad"));
    next.args(["--take-over", "--control"]).arg(place.path("control")).stderr(Stdio::piped());
    let next = next.arg("--device").arg("name=x,socket=/x,mac=52:54:00:00:00:01");
    beside_traffic(&mut pair, || {
        let _next = std::mem::ManuallyDrop::new(Daemon::start(next));
        assert_eq!(place.daemon.wait(), Some(0));
        let pid = place.pid();
        assert_eq!(pid, u64::from(_next.id()));
    });
}

#[test]
fn networks_without_a_process_are_not_taken_over() {
    let mut place = Place::start("none");
    let mut pair = place.pair();
    let refused = place.run(&["upgrade", "--daemon"]).unwrap_err();
    assert!(refused.contains("isolate=none"), "{refused}");
    let mut next = Command::new(env!("CARGO_BIN_EXE_pvrdmad"));
    next.args(["--take-over", "--control"]).arg(place.path("control"));
    let output = next.args(["--device", "name=x,socket=/x,mac=52:54:00:00:00:01"]).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("isolate=none"), "{error}");
    pair.exchange();
    place.daemon.stop();
}

/// Attack: a user who may send other requests asks for all sockets, and a daemon of another user lures a new one.
#[test]
fn only_root_and_the_same_user_take_over() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    const OTHER: u32 = 4242;
    let place = Place::start_changed(
        "network",
        |_| vec!["name=a".to_owned()],
        |_| "network=a".to_owned(),
        &format!(",owner={OTHER}"),
        |_| (),
    );
    fs::set_permissions(place.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let as_other = |words: &[&str]| {
        let mut command = Command::new(place.path("pvrdmad"));
        let output = command.args(words).arg("--control").arg(place.path("control")).uid(OTHER).output().unwrap();
        (output.status.success(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    };
    let (answered, said) = as_other(&["status"]);
    assert!(answered, "{said}");
    let (taken, said) = as_other(&["--take-over", "--device", "name=x,socket=/x,mac=52:54:00:00:00:01"]);
    assert!(!taken && said.contains("only root and "), "{said}");
    assert_eq!(status(&place)["control"]["control_replacements_refused"], 1);
}
