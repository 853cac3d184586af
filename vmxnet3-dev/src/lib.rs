//! PCI device model of vmxnet3, revisions 1 to 3. This is the network function that the Linux driver `vmxnet3` binds
//! to, and that `vmw_pvrdma` looks for next to its own function.
//!
//! A VMM creates a [`Vmxnet3Device`] with its guest's memory ([`pvrdma_guest_memory::DmaSpace`]), an
//! [`InterruptSink`](pvrdma_pci_function::InterruptSink) and a [`FramePort`], and drives it through
//! [`PciFunction`](pvrdma_pci_function::PciFunction). Frames for the guest are passed to [`Vmxnet3Device::receive`],
//! followed by [`Vmxnet3Device::flush`] at the end of a batch. With the feature `link`, a `NicLink` does both for
//! callers that move frames in batches. The crate does not depend on sockets, vfio-user or KVM.
//!
//! A VMM saves a paused device as a value ([`Vmxnet3Device::state`]) or, with the feature `saved-state`, as a stream of
//! bytes ([`Migratable`](pvrdma_pci_function::Migratable)).
//!
//! # Frames
//!
//! The checksum of a [`Frame`] is either complete or still to be calculated, or the frame is a TCP frame of up to 64
//! KiB that is still to be segmented. A port declares the offloads that it supports ([`PortOffloads`]); the device
//! performs the others. A port that accepts all offloads can still segment a frame later
//! ([`Frame::for_each_wire_frame`]). A guest with LRO enabled receives long frames whole, any other guest receives
//! segments.
//!
//! # Invariants
//!
//! * Data written by the guest is copied once and then validated. An invalid ring stops its queue, and the driver is
//!   notified.
//! * After QUIESCE, RESET, clearing Bus Master Enable, a function reset or
//!   [`Migratable::pause`](pvrdma_pci_function::Migratable::pause) has returned, no thread accesses guest memory.
//! * The device never writes to a command ring.
//! * The device holds no lock that frame delivery to this or another device takes while it calls a port.
//!
//! # Not implemented
//!
//! Revisions 4 and later (encapsulated offloads, more than 8 queues), wake on LAN. Rate-based coalescing is accepted
//! and handled as adaptive coalescing.
//!
//! # Example
//!
//! ```
//! use std::sync::Arc;
//!
//! use pvrdma_guest_memory::{DmaSpace, PinPolicy};
//! use pvrdma_pci_function::{InterruptSink, PciFunction};
//! use pvrdma_vmxnet3::{Frame, FramePort, PortOffloads, Sent, Vmxnet3Config, Vmxnet3Device};
//! use vm_memory::GuestMemoryMmap;
//!
//! /// A port without a network: every frame is lost.
//! struct Unconnected;
//!
//! impl FramePort for Unconnected {
//!     fn offloads(&self) -> PortOffloads {
//!         PortOffloads::default()
//!     }
//!
//!     fn send(&self, _frame: &Frame<'_>) -> Sent {
//!         Sent::Taken
//!     }
//! }
//!
//! fn plug_in(
//!     memory: &GuestMemoryMmap,
//!     interrupts: Arc<dyn InterruptSink>,
//! ) -> Result<Arc<dyn PciFunction>, Box<dyn std::error::Error>> {
//!     let space = DmaSpace::from_guest_memory(memory, PinPolicy::Off)?;
//!     let config = Vmxnet3Config::new("vm0", "52:54:00:00:00:01".parse()?);
//!     Ok(Vmxnet3Device::new(config, space, interrupts, Arc::new(Unconnected))?)
//! }
//! ```

mod abi;
mod cmd;
mod config;
mod core;
mod device;
mod error;
mod filter;
mod frame;
mod intr;
#[cfg(feature = "link")]
mod link;
mod offload;
mod receive;
mod regs;
mod ring;
mod rss;
mod rx;
mod saved_state;
mod session;
mod stats;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod transmit;
mod tx;

pub use config::Vmxnet3Config;
pub use device::{Vmxnet3Device, Vmxnet3Status};
pub use error::ConfigError;
pub use frame::{Checksum, Frame, FrameError, FramePort, MAX_FRAME, MAX_SEGMENTS, MAX_SUPER_FRAME, PortOffloads, Sent};
#[cfg(feature = "link")]
pub use link::NicLink;
pub use receive::Received;
pub use saved_state::{RestoreError, SaveError, Vmxnet3State};
pub use stats::all_counters;
