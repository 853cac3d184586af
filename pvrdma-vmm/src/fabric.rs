//! Resources that all VMs of a process share: a software adapter, and a switch with its uplink.

use std::sync::Arc;

use anyhow::{Context, Result};
use pvrdma_dev::{DeviceConfig, PvrdmaDevice};
use pvrdma_ether_link::link_spec::LinkSpec;
use pvrdma_guest_memory::{DmaSpace, PinPolicy};
use pvrdma_link::switch::{Switch, UnknownUnicast};
use pvrdma_pci_slot::Slot;
use pvrdma_rxe::{PortConfig, PortRules, Rxe, RxeConfig, RxeHca, RxeStation};
use pvrdma_vmxnet3::{NicLink, Vmxnet3Config, Vmxnet3Device};
use vm_memory::GuestMemoryMmap;

use crate::options::VmOptions;

/// Slot of the pair of functions, and the number of the function that is the RDMA device.
pub(crate) const SLOT: u8 = 0x10;
pub(crate) const RDMA: usize = 1;

/// The RDMA device of a VM.
pub(crate) type RdmaDevice = PvrdmaDevice<RxeHca>;

/// Both functions of a VM, in their slot.
pub(crate) struct Pair {
    pub(crate) slot: Arc<Slot>,
    pub(crate) nic: Arc<Vmxnet3Device>,
    pub(crate) rdma: Arc<RdmaDevice>,
    /// Guest memory as the network function and as the RDMA device access it.
    pub(crate) spaces: [Arc<DmaSpace>; 2],
    pub(crate) cable: Cable,
}

/// The adapter and the switch of all VMs.
pub(crate) struct Fabric {
    adapter: Rxe,
    switch: Switch,
    mtu: u32,
    /// The network has no uplink: it ends in this process.
    alone: bool,
}

/// Attachment of a VM to the network. Dropping it detaches the VM.
pub(crate) struct Cable {
    fabric: Arc<Fabric>,
    _station: RxeStation,
}

impl Cable {
    /// Longest IP packet of the network in bytes.
    pub(crate) fn mtu(&self) -> u32 {
        self.fabric.mtu
    }
}

impl Fabric {
    /// Creates a network for IP packets of at most `mtu` bytes. Without an uplink it ends in this process.
    pub(crate) fn new(mtu: u32, uplink: Option<LinkSpec>) -> Result<Self> {
        let adapter = Rxe::new(RxeConfig::default()).context("software adapter")?;
        let uplink = uplink.map(|link| link.open().with_context(|| format!("uplink {link}"))).transpose()?;
        let alone = uplink.is_none();
        let switch = Switch::new(uplink, mtu).context("switch")?;
        Ok(Self { adapter, switch, mtu, alone })
    }

    /// Longest IP packet in bytes.
    pub(crate) const fn mtu(&self) -> u32 {
        self.mtu
    }

    /// Creates both functions of a VM in their slot and connects them. This locks the guest's memory.
    pub(crate) fn plug(self: &Arc<Self>, vm: &VmOptions, memory: &GuestMemoryMmap) -> Result<Pair> {
        let slot = Slot::builder(SLOT);
        let station = self.adapter.station(vm.mac);

        // Function 0: the vNIC, a link between the guest and the port of its RDMA device. Its memory accesses never
        // happen under a lock that others need, so its memory does not have to be locked.
        let nic_space = DmaSpace::from_guest_memory(memory, PinPolicy::Off)?;
        let config = Vmxnet3Config::new(format!("{}-nic", vm.name), station.mac()).with_multifunction(true);
        let nic = Arc::new(
            NicLink::with_device(config, Arc::clone(&nic_space), slot.interrupts(0)).context("network function")?,
        );
        let uplink = self.switch.port(station.mac(), UnknownUnicast::Drop).context("port of the switch")?;
        let link = Arc::clone(&nic);
        let rules = PortRules::default().with_alone(self.alone);
        let port = PortConfig::new(uplink, self.mtu).with_nic(Some(link)).with_rules(rules);
        station.plug(port).context("port of the adapter")?;

        // Function 1: the RDMA device.
        let space = DmaSpace::from_guest_memory(memory, vm.pin)?;
        space.finish_pinning().context("cannot lock the guest's memory")?;
        let config = DeviceConfig::new(vm.name.clone());
        let rdma = PvrdmaDevice::new(config, Arc::clone(&space), slot.interrupts(RDMA), &station);
        let rdma = rdma.context("RDMA device")?;
        let cable = Cable { fabric: Arc::clone(self), _station: station };
        let slot = slot.with(0, Arc::clone(nic.device()) as _).with(RDMA, Arc::clone(&rdma) as _).build()?;
        Ok(Pair { slot, nic: Arc::clone(nic.device()), rdma, spaces: [nic_space, space], cable })
    }
}
