//! Interface between the PVRDMA device and the backends that carry its traffic.
//!
//! A *backend* is an RDMA adapter ([`Hca`]) that the device model drives with verbs: protection domains, memory
//! regions, completion queues, shared receive queues and queue pairs. This crate defines the traits. The values that
//! they pass, and the queue-pair transition table that both sides share ([`qp_state`](pvrdma_verbs_types::qp_state)),
//! are in `pvrdma-verbs-types`. The crate contains nothing about PCI, sockets or FFI; guest memory is in
//! `pvrdma-guest-memory`.
//!
//! # Direction of calls
//!
//! The guest's rings are the queues. The device passes each queue to the backend as a *source* to pull from
//! ([`SendSource`], [`RecvSource`]) or a *sink* to push to ([`CompletionSink`], [`EventSink`]). Afterwards the device
//! only notifies the backend that there may be work ([`QueuePair::notify_send`]). The backend pulls when it is ready,
//! so the rings bound its memory and provide flow control.
//!
//! # Guest memory
//!
//! Every call of a source or sink takes a [`DmaView`], which proves that the memory map is locked. A thread holds at
//! most one view of a given [`DmaSpace`]; two spaces are locked in the order of their [`SpaceId`], so that threads
//! cannot deadlock. Code that receives a view as an argument never takes another.
//!
//! # Destruction
//!
//! `destroy` returns only when nothing accesses the object's rings or memory any more, because the guest frees those
//! pages as soon as it sees the command's result. It is idempotent; objects that are still referenced afterwards do
//! nothing.
//!
//! [`DmaView`]: pvrdma_guest_memory::DmaView
//! [`DmaSpace`]: pvrdma_guest_memory::DmaSpace
//! [`SpaceId`]: pvrdma_guest_memory::SpaceId
//!
//! # Example
//!
//! A function that works with the adapters of any backend:
//!
//! ```
//! use pvrdma_verbs::{DeviceContext, Hca, Station, VerbsError};
//!
//! fn paths<S: Station>(station: &S, device: DeviceContext) -> Result<String, VerbsError> {
//!     let adapter = station.attach(device)?;
//!     let limits = adapter.limits();
//!     Ok(format!("{} queue pairs of {} requests", limits.max_qp, limits.max_qp_wr))
//! }
//! ```

#[cfg(feature = "testing")]
pub mod conformance;
mod context;
mod error;
mod hca;
mod network;
mod pause;
mod progress;
mod queue;
mod rules;
mod save;
#[cfg(feature = "testing")]
pub mod testing;

pub use context::DeviceContext;
pub use error::{CqOverrun, IndexError, QueueError, VerbsError};
pub use hca::{
    Backend, CompletionQueue, Hca, HcaLimits, MemoryRegion, MrRequest, MrShape, Object, PortAttributes, QpInit,
    QueuePair, SharedReceiveQueue, SrqInit, Station,
};
pub use network::Network;
pub use pause::PauseHca;
pub use progress::SendProgress;
pub use queue::{
    AsyncEvent, CompletionSink, EventSink, PortEvent, QpEvent, RecvSource, RingPosition, SavedRing, SendSource,
    SrqEvent,
};
pub use rules::{AddressRule, OtherAddresses, Peers, Prefix, Rules, link_local};
pub use save::{SaveHca, SavedMr, SavedQp, SavedSrq};
