//! A software RDMA adapter.
//!
//! [`Rxe`] is a [`pvrdma_verbs::Backend`]: every device of the process attaches to it and gets an adapter. Adapters
//! reach each other by *local delivery*: the payload is copied once, from the memory regions of the sender to those of
//! the receiver. A device that is plugged in ([`Rxe::plug`]) reaches the peers of other hosts through an Ethernet link,
//! by the transport of RoCE (`pvrdma_roce`). What a peer can observe (order, statuses, RNR, retries, flush, events) is
//! the same both ways.
//!
//! # Modules, from the top
//!
//! | module | what it is |
//! | --- | --- |
//! | `rxe`, `hca` | the public face: backend, adapters and their objects |
//! | `path::wire::receive` | frames that came for a device, on their way to its queue pairs |
//! | `drive` | runs a queue pair: state and route choose the path, or the flush |
//! | `fabric` | what the queue pairs of a device can reach, and who may talk to whom |
//! | `path` | `Route`; `local` delivery, the `wire`, `datagram`s, which take either; the `directory` of GIDs and QPNs |
//! | `port` | the links of a device, the thread that serves them, and what the device may do there |
//! | `capture` | shows frames, and what local delivery would have been on the wire, to those who watch |
//! | `qp` | queue pairs: both halves, `state` with the one way into ERROR, `flush`, `modify` |
//! | `cq`, `srq` | completion queues, shared receive queues |
//! | `sg`, `mr` | held guest memory, scatter/gather lists, memory regions |
//! | `addresses` | who may have which address |
//! | `bindings` | GIDs that a guest has bound, and those that it may use |
//! | `adapter` | what the objects of a device share |
//! | `engine`, `ready_queue`, `task`, `timer` | workers, and what they schedule |
//! | `failures` | who is told of queue pairs that fail |
//! | `flows` | what a device moved, by peer and road |
//! | `share` | what a device may use of the workers' time and of the bandwidth |
//!
//! # Queue pairs
//!
//! A QP is two halves, each with a lock of its own. The *requester* pulls send requests, checks their local memory,
//! keeps retry state and completes them. The *responder* owns the receive queue and answers requests of the peer: with
//! success, or with a [`pvrdma_roce::NakReason`]. Work flows from requester to responder and never back: a responder
//! that has to end its own QP sets the state and schedules the QP's task.
//!
//! # Who does the work
//!
//! Whoever learns of work runs it, up to a budget of bytes and requests: the thread that rings the doorbell first, the
//! worker threads of the engine when something is left, when a timer fires, or when a peer that was not ready posted a
//! receive. A QP whose requester is busy is marked and looked at again by the thread that has it. An idle engine waits
//! without timeout.
//!
//! # Lock order
//!
//! 1. a requester with its route; a thread holds at most one;
//! 2. [`pvrdma_guest_memory::DmaView`]s, in the order of their spaces, one for each space;
//! 3. memory region tables (read), in the order of their adapters;
//! 4. a responder, then its state for the wire; a thread holds at most one of each;
//! 5. an SRQ;
//! 6. leaves that call nothing: CQ and event sinks of the device, the ready queue, GID and QPN tables, waiter lists,
//!    windows, the queue in front of a link, those who watch a device.
//!
//! A thread of a port holds a receive queue before all of these, and while it reads from the link none of them.
//!
//! The locks of 2 and 3 are fair, a reader waits behind a waiting writer. So nobody waits for a lock of 1, 2 or 3 while
//! holding one of a higher number, and whoever takes a responder without coming from a requester takes its view first.
//! `sg::MemoryGuard` is the only place that takes 2 and 3. A responder's state for the wire is also taken alone, to
//! look at its path.
//!
//! # What ends when
//!
//! Guest memory is touched only while 2 and 3 are held. Taking a region out of its table needs the table's write lock
//! and therefore waits for every copy in flight; destroying a QP needs both of its halves; unbinding a GID bumps the
//! generation that routes are cached under and then waits for the views of its adapter.

mod adapter;
mod addresses;
mod bindings;
mod budget;
pub mod capture;
mod counters;
mod cq;
mod drive;
mod engine;
mod fabric;
mod failures;
mod flows;
mod gid;
mod hca;
mod limits;
mod mr;
mod path;
mod port;
mod qp;
mod quota;
mod ready_queue;
mod rxe;
mod sg;
mod share;
mod shared;
mod srq;
mod task;
#[cfg(test)]
mod tests;
mod timer;
mod ud_header;

use pvrdma_verbs::Counter;

pub use cq::RxeCq;
pub use failures::{ObservedFailures, QpFailure};
pub use flows::{DeviceFlows, FlowCount, Road};
pub use hca::{RxeHca, RxeMr, RxePd, RxeQp};
pub use port::PortConfig;
pub use port::policy::{ForgedTransmits, PortRules, VlanMode};
pub use port::uplink::Uplink;
pub use pvrdma_link::{Clock, ManualClock, MonotonicClock};
pub use pvrdma_roce::Congestion;
pub use rxe::{AddressConflict, ObservedConflicts, Rxe, RxeConfig};
pub use share::{DEFAULT_WEIGHT, DeviceShare, ShareConfig, ShareUsage};
pub use srq::RxeSrq;

/// Everything that adapters, ports and the switch of a network count, at zero. What a link to the outside counts, its
/// crate says.
pub fn all_counters() -> Vec<Counter> {
    let mut list = counters::Counters::default().list();
    list.extend(port::counters::all_counters());
    list.extend(pvrdma_link::all_counters());
    list
}
