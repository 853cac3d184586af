//! PCI for VMMs made of rust-vmm crates: slots of up to eight functions, accessed through the ports 0xcf8 and 0xcfc
//! ([`ConfigPorts`]) or through memory ([`Ecam`]), whose BARs are one device of `vm-device` ([`BarMap`]). This crate
//! also implements the MSI-X tables ([`MsixVectors`]), and a subscriber of `event-manager` that does the work that
//! doorbells leave behind ([`DeferredWork`]). With the feature `kvm`, interrupts are irqfds and doorbells are
//! ioeventfds ([`kvm`]).
//!
//! # Example
//!
//! A bus without devices, whose guest finds the host bridge:
//!
//! ```
//! use pvrdma_pci_slot::{ConfigPorts, HostBridge, PciBus};
//! use vm_device::DevicePio;
//! use vm_device::bus::PioAddress;
//!
//! let bus = PciBus::new([HostBridge::slot()?])?;
//! let ports = ConfigPorts::new(bus);
//!
//! // The guest selects device 0, function 0, register 0 and reads vendor and device.
//! ports.pio_write(PioAddress(0xcf8), 0, &0x8000_0000_u32.to_le_bytes());
//! let mut identity = [0; 4];
//! ports.pio_read(PioAddress(0xcf8), 4, &mut identity);
//! assert_eq!(identity[..2], 0x8086_u16.to_le_bytes());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # A network and an RDMA function
//!
//! A function is anything that implements [`PciFunction`](pvrdma_pci_function::PciFunction). This code adds a
//! network and an RDMA function to a VMM:
//!
//! ```no_run
//! use std::error::Error;
//! use std::sync::Arc;
//!
//! use event_manager::{EventManager, MutEventSubscriber, SubscriberOps};
//! use kvm_ioctls::VmFd;
//! use pvrdma_dev::{DeviceConfig, PvrdmaDevice};
//! use pvrdma_link::switch::{Switch, UnknownUnicast};
//! use pvrdma_guest_memory::{DmaSpace, PinPolicy};
//! use pvrdma_pci_slot::kvm::KvmInterrupts;
//! use pvrdma_pci_slot::{BarMap, ConfigPorts, HostBridge, PciBus, Slot};
//! use pvrdma_packet::MacAddr;
//! use pvrdma_rxe::{PortConfig, Rxe, RxeStation};
//! use pvrdma_vmxnet3::{NicLink, Vmxnet3Config};
//! use vm_allocator::{AddressAllocator, AllocPolicy};
//! use vm_device::bus::{MmioAddress, MmioRange};
//! use vm_device::device_manager::{IoManager, MmioManager, PioManager};
//! use vm_memory::GuestMemoryMmap;
//!
//! /// Guest-physical addresses of BARs, which nothing else uses.
//! const HOLE: u64 = 0xc000_0000;
//! const HOLE_SIZE: u64 = 0x3000_0000;
//!
//! /// `backend` and `switch` are one for all guests of the process.
//! fn plug_in(
//!     name: &str,
//!     mac: MacAddr,
//!     memory: &GuestMemoryMmap,
//!     vm: &Arc<VmFd>,
//!     io: &mut IoManager,
//!     events: &mut EventManager<Box<dyn MutEventSubscriber>>,
//!     (backend, switch): (&Rxe, &Switch),
//! ) -> Result<RxeStation, Box<dyn Error>> {
//!     let (slot, station) = (Slot::builder(0x10), backend.station(mac));
//!
//!     // Function 0: the network function, a link between the guest and the port of its RDMA device.
//!     let space = DmaSpace::from_guest_memory(memory, PinPolicy::Off)?;
//!     let config = Vmxnet3Config::new(name, mac).with_multifunction(true);
//!     let nic = Arc::new(NicLink::with_device(config, space, slot.interrupts(0))?);
//!     let uplink = switch.port(mac, UnknownUnicast::Drop)?;
//!     let port = PortConfig::new(uplink, 1500).with_nic(Some(nic.clone()));
//!     station.plug(port)?;
//!
//!     // Function 1: the RDMA device.
//!     let space = DmaSpace::from_guest_memory(memory, PinPolicy::All)?;
//!     space.finish_pinning()?;
//!     let rdma = PvrdmaDevice::new(DeviceConfig::new(name), space, slot.interrupts(1), &station)?;
//!     let slot = slot.with(0, nic.device().clone()).with(1, rdma).build()?;
//!
//!     // Interrupts by irqfd, doorbells by ioeventfd, and the thread of `events` does the work.
//!     let interrupts = KvmInterrupts::new(vm.clone())?;
//!     slot.connect(|| interrupts.line())?;
//!     events.add_subscriber(Box::new(slot.deferred(Some(vm.clone()))?));
//!
//!     let bus = PciBus::new([HostBridge::slot()?, slot])?;
//!     let mut room = AddressAllocator::new(HOLE, HOLE_SIZE)?;
//!     bus.place_bars(|size| room.allocate(size, size, AllocPolicy::FirstMatch).map(|range| range.start()).ok())?;
//!     io.register_pio(ConfigPorts::range(), Arc::new(ConfigPorts::new(bus.clone())))?;
//!     io.register_mmio(MmioRange::new(MmioAddress(HOLE), HOLE_SIZE)?, Arc::new(BarMap::new(bus)))?;
//!     // Dropping it takes the cable out.
//!     Ok(station)
//! }
//! ```
//!
//! # Limits
//!
//! There is one bus. Legacy interrupts are not wired: functions must not declare a pin. BARs in I/O space, expansion
//! ROMs and bridges are not supported. When the machine is reset, the VMM must call [`PciBus::reset`].
//! A VMM that saves a machine saves the functions and the address register itself, and the MSI-X tables by
//! [`Slot::save_vectors`].

mod bells;
mod bus;
mod deferred;
mod host_bridge;
mod interrupts;
#[cfg(feature = "kvm")]
pub mod kvm;
mod msix;
mod saved;
mod slot;
mod slot_window;
mod windows;

pub use bells::DoorbellCatcher;
pub use bus::{BarMap, ConfigPorts, Ecam, PciBus};
pub use deferred::DeferredWork;
pub use host_bridge::HostBridge;
pub use interrupts::{InterruptLine, Message};
pub use msix::{MsixVectors, SavedVector};
pub use slot::{Slot, SlotBuilder, SlotError};
pub use slot_window::{PageMapper, SlotWindow};
