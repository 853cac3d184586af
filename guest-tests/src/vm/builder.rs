//! What a machine is made of.

use std::path::{Path, PathBuf};

use crate::image::GuestImage;

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

/// Any other network card, in QEMU's words.
#[derive(Clone, Debug)]
pub(crate) struct Card {
    /// What follows `-netdev`.
    pub(crate) netdev: String,
    /// What follows `-device`.
    pub(crate) device: String,
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

/// A folder of this machine that a guest sees.
#[derive(Clone, Debug)]
pub(crate) struct Folder {
    /// Where it is here.
    pub(crate) path: PathBuf,
    /// The guest cannot change it.
    pub(crate) read_only: bool,
}

/// What the guest mounts a folder by.
pub(crate) const FOLDER_TAG: &str = "folder";

/// The bus of the slot that is empty at first.
pub(crate) const EMPTY_SLOT: &str = "rp0";

/// Describes a machine before it starts.
#[derive(Clone, Debug)]
pub(crate) struct VmBuilder {
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
    /// Hardware address of the card that leads to this machine.
    pub(super) user_network: Option<String>,
    /// Another root file system than the image's.
    pub(super) root_disk: Option<PathBuf>,
    pub(super) disk: Option<PathBuf>,
    pub(super) folder: Option<Folder>,
    /// Names of serial ports, and the sockets that they lead to.
    pub(super) ports: Vec<(String, PathBuf)>,
    pub(super) run_as: Option<RunAs>,
    pub(super) patience: u32,
    /// KVM runs it, whatever this machine has.
    pub(super) kvm: bool,
    /// QEMU ends when the guest's kernel panics, or the machine is reset.
    pub(super) ends_with_guest: bool,
    /// The kernel's timer interrupts every processor at fixed times.
    pub(super) ticks: bool,
    /// Its clocks count instructions.
    pub(super) virtual_time: bool,
}

/// Who QEMU runs as. It may read every file, as those of the image are where only their owner finds them, and write to
/// none but its own.
#[derive(Clone, Debug)]
pub(crate) struct RunAs {
    /// The user, and the primary group of the same number.
    pub(crate) user: u32,
    /// The other groups.
    pub(crate) groups: Vec<u32>,
}

impl VmBuilder {
    /// A machine with 1 GiB, one processor and no device. `directory` is where its sockets and logs go.
    pub(crate) fn new(image: &GuestImage, directory: &Path) -> Self {
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

    /// Adds the vmxnet3 served at this socket, at function 0 of the RDMA device's slot.
    pub(crate) fn nic_socket(mut self, path: &Path) -> Self {
        self.nic_socket = Some(path.to_owned());
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

    /// Adds other network cards.
    pub(crate) fn more_cards(mut self, cards: &[Card]) -> Self {
        self.more_cards.extend_from_slice(cards);
        self
    }

    /// Adds an empty slot behind a root port, [`EMPTY_SLOT`], for what is plugged in later.
    pub(crate) fn empty_slot(mut self, there: bool) -> Self {
        self.empty_slot = there;
        self
    }

    /// Adds a vmxnet3 behind which QEMU itself plays a router to this machine: the guest is 10.0.2.15, and what it
    /// connects to at
    /// 10.0.2.2 arrives here, at the loopback interface.
    pub(crate) fn user_network(mut self, mac: &str) -> Self {
        self.user_network = Some(mac.to_owned());
        self
    }

    /// Boots another root file system than the image's.
    pub(crate) fn root_disk(mut self, disk: &Path) -> Self {
        self.root_disk = Some(disk.to_owned());
        self
    }

    /// Adds a second disk, read only: `/dev/vdb`.
    pub(crate) fn disk(mut self, image: &Path) -> Self {
        self.disk = Some(image.to_owned());
        self
    }

    /// Shares a folder of this machine with the guest, which mounts it by [`FOLDER_TAG`].
    pub(crate) fn folder(mut self, folder: Folder) -> Self {
        self.folder = Some(folder);
        self
    }

    /// Adds a virtio serial port that leads to a socket where somebody listens, sooner or later.
    pub(crate) fn port(mut self, name: &str, socket: &Path) -> Self {
        self.ports.push((name.to_owned(), socket.to_owned()));
        self
    }

    /// QEMU runs as this user, to whom the directory belongs. Needs root.
    pub(crate) fn run_as(mut self, user: RunAs) -> Self {
        self.run_as = Some(user);
        self
    }

    /// Everything may take so many times longer than usual.
    pub(crate) fn patience(mut self, times: u32) -> Self {
        self.patience = times;
        self
    }

    /// QEMU ends when the guest's kernel panics, or the machine is reset for whatever reason.
    pub(crate) fn ends_with_guest(mut self) -> Self {
        self.ends_with_guest = true;
        self
    }

    /// The kernel's timer interrupts every processor at fixed times, whether somebody waits for that or not.
    pub(crate) fn ticks(mut self) -> Self {
        self.ticks = true;
        self
    }

    /// An emulated processor whose clocks advance by a nanosecond with each instruction, and at once to the next timer
    /// while it has nothing to do: however busy this machine is, the guest does not notice.
    pub(crate) fn virtual_time(mut self) -> Self {
        self.virtual_time = true;
        self
    }
}
