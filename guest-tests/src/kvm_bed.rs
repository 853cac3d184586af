//! Shared test environment for guests under KVM in a nested (L1) host: the host, which boots once for all of them, its
//! programs and files, a network interface, and a serial line to each guest's agent. If this machine has KVM of its
//! own, no such host is needed.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result};
use tempfile::TempDir;

use crate::daemon;
use crate::guest_with_daemon::cable;
use crate::image::{Disk, GuestImage, append_program};
use crate::kvm_host::{KvmHost, PATIENCE, TERMINAL, TOOLS};
use crate::vm::{Nic, NicModel, Prepared, Vm, VmBuilder};

/// Names of the guests that may run on a daemon at a time: each has a line to this machine.
pub(crate) const GUESTS: [&str; 2] = ["a", "b"];
/// Names of the guests of `pvrdma-vmm`, each with a line as well.
pub(crate) const VMM_GUESTS: [&str; 2] = ["c", "d"];
/// Names of the guests with different doorbell policies. They have lines of their own, because a line cannot be reused
/// by a second pair of guests.
pub(crate) const DOORBELL_GUESTS: [&str; 2] = ["e", "f"];
/// Name of the guest that is saved and restored. Its line leads to one process after the other.
pub(crate) const SAVED_GUEST: &str = "g";
/// Name of the guest that moves from one process to another. Both have its line open, which is therefore a terminal.
pub(crate) const MOVING_GUEST: &str = "h";
/// Name of a guest of a daemon, with which the moving guest communicates.
pub(crate) const PEER_GUEST: &str = "i";
/// Network interface of the host, used as uplink.
pub(crate) const CARD: &str = "eth0";
const CARD_MAC: &str = "52:54:00:00:04:10";
/// Environment variable with the path of a Cloud Hypervisor for tests with one.
pub(crate) const CLOUD_HYPERVISOR: &str = "CLOUD_HYPERVISOR";

/// Maximum number of attempts to boot a host that breaks down.
const ATTEMPTS: u32 = 6;

/// The host, created on first use and dropped with the last user.
#[derive(Clone, Debug, Default)]
pub(crate) struct KvmBeds(Rc<RefCell<Option<Rc<KvmBed>>>>);

impl KvmBeds {
    /// Starts something on the host. Boots the host if it is not running, and once more if it breaks down meanwhile:
    /// emulated virtualisation has been seen to corrupt the host's memory while guests boot, so that its kernel panics,
    /// or to reset it without a message.
    pub(crate) fn start<T>(&self, image: &GuestImage, start: impl Fn(Rc<KvmBed>) -> Result<T>) -> Result<T> {
        for _ in 1..ATTEMPTS {
            let bed = self.get(image)?;
            bed.use_second_processor(true)?;
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

/// A running host.
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
        let ports = [&GUESTS[..], &VMM_GUESTS, &DOORBELL_GUESTS, &[SAVED_GUEST, PEER_GUEST]].concat();
        let ports: Vec<_> = ports.iter().map(|name| (port(name), own.join(format!("{name}.agent")))).collect();
        let ports: Vec<_> = ports.iter().map(|(name, socket)| (name.as_str(), socket.as_path())).collect();
        let (terminal, socket) = (port(MOVING_GUEST), own.join(format!("{MOVING_GUEST}.agent")));
        let [local, remote] = cable(own);
        let card = Nic { model: NicModel::Virtio, mac: CARD_MAC.to_owned(), local, remote };
        let host = KvmHost::boot(image, own, disk, &ports, (&terminal, &socket), card)?;
        host.vm().run(&format!("modprobe virtio_net && modprobe af_packet && ip link set {CARD} up"))?;
        Ok(Self { host, directory })
    }

    /// Returns the paths of the other end and of its own end of the cable at its network interface.
    pub(crate) fn cable(&self) -> [PathBuf; 2] {
        let [ours, theirs] = cable(self.directory.path());
        [theirs, ours]
    }

    /// Returns the guest that acts as the host.
    pub(crate) fn vm(&self) -> &Vm {
        self.host.vm()
    }

    /// Returns the image with the paths that programs of the host use.
    pub(crate) fn image(&self) -> GuestImage {
        GuestImage::at(&Path::new(TOOLS).join("image"))
    }

    /// Returns the path on the host of the first stage, which contains this program.
    pub(crate) fn initramfs(&self) -> PathBuf {
        Path::new(TOOLS).join("initramfs")
    }

    /// Opens the agent socket of a guest that is to be started.
    pub(crate) fn prepare(&self, image: &GuestImage, name: &str) -> Result<Prepared> {
        let prepared = VmBuilder::new(image, self.directory.path()).name(name).patience(PATIENCE).prepare()?;
        Ok(prepared.played_by(self.vm()))
    }

    /// Returns the host's character device for the serial line of a guest's agent.
    pub(crate) fn line(&self, name: &str) -> Result<PathBuf> {
        if name == MOVING_GUEST { Ok(TERMINAL.into()) } else { self.host.port(&port(name)) }
    }

    /// Command prefix that keeps a command on one processor until [`Self::spread`]. While guests run on both, the
    /// emulation of virtualisation resets the host by a triple fault about every other minute.
    pub(crate) const ON_ONE_PROCESSOR: &str = "taskset -c 0";

    /// Lets the processes that a command lists use all processors.
    pub(crate) fn spread(&self, processes: &str) -> Result<()> {
        self.vm().run(&format!("for process in $({processes}); do taskset -a -p 3 $process || exit; done")).map(drop)
    }

    /// Takes the second processor from the host, or gives it back. With one processor the host does not break down, see
    /// [`Self::ON_ONE_PROCESSOR`], but is slower.
    pub(crate) fn use_second_processor(&self, use_it: bool) -> Result<()> {
        self.vm().run(&format!("echo {} > /sys/devices/system/cpu/cpu1/online", u8::from(use_it))).map(drop)
    }

    /// Ends remaining processes of a program, and waits for their end.
    pub(crate) fn clear(&self, program: &str) -> Result<()> {
        self.vm().exec(&format!("pkill -KILL -x {program}"), Duration::from_secs(60))?;
        self.vm().wait_until(&format!("! pgrep -x {program}"), Duration::from_secs(60))
    }
}

fn port(name: &str) -> String {
    format!("agent-{name}")
}
