//! The border between the PVRDMA device and what carries its traffic.
//!
//! A *backend* is an RDMA adapter ([`Hca`]) that the device model drives with verbs: protection domains, memory
//! regions, completion queues, shared receive queues and queue pairs. This crate holds the traits. The values that
//! cross them and the queue-pair transition table that both sides must agree on ([`qp_state`]) are those of
//! `pvrdma-verbs-types`, re-exported here. It knows no PCI, no sockets and no FFI; guest memory is
//! `pvrdma-guest-memory`.
//!
//! # Who calls whom
//!
//! The guest's rings are the queues. The device hands each queue to the backend as a *source* it can pull from
//! ([`SendSource`], [`RecvSource`]) or a *sink* it can push to ([`CompletionSink`], [`EventSink`]), and afterwards only
//! tells it that there may be work ([`QueuePair::notify_send`]). The backend pulls when it is ready, so flow control
//! and bounded memory follow from the rings.
//!
//! # Guest memory
//!
//! Every call of a source or sink takes a [`DmaView`]: the proof that the memory map is held. A thread holds at
//! most one view of a given [`DmaSpace`]; two spaces are locked in the order of their [`SpaceId`]. Code
//! that was handed a view never asks for another.
//!
//! # Destruction
//!
//! `destroy` returns only when nothing touches the object's rings or memory any more; the guest frees those pages as
//! soon as it sees the command's result. It is idempotent, and objects that are still referenced afterwards are inert.
//!
//! [`DmaView`]: pvrdma_guest_memory::DmaView
//! [`DmaSpace`]: pvrdma_guest_memory::DmaSpace
//! [`SpaceId`]: pvrdma_guest_memory::SpaceId

#[cfg(feature = "testing")]
pub mod conformance;
mod error;
mod hca;
mod network;
mod progress;
mod queue;
mod rules;
#[cfg(feature = "testing")]
pub mod testing;

pub use error::{CqOverrun, IndexError, QueueError, VerbsError};
pub use hca::{
    Backend, CompletionQueue, DeviceContext, Hca, HcaLimits, MemoryRegion, MrRequest, MrShape, Object, PortAttributes,
    QpInit, QueuePair, SharedReceiveQueue, SrqInit,
};
pub use network::Network;
pub use progress::SendProgress;
pub use queue::{AsyncEvent, CompletionSink, EventSink, PortEvent, QpEvent, RecvSource, SendSource, SrqEvent};
pub use rules::{AddressRule, OtherAddresses, Peers, Prefix, Rules, link_local};

pub use pvrdma_verbs_types::{
    Access, AddressVector, Completion, FastRegister, Gid, GidType, InvalidAttribute, InvalidValue, Invalidate,
    MAX_MESSAGE, MacAddr, Mtu, NetworkType, PortState, Psn, QpAttrMask, QpAttrs, QpCaps, QpState, QpTransitionError,
    QpType, Qpn, RecvWr, RemoteAddress, SendData, SendFlags, SendOp, SendWr, Sge, UdDestination, WcFlags, WcOpcode,
    WcStatus, qp_state,
};

// Not of the verbs: for the crates that still import these from here.
pub use pvrdma_base::{
    Count, Counter, DeviceLog, EndOnPanic, Kind, LogLimit, Random, Snapshot, Unit, counters, micros, threads,
};
