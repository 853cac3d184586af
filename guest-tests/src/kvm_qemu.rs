//! Two QEMU guests under KVM on one daemon: on this machine if it can, otherwise in a guest that acts as the host.

use std::path::Path;

use anyhow::{Context, Result};

use crate::endpoints::Endpoints;
use crate::image::GuestImage;
use crate::kvm_bed::{GUESTS, KvmBed, KvmBeds};
use crate::kvm_host::{Exits, PATIENCE, on_machine};
use crate::pair::{LinkKind, Pair, PairOptions};
use crate::played_pair::{FILES, Function, MEMORY_MIB, PlayedPair, socket};
use crate::vm::{Vm, VmBuilder, has_kvm};

/// The guests.
#[derive(Debug)]
pub(crate) enum KvmQemuPair {
    /// On this machine, with the KVM of its processor: the ordinary pair.
    Machine(Box<Pair>),
    /// In a guest that acts as the host.
    Played(Box<PlayedPair>),
}

impl KvmQemuPair {
    /// Boots both guests and brings their devices up.
    pub(crate) fn boot(image: &GuestImage, beds: &KvmBeds) -> Result<Self> {
        Self::boot_with_doorbells(image, beds, ["trapped"; 2])
    }

    /// Same as [`boot`](Self::boot), with a doorbell mode for each device.
    pub(crate) fn boot_with_doorbells(
        image: &GuestImage,
        beds: &KvmBeds,
        doorbells: [&'static str; 2],
    ) -> Result<Self> {
        if has_kvm() {
            let options = PairOptions { rxe: false, doorbells, ..PairOptions::default() };
            return Ok(Self::Machine(Box::new(Pair::boot(image, &options)?)));
        }
        let pair = beds.start(image, |bed| PlayedPair::boot_with_doorbells(image, bed, command, doorbells))?;
        Ok(Self::Played(Box::new(pair)))
    }

    /// The guests.
    pub(crate) fn vms(&self) -> [&Vm; 2] {
        match self {
            Self::Machine(pair) => [pair.a(), pair.b()],
            Self::Played(pair) => pair.vms(),
        }
    }

    /// Returns the endpoints by which programs in the guests reach each other.
    pub(crate) fn endpoints(&self) -> Result<Endpoints<'_>> {
        match self {
            Self::Machine(pair) => Ok(pair.endpoints(&pair.link(LinkKind::Pvrdma)?)),
            Self::Played(pair) => pair.endpoints(),
        }
    }

    /// Returns the host, if it is a guest.
    pub(crate) fn host(&self) -> Option<&Vm> {
        match self {
            Self::Machine(_) => None,
            Self::Played(pair) => Some(pair.host()),
        }
    }

    /// Lets the guests run on all processors of a host that is itself a guest.
    pub(crate) fn spread(&self) -> Result<()> {
        match self {
            Self::Machine(_) => Ok(()),
            Self::Played(pair) => pair.spread(),
        }
    }

    /// Returns the number of VM exits of a guest.
    pub(crate) fn exits(&self, end: usize) -> Result<Exits> {
        match self {
            Self::Machine(pair) => {
                let process = pair.vms()[end].process_id();
                Exits::parse(&on_machine(&Exits::script(&process.to_string()))?)
            }
            // The brackets keep the searching shell from matching itself.
            Self::Played(pair) => {
                let process = format!("$(pgrep -f '[g]uest-tests-{}')", GUESTS[end]);
                Exits::parse(&pair.host().run(&Exits::script(&process))?)
            }
        }
    }

    /// Describes the KVM in use and the boot time.
    pub(crate) fn description(&self) -> String {
        match self {
            Self::Machine(_) => "KVM of this machine".to_owned(),
            Self::Played(pair) => pair.description(),
        }
    }

    /// Returns the output of the daemon and the machines.
    pub(crate) fn diagnosis(&self) -> String {
        match self {
            Self::Machine(pair) => pair.diagnosis(),
            Self::Played(pair) => pair.diagnosis(),
        }
    }

    /// Returns the status report of the daemon.
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
            Self::Played(pair) => pair.reboot(end),
        }
    }

    /// Kills the QEMU of a guest.
    pub(crate) fn kill(&self, end: usize) -> Result<()> {
        match self {
            Self::Machine(pair) => {
                pair.vms()[end].kill();
                Ok(())
            }
            Self::Played(pair) => pair.kill(end),
        }
    }

    /// Restarts a guest that was killed, and brings its device up.
    pub(crate) fn restart(&mut self, end: usize) -> Result<()> {
        match self {
            Self::Machine(pair) => pair.restart(end),
            Self::Played(pair) => pair.restart(end),
        }
    }
}

fn command(bed: &KvmBed, end: usize) -> Result<String> {
    qemu(bed, GUESTS[end])
}

/// Returns the shell command that starts the QEMU of a guest. A daemon serves the devices.
pub(crate) fn qemu(bed: &KvmBed, name: &str) -> Result<String> {
    let builder = VmBuilder::new(&bed.image(), Path::new(FILES))
        .name(name)
        .memory_mib(MEMORY_MIB)
        .patience(PATIENCE)
        .nic_socket(Path::new(&socket(name, Function::Network)))
        .pvrdma_socket(Path::new(&socket(name, Function::Rdma)));
    let console = Path::new(FILES).join(format!("{name}.console"));
    let words = builder.command(&bed.initramfs(), &bed.line(name)?, &console)?;
    // No word contains a quote.
    let words: Vec<_> = words.into_iter().map(|word| format!("'{word}'")).collect();
    Ok(format!("exec {} {}", KvmBed::ON_ONE_PROCESSOR, words.join(" ")))
}
