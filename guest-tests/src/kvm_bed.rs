//! What guests under KVM in a guest that plays the host share: the host, its daemon's and QEMU's files, and a line to
//! each guest's agent. Where this machine has KVM of its own, there is no need for one.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result};
use tempfile::TempDir;

use crate::daemon;
use crate::image::{Disk, GuestImage, append_file};
use crate::kvm_host::{KvmHost, PATIENCE, TOOLS};
use crate::vm::{Prepared, Vm, VmBuilder};

/// Names of the guests that it may have at a time: each has a line to this machine.
pub(crate) const GUESTS: [&str; 2] = ["a", "b"];
/// The variable that names a Cloud Hypervisor, for tests with one.
pub(crate) const CLOUD_HYPERVISOR: &str = "CLOUD_HYPERVISOR";

/// The host, once somebody needs it. It is gone with the last of those who may.
#[derive(Clone, Debug, Default)]
pub(crate) struct KvmBeds(Rc<RefCell<Option<Rc<KvmBed>>>>);

impl KvmBeds {
    /// Starts something on the host, which is booted unless it runs, and once more if its kernel panics meanwhile:
    /// the emulation of virtualisation was seen to spoil its memory while guests boot.
    pub(crate) fn start<T>(&self, image: &GuestImage, start: impl Fn(Rc<KvmBed>) -> Result<T>) -> Result<T> {
        let bed = self.get(image)?;
        match start(Rc::clone(&bed)) {
            Err(error) if bed.has_panicked() => {
                log::warn!("the host's kernel has panicked, it is booted once more: {error:#}");
                drop(bed);
                start(self.get(image)?)
            }
            result => result,
        }
    }

    fn get(&self, image: &GuestImage) -> Result<Rc<KvmBed>> {
        let mut slot = self.0.borrow_mut();
        if let Some(bed) = slot.as_ref().filter(|bed| bed.vm().is_running() && !bed.has_panicked()) {
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
        image.pack(&disk, "image")?;
        let initramfs = own.join("first-stage");
        std::fs::copy(image.initramfs(), &initramfs).context("cannot copy the first stage")?;
        append_file(&initramfs, "guest-tests", &std::env::current_exe().context("cannot find this program")?)?;
        disk.add(&initramfs, "initramfs")?;
        if let Some(path) = std::env::var_os(CLOUD_HYPERVISOR) {
            disk.add(Path::new(&path), "cloud-hypervisor")?;
        }
        let ports = GUESTS.map(|name| (port(name), own.join(format!("{name}.agent"))));
        let ports = ports.each_ref().map(|(name, socket)| (name.as_str(), socket.as_path()));
        let host = KvmHost::boot(image, own, disk, &ports)?;
        Ok(Self { host, directory })
    }

    /// The guest that plays it.
    pub(crate) fn vm(&self) -> &Vm {
        self.host.vm()
    }

    fn has_panicked(&self) -> bool {
        self.vm().console_tail().contains("Kernel panic")
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

    /// Ends what is left of a program, and waits for its end.
    pub(crate) fn clear(&self, program: &str) -> Result<()> {
        self.vm().exec(&format!("pkill -KILL -x {program}"), Duration::from_secs(60))?;
        self.vm().wait_until(&format!("! pgrep -x {program}"), Duration::from_secs(60))
    }
}

fn port(name: &str) -> String {
    format!("agent-{name}")
}
