//! A daemon whose program a test may replace, with two devices.
#![allow(
    clippy::allow_attributes,
    dead_code,
    unreachable_pub,
    missing_debug_implementations,
    clippy::unwrap_used,
    clippy::panic,
    reason = "each test uses a part"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use pvrdmad::testing::Pair;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use super::process::Daemon;
use super::remote::probe;

/// A daemon with the devices `a1` and `a2`, each with a network function, run from a file that a test may replace.
pub struct Place {
    pub daemon: Daemon,
    pub folder: TempDir,
}

impl Place {
    pub fn start(isolate: &str) -> Self {
        Self::start_with(isolate, |_| vec!["name=a".to_owned()], |_| "network=a".to_owned())
    }

    /// Starts with networks, and with two devices, whose further keys depend on their number.
    pub fn start_with(
        isolate: &str,
        networks: impl FnOnce(&Path) -> Vec<String>,
        keys: impl Fn(usize) -> String,
    ) -> Self {
        Self::start_changed(isolate, networks, keys, "", |_| ())
    }

    /// The same, with further keys of the control socket and a change of the command.
    pub fn start_changed(
        isolate: &str,
        networks: impl FnOnce(&Path) -> Vec<String>,
        keys: impl Fn(usize) -> String,
        control: &str,
        change: impl FnOnce(&mut Command),
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("pvrdmad");
        put_program(Path::new(env!("CARGO_BIN_EXE_pvrdmad")), &program);
        let mut command = Command::new(program);
        // With `strict`, a system call outside the filter kills the process, and the test fails.
        command.args(["--sandbox=strict", &format!("--isolate={isolate}")]);
        command.arg("--control").arg(format!("{}{control}", folder.path().join("control").display()));
        command.args(networks(folder.path()).iter().flat_map(|network| ["--network", network]));
        for number in 1..=2 {
            let [socket, nic] = ["a", "nic"].map(|name| folder.path().join(format!("{name}{number}")));
            let place = format!("socket={},nic-socket={}", socket.display(), nic.display());
            let keys = format!("mac=52:54:00:00:05:0{number},pin=off,seed={number},{}", keys(number));
            command.arg("--device").arg(format!("name=a{number},{place},{keys}"));
        }
        change(&mut command);
        let log = std::env::var_os("UPGRADE_LOG").map_or_else(Stdio::null, |_| Stdio::inherit());
        Self { daemon: Daemon::start(command.stderr(log)), folder }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs a command. Returns its standard output and standard error, as an error if it fails.
    pub fn run(&self, words: &[&str]) -> Result<String, String> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pvrdmad"));
        let output = command.args(words).arg("--control").arg(self.path("control")).output().unwrap();
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        if output.status.success() { Ok(text) } else { Err(text) }
    }

    /// Returns the status of the first network.
    pub fn network(&self) -> Value {
        self.networks().swap_remove(0)
    }

    pub fn networks(&self) -> Vec<Value> {
        let status: Value = serde_json::from_str(&self.run(&["status", "--json"]).unwrap()).unwrap();
        status["networks"].as_array().unwrap().clone()
    }

    /// Installs a shell script as the program of new processes. `REAL` in it is the path of the real one.
    pub fn install(&self, script: &str) {
        let text = self.path("script");
        fs::write(&text, script.replace("REAL", env!("CARGO_BIN_EXE_pvrdmad"))).unwrap();
        put_program(&text, &self.path("pvrdmad"));
    }

    /// Replaces the daemon. A busy machine may need several attempts; each refused one leaves everything as it was.
    pub fn replace_daemon(&self) -> String {
        for _ in 0..20 {
            match self.run(&["upgrade", "--daemon"]) {
                Ok(said) => return said,
                Err(said) => assert!(said.contains("not ready within"), "{said}"),
            }
        }
        panic!("too slow")
    }

    /// Returns the process of the daemon that serves the control socket.
    pub fn pid(&self) -> u64 {
        let status: Value = serde_json::from_str(&self.run(&["status", "--json"]).unwrap()).unwrap();
        status["pid"].as_u64().unwrap()
    }

    /// Connects the guests of both devices.
    pub fn pair(&self) -> Pair {
        let macs = [1, 2].map(|number| [0x52, 0x54, 0, 0, 5, number]);
        Pair::with_macs(["a1", "a2"].map(|name| probe(&self.path(name), 16 << 20)), macs)
    }
}

/// Copies a program in a process of its own. A program that this process had open for writing could not be executed
/// while a child that another test has just forked still holds the descriptor (`ETXTBSY`).
fn put_program(from: &Path, to: &Path) {
    let status = Command::new("install").arg("--mode=755").args([from, to]).status().unwrap();
    assert!(status.success(), "cannot install {}: {status}", to.display());
}

impl Drop for Place {
    fn drop(&mut self) {
        // A daemon that replaced the first one is no child of this process.
        let Ok(status) = self.run(&["status", "--json"]) else { return };
        let status: Value = serde_json::from_str(&status).unwrap_or_default();
        let pid = status["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
        if let Some(pid) = pid {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}
