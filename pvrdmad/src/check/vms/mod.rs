//! Problems that keep a VM from using its device, as far as they are visible on this host, with suggested fixes.
//!
//! [`Host`] holds the observations, [`judge`] draws the conclusions. A separate script, `pvrdma-guest-check`, examines
//! the guest.

mod host;
mod machine;

pub use self::host::Host;
use self::host::Kvm;
use self::machine::Machine;
use super::{Finding, Findings, Severity};
use crate::config::{Config, Device, SocketPlace};
use crate::rlimits;

/// First QEMU with `vfio-user-pci`.
const FIRST_QEMU: (u32, u32) = (10, 1);

/// Renders the findings for people.
pub fn text(found: &Findings) -> String {
    match found.all() {
        [] => "nothing is wrong as far as this host shows; in the guest run pvrdma-guest-check\n".to_owned(),
        _ => found.text(),
    }
}

/// Draws conclusions for these devices from the state of this host.
pub fn judge(host: &Host, config: &Config) -> Findings {
    let mut found = Findings::default();
    judge_host(host, config, &mut found);
    for (_, device) in config.devices() {
        judge_device(host, device, &mut found);
    }
    found
}

fn judge_host(host: &Host, config: &Config, found: &mut Findings) {
    const QEMU: &str = "install QEMU 10.1 or newer (Debian 13: apt install -t trixie-backports qemu-system-x86), or \
                        name yours with --qemu";
    match host.qemu {
        None => found.note(Severity::Error, "QEMU", "there is none, or it does not say its version", QEMU),
        Some(version) if version < FIRST_QEMU => {
            let problem = format!("version {}.{} has no vfio-user-pci: 10.1 is the first", version.0, version.1);
            found.note(Severity::Error, "QEMU", problem, QEMU);
        }
        Some(_) => {}
    }
    match host.kvm {
        Kvm::Usable => {}
        Kvm::Missing => found.note(
            Severity::Warning,
            "KVM",
            "there is no /dev/kvm: guests are emulated, and slow",
            "load kvm_intel or kvm_amd, and switch virtualisation on in the firmware, or nested in the outer host",
        ),
        Kvm::NotPermitted => found.note(
            Severity::Warning,
            "KVM",
            "/dev/kvm is there, and this user may not open it",
            "add the user to the group kvm, and log in again",
        ),
    }
    if let Some(shortage) = rlimits::shortage_of(config, host.memlock) {
        const MEMLOCK: &str = "set LimitMEMLOCK=infinity in the unit, or run: prlimit --pid $$ --memlock=unlimited \
                               (as root), or use pin=registered";
        let name = format!("device {}", shortage.device);
        let finding = Finding::new(Severity::Error, &name, shortage.problem()).about("pin");
        found.push(finding.remedy(MEMLOCK));
    }
}

fn judge_device(host: &Host, device: &Device, found: &mut Findings) {
    let name = format!("device {}", device.config.name);
    for (key, place) in [("socket", Some(&device.socket)), ("nic-socket", device.nic_socket.as_ref())] {
        let Some(path) = place.and_then(SocketPlace::path) else { continue };
        if let Some(problem) = host.socket_problem(path, device.access) {
            let finding = Finding::new(Severity::Error, &name, problem).about(key);
            found.push(finding.remedy(
                "give the device group= (of the VMM alone) or owner=, and mode=660; then restart or re-add it",
            ));
        }
    }
    let Some(socket) = device.socket.path() else { return };
    let machines: Vec<_> = host.machines().filter(|machine| machine.rdma_function(socket).is_some()).collect();
    match machines.as_slice() {
        [] => found.note(
            Severity::Warning,
            &name,
            "no QEMU on this host has it (or it is another user's)",
            "pvrdmad xml --device NAME prints the options for libvirt; docs/two-vms.md has those for QEMU",
        ),
        machines => machines.iter().for_each(|machine| judge_machine(&name, machine, device, found)),
    }
}

/// Checks a virtual machine that has the device.
fn judge_machine(name: &str, machine: &Machine, device: &Device, found: &mut Findings) {
    let Some(rdma) = device.socket.path().and_then(|socket| machine.rdma_function(socket)) else { return };
    if !machine.has_shared_memory() {
        found.note(
            Severity::Error,
            name,
            "the guest's memory is not shared with the daemon",
            "-object memory-backend-memfd,id=mem,size=…,share=on and -machine …,memory-backend=mem; libvirt: \
             <memoryBacking> with <source type='memfd'/> and <access mode='shared'/>",
        );
    }
    match machine.function_zero(rdma) {
        None => found.note(Severity::Error,
            name,
            "there is no vmxnet3 at function 0 of its slot, where the driver looks for one",
            "put the nic-socket's function (or -device vmxnet3) at addr=10.0 with multifunction on, and this one at 10.1",
        ),
        Some(zero) => {
            if !zero.multifunction {
                found.note(Severity::Error,
                    name,
                    "function 0 of its slot is not multifunction, so the guest does not look for others",
                    "add multifunction=on (JSON: \"multifunction\":true) to function 0",
                );
            }
            let mac = zero.mac.as_deref().map(str::to_ascii_lowercase);
            if let Some(mac) = mac.filter(|mac| *mac != device.mac.to_string()) {
                let problem = format!("its vmxnet3 has the MAC address {mac}, and the device {}", device.mac);
                let finding = Finding::new(Severity::Error, name, problem).about("mac");
                found.push(finding.remedy("give both the same: mac= of -device vmxnet3 and mac= of the device"));
            }
        }
    }
    if rdma.function == 0 {
        found.note(
            Severity::Error,
            name,
            "it is function 0 of its slot, where the network function belongs",
            "put it at addr=10.1, and the network function at 10.0",
        );
    }
    if !machine.uses_kvm() {
        found.note(
            Severity::Warning,
            name,
            "its VM is emulated, and slow",
            "add -accel kvm -cpu host where there is /dev/kvm",
        );
    }
    if machine.is_migrated() {
        found.note(
            Severity::Error,
            name,
            "its VM waits for a migration (-incoming), which QEMU does not refuse and the device does not survive",
            "do not migrate, save or snapshot this VM unless its guest has removed the device (docs/migration.md, QEMU)",
        );
    }
}

#[cfg(test)]
mod tests;
