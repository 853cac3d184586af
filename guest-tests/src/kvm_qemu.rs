//! Two guests of QEMU under KVM, on one daemon: on this machine where it can, otherwise in a guest that plays the host.

use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::endpoints::{Endpoints, gid_index, network_script};
use crate::image::GuestImage;
use crate::kvm_bed::{GUESTS, KvmBed, KvmBeds};
use crate::kvm_host::{KvmHost, PATIENCE, TOOLS};
use crate::pair::{LinkKind, PVRDMA_DEVICE, Pair, PairOptions};
use crate::vm::{Job, Vm, VmBuilder, has_kvm};

const MAC: [&str; 2] = ["52:54:00:00:05:01", "52:54:00:00:05:02"];
const IPV4: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 168, 84, 1), Ipv4Addr::new(192, 168, 84, 2)];
const MTU: u32 = 1500;
const MEMORY_MIB: u32 = 512;
/// Everything of the guests that is no tool.
const FILES: &str = "/run";

/// The guests.
#[derive(Debug)]
pub(crate) enum KvmQemuPair {
    /// On this machine, with KVM of its processor: the pair that everybody has here.
    Machine(Box<Pair>),
    /// In a guest that plays the host.
    Played(Box<PlayedPair>),
}

/// Guests of a guest.
#[derive(Debug)]
pub(crate) struct PlayedPair {
    // Declared in the order in which they must be dropped.
    vms: [Vm; 2],
    machines: [Job; 2],
    /// How each is started.
    commands: [String; 2],
    daemon: Job,
    bed: Rc<KvmBed>,
    booted: Duration,
}

impl KvmQemuPair {
    /// Boots both and brings their devices up.
    pub(crate) fn boot(image: &GuestImage, beds: &KvmBeds) -> Result<Self> {
        if has_kvm() {
            let options = PairOptions { rxe: false, ..PairOptions::default() };
            return Ok(Self::Machine(Box::new(Pair::boot(image, &options)?)));
        }
        Ok(Self::Played(Box::new(PlayedPair::boot(image, beds.get(image)?)?)))
    }

    /// The guests.
    pub(crate) fn vms(&self) -> [&Vm; 2] {
        match self {
            Self::Machine(pair) => [pair.a(), pair.b()],
            Self::Played(pair) => [&pair.vms[0], &pair.vms[1]],
        }
    }

    /// How programs in them reach each other.
    pub(crate) fn endpoints(&self) -> Result<Endpoints<'_>> {
        match self {
            Self::Machine(pair) => Ok(pair.endpoints(&pair.link(LinkKind::Pvrdma)?)),
            Self::Played(pair) => pair.endpoints(),
        }
    }

    /// The host, if a guest plays it.
    pub(crate) fn host(&self) -> Option<&KvmHost> {
        match self {
            Self::Machine(_) => None,
            Self::Played(pair) => Some(pair.bed.host()),
        }
    }

    /// Which KVM runs them, and how long they took to boot.
    pub(crate) fn description(&self) -> String {
        match self {
            Self::Machine(_) => "KVM of this machine".to_owned(),
            Self::Played(pair) => {
                let seconds = pair.booted.as_secs_f64();
                format!("kvm_amd on emulated SVM, in a guest that plays the host; both up after {seconds:.0} s")
            }
        }
    }

    /// What the daemon and the machines say.
    pub(crate) fn diagnosis(&self) -> String {
        match self {
            Self::Machine(pair) => pair.diagnosis(),
            Self::Played(pair) => pair.diagnosis(),
        }
    }

    /// What the daemon reports.
    pub(crate) fn status(&self) -> Result<serde_json::Value> {
        match self {
            Self::Machine(pair) => pair.daemon().context("there is no daemon")?.status(),
            Self::Played(pair) => pair.status(),
        }
    }

    /// Reboots a guest and brings its device up again.
    pub(crate) fn reboot(&self, end: usize) -> Result<()> {
        match self {
            Self::Machine(pair) => pair.reboot(end),
            Self::Played(pair) => {
                pair.vms[end].reboot()?;
                pair.bring_up(end)
            }
        }
    }

    /// Kills the QEMU of a guest.
    pub(crate) fn kill(&self, end: usize) -> Result<()> {
        match self {
            Self::Machine(pair) => {
                pair.vms()[end].kill();
                Ok(())
            }
            Self::Played(pair) => {
                let machine = &pair.machines[end];
                machine.kill()?;
                machine.wait(Duration::from_secs(60)).map(drop)
            }
        }
    }

    /// Starts a guest that was killed anew, and brings its device up.
    pub(crate) fn restart(&mut self, end: usize) -> Result<()> {
        match self {
            Self::Machine(pair) => pair.restart(end),
            Self::Played(pair) => {
                let (host, command) = (pair.bed.vm(), &pair.commands[end]);
                let mut started = None;
                pair.vms[end].boot_again(|| {
                    started = Some(host.spawn(command)?);
                    Ok(())
                })?;
                if let Some(machine) = started {
                    pair.machines[end] = machine;
                }
                pair.bring_up(end)
            }
        }
    }
}

impl PlayedPair {
    fn boot(image: &GuestImage, bed: Rc<KvmBed>) -> Result<Self> {
        let started = Instant::now();
        // Of a pair that was replaced.
        bed.clear("pvrdmad")?;
        let prepared = [bed.prepare(image, GUESTS[0])?, bed.prepare(image, GUESTS[1])?];
        let daemon = bed.vm().spawn(&daemon_command()?)?;
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
        for end in [0, 1] {
            pair.bring_up(end).with_context(|| pair.diagnosis())?;
        }
        Ok(pair)
    }

    /// Loads drivers and sets addresses in a guest that has just booted.
    fn bring_up(&self, end: usize) -> Result<()> {
        let vm = &self.vms[end];
        vm.run(&network_script("vmxnet3", &[IPV4[end].into()], MTU))?;
        vm.run("modprobe ib_uverbs && modprobe rdma_ucm && modprobe vmw_pvrdma")?;
        gid_index(vm, PVRDMA_DEVICE, IPV4[end].into()).map(drop)
    }

    fn endpoints(&self) -> Result<Endpoints<'_>> {
        let ip = IPV4.map(IpAddr::V4);
        let endpoints = Endpoints {
            vms: [&self.vms[0], &self.vms[1]],
            device: [PVRDMA_DEVICE; 2],
            gid_index: [0; 2],
            ip,
            interface: ["eth0"; 2],
            tcp: IPV4,
            path_mtu: None,
            patience: Duration::from_secs(60) * PATIENCE,
        };
        endpoints.with_gids(ip)
    }

    fn status(&self) -> Result<serde_json::Value> {
        let text = self.bed.vm().run(&format!("{TOOLS}/pvrdmad status --json --control {FILES}/control"))?;
        serde_json::from_str(&text).with_context(|| format!("no JSON: {text}"))
    }

    fn diagnosis(&self) -> String {
        let mut text = format!("--- pvrdmad\n{}", self.daemon.output());
        for (name, machine) in GUESTS.iter().zip(&self.machines) {
            // A string takes everything.
            let _ = write!(text, "\n--- QEMU of {name}\n{}", machine.output());
        }
        let consoles = self.bed.vm().exec(&format!("tail -n 40 {FILES}/*.console"), Duration::from_secs(60));
        let consoles = consoles.map_or_else(|error| error.to_string(), |output| output.text);
        format!("{text}\n--- consoles\n{consoles}")
    }
}

fn socket(end: usize, function: &str) -> String {
    format!("{FILES}/{}.{function}", GUESTS[end])
}

fn daemon_command() -> Result<String> {
    let mut command =
        format!("RUST_BACKTRACE=1 RUST_LOG=info exec {TOOLS}/pvrdmad --sandbox strict --control {FILES}/control");
    for end in [0, 1] {
        write!(
            command,
            " --device name={},socket={},nic-socket={},mac={},pin=registered",
            GUESTS[end],
            socket(end, "pvrdma"),
            socket(end, "nic"),
            MAC[end]
        )?;
    }
    Ok(command)
}

/// The shell's command that starts the QEMU of a guest.
fn command(bed: &KvmBed, end: usize) -> Result<String> {
    let name = GUESTS[end];
    let builder = VmBuilder::new(&bed.image(), Path::new(FILES))
        .name(name)
        .memory_mib(MEMORY_MIB)
        .nic_socket(Path::new(&socket(end, "nic")))
        .pvrdma_socket(Path::new(&socket(end, "pvrdma")));
    let console = Path::new(FILES).join(format!("{name}.console"));
    let words = builder.command(&bed.initramfs(), &bed.line(name)?, &console)?;
    // None of them contains a quote.
    let words: Vec<_> = words.into_iter().map(|word| format!("'{word}'")).collect();
    Ok(format!("exec {}", words.join(" ")))
}
