//! Guest verbs on the host's RDMA adapter.
//!
//! [`Ibverbs`] is a [`pvrdma_verbs::Backend`] on `libibverbs`, which is loaded when the backend is made and not before. Each
//! guest object is one object of the host, and the adapter moves the payload: guest memory is registered with it where it is.
//!
//! # What a request goes through
//!
//! A doorbell pulls requests from the guest's ring, translates what the host names differently (keys of bus addresses, GIDs) and
//! posts them. The slot goes back to the guest at once; how many requests are under way is bounded by the size of the ring. A
//! completion of the host finds its request by a number that we gave it, and becomes the guest's completion.
//!
//! # Who does the work
//!
//! The thread that rings posts. One thread for each device waits for completions and events of the host, without a timeout; it
//! polls for a while after the last completion ([`IbverbsConfig::poll`]). A guest that looks at an empty queue and says so has
//! the host's queue looked at on its own thread.
//!
//! Where the connection manager reaches beyond the process (`cm`), one thread receives for all devices, and each device
//! has one that sends: to find a peer's MAC address takes the kernel up to a second.
//!
//! # Memory
//!
//! The adapter wants one range at one address. The pages of a region are mapped side by side (`window`) and registered with the
//! guest's virtual address. Bus addresses (the key of guest kernels) are registered range by range when they are first used.
//! Fast registrations become memory windows of type 2: the guest chooses the low byte of the key as it does on hardware, and
//! either side may invalidate it. What goes from the map (DMA unmap, bus mastering off) is deregistered before the call returns.
//!
//! # Lock order
//!
//! 1. the control lock of a QP;
//! 2. its send side or its receive side or that of an SRQ; the lock of a completion queue; a thread holds one of these;
//! 3. a view of guest memory;
//! 4. the table of regions, then one region;
//! 5. what is under way (of a QP or SRQ), the tables of the adapter;
//! 6. leaves: sinks of the device, the table of GIDs of the process.
//!
//! What the adapter reports is delivered under 5, so that destroying a QP, which takes it, waits for that.

mod adapter;
mod addresses;
mod backend;
mod cm;
mod convert;
mod counters;
mod cq;
mod datagram;
mod flight;
mod gid;
mod gsi;
mod hca;
mod limits;
mod mr;
#[cfg(feature = "testing")]
pub mod native;
mod poller;
mod qp;
mod srq;
mod sys;
mod verbs;
mod window;
mod worker;

use pvrdma_verbs::Counter;

pub use addresses::Network;
pub use backend::{GidIndex, Ibverbs, IbverbsConfig};
pub use cm::CmMode;
pub use cq::IbvCq;
pub use hca::{IbvHca, IbvPd};
pub use mr::IbvMr;
pub use qp::IbvQp;
pub use srq::IbvSrq;
pub use sys::library::LoadError;
pub use verbs::OpenError;

/// Everything that adapters and the connection manager count, at zero.
pub fn all_counters() -> Vec<Counter> {
    counters::all_counters()
}
