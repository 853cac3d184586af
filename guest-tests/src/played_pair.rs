//! Two guests of any VMM on one daemon, under KVM of a guest that acts as their host.

use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::endpoints::{Endpoints, bring_up, gid_index};
use crate::image::GuestImage;
use crate::kvm_bed::{GUESTS, KvmBed};
use crate::kvm_host::{PATIENCE, TOOLS};
use crate::pair::PVRDMA_DEVICE;
use crate::vm::{Job, Vm};

const MAC: [&str; 2] = ["52:54:00:00:05:01", "52:54:00:00:05:02"];
const IPV4: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 168, 84, 1), Ipv4Addr::new(192, 168, 84, 2)];
const MTU: u32 = 1500;
/// Memory of each guest in MiB.
pub(crate) const MEMORY_MIB: u32 = 512;
/// Directory on the host for all files of the guests except tools.
pub(crate) const FILES: &str = "/run";

/// Returns the command that starts a guest's VMM on the host.
pub(crate) type Command = fn(&KvmBed, usize) -> Result<String>;

/// A function of a guest's slot.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Function {
    /// The vNIC.
    Network,
    /// The RDMA device.
    Rdma,
}

/// The guests.
#[derive(Debug)]
pub(crate) struct PlayedPair {
    // Declared in the order in which they must be dropped.
    vms: [Vm; 2],
    machines: [Job; 2],
    /// Commands that start the VMMs.
    commands: [String; 2],
    daemon: Job,
    bed: Rc<KvmBed>,
    booted: Duration,
}

impl PlayedPair {
    /// Boots both guests and brings their devices up.
    pub(crate) fn boot(image: &GuestImage, bed: Rc<KvmBed>, command: Command) -> Result<Self> {
        Self::boot_with_doorbells(image, bed, command, ["trapped"; 2])
    }

    /// Same as [`boot`](Self::boot), with a doorbell mode for each device.
    pub(crate) fn boot_with_doorbells(
        image: &GuestImage,
        bed: Rc<KvmBed>,
        command: Command,
        doorbells: [&str; 2],
    ) -> Result<Self> {
        let pair = Self::boot_machines(image, bed, command, doorbells)?;
        for end in [0, 1] {
            pair.bring_up(end).with_context(|| pair.diagnosis())?;
        }
        Ok(pair)
    }

    /// Boots both guests without loading drivers.
    pub(crate) fn boot_without_driver(image: &GuestImage, bed: Rc<KvmBed>, command: Command) -> Result<Self> {
        Self::boot_machines(image, bed, command, ["trapped"; 2])
    }

    fn boot_machines(image: &GuestImage, bed: Rc<KvmBed>, command: Command, doorbells: [&str; 2]) -> Result<Self> {
        let started = Instant::now();
        // Left over from a pair that was replaced.
        bed.clear("pvrdmad")?;
        let prepared = [bed.prepare(image, GUESTS[0])?, bed.prepare(image, GUESTS[1])?];
        let daemon = bed.vm().spawn(&daemon_command(doorbells)?)?;
        for name in GUESTS {
            daemon.wait_for_output(&format!("{name}: ready"), Duration::from_secs(60))?;
        }
        let commands = [command(&bed, 0)?, command(&bed, 1)?];
        let machines = [bed.vm().spawn(&commands[0])?, bed.vm().spawn(&commands[1])?];
        let [a, b] = prepared;
        let vms = [a.accept(bed.vm().process())?, b.accept(bed.vm().process())?];
        let mut pair = Self { vms, machines, commands, daemon, bed, booted: Duration::ZERO };
        for vm in &pair.vms {
            vm.wait_boot().with_context(|| pair.diagnosis())?;
        }
        pair.booted = started.elapsed();
        Ok(pair)
    }

    /// The guests.
    pub(crate) fn vms(&self) -> [&Vm; 2] {
        [&self.vms[0], &self.vms[1]]
    }

    /// Their host.
    pub(crate) fn host(&self) -> &Vm {
        self.bed.vm()
    }

    /// Describes the KVM in use and the boot time.
    pub(crate) fn description(&self) -> String {
        let seconds = self.booted.as_secs_f64();
        format!("kvm_amd on emulated SVM, in a guest that plays the host; both up after {seconds:.0} s")
    }

    /// Reboots a guest and brings its device up again.
    pub(crate) fn reboot(&self, end: usize) -> Result<()> {
        self.vms[end].reboot()?;
        self.bring_up(end)
    }

    /// Kills the VMM of a guest.
    pub(crate) fn kill(&self, end: usize) -> Result<()> {
        let machine = &self.machines[end];
        machine.kill()?;
        machine.wait(Duration::from_secs(60)).map(drop)
    }

    /// Restarts a guest that was killed, and brings its device up.
    pub(crate) fn restart(&mut self, end: usize) -> Result<()> {
        let (host, command) = (self.bed.vm(), &self.commands[end]);
        let mut started = None;
        self.vms[end].boot_again(|| {
            started = Some(host.spawn(command)?);
            Ok(())
        })?;
        if let Some(machine) = started {
            self.machines[end] = machine;
        }
        self.bring_up(end)
    }

    /// Loads drivers and sets addresses in a guest that has just booted.
    fn bring_up(&self, end: usize) -> Result<()> {
        let vm = &self.vms[end];
        bring_up(vm, &[IPV4[end].into()], MTU)?;
        gid_index(vm, PVRDMA_DEVICE, IPV4[end].into()).map(drop)
    }

    /// Returns the endpoints by which programs in the guests reach each other.
    pub(crate) fn endpoints(&self) -> Result<Endpoints<'_>> {
        let vms = [&self.vms[0], &self.vms[1]];
        Endpoints::new(vms, PVRDMA_DEVICE, IPV4, Duration::from_secs(60) * PATIENCE).with_gids(IPV4.map(IpAddr::V4))
    }

    /// Lets QEMU guests run on all processors of the host, see [`KvmBed::ON_ONE_PROCESSOR`].
    pub(crate) fn spread(&self) -> Result<()> {
        // The brackets keep the searching shell from matching itself.
        self.bed.spread("pgrep -f '[g]uest-tests-'")
    }

    /// Returns the status report of the daemon.
    pub(crate) fn status(&self) -> Result<serde_json::Value> {
        let text = self.bed.vm().run(&format!("{TOOLS}/pvrdmad status --json --control {FILES}/control"))?;
        serde_json::from_str(&text).with_context(|| format!("no JSON: {text}"))
    }

    /// Returns the output of the daemon, the VMMs and the consoles.
    pub(crate) fn diagnosis(&self) -> String {
        let mut text = format!("--- pvrdmad\n{}", self.daemon.output());
        for (name, machine) in GUESTS.iter().zip(&self.machines) {
            // Writing to a string cannot fail.
            let _ = write!(text, "\n--- VMM of {name}\n{}", machine.output());
        }
        let consoles =
            self.bed.vm().exec(&format!("tail -n 40 {FILES}/*.console {FILES}/*.vmm"), Duration::from_secs(60));
        let consoles = consoles.map_or_else(|error| error.to_string(), |output| output.text);
        format!("{text}\n--- consoles\n{consoles}")
    }
}

/// Path at which a daemon serves a function of a guest.
pub(crate) fn socket(guest: &str, function: Function) -> String {
    let suffix = match function {
        Function::Network => "nic",
        Function::Rdma => "pvrdma",
    };
    format!("{FILES}/{guest}.{suffix}")
}

/// Option of a daemon for the devices of a guest.
pub(crate) fn device(guest: &str, mac: &str) -> String {
    let [rdma, network] = [Function::Rdma, Function::Network].map(|function| socket(guest, function));
    format!("--device name={guest},socket={rdma},nic-socket={network},mac={mac}")
}

fn daemon_command(doorbells: [&str; 2]) -> Result<String> {
    // The daemon needs FUSE to export doorbell pages.
    let fuse = if doorbells.contains(&"mapped") { "modprobe fuse && " } else { "" };
    let mut command =
        format!("{fuse}RUST_BACKTRACE=1 RUST_LOG=info exec {TOOLS}/pvrdmad --sandbox strict --control {FILES}/control");
    for end in [0, 1] {
        write!(command, " {},doorbells={}", device(GUESTS[end], MAC[end]), doorbells[end])?;
    }
    Ok(command)
}
