//! The hook script for Proxmox VE, called as Proxmox does.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

use crate::common::daemon::{PROGRAM, Running, TestDaemon};
use serde_json::Value;

const HOOK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/proxmox-hook");

/// Starts a daemon that already serves another VM's device.
fn start() -> Running {
    let daemon = TestDaemon::new().device("other", 1, "");
    symlink(PROGRAM, daemon.path("pvrdmad")).unwrap();
    daemon.start()
}

fn hook(daemon: &Running, arguments: &[&str]) -> Output {
    let path = format!("{}:{}", daemon.folder().display(), std::env::var("PATH").unwrap());
    let mut hook = Command::new(HOOK);
    hook.args(arguments).env("PATH", path).env("PVRDMA_SOCKETS", daemon.folder()).output().unwrap()
}

/// Name and MAC of each device.
fn devices(daemon: &Running) -> Vec<[String; 2]> {
    let status = daemon.status();
    let word = |device: &Value, key: &str| device[key].as_str().unwrap().to_owned();
    status["devices"].as_array().unwrap().iter().map(|device| ["name", "mac"].map(|key| word(device, key))).collect()
}

#[test]
fn a_vm_has_its_device_as_long_as_it_runs() {
    let host = start();
    let sockets = ["vm66051.sock", "nic66051.sock"].map(|name| host.path(name));
    let phase = |phase: &str| {
        let output = hook(&host, &["66051", phase]);
        assert!(output.status.success(), "{phase}: {output:?}");
    };
    let with = || devices(&host).iter().any(|device| device == &["vm66051", "52:54:00:01:02:03"]);
    // After a crash of the host, the last phases of the previous run were never called.
    for phases in [&["pre-start", "post-start"][..], &["pre-start", "post-start", "pre-stop"]] {
        for name in phases {
            phase(name);
            assert!(with() && sockets.iter().all(|socket| socket.exists()), "{name}");
        }
    }
    // The arguments for QEMU name these sockets, with one shell word for each option.
    let output = hook(&host, &["66051", "args", "2048"]);
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
    assert_eq!(devices(&host).len(), 1);
}

/// The hook fails if it cannot add the device; Proxmox then does not start the VM.
#[test]
fn the_hook_fails_if_the_device_cannot_be_added() {
    let mut host = start();
    fs::write(host.path("vm7.sock"), "").unwrap();
    let output = hook(&host, &["7", "pre-start"]);
    assert!(!output.status.success() && String::from_utf8_lossy(&output.stderr).contains("vm7.sock"), "{output:?}");
    assert_eq!(hook(&host, &["7", "reboot"]).status.code(), Some(2));
    host.kill();
    assert!(!hook(&host, &["8", "pre-start"]).status.success());
}
