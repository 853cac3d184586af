//! What all guests under KVM in a guest that plays the host share: the host, which boots once for them, the programs
//! and files that it has, a card, and a line to each guest's agent. Where this machine has KVM of its own, there is no
//! need for one.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result};
use tempfile::TempDir;

use crate::daemon;
use crate::guest_with_daemon::cable;
use crate::image::{Disk, GuestImage, append_program};
use crate::kvm_host::{KvmHost, PATIENCE, TOOLS};
use crate::vm::{Nic, NicModel, Prepared, Vm, VmBuilder};

/// Names of the guests that it may have at a time on a daemon: each has a line to this machine.
pub(crate) const GUESTS: [&str; 2] = ["a", "b"];
/// Names of those of `pvrdma-vmm`, likewise.
pub(crate) const VMM_GUESTS: [&str; 2] = ["c", "d"];
/// Names of those whose doorbells differ. A line does not come back for a second pair of guests.
pub(crate) const DOORBELL_GUESTS: [&str; 2] = ["e", "f"];
/// Its card, which is an uplink.
pub(crate) const CARD: &str = "eth0";
const CARD_MAC: &str = "52:54:00:00:04:10";
/// The variable that names a Cloud Hypervisor, for tests with one.
pub(crate) const CLOUD_HYPERVISOR: &str = "CLOUD_HYPERVISOR";

/// How often a host is booted that breaks down.
const ATTEMPTS: u32 = 6;

/// The host, once somebody needs it. It is gone with the last of those who may.
#[derive(Clone, Debug, Default)]
pub(crate) struct KvmBeds(Rc<RefCell<Option<Rc<KvmBed>>>>);

impl KvmBeds {
    /// Starts something on the host, which is booted unless it runs, and once more if it breaks down meanwhile: the
    /// emulation of virtualisation was seen to spoil its memory while guests boot, so that its kernel panics, or resets
    /// the machine without a word.
    pub(crate) fn start<T>(&self, image: &GuestImage, start: impl Fn(Rc<KvmBed>) -> Result<T>) -> Result<T> {
        for _ in 1..ATTEMPTS {
            let bed = self.get(image)?;
            match start(Rc::clone(&bed)) {
                Err(error) if bed.vm().has_ended() => {
                    log::warn!("the host has broken down, it is booted once more: {error:#}");
                }
                result => return result,
            }
        }
        start(self.get(image)?)
    }

    fn get(&self, image: &GuestImage) -> Result<Rc<KvmBed>> {
        let mut slot = self.0.borrow_mut();
        if let Some(bed) = slot.as_ref().filter(|bed| bed.vm().is_running()) {
            return Ok(Rc::clone(bed));
        }
        *slot = None;
        Ok(Rc::clone(slot.insert(Rc::new(KvmBed::boot(image)?))))
    }
}

/// A host that runs.
#[derive(Debug)]
pub(crate) struct KvmBed {
    // Declared in the order in which they must be dropped.
    host: KvmHost,
    directory: TempDir,
}

impl KvmBed {
    fn boot(image: &GuestImage) -> Result<Self> {
        let directory =
            tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
        let own = directory.path();
        let disk = Disk::new(own)?;
        disk.add(&daemon::program()?, "pvrdmad")?;
        disk.add(&daemon::vmm_program()?, "pvrdma-vmm")?;
        image.pack(&disk, "image")?;
        let initramfs = own.join("first-stage");
        std::fs::copy(image.initramfs(), &initramfs).context("cannot copy the first stage")?;
        append_program(&initramfs, "guest-tests", &std::env::current_exe().context("cannot find this program")?)?;
        disk.add(&initramfs, "initramfs")?;
        if let Some(path) = std::env::var_os(CLOUD_HYPERVISOR) {
            disk.add(Path::new(&path), "cloud-hypervisor")?;
        }
        let ports = [GUESTS, VMM_GUESTS, DOORBELL_GUESTS].concat();
        let ports: Vec<_> = ports.iter().map(|name| (port(name), own.join(format!("{name}.agent")))).collect();
        let ports: Vec<_> = ports.iter().map(|(name, socket)| (name.as_str(), socket.as_path())).collect();
        let [local, remote] = cable(own);
        let card = Nic { model: NicModel::Virtio, mac: CARD_MAC.to_owned(), local, remote };
        let host = KvmHost::boot(image, own, disk, &ports, card)?;
        host.vm().run(&format!("modprobe virtio_net && modprobe af_packet && ip link set {CARD} up"))?;
        Ok(Self { host, directory })
    }

    /// Where the other end of its card's cable is, and where its own.
    pub(crate) fn cable(&self) -> [PathBuf; 2] {
        let [ours, theirs] = cable(self.directory.path());
        [theirs, ours]
    }

    /// The guest that plays it.
    pub(crate) fn vm(&self) -> &Vm {
        self.host.vm()
    }

    /// The image as programs of the host find it there.
    pub(crate) fn image(&self) -> GuestImage {
        GuestImage::at(&Path::new(TOOLS).join("image"))
    }

    /// The first stage with this program in it, there.
    pub(crate) fn initramfs(&self) -> PathBuf {
        Path::new(TOOLS).join("initramfs")
    }

    /// Listens for the agent of a guest that is to be started.
    pub(crate) fn prepare(&self, image: &GuestImage, name: &str) -> Result<Prepared> {
        let prepared = VmBuilder::new(image, self.directory.path()).name(name).patience(PATIENCE).prepare()?;
        Ok(prepared.played_by(self.vm()))
    }

    /// The device of the host that leads to who listens for the agent of a guest.
    pub(crate) fn line(&self, name: &str) -> Result<PathBuf> {
        self.host.port(&port(name))
    }

    /// A command in front of another, which keeps that on one processor until [`Self::spread`]. While guests run on
    /// both, the emulation of virtualisation has the host reset by a triple fault about every other minute.
    pub(crate) const ON_ONE_PROCESSOR: &str = "taskset -c 0";

    /// Lets the processes that a command names have all processors.
    pub(crate) fn spread(&self, processes: &str) -> Result<()> {
        self.vm().run(&format!("for process in $({processes}); do taskset -a -p 3 $process || exit; done")).map(drop)
    }

    /// Ends what is left of a program, and waits for its end.
    pub(crate) fn clear(&self, program: &str) -> Result<()> {
        self.vm().exec(&format!("pkill -KILL -x {program}"), Duration::from_secs(60))?;
        self.vm().wait_until(&format!("! pgrep -x {program}"), Duration::from_secs(60))
    }
}

fn port(name: &str) -> String {
    format!("agent-{name}")
}
