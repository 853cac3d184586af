//! The PVRDMA PCI function as a device model, compatible with the Linux driver `vmw_pvrdma`.
//!
//! A VMM creates a [`PvrdmaDevice`] with its guest's memory ([`pvrdma_guest_memory::DmaSpace`]), an
//! [`InterruptSink`](pvrdma_pci_function::InterruptSink) and its [station](pvrdma_verbs::Station) at a backend, and
//! drives it through [`PciFunction`](pvrdma_pci_function::PciFunction): configuration space, three BARs, reset. The
//! crate contains nothing about sockets, vfio-user or KVM.
//!
//! ```
//! # use std::error::Error;
//! # use std::sync::Arc;
//! use pvrdma_dev::{DeviceConfig, PvrdmaDevice};
//! use pvrdma_guest_memory::{DmaSpace, PinPolicy};
//! use pvrdma_pci_function::{InterruptSink, PciFunction};
//! use pvrdma_verbs::Backend;
//! use vm_memory::GuestMemoryMmap;
//!
//! fn plug_in<B: Backend<Hca: 'static>>(
//!     memory: &GuestMemoryMmap,
//!     interrupts: Arc<dyn InterruptSink>,
//!     backend: &B,
//! ) -> Result<Arc<dyn PciFunction>, Box<dyn Error>> {
//!     let space = DmaSpace::from_guest_memory(memory, PinPolicy::All)?;
//!     let station = backend.station("52:54:00:00:00:01".parse()?)?;
//!     Ok(PvrdmaDevice::new(DeviceConfig::new("vm0"), space, interrupts, &station)?)
//! }
//! ```
//!
//! # Parts
//!
//! * Control plane: configuration space, registers, the device shared region, the command channel and the object
//!   tables. All of it runs inside register writes, under one lock.
//! * Data plane: doorbells, work queues, completion queues and event rings in guest memory. Doorbells take no lock of
//!   the control plane. They only leave [`Deferred`](pvrdma_pci_function::Deferred) work, which the VMM must run after
//!   the guest's write has completed: nothing is sent before that.
//!
//! # Invariants
//!
//! * Data written by the guest is copied once and then validated. A response is either complete or an error that the
//!   ERR register, the log and a counter report.
//! * After a destroy command, a reset or the disabling of bus mastering (which destroys everything, as a reset does) no
//!   thread accesses the memory concerned.
//! * Code that calls a backend operation that may wait (modify, destroy) holds no view of guest memory.
//!
//! # Not implemented
//!
//! Resizing of CQs (the driver never requests it), multicast, power management.
//!
//! Section and conformance numbers in comments are those of `docs/interface.md`.

mod abi;
mod cmd;
mod config;
mod control;
mod core;
mod datapath;
mod device;
mod doorbell;
mod dsr;
mod due;
mod error;
mod events;
mod inspect;
mod intr;
mod limits;
mod mapped;
mod objects;
mod page_dir;
mod pause;
mod pci;
mod pending_doorbells;
mod reclaim;
mod recover;
mod regs;
mod ring;
mod saved;
mod stats;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod uar;
mod watch;
mod watch_list;
mod watched;
mod watcher;
mod window;

pub use config::DeviceConfig;
pub use device::PvrdmaDevice;
pub use events::EventRingInspect;
pub use inspect::{
    ContextInspect, CqInspect, DeviceInspect, MrInspect, ObjectKind, PdInspect, QpInspect, QpPeer, QpTraffic,
    SrqInspect,
};
pub use limits::{LimitChange, LimitError, LimitKey, LimitStatus, Limits};
pub use objects::GidInspect;
pub use ring::RingInspect;
pub use saved::{RestoreError, SaveError};
pub use stats::{
    CommandCount, DeviceStatus, KeptStatus, MemoryStatus, ObjectCounts, Phase, RecoveryStatus, all_counters,
};
pub use watcher::{Depth, DoorbellWatcher, MappedDoorbells, Outcome};
pub use window::{Clock, DoorbellMode, Pause, Processors, WindowConfigError, WindowPolicy, WindowWatcher};
