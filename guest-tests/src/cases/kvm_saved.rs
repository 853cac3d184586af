//! A VM of `pvrdma-vmm` that is saved to a file, and continues from it in another process.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::case::{Case, skip};
use super::kernel_log;
use super::pingpong::pingpong;
use crate::endpoints::{Endpoints, bring_up};
use crate::image::GuestImage;
use crate::kvm_bed::{KvmBed, KvmBeds, SAVED_GUEST};
use crate::kvm_host::{PATIENCE, TOOLS};
use crate::pair::PVRDMA_DEVICE;
use crate::vm::{Job, Vm, has_kvm, watchdog};
use crate::vmm_pair::{COMMAND_LINE, STATE};

const MAC: &str = "52:54:00:00:04:11";
const MEMORY: &str = "512M";
const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 168, 84, 1);
const MTU: u32 = 1500;
/// File on the host that the VM is saved to.
const FILE: &str = "/run/saved.state";
/// Maximum time to write or read it.
const PATIENT: Duration = Duration::from_secs(300);
/// Maximum number of hosts that may break down.
const ATTEMPTS: u32 = 3;
/// Script that counts in the guest's memory until it is killed. It sleeps, so it needs a timer.
const COUNT: &str = "count=0; while :; do count=$((count + 1)); echo $count > /run/count; sleep 0.1; done";

const WHEN: &str = "takes minutes; runs when asked for: --only kvm/saved";

/// Returns the case `kvm/saved`.
pub(crate) fn cases(beds: &KvmBeds) -> Vec<Case> {
    let beds = beds.clone();
    let run = move |image: &GuestImage| {
        if has_kvm() && !Path::new("/sys/module/kvm_amd").exists() {
            return Err(skip("the guest that acts as the host has kvm_amd, and this machine's processor is another"));
        }
        for _ in 1..ATTEMPTS {
            let machine = Machine::boot(image, &beds)?;
            match saved(&machine) {
                Err(error) if machine.bed.vm().has_ended() => log::warn!("the host has broken down: {error:#}"),
                result => return result.with_context(|| machine.diagnosis()),
            }
        }
        saved(&Machine::boot(image, &beds)?)
    };
    vec![Case::alone("kvm/saved", run).slow(WHEN)]
}

/// A VM, and the host that it runs on.
struct Machine {
    // Declared in the order in which they must be dropped.
    vm: Vm,
    vmm: Job,
    bed: Rc<KvmBed>,
}

impl Machine {
    fn boot(image: &GuestImage, beds: &KvmBeds) -> Result<Self> {
        beds.start(image, |bed| {
            bed.clear("pvrdma-vmm")?;
            let prepared = bed.prepare(image, SAVED_GUEST)?;
            let vmm = start(&bed, &format!("--save {FILE}"), MAC, MEMORY)?;
            let vm = prepared.accept(bed.vm().process())?;
            let machine = Self { vm, vmm, bed };
            machine.up().with_context(|| machine.diagnosis())?;
            Ok(machine)
        })
    }

    fn up(&self) -> Result<()> {
        self.vm.wait_boot()?;
        bring_up(&self.vm, &[ADDRESS.into()], MTU)
    }

    fn diagnosis(&self) -> String {
        let state = self.bed.vm().exec(STATE, Duration::from_secs(60));
        let state = state.map_or_else(|error| error.to_string(), |output| output.text);
        format!("--- pvrdma-vmm that saves\n{}\n{state}", self.vmm.output())
    }

    /// Sends messages from the RDMA device to itself.
    fn exchange(&self) -> Result<String> {
        let patience = Duration::from_secs(60) * PATIENCE;
        let endpoints = Endpoints::new([&self.vm; 2], PVRDMA_DEVICE, [ADDRESS; 2], patience);
        pingpong(&endpoints.with_gids([IpAddr::V4(ADDRESS); 2])?, 1, "ibv_rc_pingpong", "-n 50")
    }

    /// Returns the count of [`COUNT`], and the time since the guest's boot in seconds.
    fn progress(&self) -> Result<(u64, f64)> {
        let text = self.vm.run("cat /run/count /proc/uptime")?;
        let mut words = text.split_whitespace();
        let (count, uptime) = (words.next().context("no count")?, words.next().context("no uptime")?);
        Ok((count.parse().context("count")?, uptime.parse().context("uptime")?))
    }
}

/// Starts the VMM with one VM on the host.
fn start(bed: &KvmBed, option: &str, mac: &str, memory: &str) -> Result<Job> {
    let line = format!("{COMMAND_LINE}{}", watchdog(PATIENCE));
    bed.vm().spawn(&format!(
        "RUST_BACKTRACE=1 RUST_LOG=info exec {} {TOOLS}/pvrdma-vmm --kernel {} --append '{line}' {option} --vm \
         name={SAVED_GUEST},mac={mac},cpus=2,memory={memory},disk-ro=/dev/vda,initramfs={},serial={},\
         console=/run/{SAVED_GUEST}.console",
        KvmBed::ON_ONE_PROCESSOR,
        bed.image().kernel().display(),
        bed.initramfs().display(),
        bed.line(SAVED_GUEST)?.display(),
    ))
}

/// A guest continues in another process: its programs, clock and RDMA device. Other machines are refused.
fn saved(machine: &Machine) -> Result<String> {
    let Machine { vm, vmm, bed } = machine;
    let host = bed.vm();
    machine.exchange().context("before the save")?;
    let _counting = vm.spawn(COUNT)?;
    vm.wait_until("[ -s /run/count ]", PATIENT)?;
    let before = machine.progress()?;

    host.run("kill -USR1 $(pidof pvrdma-vmm)")?;
    let said = vmm.wait_success(PATIENT).context("save")?;
    ensure!(said.contains(&format!("{SAVED_GUEST}: saved")), "the VMM did not save:\n{said}");
    let file = host.run(&format!("stat -c '%a %s' {FILE}"))?;
    let bytes = file.trim().strip_prefix("600 ").with_context(|| format!("mode and bytes of the file: {file}"))?;

    let restore = format!("--restore {FILE}");
    for (mac, memory, option) in [("52:54:00:00:04:12", MEMORY, "mac"), (MAC, "256M", "memory")] {
        let refused = start(bed, &restore, mac, memory)?.wait(PATIENT)?;
        let named = refused.text.contains(&format!("the state has {option} "));
        ensure!(refused.code == 1 && named, "another {option}: exit code {}\n{}", refused.code, refused.text);
    }

    let restored = start(bed, &restore, MAC, MEMORY)?;
    let note = continued(machine, before).with_context(|| format!("after the restore\n{}", restored.output()))?;
    Ok(format!("{bytes} bytes; {note}"))
}

/// Checks that the guest goes on after `before`, and not from a new boot.
fn continued(machine: &Machine, (count, uptime): (u64, f64)) -> Result<String> {
    let vm = &machine.vm;
    vm.wait_until(&format!("[ $(cat /run/count) -gt {} ]", count.saturating_add(10)), PATIENT)?;
    let after = machine.progress()?;
    ensure!(after.1 > uptime, "the clock went from {uptime} to {}", after.1);
    let speed = machine.exchange()?;
    kernel_log::check(vm)?;
    kernel_log::check(machine.bed.vm())?;
    Ok(format!("counted from {count} to {}, RDMA afterwards: {speed}", after.0))
}
