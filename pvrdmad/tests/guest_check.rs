//! The script for guests, run on a folder that imitates a guest with one fault at a time.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// A guest's files.
struct Guest {
    root: TempDir,
    memlock: &'static str,
}

const CARD: &str = "sys/bus/pci/devices/0000:00:10.0";
const DEVICE: &str = "sys/bus/pci/devices/0000:00:10.1";
const PORT: &str = "sys/bus/pci/devices/0000:00:10.1/infiniband/vmw_pvrdma0/ports/1";
const PROVIDER: &str = "usr/lib/x86_64-linux-gnu/libibverbs/libvmw_pvrdma-rdmav57.so";

impl Guest {
    /// Creates a guest without faults.
    fn new() -> Self {
        let guest = Self { root: tempfile::tempdir().unwrap(), memlock: "unlimited" };
        for (function, device) in [(CARD, "0x07b0"), (DEVICE, "0x0820")] {
            guest.write(&format!("{function}/vendor"), "0x15ad");
            guest.write(&format!("{function}/device"), device);
        }
        // Another network function, in another slot.
        guest.write("sys/bus/pci/devices/0000:00:03.0/vendor", "0x1af4");
        guest.write("sys/bus/pci/devices/0000:00:03.0/device", "0x1000");
        guest.link(&format!("{CARD}/driver"), "../../../../bus/pci/drivers/vmxnet3");
        guest.link(&format!("{DEVICE}/driver"), "../../../../bus/pci/drivers/vmw_pvrdma");
        for (name, value) in [("address", "52:54:00:00:00:01"), ("flags", "0x1003"), ("mtu", "1500")] {
            guest.write(&format!("{CARD}/net/eth0/{name}"), value);
        }
        guest.write(&format!("{DEVICE}/infiniband/vmw_pvrdma0/node_guid"), "5054:00ff:fe00:0001");
        guest.write(&format!("{PORT}/state"), "4: ACTIVE");
        guest.write(&format!("{PORT}/gids/0"), "fe80:0000:0000:0000:5054:00ff:fe00:0001");
        guest.write(&format!("{PORT}/gids/1"), "0000:0000:0000:0000:0000:ffff:c0a8:0701");
        guest.write(&format!("{PORT}/gids/2"), "0000:0000:0000:0000:0000:0000:0000:0000");
        for path in [PROVIDER, "dev/infiniband/uverbs0", "dev/infiniband/rdma_cm", "sys/module/vmw_pvrdma/refcnt"] {
            guest.write(path, "");
        }
        guest
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
    }

    fn link(&self, name: &str, target: &str) {
        symlink(target, self.path(name)).unwrap();
    }

    fn remove(&self, name: &str) {
        let path = self.path(name);
        if path.is_dir() { fs::remove_dir_all(path).unwrap() } else { fs::remove_file(path).unwrap() }
    }

    /// Runs the script. Returns its output, and whether it found no error.
    fn check(&self) -> (bool, String) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/pvrdma-guest-check");
        let mut command = Command::new("sh");
        command.arg(script).env("PVRDMA_CHECK_ROOT", self.root.path()).env("PVRDMA_CHECK_MEMLOCK", self.memlock);
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
        (output.status.success(), said)
    }

    /// Checks that there is a single finding, on one line with its fix, and that it contains this text.
    #[track_caller]
    fn assert_finding(&self, kind: &str, problem: &str, cure: &str) {
        let (success, said) = self.check();
        let lines: Vec<_> = said.lines().collect();
        let [first, second] = lines[..] else { panic!("wanted {problem}:\n{said}") };
        assert!(first.starts_with(&format!("{kind}: ")) && first.contains(problem), "wanted {problem}:\n{said}");
        assert!(second.starts_with("    ") && second.contains(cure), "wanted {cure}:\n{said}");
        assert_eq!(success, kind == "warning", "{said}");
    }
}

#[test]
fn nothing_is_wrong() {
    assert_eq!(Guest::new().check(), (true, "nothing is wrong as far as this guest shows\n".to_owned()));
}

#[test]
fn no_function() {
    let guest = Guest::new();
    guest.remove(DEVICE);
    guest.assert_finding("error", "there is no PVRDMA function", "pvrdmad check --vms");
}

#[test]
fn no_network_card_at_function_0() {
    let guest = Guest::new();
    guest.write(&format!("{CARD}/device"), "0x0770");
    guest.assert_finding("error", "no vmxnet3 at function 0", "addr=10.0");
}

#[test]
fn no_driver_for_the_card() {
    let guest = Guest::new();
    guest.remove(&format!("{CARD}/driver"));
    guest.assert_finding("error", "the network function at function 0 has no driver", "modprobe vmxnet3");
}

#[test]
fn no_driver() {
    let guest = Guest::new();
    guest.remove(&format!("{DEVICE}/driver"));
    guest.assert_finding("error", "was there before vmxnet3", "modprobe -r vmw_pvrdma; modprobe vmxnet3");
    guest.remove("sys/module/vmw_pvrdma");
    guest.assert_finding("error", "has no vmw_pvrdma", "docs/two-vms.md");
    let release = Command::new("uname").arg("-r").output().unwrap();
    let release = String::from_utf8(release.stdout).unwrap();
    guest.write(&format!("lib/modules/{}/extra/vmw_pvrdma.ko.xz", release.trim()), "");
    guest.assert_finding("error", "vmw_pvrdma is not loaded", "modprobe vmw_pvrdma");
}

#[test]
fn no_provider() {
    let guest = Guest::new();
    guest.remove(PROVIDER);
    guest.assert_finding("error", "has no provider", "ibverbs-providers");
}

#[test]
fn no_character_devices() {
    let guest = Guest::new();
    guest.remove("dev/infiniband/rdma_cm");
    guest.assert_finding("warning", "no /dev/infiniband/rdma_cm", "modprobe rdma_ucm");
    let guest = Guest::new();
    guest.remove("dev/infiniband/uverbs0");
    guest.assert_finding("error", "no /dev/infiniband/uverbs0", "modprobe ib_uverbs");
}

#[test]
fn another_mac() {
    let guest = Guest::new();
    guest.write(&format!("{CARD}/net/eth0/address"), "52:54:00:00:00:0a");
    guest.assert_finding("error", "eth0 has the MAC address 52:54:00:00:00:0a, and vmw_pvrdma0 another one", "mac=");
}

#[test]
fn an_interface_that_is_down() {
    let guest = Guest::new();
    guest.write(&format!("{CARD}/net/eth0/flags"), "0x1002");
    guest.assert_finding("error", "eth0 is down", "ip link set eth0 up");
    let guest = Guest::new();
    guest.write(&format!("{PORT}/state"), "1: DOWN");
    guest.assert_finding("error", "the port of vmw_pvrdma0 is not active", "pvrdmad link up");
}

#[test]
fn a_small_mtu() {
    let guest = Guest::new();
    guest.write(&format!("{CARD}/net/eth0/mtu"), "1000");
    guest.assert_finding("warning", "eth0 has an MTU of 1000", "mtu 1500");
}

#[test]
fn no_address() {
    let guest = Guest::new();
    guest.write(&format!("{PORT}/gids/1"), "fe80:0000:0000:0000:5054:00ff:fe00:0001");
    guest.assert_finding("warning", "has no address but the link-local one", "ip address add ADDRESS/BITS dev eth0");
}

#[test]
fn little_locked_memory() {
    let guest = Guest { memlock: "8192", ..Guest::new() };
    guest.assert_finding("warning", "may lock 8192 KiB", "limits.conf");
    assert!(Guest { memlock: "65536", ..Guest::new() }.check().0);
}
