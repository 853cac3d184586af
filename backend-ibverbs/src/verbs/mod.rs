//! The library's objects as owning types. Dropping one destroys it; each keeps the objects that it was created from
//! alive.
//!
//! All unsafe calls of the library are in the files of this folder. They are sound for the same reason everywhere: a
//! pointer that the library returned is valid until its object is destroyed, objects are destroyed only by `drop`, and
//! the library's functions may be called from any thread (`man 7 rdma`: "libibverbs is fully thread safe").

mod batch;
mod device;
mod errno;
mod event;
mod memory;
mod qp;
mod queue;

pub(crate) use batch::{HostOp, RecvBatch, SendBatch};
pub(crate) use device::HostDevice;
pub use device::OpenError;
pub(crate) use event::HostEvent;
pub(crate) use memory::{HostAh, HostMr, HostMw, HostPd};
pub(crate) use qp::{HostQp, HostQpInit};
pub(crate) use queue::{Channel, HostCq, HostSrq};
