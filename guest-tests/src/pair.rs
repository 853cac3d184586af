//! Two guests that are connected to each other.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
pub(crate) use pvrdma_lab::endpoints::PVRDMA_DEVICE;
use pvrdma_packet::MacAddr;
use serde_json::json;
use tempfile::TempDir;

use crate::daemon::{Daemon, DaemonDevice, Setup};
use crate::endpoints::{Endpoints, bring_up, gid_index, network_script};
use crate::image::GuestImage;
use crate::vm::{Card, EMPTY_SLOT, MemoryKind, Nic, NicModel, Vm, VmBuilder};

/// Kind of RDMA between the guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkKind {
    /// Through the PVRDMA device.
    Pvrdma,
    /// `rdma_rxe` in both guests over virtio-net: the alternative without the PVRDMA device.
    Rxe,
}

/// An RDMA device of both guests, with the addresses of the two ends.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    /// Kind of the device.
    pub(crate) kind: LinkKind,
    /// Name of the RDMA device in the guests.
    pub(crate) device: &'static str,
    /// Addresses of the guests on its network.
    pub(crate) ip: [Ipv4Addr; 2],
    /// Index of the RoCE v2 GID with that address, for each guest.
    pub(crate) gid_index: [u32; 2],
}

/// Parameters of a pair.
#[derive(Clone, Debug)]
pub(crate) struct PairOptions {
    /// Guests have the PVRDMA device beside a vmxnet3.
    pub(crate) pvrdma: bool,
    /// Guests have virtio-net and `rdma_rxe` on it.
    pub(crate) rxe: bool,
    /// Memory of each guest.
    pub(crate) memory_mib: u32,
    /// Processors of the guests.
    pub(crate) cpus: [u32; 2],
    /// Backing of guest memory.
    pub(crate) memory_kind: MemoryKind,
    /// Guests have an IOMMU.
    pub(crate) iommu: bool,
    /// The vNICs of the guests are QEMU's own instead of the daemon's.
    pub(crate) qemu_nic: bool,
    /// Further properties of QEMU's vfio-user device.
    pub(crate) vfio_user: Vec<(&'static str, serde_json::Value)>,
    /// Further options of each device of the daemon.
    pub(crate) device_options: String,
    /// Doorbell mode of each device.
    pub(crate) doorbells: [&'static str; 2],
    /// Both functions are hot-plugged after the guests have booted.
    pub(crate) hot_plug: bool,
    /// Guests have an empty slot for a second device.
    pub(crate) empty_slot: bool,
    /// Memory that can be hot-plugged into each guest.
    pub(crate) more_memory_mib: u32,
    /// Parameters at the end of the command line of the guests' kernels.
    pub(crate) kernel_parameters: &'static str,
    /// More vNICs of the guests.
    pub(crate) more_cards: [Vec<Card>; 2],
    /// Networks of the daemon that devices may refer to.
    pub(crate) networks: Vec<String>,
    /// Root file system that replaces the image's.
    pub(crate) root_disk: Option<PathBuf>,
}

impl Default for PairOptions {
    fn default() -> Self {
        Self {
            pvrdma: true,
            rxe: true,
            memory_mib: 1024,
            cpus: [1; 2],
            memory_kind: MemoryKind::Shared,
            iommu: false,
            qemu_nic: false,
            vfio_user: Vec::new(),
            device_options: String::new(),
            doorbells: ["trapped"; 2],
            hot_plug: false,
            empty_slot: false,
            more_memory_mib: 0,
            kernel_parameters: "",
            more_cards: [Vec::new(), Vec::new()],
            networks: Vec::new(),
            root_disk: None,
        }
    }
}

/// Two running guests, and the daemon between them.
#[derive(Debug)]
pub(crate) struct Pair {
    // Fields are dropped in this order: machines first.
    vms: [Vm; 2],
    daemon: Option<Daemon>,
    image: GuestImage,
    options: PairOptions,
    directory: TempDir,
}

impl Pair {
    /// Boots both guests and brings their links up.
    pub(crate) fn boot(image: &GuestImage, options: &PairOptions) -> Result<Self> {
        let pair = Self::boot_without_driver(image, options)?;
        // Drivers take seconds in an emulated guest, so both guests load them at the same time.
        thread::scope(|scope| {
            let other = scope.spawn(|| pair.set_up(1));
            pair.set_up(0)?;
            other.join().map_err(|_| anyhow!("the thread for the second guest panicked"))?
        })?;
        Ok(pair)
    }

    /// Boots both guests without loading drivers.
    pub(crate) fn boot_without_driver(image: &GuestImage, options: &PairOptions) -> Result<Self> {
        let directory = tempfile::Builder::new()
            .prefix("guest-tests-")
            .tempdir()
            .context("cannot create a directory for the machines' sockets")?;
        let daemon = if options.pvrdma {
            let devices = [0, 1].map(|index| DaemonDevice {
                name: format!("vm{index}"),
                socket: socket(directory.path(), index),
                mac: device_mac(index).to_string(),
                options: device_options(options, directory.path(), index),
            });
            let setup = Setup { networks: &options.networks, ..Setup::default() };
            Some(Daemon::launch(&setup, directory.path(), &devices)?)
        } else {
            None
        };
        let machine = |index| machine(image, directory.path(), options, index).start();
        let pair =
            Self { vms: [machine(0)?, machine(1)?], daemon, image: image.clone(), options: options.clone(), directory };
        for index in [0, 1] {
            pair.vms[index].wait_boot()?;
            if options.hot_plug {
                let sockets = [nic_socket(pair.directory(), index), socket(pair.directory(), index)];
                plug_in(&pair.vms[index], &sockets)?;
            }
        }
        Ok(pair)
    }

    /// Adds a device to the daemon and plugs it into a guest that has an empty slot.
    pub(crate) fn add_device(&self, index: usize, name: &str, mac: MacAddr) -> Result<()> {
        let sockets = ["nic", "pvrdma"].map(|function| self.directory().join(format!("{name}.{function}")));
        let [nic, device] = &sockets;
        self.daemon().context("there is no daemon")?.add(&DaemonDevice {
            name: name.to_owned(),
            socket: device.clone(),
            mac: mac.to_string(),
            options: format!(",nic-socket={}", nic.display()),
        })?;
        plug_in(&self.vms[index], &sockets)
    }

    /// Guest a.
    pub(crate) fn a(&self) -> &Vm {
        &self.vms[0]
    }

    /// Guest b.
    pub(crate) fn b(&self) -> &Vm {
        &self.vms[1]
    }

    /// Both guests.
    pub(crate) fn vms(&self) -> &[Vm; 2] {
        &self.vms
    }

    /// Returns the image that the machines boot.
    pub(crate) fn image(&self) -> &GuestImage {
        &self.image
    }

    /// Returns the daemon, if the guests have its device.
    pub(crate) fn daemon(&self) -> Option<&Daemon> {
        self.daemon.as_ref()
    }

    /// Returns the daemon for a change of its process, if the guests have its device.
    pub(crate) const fn daemon_mut(&mut self) -> Option<&mut Daemon> {
        self.daemon.as_mut()
    }

    /// Returns the directory of sockets and logs.
    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Replaces a guest (killed or not) by a fresh one.
    pub(crate) fn restart(&mut self, index: usize) -> Result<()> {
        self.vms[index].kill();
        self.vms[index] = machine(&self.image, self.directory.path(), &self.options, index).boot()?;
        self.set_up(index)
    }

    /// Reboots a guest and brings its links up again.
    pub(crate) fn reboot(&self, index: usize) -> Result<()> {
        self.vms[index].reboot()?;
        self.set_up(index)
    }

    /// Loads drivers and sets addresses in a guest that has just booted.
    pub(crate) fn set_up(&self, index: usize) -> Result<()> {
        if self.options.pvrdma {
            self.load_pvrdma(index)?;
        }
        if self.options.rxe {
            let vm = &self.vms[index];
            vm.run(&network_script("virtio_net", &[RXE_IP[index].into()], MTU))?;
            vm.run("modprobe rdma_rxe && rdma link add rxe0 type rxe netdev $(cat /run/nic-virtio_net)")?;
            gid_index(vm, "rxe0", RXE_IP[index].into())?;
        }
        Ok(())
    }

    /// Loads vmxnet3 and then the driver, and waits for the port.
    pub(crate) fn load_pvrdma(&self, index: usize) -> Result<()> {
        let vm = &self.vms[index];
        bring_up(vm, &[PVRDMA_IP[index].into()], MTU)?;
        gid_index(vm, PVRDMA_DEVICE, PVRDMA_IP[index].into()).map(drop).with_context(|| {
            let log = self.daemon.as_ref().map(Daemon::log_tail).unwrap_or_default();
            format!("the driver did not bring up its port; the daemon's log:\n{log}\n{}", vm.diagnosis())
        })
    }

    /// Returns a link, with the current GID indices.
    pub(crate) fn link(&self, kind: LinkKind) -> Result<Link> {
        let (device, ip) = match kind {
            LinkKind::Pvrdma => (PVRDMA_DEVICE, PVRDMA_IP),
            LinkKind::Rxe => ("rxe0", RXE_IP),
        };
        Ok(Link {
            kind,
            device,
            ip,
            gid_index: [gid_index(&self.vms[0], device, ip[0].into())?, gid_index(&self.vms[1], device, ip[1].into())?],
        })
    }

    /// Returns the endpoints of the guests over a link.
    pub(crate) fn endpoints(&self, link: &Link) -> Endpoints<'_> {
        Endpoints {
            vms: [&self.vms[0], &self.vms[1]],
            device: [link.device; 2],
            gid_index: link.gid_index,
            ip: link.ip.map(Into::into),
            interface: [if link.kind == LinkKind::Pvrdma { "eth0" } else { "eth1" }; 2],
            tcp: link.ip,
            path_mtu: None,
            // The software transport in the guest reaches a hundredth of the device's throughput.
            patience: Duration::from_secs(if link.kind == LinkKind::Rxe { 300 } else { 120 }),
        }
    }

    /// Returns all information that helps to understand a failure.
    pub(crate) fn diagnosis(&self) -> String {
        let daemon = self.daemon.as_ref().map(Daemon::log_tail).unwrap_or_default();
        format!("{}\n{}\n--- pvrdmad\n{daemon}", self.vms[0].diagnosis(), self.vms[1].diagnosis())
    }
}

fn machine(image: &GuestImage, directory: &Path, options: &PairOptions, index: usize) -> VmBuilder {
    let mut builder = VmBuilder::new(image, directory)
        .name(NAMES[index])
        .memory_mib(options.memory_mib)
        .memory_kind(options.memory_kind)
        .iommu(options.iommu)
        .cpus(options.cpus[index])
        .more_cards(&options.more_cards[index])
        .empty_slot(options.hot_plug || options.empty_slot)
        .more_memory_mib(options.more_memory_mib)
        .kernel_parameters(options.kernel_parameters);
    if let Some(disk) = &options.root_disk {
        builder = builder.root_disk(disk);
    }
    let nic = |model: NicModel| {
        let path = |index: usize| directory.join(format!("{}.net-{model:?}", NAMES[index]));
        Nic { model, mac: mac(model, index).to_string(), local: path(index), remote: path(1 - index) }
    };
    if options.pvrdma && !options.hot_plug {
        builder = match options.qemu_nic {
            true => builder.nic(nic(NicModel::Vmxnet3)),
            false => builder.nic_socket(&nic_socket(directory, index)),
        };
        builder = builder.pvrdma_socket(&socket(directory, index));
        for (name, value) in &options.vfio_user {
            builder = builder.vfio_user_option(name, value.clone());
        }
    }
    if options.rxe {
        builder = builder.nic(nic(NicModel::Virtio));
    }
    builder
}

/// Plugs the functions behind two sockets into the empty slot of a guest. The guest scans the slot when function 0
/// appears, so function 0 comes last.
fn plug_in(vm: &Vm, functions: &[PathBuf; 2]) -> Result<()> {
    const DEVICES: &str = "lspci -n | grep -c 15ad:0820";
    // The command fails if it counts none.
    let before = vm.exec(DEVICES, Duration::from_secs(60))?.text;
    for (function, path) in functions.iter().enumerate().rev() {
        vm.add_device(&json!({
            "driver": "vfio-user-pci",
            "id": format!("function{function}"),
            "bus": EMPTY_SLOT,
            "addr": format!("0.{function}"),
            "multifunction": function == 0,
            "socket": { "path": path, "type": "unix" },
        }))?;
    }
    vm.wait_until(&format!("[ $({DEVICES}) -gt {} ]", before.trim()), Duration::from_secs(60))
}

/// Returns the options of a device other than its name, socket and address.
fn device_options(options: &PairOptions, directory: &Path, index: usize) -> String {
    let nic = match options.qemu_nic {
        true => String::new(),
        false => format!(",nic-socket={}", nic_socket(directory, index).display()),
    };
    format!("{nic},doorbells={}{}", options.doorbells[index], options.device_options)
}

fn socket(directory: &Path, index: usize) -> PathBuf {
    directory.join(format!("{}.pvrdma", NAMES[index]))
}

fn nic_socket(directory: &Path, index: usize) -> PathBuf {
    directory.join(format!("{}.nic", NAMES[index]))
}

/// Returns the Ethernet address of a guest's device and its vNIC.
pub(crate) const fn device_mac(guest: usize) -> MacAddr {
    mac(NicModel::Vmxnet3, guest)
}

const fn mac(model: NicModel, index: usize) -> MacAddr {
    let kind = match model {
        NicModel::Vmxnet3 => 0,
        NicModel::Virtio => 1,
    };
    MacAddr([0x52, 0x54, 0, 0, kind, [1, 2][index]])
}

const NAMES: [&str; 2] = ["a", "b"];
const PVRDMA_IP: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 168, 77, 1), Ipv4Addr::new(192, 168, 77, 2)];
const RXE_IP: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 168, 78, 1), Ipv4Addr::new(192, 168, 78, 2)];
/// Default MTU of Ethernet.
const MTU: u32 = 1500;
