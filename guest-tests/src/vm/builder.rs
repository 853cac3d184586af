//! What a machine is made of.

use std::fs::File;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::Vm;
use super::channel::Channel;
use super::qemu;
use crate::bed::{Bed, append_file};
use crate::process::BoundChild;

/// One network card, connected to another machine's by a pair of datagram sockets: no order of starting, and either
/// side may be killed and come back.
#[derive(Clone, Debug)]
pub(crate) struct Nic {
    /// Which device the guest sees.
    pub(crate) model: NicModel,
    /// The guest's hardware address.
    pub(crate) mac: String,
    /// Our socket.
    pub(crate) local: PathBuf,
    /// The other machine's socket.
    pub(crate) remote: PathBuf,
}

/// Kinds of network cards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NicModel {
    /// VMware's, at function 0 of the slot whose function 1 is the RDMA device.
    Vmxnet3,
    /// virtio-net, for `rdma_rxe` in the guest.
    Virtio,
}

/// How guest memory is backed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    /// A shared memfd, as the device needs it.
    #[default]
    Shared,
    /// The same in huge pages.
    Hugetlb,
    /// Private: the device must refuse it.
    Private,
}

/// Describes a machine before it starts.
#[derive(Clone, Debug)]
pub(crate) struct VmBuilder {
    pub(super) bed: Bed,
    pub(super) directory: PathBuf,
    pub(super) name: String,
    pub(super) memory_mib: u32,
    pub(super) memory_kind: MemoryKind,
    pub(super) cpus: u32,
    pub(super) pvrdma_socket: Option<PathBuf>,
    pub(super) vfio_user_options: Vec<(String, serde_json::Value)>,
    pub(super) iommu: bool,
    pub(super) nics: Vec<Nic>,
    /// Hardware address of the card that leads to this machine.
    pub(super) user_network: Option<String>,
    pub(super) disk: Option<PathBuf>,
    pub(super) patience: u32,
}

impl VmBuilder {
    /// A machine with 1 GiB, one processor and no device. `directory` is where its sockets and logs go.
    pub(crate) fn new(bed: &Bed, directory: &Path) -> Self {
        Self {
            bed: bed.clone(),
            directory: directory.to_owned(),
            name: "vm".to_owned(),
            memory_mib: 1024,
            memory_kind: MemoryKind::default(),
            cpus: 1,
            pvrdma_socket: None,
            vfio_user_options: Vec::new(),
            iommu: false,
            nics: Vec::new(),
            user_network: None,
            disk: None,
            patience: 1,
        }
    }

    /// The name, for messages and files.
    pub(crate) fn name(mut self, name: &str) -> Self {
        self.name = name.to_owned();
        self
    }

    /// The size of the memory.
    pub(crate) fn memory_mib(mut self, memory_mib: u32) -> Self {
        self.memory_mib = memory_mib;
        self
    }

    /// How memory is backed.
    pub(crate) fn memory_kind(mut self, kind: MemoryKind) -> Self {
        self.memory_kind = kind;
        self
    }

    /// The number of processors.
    pub(crate) fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    /// Adds the RDMA device served at this socket; wants a vmxnet3 beside it.
    pub(crate) fn pvrdma_socket(mut self, path: &Path) -> Self {
        self.pvrdma_socket = Some(path.to_owned());
        self
    }

    /// Any other property of the vfio-user device.
    pub(crate) fn vfio_user_option(mut self, name: &str, value: serde_json::Value) -> Self {
        self.vfio_user_options.push((name.to_owned(), value));
        self
    }

    /// Adds an IOMMU that the guest uses.
    pub(crate) fn iommu(mut self, on: bool) -> Self {
        self.iommu = on;
        self
    }

    /// Adds a network card.
    pub(crate) fn nic(mut self, nic: Nic) -> Self {
        self.nics.push(nic);
        self
    }

    /// Adds a vmxnet3 behind which QEMU itself plays a router to this machine: the guest is 10.0.2.15, and what it connects to at
    /// 10.0.2.2 arrives here, at the loopback interface.
    pub(crate) fn user_network(mut self, mac: &str) -> Self {
        self.user_network = Some(mac.to_owned());
        self
    }

    /// Adds a second disk, read only: `/dev/vdb`.
    pub(crate) fn disk(mut self, image: &Path) -> Self {
        self.disk = Some(image.to_owned());
        self
    }

    /// Everything may take so many times longer than usual.
    pub(crate) fn patience(mut self, times: u32) -> Self {
        self.patience = times;
        self
    }

    /// Starts the machine and waits until its agent answers.
    pub(crate) fn boot(self) -> Result<Vm> {
        let vm = self.start()?;
        vm.wait_boot()?;
        Ok(vm)
    }

    /// Starts the machine and does not wait for the guest.
    pub(crate) fn start(self) -> Result<Vm> {
        let file = |suffix: &str| self.directory.join(format!("{}.{suffix}", self.name));
        let agent_socket = file("agent");
        remove_stale(&agent_socket)?;
        let listener = UnixListener::bind(&agent_socket)
            .with_context(|| format!("cannot listen on {}", agent_socket.display()))?;
        let initramfs = file("initramfs");
        std::fs::copy(self.bed.initramfs(), &initramfs)
            .with_context(|| format!("cannot write {}", initramfs.display()))?;
        let program = std::env::current_exe().context("cannot find this program")?;
        append_file(&initramfs, "guest-tests", &program)?;

        let console = file("console");
        let errors = file("qemu.log");
        let log = File::create(&errors).with_context(|| format!("cannot create {}", errors.display()))?;
        let (qemu, mut arguments) = self.bed.qemu();
        arguments.extend(qemu::arguments(&self, &initramfs, &agent_socket, &console)?);
        log::debug!("{}: {qemu} {}", self.name, arguments.join(" "));
        let mut process = BoundChild::spawn(&format!("QEMU of {}", self.name), &qemu, |command| {
            command
                .args(&arguments)
                .env("QEMU_MODULE_DIR", self.bed.qemu_module_directory())
                .stdin(std::process::Stdio::null())
                .stderr(log);
            if let Ok(out) = File::options().append(true).open(&errors) {
                command.stdout(out);
            }
        })?;
        let stream = accept(&listener, &mut process, &errors)?;
        let channel = Channel::new(stream)?;
        Ok(Vm {
            name: self.name.clone(),
            process: Mutex::new(process),
            channel,
            console,
            qemu_log: errors,
            started: Instant::now(),
            patience: self.patience,
        })
    }
}

/// QEMU connects to us as it starts.
fn accept(listener: &UnixListener, process: &mut BoundChild, errors: &Path) -> Result<std::os::unix::net::UnixStream> {
    listener.set_nonblocking(true).context("cannot poll a socket")?;
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).context("cannot use a socket")?;
                return Ok(stream);
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error).context("cannot accept QEMU's connection"),
        }
        if let Some(status) = process.exited() {
            bail!("QEMU ended at once with {status}:\n{}", std::fs::read_to_string(errors).unwrap_or_default());
        }
        if Instant::now() > deadline {
            bail!("QEMU did not connect to the agent's socket within 30 s");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn remove_stale(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}
