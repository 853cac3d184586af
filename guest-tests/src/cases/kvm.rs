//! Two VMs of one `pvrdma-vmm` under KVM, with the unmodified kernel and drivers. All cases share one boot.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::case::Case;
use super::programs::{self, Program};
use super::shared::{Machines, Shared};
use super::{exits, kernel_log, nvme};
use crate::kvm_bed::{KvmBeds, VMM_GUESTS};
use crate::vm::Vm;
use crate::vmm_pair::VmmPair;

impl Machines for VmmPair {
    fn vms(&self) -> [&Vm; 2] {
        self.vms()
    }

    fn diagnosis(&self) -> String {
        self.diagnosis()
    }

    fn are_lost(&self) -> bool {
        self.host().is_some_and(Vm::has_ended)
    }
}

/// Returns the cases; read-only ones come first, those that kill machines last.
pub(crate) fn cases(beds: &KvmBeds) -> Vec<Case> {
    let (for_pair, for_lonely) = (beds.clone(), beds.clone());
    let shared = Shared::new(move |image| VmmPair::boot(image, &for_pair));
    let mut cases = vec![shared.case("kvm/boot", boot)];
    // Each takes several times as long as in an emulated pair, and one direction shows that both ends work.
    let connected: Vec<_> = programs::CONNECTED.into_iter().map(Program::one_way).collect();
    let datagrams: Vec<_> = programs::DATAGRAMS.into_iter().map(Program::one_way).collect();
    let run = |pair: &VmmPair, program: &Program, server: usize| program.run(&pair.endpoints()?, server);
    cases.extend(programs::cases("kvm", &connected, &shared, run));
    cases.extend(programs::cases("kvm", &datagrams, &shared, run));
    cases.push(shared.case("kvm/network", network));
    cases.push(shared.case("kvm/exits", |pair| exits::report(&pair.endpoints()?, &|| pair.exits())));
    cases.push(shared.case("kvm/nvme-fio-verify", |pair| nvme::between(pair.vms(), pair.addresses()[0], 16)));
    // Over the wire, with a daemon's guest.
    let run = |pair: &VmmPair, program: &Program, server: usize| program.run(&pair.uplink_endpoints()?, server);
    cases.extend(programs::cases("kvm/uplink", &programs::PATIENT, &shared, run));
    cases.extend(programs::cases("kvm/uplink", &datagrams, &shared, run));
    cases.push(shared.case("kvm/uplink/nvme-fio-verify", |pair| {
        let endpoints = pair.uplink_endpoints()?;
        nvme::between(endpoints.vms, endpoints.tcp[0], 16)
    }));
    cases.push(shared.case("kvm/reboot", reboot));
    cases.push(shared.last_case("kvm/killed", killed));
    let lonely = Shared::new(move |image| VmmPair::boot_alone(image, &for_lonely));
    cases.push(lonely.last_case("kvm/powered-off", powered_off));
    cases.into_iter().map(|case| case.slow_unless(&ORDINARY, WHEN)).collect()
}

/// Cases that run by default: each operation, doorbells, and the end of the VMM.
pub(super) const ORDINARY: [&str; 11] = [
    "kvm/boot",
    "kvm/rc_pingpong/a-to-b",
    "kvm/send_bw/a-to-b",
    "kvm/write_bw/a-to-b",
    "kvm/read_bw/a-to-b",
    "kvm/atomic_bw/a-to-b",
    "kvm/rping/a-to-b",
    "kvm/ud_pingpong/a-to-b",
    "kvm/network",
    "kvm/exits",
    "kvm/killed",
];
/// Hint for the other cases. With emulated virtualisation, each takes seconds, and a reboot half a minute.
const WHEN: &str = "takes minutes with the others; runs when asked for: --only kvm/";

/// Both functions are in the slot that the driver expects, with MSI-X, and the VMM found real KVM.
fn boot(pair: &VmmPair) -> Result<String> {
    for (vm, cpus) in pair.vms().into_iter().zip(pair.cpus()) {
        let found = vm.run("nproc")?;
        ensure!(found.trim() == cpus.to_string(), "{}: {found} processors instead of {cpus}", vm.name());
        let drivers =
            vm.run("for f in 0 1; do basename $(readlink /sys/bus/pci/devices/0000:00:10.$f/driver); done")?;
        if drivers.split_whitespace().ne(["vmxnet3", "vmw_pvrdma"]) {
            bail!("{}: drivers of slot 10: {drivers}", vm.name());
        }
        let interrupts = vm.run("grep -c -e vmxnet3 -e vmw_pvrdma -e eth0 /proc/interrupts")?;
        if interrupts.trim().parse::<u32>().ok().is_none_or(|count| count < 5) {
            bail!("{}: interrupts:\n{}", vm.name(), vm.run("cat /proc/interrupts")?);
        }
    }
    pair.host().map_or(Ok(()), kernel_log::check)?;
    let exits = pair.exits()?;
    Ok(format!("{}, {} exits ({} to memory space)", pair.description(), exits.all, exits.mmio))
}

/// Traffic over the vNIC: small packets, and some that are segmented.
fn network(pair: &VmmPair) -> Result<String> {
    let [a, _] = pair.vms();
    let to = pair.addresses()[1];
    for size in [56, 1472, 8000] {
        let command = format!("ping -c 5 -i 0.2 -s {size} {to}");
        let output = a.spawn(&command)?.wait_success(Duration::from_secs(120))?;
        if !output.contains(" 0% packet loss") {
            bail!("{command}:\n{output}");
        }
    }
    Ok(String::new())
}

fn reboot(pair: &VmmPair) -> Result<String> {
    let [a, _] = pair.vms();
    a.reboot()?;
    pair.bring_up(0)?;
    let [rc, ..] = programs::CONNECTED;
    rc.run(&pair.endpoints()?, 1).context("after the reboot")
}

/// A guest powers itself off. Its VM ends and the other one continues. With the last VM, the VMM ends without an error.
fn powered_off(pair: &mut VmmPair) -> Result<String> {
    // The command ends with the guest, so its end is not awaited.
    let power_off = |vm: &Vm| vm.spawn("modprobe pvpanic-pci && sync && /bed/busybox poweroff -f");
    let [a, b] = pair.vms();
    let _job = power_off(a)?;
    pair.wait_for_vms(1)?;
    b.run("rdma link show")?;
    let _job = power_off(b)?;
    let said = pair.ended()?;
    for name in VMM_GUESTS {
        ensure!(said.contains(&format!("{name}: powered off")), "output of the VMM:\n{said}");
    }
    Ok(String::new())
}

/// The VMM is killed during memory writes. No resource of it remains, and the host's kernel reports no problem.
fn killed(pair: &mut VmmPair) -> Result<String> {
    let endpoints = pair.endpoints()?;
    let command =
        |end: usize| format!("ib_write_bw -F -d {} -x {} -D 600", endpoints.device[end], endpoints.gid_index[end]);
    let [a, b] = pair.vms();
    let _server = a.spawn(&command(0))?;
    a.wait_until(&crate::endpoints::listens(18515), Duration::from_secs(120))?;
    let _client = b.spawn(&format!("{} {}", command(1), endpoints.tcp[0]))?;
    b.wait_until("rdma resource show qp | grep -q RTS", Duration::from_secs(120))?;
    pair.kill()?;
    let Some(host) = pair.host() else { return Ok("gone".to_owned()) };
    host.wait_until("! pidof pvrdma-vmm", Duration::from_secs(60))?;
    kernel_log::check(host)?;
    Ok("gone, and the host's kernel has nothing to say".to_owned())
}
