//! Description of a machine before it starts.

use std::path::{Path, PathBuf};

use crate::image::GuestImage;

/// A vNIC that is connected to another machine's by a pair of datagram sockets. The machines can start in any order,
/// and either may be killed and started again.
#[derive(Clone, Debug)]
pub struct Nic {
    /// Device model that the guest sees.
    pub model: NicModel,
    /// Ethernet address in the guest.
    pub mac: String,
    /// Socket of this machine.
    pub local: PathBuf,
    /// Socket of the other machine.
    pub remote: PathBuf,
}

/// Any other vNIC, as QEMU arguments.
#[derive(Clone, Debug)]
pub struct Card {
    /// Value of `-netdev`.
    pub netdev: String,
    /// Value of `-device`.
    pub device: String,
}

/// Kinds of vNICs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NicModel {
    /// VMware's, at function 0 of the slot whose function 1 is the RDMA device.
    Vmxnet3,
    /// virtio-net, for `rdma_rxe` in the guest.
    Virtio,
}

/// Backing of guest memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryKind {
    /// A shared memfd, which the device requires.
    #[default]
    Shared,
    /// The same in huge pages.
    Hugetlb,
    /// Private: the device must refuse it.
    Private,
}

/// A folder of this machine that is shared with a guest.
#[derive(Clone, Debug)]
pub struct Folder {
    /// Path on this machine.
    pub path: PathBuf,
    /// The guest cannot change it.
    pub read_only: bool,
}

/// Tag by which the guest mounts a folder.
pub const FOLDER_TAG: &str = "folder";

/// Bus of the slot that is empty at boot.
pub const EMPTY_SLOT: &str = "rp0";

/// Describes a machine before it starts.
#[derive(Clone, Debug)]
pub struct VmBuilder {
    pub(super) image: GuestImage,
    pub(super) directory: PathBuf,
    pub(super) name: String,
    pub(super) memory_mib: u32,
    pub(super) memory_kind: MemoryKind,
    pub(super) cpus: u32,
    pub(super) pvrdma_socket: Option<PathBuf>,
    pub(super) nic_socket: Option<PathBuf>,
    pub(super) vfio_user_options: Vec<(String, serde_json::Value)>,
    pub(super) iommu: bool,
    pub(super) nics: Vec<Nic>,
    pub(super) more_cards: Vec<Card>,
    /// A root port with an empty slot.
    pub(super) empty_slot: bool,
    /// Memory that can be hot-plugged later.
    pub(super) more_memory_mib: u32,
    /// Parameters at the end of the kernel's command line.
    pub(super) kernel_parameters: String,
    /// Ethernet address of the vNIC that leads to this machine.
    pub(super) user_network: Option<String>,
    /// Root file system that replaces the image's.
    pub(super) root_disk: Option<PathBuf>,
    pub(super) disk: Option<PathBuf>,
    pub(super) folder: Option<Folder>,
    pub(super) ports: Vec<Port>,
    pub(super) run_as: Option<RunAs>,
    pub(super) patience: u32,
    /// Uses KVM, whatever this machine supports.
    pub(super) kvm: bool,
    /// QEMU ends when the guest's kernel panics, or the machine is reset.
    pub(super) ends_with_guest: bool,
    /// The kernel's timer interrupts every processor at fixed times.
    pub(super) ticks: bool,
    /// The clocks count instructions.
    pub(super) virtual_time: bool,
    /// Socket through which the machine comes from another one, in place of a boot.
    pub(super) incoming: Option<PathBuf>,
}

/// A serial port.
#[derive(Clone, Debug)]
pub(super) struct Port {
    /// QEMU's name for its kind.
    pub(super) device: &'static str,
    pub(super) name: String,
    /// Socket that it leads to.
    pub(super) socket: PathBuf,
}

/// User as which QEMU runs. It may read every file, because the image is in folders that only their owner can read, and
/// write only its own.
#[derive(Clone, Debug)]
pub struct RunAs {
    /// The user, and the primary group of the same number.
    pub user: u32,
    /// The other groups.
    pub groups: Vec<u32>,
}

impl VmBuilder {
    /// Describes a machine with 1 GiB, one processor and no device. Its sockets and logs are created in `directory`.
    pub fn new(image: &GuestImage, directory: &Path) -> Self {
        Self {
            image: image.clone(),
            directory: directory.to_owned(),
            name: "vm".to_owned(),
            memory_mib: 1024,
            memory_kind: MemoryKind::default(),
            cpus: 1,
            pvrdma_socket: None,
            nic_socket: None,
            vfio_user_options: Vec::new(),
            iommu: false,
            nics: Vec::new(),
            more_cards: Vec::new(),
            empty_slot: false,
            more_memory_mib: 0,
            kernel_parameters: String::new(),
            user_network: None,
            root_disk: None,
            disk: None,
            folder: None,
            ports: Vec::new(),
            run_as: None,
            patience: 1,
            kvm: false,
            ends_with_guest: false,
            ticks: false,
            virtual_time: false,
            incoming: None,
        }
    }

    /// Sets the name, for messages and files.
    pub fn name(mut self, name: &str) -> Self {
        self.name = name.to_owned();
        self
    }

    /// Sets the size of the memory.
    pub fn memory_mib(mut self, memory_mib: u32) -> Self {
        self.memory_mib = memory_mib;
        self
    }

    /// Sets the backing of the memory.
    pub fn memory_kind(mut self, kind: MemoryKind) -> Self {
        self.memory_kind = kind;
        self
    }

    /// Sets the number of processors.
    pub fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    /// Adds the RDMA device served at this socket; it needs a vmxnet3 beside it.
    pub fn pvrdma_socket(mut self, path: &Path) -> Self {
        self.pvrdma_socket = Some(path.to_owned());
        self
    }

    /// Adds the vmxnet3 served at this socket, at function 0 of the RDMA device's slot.
    pub fn nic_socket(mut self, path: &Path) -> Self {
        self.nic_socket = Some(path.to_owned());
        self
    }

    /// Sets any other property of the vfio-user device.
    pub fn vfio_user_option(mut self, name: &str, value: serde_json::Value) -> Self {
        self.vfio_user_options.push((name.to_owned(), value));
        self
    }

    /// Adds an IOMMU that the guest uses.
    pub fn iommu(mut self, on: bool) -> Self {
        self.iommu = on;
        self
    }

    /// Adds a vNIC.
    pub fn nic(mut self, nic: Nic) -> Self {
        self.nics.push(nic);
        self
    }

    /// Adds other vNICs.
    pub fn more_cards(mut self, cards: &[Card]) -> Self {
        self.more_cards.extend_from_slice(cards);
        self
    }

    /// Adds an empty slot behind a root port, [`EMPTY_SLOT`], for devices that are hot-plugged later.
    pub fn empty_slot(mut self, there: bool) -> Self {
        self.empty_slot = there;
        self
    }

    /// Allows this much memory to be hot-plugged later ([`Vm::add_memory`](super::machine::Vm::add_memory)).
    pub fn more_memory_mib(mut self, memory_mib: u32) -> Self {
        self.more_memory_mib = memory_mib;
        self
    }

    /// Sets parameters that end the kernel's command line.
    pub fn kernel_parameters(mut self, parameters: &str) -> Self {
        parameters.clone_into(&mut self.kernel_parameters);
        self
    }

    /// Adds a vmxnet3 behind which QEMU emulates a router to this machine: the guest is 10.0.2.15, and its connections
    /// to 10.0.2.2 arrive at the loopback interface of this machine.
    pub fn user_network(mut self, mac: &str) -> Self {
        self.user_network = Some(mac.to_owned());
        self
    }

    /// Boots a root file system other than the image's.
    pub fn root_disk(mut self, disk: &Path) -> Self {
        self.root_disk = Some(disk.to_owned());
        self
    }

    /// Adds a second disk, read only: `/dev/vdb`.
    pub fn disk(mut self, image: &Path) -> Self {
        self.disk = Some(image.to_owned());
        self
    }

    /// Shares a folder of this machine with the guest, which mounts it by [`FOLDER_TAG`].
    pub fn folder(mut self, folder: Folder) -> Self {
        self.folder = Some(folder);
        self
    }

    /// Adds a virtio serial port that leads to a socket, which need not be listening yet.
    pub fn port(mut self, name: &str, socket: &Path) -> Self {
        self.ports.push(Port { device: "virtserialport", name: name.to_owned(), socket: socket.to_owned() });
        self
    }

    /// Same as [`Self::port`], as a terminal: `/dev/hvc0` for the first one. Several processes can open it at a time.
    pub fn terminal(mut self, name: &str, socket: &Path) -> Self {
        self.ports.push(Port { device: "virtconsole", name: name.to_owned(), socket: socket.to_owned() });
        self
    }

    /// Runs QEMU as this user, which owns the directory. Needs root.
    pub fn run_as(mut self, user: RunAs) -> Self {
        self.run_as = Some(user);
        self
    }

    /// Multiplies all time limits by `times`.
    pub fn patience(mut self, times: u32) -> Self {
        self.patience = times;
        self
    }

    /// Ends QEMU when the guest's kernel panics, or the machine is reset for any reason.
    pub fn ends_with_guest(mut self) -> Self {
        self.ends_with_guest = true;
        self
    }

    /// Makes the kernel's timer interrupt every processor periodically, even if no timer is pending.
    pub fn ticks(mut self) -> Self {
        self.ticks = true;
        self
    }

    /// Uses an emulated processor whose clocks advance by a nanosecond with each instruction, and directly to the next
    /// timer while it is idle. So the load of this machine has no effect on the guest.
    pub fn virtual_time(mut self) -> Self {
        self.virtual_time = true;
        self
    }

    /// Waits for the state of another machine on this Unix socket instead of booting.
    pub fn incoming(mut self, socket: &Path) -> Self {
        self.incoming = Some(socket.to_owned());
        self
    }
}
