//! A network is handed from one worker to the next one under running VMs.

use std::collections::BTreeMap;
use std::io::Read;
use std::process::Stdio;

use crate::common::place::{DEVICES, one_network, two_networks};
use pvrdmad::testing::beside_traffic;
use serde_json::Value;

/// Region of the configuration space.
const CONFIG: u32 = 7;

#[test]
fn vms_keep_their_devices_and_connections() {
    let mut daemon = one_network("").start();
    let mut pair = daemon.pair(DEVICES);
    // A client of the network function, which does not use it.
    let mut nic = daemon.client("nic1");
    let identity = nic.read(CONFIG, 0, 4);
    daemon.run("limits --device a1 max_memory=123456789");
    let mut workers = vec![daemon.network("a")["pid"].clone()];
    beside_traffic(&mut pair, || {
        for _ in 0..20 {
            let upgraded = daemon.run("upgrade");
            assert!(upgraded.starts_with("network a: upgraded in "), "{upgraded}");
            workers.push(daemon.network("a")["pid"].clone());
            assert_eq!(nic.read(CONFIG, 0, 4), identity);
        }
    });
    assert!(workers.windows(2).all(|pair| pair[0] != pair[1]), "{workers:?}");
    let network = daemon.network("a");
    assert_eq!(
        (&network["state"], &network["restarts"], &network["last_end"]),
        (&"running".into(), &0.into(), &Value::Null)
    );
    assert_eq!(network["lost_vms"], Value::Array(Vec::new()));
    let limits = daemon.run("limits --device a1");
    assert!(limits.contains("123456789"), "{limits}");
    drop(pair);
    // The devices are reset, and serve other clients.
    daemon.pair(DEVICES).exchange();
    daemon.stop();
}

/// Only one end of the connection moves, so packets on the way to it are lost and sent again.
#[test]
fn connections_to_other_hosts_continue() {
    let mut daemon = two_networks().start();
    let mut pair = daemon.pair(DEVICES);
    beside_traffic(&mut pair, || {
        for name in ["a", "b"].repeat(5) {
            let upgraded = daemon.run(&format!("upgrade --network {name}"));
            assert!(upgraded.starts_with(&format!("network {name}: upgraded in ")), "{upgraded}");
        }
        daemon.run("upgrade");
    });
    let status = daemon.status();
    assert!(
        status["networks"]
            .as_array()
            .unwrap()
            .iter()
            .all(|network| network["state"] == "running" && network["restarts"] == 0)
    );
    daemon.stop();
}

/// The old worker continues, and the command reports the reason.
#[test]
fn a_refused_upgrade_changes_nothing() {
    let mut daemon = one_network("").start();
    let mut pair = daemon.pair(DEVICES);
    let worker = daemon.network("a")["pid"].clone();
    beside_traffic(&mut pair, || {
        for (text, problem) in [
            ("#!/bin/sh\nexit 3\n", "the new worker ended: exit status: 3"),
            ("#!/bin/sh\nexec <&-\nexec sleep 60\n", "the new worker closed its socket"),
            ("no program", "Exec format error"),
        ] {
            daemon.install(text);
            let refused = daemon.try_run("upgrade --network a").unwrap_err();
            assert!(refused.contains(problem), "{refused}");
        }
        let unknown = daemon.try_run("upgrade --network b").unwrap_err();
        assert!(unknown.contains("there is no network 'b'"), "{unknown}");
    });
    assert_eq!(daemon.network("a")["pid"], worker);
    pair.exchange();
    daemon.stop();
}

/// At each step of the hand-over before the old worker lets its devices go, the new worker ends, or does not continue.
/// The old one serves the guests again.
#[test]
fn a_new_worker_that_fails_at_any_step_takes_nothing() {
    let mut daemon = one_network("").env("PVRDMAD_PATIENCE_MS", "3000").start();
    let mut pair = daemon.pair(DEVICES);
    let mut nic = daemon.client("nic1");
    let worker = daemon.network("a")["pid"].clone();
    beside_traffic(&mut pair, || {
        for step in ["start", "hello", "expect", "take-over", "function", "client", "restored", "ready"] {
            for (way, word) in [("die", "exit status: 9"), ("hang", "")] {
                daemon.install(&format!("#!/bin/sh\nPVRDMAD_FAULT=worker-{step}:{way} exec REAL \"$@\"\n"));
                let refused = daemon.try_run("upgrade").unwrap_err();
                let said = refused.contains("network a: not upgraded: the new worker ") && refused.contains(word);
                assert!(said, "{step} {way}: {refused}");
                assert_eq!(daemon.network("a")["pid"], worker, "{step} {way}");
                nic.read(CONFIG, 0, 4);
            }
        }
    });
    assert_eq!(
        (&daemon.network("a")["restarts"], &daemon.network("a")["lost_vms"]),
        (&0.into(), &Value::Array(Vec::new()))
    );
    daemon.install("#!/bin/sh\nexec REAL \"$@\"\n");
    beside_traffic(&mut pair, || {
        daemon.run("upgrade");
    });
    daemon.stop();
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
    let mut daemon = two_networks().start();
    let mut pair = daemon.pair(DEVICES);
    let _nic = daemon.client("nic1");
    pair.exchange();
    let before = counters(&daemon.status());
    assert!(before.values().filter(|&&value| value > 0).count() > 20, "{before:?}");
    daemon.run("upgrade");
    daemon.replace_daemon();
    let after = counters(&daemon.status());
    let lost: Vec<_> = before.iter().filter(|(name, value)| after.get(*name) < Some(value)).collect();
    assert!(lost.is_empty(), "{lost:?}");
    pair.exchange();
    assert_eq!(daemon.exit(), Some(0));
}

#[test]
fn a_capture_that_ends_is_listed() {
    let mut daemon = one_network("").start();
    let mut capture = daemon.command("capture --device a1 -w -");
    let mut capture = capture.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    // The output begins once the capture runs, and ends with the old worker.
    let mut output = capture.stdout.take().unwrap();
    output.read_exact(&mut [0; 4]).unwrap();
    let upgraded = daemon.run("upgrade");
    let lines: Vec<_> = upgraded.lines().collect();
    assert_eq!(lines[1..], ["network a: ended: capture of device a1"], "{upgraded}");
    output.read_to_end(&mut Vec::new()).unwrap();
    capture.wait().unwrap();
    // The next worker has none.
    assert!(!daemon.run("upgrade").contains("ended"));
    daemon.stop();
}

#[test]
fn a_check_lists_the_obstacles_to_an_upgrade() {
    let mut daemon = one_network("").start();
    let worker = daemon.network("a")["pid"].clone();
    assert_eq!(daemon.run("upgrade --check"), "network a: can be upgraded\n");
    assert_eq!(daemon.network("a")["pid"], worker);
    assert!(daemon.try_run("upgrade --check --network b").unwrap_err().contains("no network 'b'"));
    daemon.stop();
}

#[test]
fn networks_without_a_process_cannot_be_upgraded() {
    let mut daemon = one_network("").isolate("none").start();
    let mut pair = daemon.pair(DEVICES);
    let checked = daemon.try_run("upgrade --check").unwrap_err();
    assert!(checked.contains("network a: cannot be upgraded: ") && checked.contains("isolate=none"), "{checked}");
    let refused = daemon.try_run("upgrade --json").unwrap_err();
    assert!(refused.contains("isolate=none") && refused.contains("1 of 1 networks"), "{refused}");
    pair.exchange();
    daemon.stop();
}
