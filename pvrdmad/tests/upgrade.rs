//! A network is handed from one worker to the next one under running VMs.

#![expect(clippy::unwrap_used, reason = "a test")]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::Raw;
use common::process::Daemon;
use common::remote::probe;
use pvrdmad::testing::{Pair, beside_traffic};
use serde_json::Value;
use tempfile::TempDir;

/// Region of the configuration space.
const CONFIG: u32 = 7;

/// A daemon with the devices `a1` and `a2`, each with a network function, run from a file that a test may replace.
struct Place {
    daemon: Daemon,
    folder: TempDir,
}

impl Place {
    fn start(isolate: &str) -> Self {
        Self::start_with(isolate, |_| vec!["name=a".to_owned()], |_| "network=a".to_owned())
    }

    /// Starts with networks, and with two devices, whose further keys depend on their number.
    fn start_with(isolate: &str, networks: impl FnOnce(&Path) -> Vec<String>, keys: impl Fn(usize) -> String) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("pvrdmad");
        fs::copy(env!("CARGO_BIN_EXE_pvrdmad"), &program).unwrap();
        let mut command = Command::new(program);
        // With `strict`, a system call outside the filter kills the process, and the test fails.
        command.args(["--sandbox=strict", &format!("--isolate={isolate}")]);
        command.arg("--control").arg(folder.path().join("control"));
        command.args(networks(folder.path()).iter().flat_map(|network| ["--network", network]));
        for number in 1..=2 {
            let [socket, nic] = ["a", "nic"].map(|name| folder.path().join(format!("{name}{number}")));
            let place = format!("socket={},nic-socket={}", socket.display(), nic.display());
            let keys = format!("mac=52:54:00:00:05:0{number},pin=off,seed={number},{}", keys(number));
            command.arg("--device").arg(format!("name=a{number},{place},{keys}"));
        }
        let log = std::env::var_os("UPGRADE_LOG").map_or_else(Stdio::null, |_| Stdio::inherit());
        Self { daemon: Daemon::start(command.stderr(log)), folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs a command. Returns its output and its complaints.
    fn run(&self, words: &[&str]) -> Result<String, String> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pvrdmad"));
        let output = command.args(words).arg("--control").arg(self.path("control")).output().unwrap();
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        if output.status.success() { Ok(text) } else { Err(text) }
    }

    /// Returns the status of the first network.
    fn network(&self) -> Value {
        self.networks().swap_remove(0)
    }

    fn networks(&self) -> Vec<Value> {
        let status: Value = serde_json::from_str(&self.run(&["status", "--json"]).unwrap()).unwrap();
        status["networks"].as_array().unwrap().clone()
    }

    /// Connects the guests of both devices.
    fn pair(&self) -> Pair {
        let macs = [1, 2].map(|number| [0x52, 0x54, 0, 0, 5, number]);
        Pair::with_macs(["a1", "a2"].map(|name| probe(&self.path(name), 16 << 20)), macs)
    }
}

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
    let program = place.path("pvrdmad");
    beside_traffic(&mut pair, || {
        for (text, problem) in [
            ("#!/bin/sh\nexit 3\n", "the new worker ended: exit status: 3"),
            ("#!/bin/sh\nexec <&-\nexec sleep 60\n", "the new worker closed its socket"),
            ("no program", "Exec format error"),
        ] {
            fs::remove_file(&program).unwrap();
            fs::write(&program, text).unwrap();
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
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

#[test]
fn networks_without_a_process_cannot_be_upgraded() {
    let mut place = Place::start("none");
    let mut pair = place.pair();
    let refused = place.run(&["upgrade", "--json"]).unwrap_err();
    assert!(refused.contains("isolate=none") && refused.contains("1 of 1 networks"), "{refused}");
    pair.exchange();
    place.daemon.stop();
}
