//! The hook script for Proxmox VE, called as Proxmox does.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

use crate::common::process::Daemon;
use serde_json::Value;
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_pvrdmad");
const HOOK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/proxmox-hook");

/// A daemon that already serves another VM's device.
struct Host {
    folder: TempDir,
    daemon: Daemon,
}

impl Host {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        symlink(PROGRAM, folder.path().join("pvrdmad")).unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let device = format!("name=other,socket={},mac=52:54:00:ff:00:01", path("other.sock"));
        let mut command = Command::new(PROGRAM);
        command.args(["--sandbox", "strict", "--control", &path("control"), "--device", &device]);
        let daemon = Daemon::start(&mut command);
        Self { folder, daemon }
    }

    fn hook(&self, arguments: &[&str]) -> Output {
        let path = format!("{}:{}", self.folder.path().display(), std::env::var("PATH").unwrap());
        let sockets = self.folder.path();
        Command::new(HOOK).args(arguments).env("PATH", path).env("PVRDMA_SOCKETS", sockets).output().unwrap()
    }

    /// Name and MAC of each device.
    fn devices(&self) -> Vec<[String; 2]> {
        let control = self.folder.path().join("control");
        let output = Command::new(PROGRAM).args(["status", "--json", "--control"]).arg(control).output().unwrap();
        let status: Value = serde_json::from_slice(&output.stdout).unwrap();
        let word = |device: &Value, key: &str| device[key].as_str().unwrap().to_owned();
        status["devices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|device| ["name", "mac"].map(|key| word(device, key)))
            .collect()
    }
}

#[test]
fn a_vm_has_its_device_as_long_as_it_runs() {
    let host = Host::start();
    let sockets = ["vm66051.sock", "nic66051.sock"].map(|name| host.folder.path().join(name));
    let phase = |phase: &str| {
        let output = host.hook(&["66051", phase]);
        assert!(output.status.success(), "{phase}: {output:?}");
    };
    let with = || host.devices().iter().any(|device| device == &["vm66051", "52:54:00:01:02:03"]);
    // After a crash of the host, the last phases of the previous run were never called.
    for phases in [&["pre-start", "post-start"][..], &["pre-start", "post-start", "pre-stop"]] {
        for name in phases {
            phase(name);
            assert!(with() && sockets.iter().all(|socket| socket.exists()), "{name}");
        }
    }
    // The arguments for QEMU name these sockets, with one shell word for each option.
    let output = host.hook(&["66051", "args", "2048"]);
    let script = format!("set -- {}\nprintf '%s\\n' \"$@\"", String::from_utf8(output.stdout).unwrap());
    let words = Command::new("sh").args(["-ec", &script]).output().unwrap().stdout;
    let words = String::from_utf8(words).unwrap();
    let functions: Vec<Value> = words.lines().filter_map(|word| serde_json::from_str(word).ok()).collect();
    let [nic, rdma] = &functions[..] else { panic!("{words}") };
    assert_eq!(
        [&rdma["socket"]["path"], &nic["socket"]["path"]].map(|path| Path::new(path.as_str().unwrap())),
        [&sockets[0], &sockets[1]]
    );
    assert_eq!((&nic["addr"], &nic["multifunction"], &rdma["addr"]), (&"10.0".into(), &true.into(), &"10.1".into()));
    assert!(words.contains("size=2048M,share=on"), "{words}");
    phase("post-stop");
    assert!(!with() && sockets.iter().all(|socket| !socket.exists()));
    assert_eq!(host.devices().len(), 1);
}

/// The hook fails if it cannot add the device; Proxmox then does not start the VM.
#[test]
fn the_hook_fails_if_the_device_cannot_be_added() {
    let mut host = Host::start();
    fs::write(host.folder.path().join("vm7.sock"), "").unwrap();
    let output = host.hook(&["7", "pre-start"]);
    assert!(!output.status.success() && String::from_utf8_lossy(&output.stderr).contains("vm7.sock"), "{output:?}");
    assert_eq!(host.hook(&["7", "reboot"]).status.code(), Some(2));
    host.daemon.kill();
    assert!(!host.hook(&["8", "pre-start"]).status.success());
}
