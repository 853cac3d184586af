//! Two guests of QEMU with `-accel kvm` on one daemon, with the unmodified kernel and drivers. All cases share one
//! boot.

use anyhow::{Context, Result, bail};

use super::case::Case;
use super::exchange::{Programs, Ready};
use super::programs::{self, EACH_OPERATION, Program};
use super::shared::{Machines, Shared};
use super::{exits, kernel_log, nvme};
use crate::kvm_bed::KvmBeds;
use crate::kvm_qemu::KvmQemuPair;
use crate::pair::PVRDMA_DEVICE;
use crate::vm::Vm;

impl Machines for KvmQemuPair {
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
    let beds = beds.clone();
    let shared = Shared::new(move |image| KvmQemuPair::boot(image, &beds));
    let mut cases = vec![shared.case("kvm/qemu/boot", boot)];
    let run = |pair: &KvmQemuPair, program: &Program, server: usize| program.run(&pair.endpoints()?, server);
    cases.extend(programs::cases("kvm/qemu", &EACH_OPERATION, &shared, run));
    cases.push(shared.case("kvm/qemu/exits", |pair| exits::report(&pair.endpoints()?, &|| pair.exits(0))));
    cases.push(shared.case("kvm/qemu/nvme-fio-verify", |pair| nvme::between(pair.vms(), pair.endpoints()?.tcp[0], 16)));
    cases.push(shared.case("kvm/qemu/reboot", reboot));
    cases.push(shared.last_case("kvm/qemu/killed", killed));
    cases.into_iter().map(|case| case.slow(WHEN)).collect()
}

/// Hint for all cases. With emulated virtualisation, a boot takes minutes, and each other case many seconds.
const WHEN: &str = "takes minutes with the others; runs when asked for: --only kvm/qemu";

/// The drivers have bound, and KVM runs both guests.
fn boot(pair: &KvmQemuPair) -> Result<String> {
    for vm in pair.vms() {
        let drivers =
            vm.run("for f in 0 1; do basename $(readlink /sys/bus/pci/devices/0000:00:10.$f/driver); done")?;
        if drivers.split_whitespace().ne(["vmxnet3", "vmw_pvrdma"]) {
            bail!("{}: drivers of slot 10: {drivers}", vm.name());
        }
        // The CPUID leaf of the hypervisor.
        let hypervisor = vm.run("lscpu | grep 'Hypervisor vendor'")?;
        if !hypervisor.contains("KVM") {
            bail!("{}: {hypervisor}", vm.name());
        }
    }
    pair.host().map_or(Ok(()), kernel_log::check)?;
    Ok(pair.description())
}

fn reboot(pair: &KvmQemuPair) -> Result<String> {
    pair.reboot(0)?;
    pingpong(pair).context("after the reboot")
}

fn pingpong(pair: &KvmQemuPair) -> Result<String> {
    let [rc, ..] = EACH_OPERATION;
    rc.run(&pair.endpoints()?, 1)
}

/// A guest is killed while another one writes to its memory. The writer gets an error, and the next guest finds a clean
/// device.
fn killed(pair: &mut KvmQemuPair) -> Result<String> {
    let endpoints = pair.endpoints()?;
    let command =
        |end: usize| format!("ib_write_bw -F -d {} -x {} -s 65536 -D 600", PVRDMA_DEVICE, endpoints.gid_index[end]);
    let before = written(pair)?;
    let (server, client) = Programs {
        server_vm: endpoints.vms[1],
        server: command(1),
        ready: Ready::Tcp(18515),
        client_vm: endpoints.vms[0],
        client: format!("{} {}", command(0), endpoints.tcp[1]),
        timeout: endpoints.patience,
    }
    .start()?;
    while written(pair)? < before + (1 << 20) {
        if !client.is_running() {
            bail!("the transfer ended before the kill:\n{}", client.output());
        }
    }
    pair.kill(1)?;
    let output = client.wait(endpoints.patience).context("the other guest did not notice that its peer is gone")?;
    if output.code == 0 {
        bail!("the transfer to a machine that was killed succeeded:\n{}", output.text);
    }
    drop((server, client));
    pair.restart(1)?;
    let note = pingpong(pair).context("after the kill")?;
    pair.host().map_or(Ok(()), kernel_log::check)?;
    Ok(note)
}

/// Returns the number of bytes that RDMA writes of the guests have moved.
fn written(pair: &KvmQemuPair) -> Result<u64> {
    let status = pair.status()?;
    let devices = status["devices"].as_array().context("no devices")?;
    Ok(devices.iter().filter_map(|device| device["adapter"]["rc_write_bytes"].as_u64()).sum())
}
