//! Guest verbs on the host's RDMA adapter.
//!
//! [`Ibverbs`] is a [`pvrdma_verbs::Backend`] on `libibverbs`, which is loaded when the backend is created. Each guest
//! object corresponds to one object of the host, and the adapter moves the payload: guest memory is registered with the
//! adapter in place.
//!
//! # Life cycle of a request
//!
//! A doorbell pulls requests from the guest's ring (`qp/send.rs`, `qp/recv.rs`), translates the keys of bus addresses
//! and the GIDs, which differ on the host (`qp/translate.rs`), and posts the requests. The slot is returned to the
//! guest at once; the size of the ring bounds the number of requests in flight. A completion of the host (`reap.rs`) is
//! matched to its request by the `wr_id` that the backend assigned (`inflight.rs`), and becomes the guest's completion
//! (`qp/complete.rs`).
//!
//! # Layers
//!
//! Each file uses only the layers below it.
//!
//! | files | purpose |
//! | --- | --- |
//! | `backend`, `hca`, `handles` | the traits of `pvrdma-verbs` |
//! | `poller`, `events`, `objects` | a device's thread, events of the host, all objects of a device |
//! | `reap` | dispatch of the host's completions to queue pairs |
//! | `gsi`, `qp/`, `srq`, `cq`, `mr/` | the objects |
//! | `host_cm/` | connections of guests that the host makes (`cm=host`) |
//! | `adapter` | resources common to all objects: memory, events, counters, GIDs, limits |
//! | `cm_paths` | the meeting point of queue pairs and `host_cm/` |
//! | `shared`, `cm/`, `gid/`, `addresses/` | state shared by the devices of a process |
//! | `verbs/`, `rdmacm/`, `sys/` | the libraries' objects as owning types, and their binary interfaces |
//!
//! # Threads
//!
//! The thread that rings a doorbell posts the requests. One thread per device waits for completions and events of the
//! host, without a timeout; it polls for a while after the last completion ([`IbverbsConfig::poll`]). If a guest polls
//! an empty queue and reports that by a doorbell, the host's queue is polled on the guest's own thread.
//!
//! If the connection manager reaches beyond the process by `ib_umad` (`cm`), one thread receives for all devices, and
//! each device has a sending thread of its own, because the kernel takes up to a second to resolve a peer's MAC
//! address. With `cm=host`, one thread of each device makes its connections (`host_cm/`).
//!
//! # Memory
//!
//! The adapter needs one contiguous range at one address. The pages of a region are mapped side by side
//! (`contiguous_mapping`) and registered with the guest's virtual address. Bus addresses (the key of guest kernels) are
//! registered range by range on first use. Fast registrations become memory windows of type 2: the guest chooses the
//! low byte of the key as on hardware, and either side may invalidate it. Memory that leaves the map (DMA unmap, bus
//! mastering off) is deregistered before the call returns.
//!
//! # Lock order
//!
//! 1. the send side or the receive side of a QP or that of an SRQ; the right to take completions of a CQ; a thread
//!    holds at most one of these;
//! 2. a view of guest memory; or, in a thread without a view, the state of a QP of the host or the limit of an SRQ;
//! 3. the table of regions, then one region;
//! 4. requests in flight (of a QP or SRQ), the directories of objects;
//! 5. leaves: sinks of the device, the GID table of the process.
//!
//! Completions and events are published while a lock of level 4 is held, so that destroying a QP, which takes it, waits
//! for them.
//!
//! # Example
//!
//! ```no_run
//! use pvrdma_ibverbs::{Ibverbs, IbverbsConfig};
//!
//! // Port 1 of the adapter; guests use its first RoCE v2 address that is not link-local.
//! let backend = Ibverbs::new(IbverbsConfig::new("mlx5_0").with_max_pinned(4 << 30))?;
//! # drop(backend);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod adapter;
mod addresses;
mod backend;
mod cm;
mod cm_paths;
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
mod host_cm;
mod inflight;
mod limits;
mod mr;
mod objects;
mod poller;
mod qp;
mod rdmacm;
mod reap;
mod resolver;
mod shared;
mod srq;
mod sys;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(test)]
mod tests;
mod transport;
mod verbs;
mod worker;

use pvrdma_base::Counter;

pub use addresses::{AddressOwner, HostAddresses, MAX_ADDRESSES};
pub use backend::{Ibverbs, IbverbsStation, host_addresses};
pub use config::{CmMode, GidIndex, IbverbsConfig};
pub use handles::{IbvCq, IbvMr, IbvPd, IbvQp, IbvSrq};
pub use hca::IbvHca;
pub use sys::load::LoadError;
pub use verbs::OpenError;

/// Returns all counters of adapters and of the connection manager, at zero.
pub fn all_counters() -> Vec<Counter> {
    counters::all_counters()
}
