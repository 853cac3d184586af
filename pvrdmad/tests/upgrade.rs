//! A network is handed from one worker to the next one under running VMs.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::Raw;
use crate::common::place::Place;
use pvrdmad::testing::beside_traffic;
use serde_json::Value;

/// Region of the configuration space.
const CONFIG: u32 = 7;

#[test]
fn vms_keep_their_devices_and_connections() {
    let mut place = Place::start("network");
    let mut pair = place.pair();
    // A client of the network function, which does not use it.
    let mut nic = Raw::connect(&place.path("nic1"));
    nic.negotiate();
    let identity = nic.read(CONFIG, 0, 4);
    place.run(&["limits", "--device", "a1", "max_memory=123456789"]).unwrap();
    let mut workers = vec![place.network()["pid"].clone()];
    beside_traffic(&mut pair, || {
        for _ in 0..20 {
            let upgraded = place.run(&["upgrade"]).unwrap();
            assert!(upgraded.starts_with("network a: upgraded in "), "{upgraded}");
            workers.push(place.network()["pid"].clone());
            assert_eq!(nic.read(CONFIG, 0, 4), identity);
        }
    });
    assert!(workers.windows(2).all(|pair| pair[0] != pair[1]), "{workers:?}");
    let network = place.network();
    assert_eq!(
        (&network["state"], &network["restarts"], &network["last_end"]),
        (&"running".into(), &0.into(), &Value::Null)
    );
    assert_eq!(network["lost_vms"], Value::Array(Vec::new()));
    let limits = place.run(&["limits", "--device", "a1"]).unwrap();
    assert!(limits.contains("123456789"), "{limits}");
    drop(pair);
    // The devices are reset, and serve other clients.
    place.pair().exchange();
    place.daemon.stop();
}

/// Only one end of the connection moves, so packets on the way to it are lost and sent again.
#[test]
fn connections_to_other_hosts_continue() {
    let networks = |folder: &Path| {
        let [left, right] = ["left", "right"].map(|name| folder.join(name).display().to_string());
        let links = [("a", &left, &right), ("b", &right, &left)];
        links.map(|(name, own, other)| format!("name={name},uplink=unix-dgram:{own}:{other},mtu=9000")).to_vec()
    };
    let mut place =
        Place::start_with("network", networks, |number| format!("network={}", if number == 1 { "a" } else { "b" }));
    let mut pair = place.pair();
    beside_traffic(&mut pair, || {
        for name in ["a", "b"].repeat(5) {
            let upgraded = place.run(&["upgrade", "--network", name]).unwrap();
            assert!(upgraded.starts_with(&format!("network {name}: upgraded in ")), "{upgraded}");
        }
        place.run(&["upgrade"]).unwrap();
    });
    assert!(place.networks().iter().all(|network| network["state"] == "running" && network["restarts"] == 0));
    place.daemon.stop();
}

/// The old worker continues, and the command reports the reason.
#[test]
fn a_refused_upgrade_changes_nothing() {
    let mut place = Place::start("network");
    let mut pair = place.pair();
    let worker = place.network()["pid"].clone();
    beside_traffic(&mut pair, || {
        for (text, problem) in [
            ("#!/bin/sh\nexit 3\n", "the new worker ended: exit status: 3"),
            ("#!/bin/sh\nexec <&-\nexec sleep 60\n", "the new worker closed its socket"),
            ("no program", "Exec format error"),
        ] {
            place.install(text);
            let refused = place.run(&["upgrade", "--network", "a"]).unwrap_err();
            assert!(refused.contains(problem), "{refused}");
        }
        let unknown = place.run(&["upgrade", "--network", "b"]).unwrap_err();
        assert!(unknown.contains("there is no network 'b'"), "{unknown}");
    });
    assert_eq!(place.network()["pid"], worker);
    pair.exchange();
    place.daemon.stop();
}

/// At each step of the hand-over before the old worker lets its devices go, the new worker ends, or does not continue.
/// The old one serves the guests again.
#[test]
fn a_new_worker_that_fails_at_any_step_takes_nothing() {
    let patience = |command: &mut Command| {
        command.env("PVRDMAD_PATIENCE_MS", "3000");
    };
    let network = |_: &Path| vec!["name=a".to_owned()];
    let mut place = Place::start_changed("network", network, |_| "network=a".to_owned(), "", patience);
    let mut pair = place.pair();
    let mut nic = Raw::connect(&place.path("nic1"));
    nic.negotiate();
    let worker = place.network()["pid"].clone();
    beside_traffic(&mut pair, || {
        for step in ["start", "hello", "expect", "take-over", "function", "client", "restored", "ready"] {
            for (way, word) in [("die", "exit status: 9"), ("hang", "")] {
                place.install(&format!("#!/bin/sh\nPVRDMAD_FAULT=worker-{step}:{way} exec REAL \"$@\"\n"));
                let refused = place.run(&["upgrade"]).unwrap_err();
                let said = refused.contains("network a: not upgraded: the new worker ") && refused.contains(word);
                assert!(said, "{step} {way}: {refused}");
                assert_eq!(place.network()["pid"], worker, "{step} {way}");
                nic.read(CONFIG, 0, 4);
            }
        }
    });
    assert_eq!((&place.network()["restarts"], &place.network()["lost_vms"]), (&0.into(), &Value::Array(Vec::new())));
    place.install("#!/bin/sh\nexec REAL \"$@\"\n");
    beside_traffic(&mut pair, || {
        place.run(&["upgrade"]).unwrap();
    });
    place.daemon.stop();
}

/// Returns the counters of a status, without gauges, by device and kind.
fn counters(status: &Value) -> BTreeMap<String, u64> {
    let kinds = status["counters"].as_object().unwrap();
    let mut all = BTreeMap::new();
    for device in status["devices"].as_array().unwrap() {
        for place in ["/counters", "/adapter", "/network/counters", "/nic/counters"] {
            let listed = device.pointer(place).and_then(Value::as_object).into_iter().flatten();
            for (name, value) in listed.filter(|(name, _)| kinds[name.as_str()]["kind"] == "counter") {
                all.insert(format!("{} {place} {name}", device["name"]), value.as_u64().unwrap());
            }
        }
    }
    all
}

#[test]
fn counters_continue() {
    let networks = |folder: &Path| {
        let [left, right] = ["left", "right"].map(|name| folder.join(name).display().to_string());
        let links = [("a", &left, &right), ("b", &right, &left)];
        links.map(|(name, own, other)| format!("name={name},uplink=unix-dgram:{own}:{other}")).to_vec()
    };
    let mut place =
        Place::start_with("network", networks, |number| format!("network={}", if number == 1 { "a" } else { "b" }));
    let mut pair = place.pair();
    let mut nic = Raw::connect(&place.path("nic1"));
    nic.negotiate();
    pair.exchange();
    let status = || serde_json::from_str::<Value>(&place.run(&["status", "--json"]).unwrap()).unwrap();
    let before = counters(&status());
    assert!(before.values().filter(|&&value| value > 0).count() > 20, "{before:?}");
    place.run(&["upgrade"]).unwrap();
    place.replace_daemon();
    let after = counters(&status());
    let lost: Vec<_> = before.iter().filter(|(name, value)| after.get(*name) < Some(value)).collect();
    assert!(lost.is_empty(), "{lost:?}");
    pair.exchange();
    assert_eq!(place.daemon.wait(), Some(0));
}

#[test]
fn a_capture_that_ends_is_listed() {
    let mut place = Place::start("network");
    let mut capture = Command::new(env!("CARGO_BIN_EXE_pvrdmad"));
    capture.args(["capture", "--device", "a1", "-w", "-", "--control"]).arg(place.path("control"));
    let mut capture = capture.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    // The output begins once the capture runs, and ends with the old worker.
    let mut output = capture.stdout.take().unwrap();
    output.read_exact(&mut [0; 4]).unwrap();
    let upgraded = place.run(&["upgrade"]).unwrap();
    let lines: Vec<_> = upgraded.lines().collect();
    assert_eq!(lines[1..], ["network a: ended: capture of device a1"], "{upgraded}");
    output.read_to_end(&mut Vec::new()).unwrap();
    capture.wait().unwrap();
    // The next worker has none.
    assert!(!place.run(&["upgrade"]).unwrap().contains("ended"));
    place.daemon.stop();
}

#[test]
fn a_check_lists_the_obstacles_to_an_upgrade() {
    let mut place = Place::start("network");
    let worker = place.network()["pid"].clone();
    assert_eq!(place.run(&["upgrade", "--check"]).unwrap(), "network a: can be upgraded\n");
    assert_eq!(place.network()["pid"], worker);
    assert!(place.run(&["upgrade", "--check", "--network", "b"]).unwrap_err().contains("no network 'b'"));
    place.daemon.stop();
}

#[test]
fn networks_without_a_process_cannot_be_upgraded() {
    let mut place = Place::start("none");
    let mut pair = place.pair();
    let checked = place.run(&["upgrade", "--check"]).unwrap_err();
    assert!(checked.contains("network a: cannot be upgraded: ") && checked.contains("isolate=none"), "{checked}");
    let refused = place.run(&["upgrade", "--json"]).unwrap_err();
    assert!(refused.contains("isolate=none") && refused.contains("1 of 1 networks"), "{refused}");
    pair.exchange();
    place.daemon.stop();
}
