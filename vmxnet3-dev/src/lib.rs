//! The vmxnet3 PCI function as a device model, revisions 1 to 3: the network function that the Linux driver `vmxnet3`
//! talks to, and that `vmw_pvrdma` looks for beside its own.
//!
//! A VMM makes a [`Vmxnet3Device`] with its guest's memory ([`pvrdma_guest_memory::DmaSpace`]), an
//! [`InterruptSink`](pvrdma_pci_function::InterruptSink) and a [`FramePort`], and drives it through
//! [`PciFunction`](pvrdma_pci_function::PciFunction). Whoever has frames for the guest calls
//! [`Vmxnet3Device::receive`] and, at the end of a batch, [`Vmxnet3Device::flush`]. A [`NicLink`] does both for who
//! moves frames in batches. The crate knows no sockets, no vfio-user and no KVM.
//!
//! # Frames
//!
//! A [`Frame`] has its checksum in place, or one that is still to be calculated, or is a TCP frame of up to 64 KiB that
//! is still to be cut into segments. A port says what it takes ([`PortOffloads`]), the rest is done here; a port that
//! takes everything can still cut a frame later ([`Frame::for_each_wire_frame`]). A guest with LRO receives long frames
//! whole, any other in segments.
//!
//! # Rules that hold everywhere
//!
//! * What the guest wrote is copied once and then judged. Rings that make no sense stop their queue, and the driver is
//!   told.
//! * When QUIESCE, RESET, a cleared Bus Master Enable or the function's reset returns, nothing touches guest memory.
//! * The device never writes a ring of commands.
//! * A port is called without any lock that delivery to this or another device takes.
//!
//! # Not implemented
//!
//! Revisions 4 and later (encapsulated offloads, more than 8 queues), wake on LAN, saved state. Coalescing by rate is
//! accepted, and means what adaptive coalescing means.

mod abi;
mod cmd;
mod config;
mod core;
mod device;
mod error;
mod filter;
mod frame;
mod intr;
mod link;
mod offload;
mod receive;
mod regs;
mod ring;
mod rss;
mod rx;
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
pub use link::NicLink;
pub use receive::Received;
pub use stats::all_counters;
