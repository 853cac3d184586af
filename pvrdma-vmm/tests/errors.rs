//! Errors before a guest runs cause one line of output and a non-zero exit status. None of these tests needs KVM.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::NamedTempFile;

const VM: &str = "name=a,mac=52:54:00:00:00:01,memory=128M,pin=off";

fn vmm(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pvrdma-vmm"));
    command.args(arguments);
    command
}

/// The one line that it prints.
#[track_caller]
fn refusal(output: &Output) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert_eq!((text.lines().count(), text.starts_with("pvrdma-vmm: ")), (1, true), "{text}");
    assert!(output.stdout.is_empty(), "nothing has run");
    text
}

#[track_caller]
fn refused(arguments: &[&str], what: &str) {
    let line = refusal(&vmm(arguments).output().unwrap());
    assert!(line.contains(what), "{what}: {line}");
}

/// An image that loads, and is never run.
fn kernel() -> NamedTempFile {
    let mut bytes = vec![0; 1536];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0x1f1, &[1]);
    put(0x202, b"HdrS");
    put(0x206, &[0x0f, 2]);
    put(0x211, &[1]);
    put(0x214, &0x10_0000_u32.to_le_bytes());
    put(0x22c, &0x7fff_ffff_u32.to_le_bytes());
    put(0x236, &[1]);
    put(0x258, &0x100_0000_u32.to_le_bytes());
    put(0x260, &0x100_0000_u32.to_le_bytes());
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(&bytes).unwrap();
    file
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_kernel_that_is_none() {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(&[0x7f; 4096]).unwrap();
    refused(&["--vm", VM, "--kernel", text(file.path())], "no Linux kernel in bzImage format");
    refused(&["--vm", VM, "--kernel", "/nowhere/vmlinuz"], "cannot open the kernel /nowhere/vmlinuz");
    refused(&["--vm", VM, "--kernel", "/"], "no Linux kernel in bzImage format");
    refused(&["--vm", VM], "kernel is missing");
}

#[test]
fn a_bad_image() {
    let kernel = kernel();
    let with = |disk: &str, what: &str| {
        refused(&["--kernel", text(kernel.path()), "--vm", &format!("{VM},{disk}")], what);
    };
    let mut odd = NamedTempFile::new().unwrap();
    odd.write_all(&[0; 1000]).unwrap();
    with("disk-ro=/nowhere/image.ext4", "cannot open the disk /nowhere/image.ext4");
    with(&format!("disk-ro={}", odd.path().display()), "no sectors of 512");
    with("disk=/", "cannot open the disk /");
    with("initramfs=/nowhere/initramfs", "cannot open the initramfs /nowhere/initramfs");
}

#[test]
fn no_kvm() {
    let kernel = kernel();
    let with = |kvm: &str, what: &str| {
        refused(&["--kernel", text(kernel.path()), "--vm", VM, "--kvm", kvm], what);
    };
    with("/nowhere/kvm", "no KVM: cannot open /nowhere/kvm");
    with("/dev/null", "no KVM: /dev/null has version");
}

/// The lock limit applies to unprivileged users. Root may exceed it, unless the capability is dropped.
#[test]
fn memory_that_cannot_be_locked() {
    let kernel = kernel();
    let vm = VM.replace("pin=off", "pin=all");
    let arguments = ["--kernel", text(kernel.path()), "--vm", &vm, "--kvm", "/nowhere/kvm"];
    let program = vmm(&arguments);
    let words = program.get_args().map(|word| word.to_str().unwrap());
    let command = std::iter::once(program.get_program().to_str().unwrap()).chain(words);
    let drop = "exec setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock";
    // Dropping a capability needs a capability itself. A user without it has none to drop.
    let script = format!(
        "ulimit -l 64 && if [ $(id -u) = 0 ]; then {drop} -- {0}; else exec {0}; fi",
        command.collect::<Vec<_>>().join(" ")
    );
    let line = refusal(&Command::new("sh").args(["-c", &script]).output().unwrap());
    assert!(line.contains("a: cannot lock the guest's memory"), "{line}");
}

#[test]
fn an_uplink_that_is_not_there() {
    let kernel = kernel();
    let with = |words: &[&str], what: &str| {
        refused(&[&["--kernel", text(kernel.path()), "--vm", VM], words].concat(), what);
    };
    with(&["--uplink", "af_packet:not-there"], "uplink af_packet:not-there: ");
    with(&["--uplink", "unix:/nowhere/socket"], "uplink unix:/nowhere/socket: /nowhere/socket: ");
    with(&["--uplink", "vxlan:127.0.0.1"], "vxlan needs a --remote");
}

#[test]
fn a_migration_that_cannot_begin() {
    let (kernel, folder) = (kernel(), tempfile::tempdir().unwrap());
    let socket = folder.path().join("socket");
    let with = |words: &[&str], what: &str| {
        refused(&[&["--kernel", text(kernel.path()), "--vm", VM, "--kvm", "/nowhere/kvm"], words].concat(), what);
    };
    with(&["--incoming", "/nowhere/socket"], "cannot listen on /nowhere/socket: ");
    with(&["--incoming", text(&socket)], "no KVM: ");
    assert!(!socket.exists(), "the file is removed");
    std::fs::write(&socket, []).unwrap();
    with(&["--incoming", text(&socket)], "cannot listen on ");
    assert!(socket.exists(), "the file belongs to another program");
    let other = VM.replace("name=a", "name=b").replace("00:01", "00:02");
    with(&["--migrate", text(&socket), "--vm", &other], "--migrate is for one --vm, there are 2");
}

#[test]
fn a_vm_that_makes_no_sense() {
    let kernel = kernel();
    let kernel = text(kernel.path());
    refused(&["--kernel", kernel, "--vm", "name=a"], "--vm name=a: mac is missing");
    refused(&["--kernel", kernel, "--vm", VM, "--vm", VM], "name or MAC address of a");
    let missing = format!("{VM},serial=/nowhere/line");
    refused(&["--kernel", kernel, "--vm", &missing, "--kvm", "/nowhere/kvm"], "no KVM");
}
