use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use super::*;
use crate::config::ConfigSpec;

/// A host without problems, with a VM that has the device of [`config`].
fn host() -> Host {
    let machine = |name: &str| format!("/usr/bin/{name} -accel kvm -cpu host {MEMORY} {ZERO} {ONE}");
    Host {
        qemu: Some((11, 1)),
        kvm: Kvm::Usable,
        memlock: None,
        processes: vec![words("bash -c true"), words(&machine("qemu-system-x86_64"))],
    }
}

const MEMORY: &str = "-machine q35,memory-backend=mem -object memory-backend-memfd,id=mem,size=1G,share=on";
const ZERO: &str = r#"-device {"driver":"vfio-user-pci","bus":"pcie.0","addr":"10.0","multifunction":true,"socket":{"path":"/r/nic0","type":"unix"}}"#;
const ONE: &str =
    r#"-device {"driver":"vfio-user-pci","bus":"pcie.0","addr":"10.1","socket":{"path":"/r/vm0","type":"unix"}}"#;
const VMXNET3: &str = "-device vmxnet3,netdev=n,mac=52:54:00:00:00:01,bus=pcie.0,addr=10.0,multifunction=on";

fn words(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_owned).collect()
}

fn config(more: &str) -> Config {
    let device = format!("name=vm0,socket=/r/vm0,nic-socket=/r/nic0,mac=52:54:00:00:00:01{more}");
    let spec = ConfigSpec { devices: vec![device.parse().unwrap()], ..ConfigSpec::default() };
    Config::load(None, spec).unwrap()
}

/// The same host with a VM of this command line.
fn machine(line: &str) -> Host {
    Host { processes: vec![words(&format!("qemu-system-x86_64 {line}"))], ..host() }
}

/// Checks that there is a single finding, with this problem and this fix.
#[track_caller]
fn assert_finding(found: &Findings, severity: Severity, problem: &str, cure: &str) {
    let [finding] = found.all() else { panic!("wanted {problem}: {}", found.text()) };
    assert!(finding.message.contains(problem), "wanted {problem}: {}", found.text());
    assert!(finding.remedy.as_deref().unwrap().contains(cure), "wanted {cure}: {}", found.text());
    assert_eq!(finding.severity, severity, "{}", found.text());
    assert_eq!(found.result().is_err(), severity == Severity::Error);
}

#[test]
fn nothing_is_wrong() {
    for machine_line in [
        format!("-accel kvm {MEMORY} {ZERO} {ONE}"),
        format!("-enable-kvm {MEMORY} {VMXNET3} {ONE}"),
        // The form in which libvirt writes it.
        format!(
            "-machine pc-q35-10.1,accel=kvm,memory-backend=pc.ram {ZERO} {ONE} -object \
             {{\"qom-type\":\"memory-backend-memfd\",\"id\":\"pc.ram\",\"share\":true,\"size\":1}}"
        ),
        format!("-accel kvm {ZERO} {ONE} -numa node,memdev=m -object memory-backend-file,id=m,share=on"),
    ] {
        let found = judge(&machine(&machine_line), &config(""));
        assert_eq!(found.all(), [], "{machine_line}");
        assert!(text(&found).contains("nothing is wrong"));
        found.result().unwrap();
    }
    assert_eq!(judge(&host(), &config("")).all(), []);
}

#[test]
fn an_old_qemu() {
    for (qemu, problem) in [(Some((10, 0)), "version 10.0 has no vfio-user-pci"), (None, "there is none")] {
        assert_finding(&judge(&Host { qemu, ..host() }, &config("")), Severity::Error, problem, "trixie-backports");
    }
    let debian = "QEMU emulator version 7.2.19 (Debian 1:7.2+dfsg-7)\nCopyright";
    assert_eq!(host::version(debian), Some((7, 2)));
    assert_eq!(host::version("no such thing"), None);
}

#[test]
fn no_kvm() {
    let judged = |kvm| judge(&Host { kvm, ..host() }, &config(""));
    assert_finding(&judged(Kvm::Missing), Severity::Warning, "there is no /dev/kvm", "kvm_intel or kvm_amd");
    assert_finding(&judged(Kvm::NotPermitted), Severity::Warning, "may not open it", "group kvm");
}

#[test]
fn too_little_locked_memory() {
    let small = Host { memlock: Some(8 << 20), ..host() };
    assert_finding(&judge(&small, &config(",pin=all")), Severity::Error, "may lock 8192 KiB", "LimitMEMLOCK=infinity");
    assert_eq!(judge(&small, &config("")).all(), []);
}

#[test]
fn memory_that_is_not_shared() {
    for memory in [
        "-m 1G",
        "-machine q35,memory-backend=mem -object memory-backend-memfd,id=mem,size=1G,share=off",
        "-machine q35,memory-backend=mem -object memory-backend-ram,id=mem,size=1G",
        "-machine q35 -object memory-backend-memfd,id=mem,size=1G,share=on",
    ] {
        let found = judge(&machine(&format!("-accel kvm {memory} {ZERO} {ONE}")), &config(""));
        assert_finding(&found, Severity::Error, "memory is not shared", "memory-backend=mem");
    }
}

#[test]
fn no_network_card_beside_the_device() {
    for other in ["", "-device virtio-net-pci,addr=10.0,multifunction=on", "-device vmxnet3,addr=9.0,multifunction=on"]
    {
        let found = judge(&machine(&format!("-accel kvm {MEMORY} {ONE} {other}")), &config(""));
        assert_finding(&found, Severity::Error, "no vmxnet3 at function 0", "addr=10.0");
    }
    let alone = ZERO.replace("\"multifunction\":true,", "");
    let found = judge(&machine(&format!("-accel kvm {MEMORY} {alone} {ONE}")), &config(""));
    assert_finding(&found, Severity::Error, "not multifunction", "multifunction=on");
}

#[test]
fn another_mac() {
    let other = VMXNET3.replace("00:01", "00:AA");
    let found = judge(&machine(&format!("-accel kvm {MEMORY} {other} {ONE}")), &config(""));
    assert_finding(
        &found,
        Severity::Error,
        "has the MAC address 52:54:00:00:00:aa, and the device 52:54:00:00:00:01",
        "the same",
    );
}

#[test]
fn a_machine_that_is_emulated_or_migrated() {
    let line = format!("{MEMORY} {ZERO} {ONE}");
    assert_finding(
        &judge(&machine(&format!("-accel tcg {line}")), &config("")),
        Severity::Warning,
        "emulated",
        "-accel kvm",
    );
    let found = judge(&machine(&format!("-accel kvm {line} -incoming defer")), &config(""));
    assert_finding(&found, Severity::Error, "-incoming", "do not migrate");
}

#[test]
fn no_machine_has_it() {
    let found = judge(&Host { processes: vec![words("qemu-system-x86_64 -m 1G")], ..host() }, &config(""));
    assert_finding(&found, Severity::Warning, "no QEMU on this host has it", "pvrdmad xml");
}

#[test]
fn a_socket_with_other_rights() {
    let folder = tempfile::tempdir().unwrap();
    let path: PathBuf = folder.path().join("vm0");
    let _listener = UnixListener::bind(&path).unwrap();
    let mode = |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    let access = pvrdma_vfio_user_server::socket::SocketAccess { mode: Some(0o660), ..Default::default() };
    mode(0o660);
    assert_eq!(host().socket_problem(&path, access), None);
    mode(0o600);
    let problem = host().socket_problem(&path, access).unwrap();
    assert!(problem.contains("mode 600") && problem.contains("(mode 660)"), "{problem}");
    assert!(host().socket_problem(folder.path(), access).unwrap().contains("is no socket"));
    assert_eq!(host().socket_problem(&folder.path().join("none"), access), None);
}
