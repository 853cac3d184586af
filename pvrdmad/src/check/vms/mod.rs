//! Problems that keep a VM from using its device, as far as they are visible on this host, with suggested fixes.
//!
//! [`Host`] holds the observations, [`judge`] draws the conclusions. A separate script, `pvrdma-guest-check`, examines
//! the guest.

mod host;
mod machine;

use std::fmt::Write;

use anyhow::{Result, bail};

pub use self::host::Host;
use self::host::Kvm;
use self::machine::Machine;
use crate::config::{Config, Device};
use crate::rlimits;

/// First QEMU with `vfio-user-pci`.
const FIRST_QEMU: (u32, u32) = (10, 1);

/// An actual or possible problem.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// `true` if it keeps a VM from working, `false` for a warning.
    pub is_error: bool,
    /// The device, or this host.
    pub subject: String,
    /// The problem.
    pub problem: String,
    /// The suggested fix.
    pub cure: String,
}

/// All findings.
#[derive(Debug, Default)]
pub struct Diagnosis {
    findings: Vec<Finding>,
}

impl Diagnosis {
    /// Returns the findings in order.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// Renders two lines for each finding.
    pub fn text(&self) -> String {
        if self.findings.is_empty() {
            return "nothing is wrong as far as this host shows; in the guest run pvrdma-guest-check\n".to_owned();
        }
        let mut text = String::new();
        for Finding { is_error, subject, problem, cure } in &self.findings {
            let kind = if *is_error { "error" } else { "warning" };
            // Writing to a string does not fail.
            let _ = writeln!(text, "{kind}: {subject}: {problem}\n    {cure}");
        }
        text
    }

    /// # Errors
    /// A finding keeps a VM from working.
    pub fn result(&self) -> Result<()> {
        match self.findings.iter().filter(|finding| finding.is_error).count() {
            0 => Ok(()),
            1 => bail!("1 error"),
            errors => bail!("{errors} errors"),
        }
    }

    fn note(&mut self, is_error: bool, subject: &str, problem: impl Into<String>, cure: &str) {
        let (problem, cure) = (problem.into(), cure.to_owned());
        self.findings.push(Finding { is_error, subject: subject.to_owned(), problem, cure });
    }
}

/// Draws conclusions for these devices from the state of this host.
pub fn judge(host: &Host, config: &Config) -> Diagnosis {
    let mut found = Diagnosis::default();
    judge_host(host, config, &mut found);
    for (_, device) in config.devices() {
        judge_device(host, device, &mut found);
    }
    found
}

fn judge_host(host: &Host, config: &Config, found: &mut Diagnosis) {
    const QEMU: &str = "install QEMU 10.1 or newer (Debian 13: apt install -t trixie-backports qemu-system-x86), or \
                        name yours with --qemu";
    match host.qemu {
        None => found.note(true, "QEMU", "there is none, or it does not say its version", QEMU),
        Some(version) if version < FIRST_QEMU => {
            let problem = format!("version {}.{} has no vfio-user-pci: 10.1 is the first", version.0, version.1);
            found.note(true, "QEMU", problem, QEMU);
        }
        Some(_) => {}
    }
    match host.kvm {
        Kvm::Usable => {}
        Kvm::Missing => found.note(
            false,
            "KVM",
            "there is no /dev/kvm: guests are emulated, and slow",
            "load kvm_intel or kvm_amd, and switch virtualisation on in the firmware, or nested in the outer host",
        ),
        Kvm::NotPermitted => found.note(
            false,
            "KVM",
            "/dev/kvm is there, and this user may not open it",
            "add the user to the group kvm, and log in again",
        ),
    }
    if let Some(problem) = rlimits::shortage_of(config, host.memlock) {
        found.note(
            true,
            "locked memory",
            problem,
            "set LimitMEMLOCK=infinity in the unit, or run: prlimit --pid $$ --memlock=unlimited (as root), or use pin=registered",
        );
    }
}

fn judge_device(host: &Host, device: &Device, found: &mut Diagnosis) {
    let name = format!("device {}", device.config.name);
    for path in
        [Some(&device.socket), device.nic_socket.as_ref()].into_iter().flatten().filter_map(|place| place.path())
    {
        if let Some(problem) = host.socket_problem(path, device.access) {
            found.note(
                true,
                &name,
                problem,
                "give the device group= (of the VMM alone) or owner=, and mode=660; then restart or re-add it",
            );
        }
    }
    let Some(socket) = device.socket.path() else { return };
    let machines: Vec<_> = host.machines().filter(|machine| machine.rdma_function(socket).is_some()).collect();
    match machines.as_slice() {
        [] => found.note(
            false,
            &name,
            "no QEMU on this host has it (or it is another user's)",
            "pvrdmad xml --device NAME prints what libvirt needs, docs/two-vms.md what QEMU does",
        ),
        machines => machines.iter().for_each(|machine| judge_machine(&name, machine, device, found)),
    }
}

/// Checks a virtual machine that has the device.
fn judge_machine(name: &str, machine: &Machine, device: &Device, found: &mut Diagnosis) {
    let Some(rdma) = device.socket.path().and_then(|socket| machine.rdma_function(socket)) else { return };
    if !machine.has_shared_memory() {
        found.note(
            true,
            name,
            "the guest's memory is not shared with the daemon",
            "-object memory-backend-memfd,id=mem,size=…,share=on and -machine …,memory-backend=mem; libvirt: \
             <memoryBacking> with <source type='memfd'/> and <access mode='shared'/>",
        );
    }
    match machine.function_zero(rdma) {
        None => found.note(
            true,
            name,
            "there is no vmxnet3 at function 0 of its slot, where the driver looks for one",
            "put the nic-socket's function (or -device vmxnet3) at addr=10.0 with multifunction on, and this one at 10.1",
        ),
        Some(zero) => {
            if !zero.multifunction {
                found.note(
                    true,
                    name,
                    "function 0 of its slot is not multifunction, so the guest does not look for others",
                    "add multifunction=on (JSON: \"multifunction\":true) to function 0",
                );
            }
            let mac = zero.mac.as_deref().map(str::to_ascii_lowercase);
            if let Some(mac) = mac.filter(|mac| *mac != device.config.mac.to_string()) {
                found.note(
                    true,
                    name,
                    format!("its vmxnet3 has the MAC address {mac}, and the device {}", device.config.mac),
                    "give both the same: mac= of -device vmxnet3 and mac= of the device",
                );
            }
        }
    }
    if rdma.function == 0 {
        found.note(
            true,
            name,
            "it is function 0 of its slot, where the network function belongs",
            "put it at addr=10.1, and the network function at 10.0",
        );
    }
    if !machine.uses_kvm() {
        found.note(false, name, "its VM is emulated, and slow", "add -accel kvm -cpu host where there is /dev/kvm");
    }
    if machine.is_migrated() {
        found.note(
            true,
            name,
            "its VM waits for a migration (-incoming), which QEMU does not refuse and the device does not survive",
            "do not migrate, save or snapshot this VM; unplug the device before",
        );
    }
}

#[cfg(test)]
mod tests;
