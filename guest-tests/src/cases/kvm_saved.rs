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

pub(super) const MAC: &str = "52:54:00:00:04:11";
const MEMORY: &str = "512M";
pub(super) const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 168, 84, 1);
pub(super) const MTU: u32 = 1500;
/// File on the host that the VM is saved to.
const FILE: &str = "/run/saved.state";
/// Maximum time to write or read it.
pub(super) const PATIENT: Duration = Duration::from_secs(300);
/// Maximum number of hosts that may break down.
const ATTEMPTS: u32 = 3;
/// Script that counts in the guest's memory until it is killed. It sleeps, so it needs a timer. A reader never finds an
/// empty file.
pub(super) const COUNT: &str = "count=0; cd /run; while :; do count=$((count + 1)); echo $count > next && mv next count; \
                                sleep 0.1; done";

const WHEN: &str = "takes minutes; runs when asked for: --only kvm/saved";

/// Returns the case `kvm/saved`.
pub(crate) fn cases(beds: &KvmBeds) -> Vec<Case> {
    let beds = beds.clone();
    let boot = move |image: &GuestImage| {
        Machine::boot(image, &beds, (SAVED_GUEST, MEMORY), &format!("--save {FILE}"), |_| Ok(()))
    };
    vec![Case::alone("kvm/saved", move |image| on_hosts(|| boot(image), saved)).slow(WHEN)]
}

/// Runs a test with a machine. If its host breaks down, the test runs again on another. It is skipped if all of them
/// break down.
pub(super) fn on_hosts(
    boot: impl Fn() -> Result<Machine>,
    test: impl Fn(&Machine) -> Result<String>,
) -> Result<String> {
    if has_kvm() && !Path::new("/sys/module/kvm_amd").exists() {
        return Err(skip("the guest that acts as the host has kvm_amd, and this machine's processor is another"));
    }
    for _ in 0..ATTEMPTS {
        let machine = boot()?;
        match test(&machine) {
            Err(error) if machine.bed.vm().has_ended() => log::warn!("the host has broken down: {error:#}"),
            result => return result.with_context(|| machine.diagnosis()),
        }
    }
    Err(skip("the emulated hosts have broken down, see the log"))
}

/// A VM, and the host that it runs on.
pub(super) struct Machine {
    // Declared in the order in which they must be dropped.
    pub(super) vm: Vm,
    pub(super) vmm: Job,
    pub(super) bed: Rc<KvmBed>,
    guest: &'static str,
}

impl Machine {
    /// Boots a guest with this name and memory in a VMM with these options, on a host that `prepare` has prepared.
    pub(super) fn boot(
        image: &GuestImage,
        beds: &KvmBeds,
        (guest, memory): (&'static str, &str),
        options: &str,
        prepare: impl Fn(&KvmBed) -> Result<()>,
    ) -> Result<Self> {
        beds.start(image, |bed| {
            bed.clear("pvrdma-vmm")?;
            prepare(&bed)?;
            let prepared = bed.prepare(image, guest)?;
            let vmm = start(&bed, guest, options, MAC, memory)?;
            let vm = prepared.accept(bed.vm().process())?;
            let machine = Self { vm, vmm, bed, guest };
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
        format!("--- first pvrdma-vmm\n{}\n{state}", self.vmm.output())
    }

    /// Starts another VMM for the guest, with these options in place of the first ones.
    pub(super) fn start(&self, options: &str, mac: &str, memory: &str) -> Result<Job> {
        start(&self.bed, self.guest, options, mac, memory)
    }

    /// Returns the RDMA device as the server and the client of programs.
    pub(super) fn endpoints(&self) -> Result<Endpoints<'_>> {
        let patience = Duration::from_secs(60) * PATIENCE;
        let endpoints = Endpoints::new([&self.vm; 2], PVRDMA_DEVICE, [ADDRESS; 2], patience);
        endpoints.with_gids([IpAddr::V4(ADDRESS); 2])
    }

    /// Sends messages from the RDMA device to itself.
    pub(super) fn exchange(&self) -> Result<String> {
        pingpong(&self.endpoints()?, 1, "ibv_rc_pingpong", "-n 50")
    }

    /// Returns the count of [`COUNT`], and the time since the guest's boot in seconds.
    pub(super) fn progress(&self) -> Result<(u64, f64)> {
        let text = self.vm.run("cat /run/count /proc/uptime")?;
        let mut words = text.split_whitespace();
        let (count, uptime) = (words.next().context("no count")?, words.next().context("no uptime")?);
        Ok((count.parse().context("count")?, uptime.parse().context("uptime")?))
    }

    /// Checks that the guest continues after `before`, and not from a new boot.
    pub(super) fn continues(&self, (count, uptime): (u64, f64)) -> Result<String> {
        self.vm.wait_until(&format!("[ $(cat /run/count) -gt {} ]", count.saturating_add(10)), PATIENT)?;
        let after = self.progress()?;
        ensure!(after.1 > uptime, "the clock went from {uptime} to {}", after.1);
        Ok(format!("counted from {count} to {}", after.0))
    }
}

/// Starts the VMM with one VM on the host.
fn start(bed: &KvmBed, guest: &str, options: &str, mac: &str, memory: &str) -> Result<Job> {
    let line = format!("{COMMAND_LINE}{}", watchdog(PATIENCE));
    bed.vm().spawn(&format!(
        "RUST_BACKTRACE=1 RUST_LOG=info exec {} {TOOLS}/pvrdma-vmm --kernel {} --append '{line}' {options} --vm \
         name={guest},mac={mac},cpus=2,memory={memory},disk-ro=/dev/vda,initramfs={},serial={},\
         console=/run/{guest}.console",
        KvmBed::ON_ONE_PROCESSOR,
        bed.image().kernel().display(),
        bed.initramfs().display(),
        bed.line(guest)?.display(),
    ))
}

/// A guest continues in another process: its programs, clock and RDMA device. Other machines are refused.
fn saved(machine: &Machine) -> Result<String> {
    let Machine { vm, vmm, bed, .. } = machine;
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
        let refused = machine.start(&restore, mac, memory)?.wait(PATIENT)?;
        let named = refused.text.contains(&format!("the state has {option} "));
        ensure!(refused.code == 1 && named, "another {option}: exit code {}\n{}", refused.code, refused.text);
    }

    let restored = machine.start(&restore, MAC, MEMORY)?;
    let note = continued(machine, before).with_context(|| format!("after the restore\n{}", restored.output()))?;
    Ok(format!("{bytes} bytes; {note}"))
}

fn continued(machine: &Machine, before: (u64, f64)) -> Result<String> {
    let counted = machine.continues(before)?;
    let speed = machine.exchange()?;
    kernel_log::check(&machine.vm)?;
    kernel_log::check(machine.bed.vm())?;
    Ok(format!("{counted}, RDMA afterwards: {speed}"))
}
