//! Guest verbs on the host's RDMA adapter.
//!
//! [`Ibverbs`] is a [`pvrdma_verbs::Backend`] on `libibverbs`, which is loaded when the backend is made and not before.
//! Each guest object is one object of the host, and the adapter moves the payload: guest memory is registered with it
//! where it is.
//!
//! # The life of a request
//!
//! A doorbell pulls requests from the guest's ring (`qp/send.rs`, `qp/recv.rs`), translates what the host names
//! differently, keys of bus addresses and GIDs (`qp/translate.rs`), and posts them. The slot goes back to the guest at
//! once; how many requests are in flight is bounded by the size of the ring. A completion of the host (`reap.rs`) finds
//! its request by the `wr_id` that we gave it (`inflight.rs`), and becomes the guest's completion (`qp/complete.rs`).
//!
//! # Layers
//!
//! Each file uses those below it only.
//!
//! | files | what they are |
//! | --- | --- |
//! | `backend`, `hca`, `handles` | the traits of `pvrdma-verbs` |
//! | `poller`, `events`, `objects` | a device's thread, events of the host, everything that a device has made |
//! | `reap` | from completions of the host to queue pairs |
//! | `gsi`, `qp/`, `srq`, `cq`, `mr/` | the objects |
//! | `adapter` | what each object needs: memory, events, counters, GIDs, limits |
//! | `shared`, `cm/`, `gid/`, `addresses/` | what the devices of a process share |
//! | `verbs/`, `sys/` | the library's objects as owning types, and its binary interface |
//!
//! # Threads
//!
//! The thread that rings posts. One thread for each device waits for completions and events of the host, without a
//! timeout; it polls for a while after the last completion ([`IbverbsConfig::poll`]). A guest that polls an empty queue
//! and says so has the host's queue polled on its own thread.
//!
//! Where the connection manager reaches beyond the process (`cm`), one thread receives for all devices, and each device
//! has one that sends: to find a peer's MAC address takes the kernel up to a second.
//!
//! # Memory
//!
//! The adapter wants one range at one address. The pages of a region are mapped side by side (`contiguous_mapping`) and
//! registered with the guest's virtual address. Bus addresses (the key of guest kernels) are registered range by range
//! when they are first used. Fast registrations become memory windows of type 2: the guest chooses the low byte of the
//! key as it does on hardware, and either side may invalidate it. What goes from the map (DMA unmap, bus mastering off)
//! is deregistered before the call returns.
//!
//! # Lock order
//!
//! 1. the send side or the receive side of a QP or that of an SRQ; the right to take completions of a CQ; a thread
//!    holds one of these;
//! 2. a view of guest memory; or, by who has none, the state of a QP of the host or the limit of an SRQ;
//! 3. the table of regions, then one region;
//! 4. requests in flight (of a QP or SRQ), the directories of objects;
//! 5. leaves: sinks of the device, the table of GIDs of the process.
//!
//! Completions and events are published under 4, so that destroying a QP, which takes it, waits for that.

mod adapter;
mod addresses;
mod backend;
mod cm;
mod config;
mod contiguous_mapping;
mod convert;
mod counters;
mod cq;
mod datagram;
mod directory;
mod events;
#[cfg(test)]
mod fake;
mod gid;
mod gsi;
mod handles;
mod hca;
mod inflight;
mod limits;
mod mr;
mod objects;
mod poller;
mod qp;
mod reap;
mod resolver;
mod shared;
mod srq;
mod sys;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(test)]
mod tests;
mod verbs;
mod worker;

use pvrdma_verbs::Counter;

pub use addresses::{AddressOwner, HostAddresses, MAX_ADDRESSES};
pub use backend::{Ibverbs, host_addresses};
pub use config::{CmMode, GidIndex, IbverbsConfig};
pub use handles::{IbvCq, IbvMr, IbvPd, IbvQp, IbvSrq};
pub use hca::IbvHca;
pub use sys::library::LoadError;
pub use verbs::OpenError;

/// Everything that adapters and the connection manager count, at zero.
pub fn all_counters() -> Vec<Counter> {
    counters::all_counters()
}
