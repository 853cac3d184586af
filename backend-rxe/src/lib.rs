//! A software RDMA adapter.
//!
//! [`Rxe`] is a [`pvrdma_verbs::Backend`]: every device of the process attaches to it and gets an adapter. Adapters
//! reach each other by *local delivery*: the payload is copied once, from the memory regions of the sender to those of
//! the receiver. A device that is plugged in ([`Rxe::plug`]) reaches peers on other hosts through an Ethernet link,
//! with the RoCE transport (`pvrdma_roce`). Peers that the embedder lists ([`RxeStation::set_iwarp`]) are reached by
//! iWARP instead (`pvrdma_iwarp`), over TCP sockets of the embedder. The behaviour that a peer of the same process or
//! of the RoCE transport can observe (order, statuses, RNR, retries, flush, events) is the same.
//!
//! # Modules, from the top
//!
//! | module | purpose |
//! | --- | --- |
//! | `rxe`, `hca` | the public interface: backend, adapters and their objects |
//! | `path::wire::receive` | received frames of a device, distributed to its queue pairs |
//! | `drive` | runs a queue pair: state and route determine the path, or the flush |
//! | `fabric` | reachability of peers for the queue pairs of a device, and the rules for it |
//! | `path` | `Route`; `local` delivery, `stream`s, the `wire`, `datagram`s; the `directory` of GIDs and QPNs |
//! | `iwarp` | connections of guests to iWARP peers, until their queue pairs take them |
//! | `port` | the links of a device, the threads that serve them, and the rules for the device there |
//! | `capture` | shows frames to captures, and local delivery as it would have been on the wire |
//! | `qp` | queue pairs: both halves, `state` with the single transition to ERROR, `flush`, `modify` |
//! | `cq`, `srq` | completion queues, shared receive queues |
//! | `sg`, `mr` | held guest memory, scatter/gather lists, memory regions |
//! | `addresses`, `conflicts` | ownership of addresses, and observers of conflicts |
//! | `bindings` | GIDs that a guest has bound, and whether it can use them |
//! | `pause`, `paused` | pausing an adapter, and the mark that it is paused |
//! | `adapter` | state that the objects of a device share |
//! | `engine`, `ready_queue`, `task`, `timer` | workers, and the tasks that they schedule |
//! | `own_thread` | the thread of a device whose memory is slow |
//! | `failures` | causes and observers of failed queue pairs |
//! | `faults` | failures on request, for tests |
//! | `flows` | traffic of a device, by peer and path |
//! | `station`, `place` | the stations of devices, which a restart of a driver does not end |
//! | `share` | shares of devices in the workers' time and in the bandwidth |
//!
//! # Queue pairs
//!
//! A QP consists of two halves, each with its own lock. The *requester* pulls send requests, checks their local memory,
//! keeps retry state and completes them. The *responder* owns the receive queue and answers requests of the peer: with
//! success, or with a [`NakReason`](pvrdma_verbs_types::NakReason). Work flows from requester to responder and never
//! back: a responder that has to end its own QP sets the state and schedules the QP's task.
//!
//! # Threads
//!
//! The thread that notices work runs it, up to a budget of bytes and requests. First this is the thread that handles
//! the doorbell; the worker threads of the engine continue when work is left, when a timer fires, or when a peer that
//! was not ready has posted a receive. A QP whose requester is busy is marked, and the thread that holds the requester
//! checks it again. An idle engine waits without a timeout.
//!
//! Memory whose owner makes accesses wait is slow for some time. The tasks of its device then run on a thread of the
//! device, as do the accesses of other devices' requesters to that memory.
//!
//! A device that reaches peers by iWARP has a thread for their connections. It waits for their sockets, and schedules
//! the queue pairs, whose runs read and write them.
//!
//! # Lock order
//!
//! 1. a requester with its route; a thread holds at most one;
//! 2. [`pvrdma_guest_memory::DmaView`]s, in the order of their spaces, one for each space;
//! 3. memory region tables (read), in the order of their adapters;
//! 4. a responder, then its state for the wire; a thread holds at most one of each;
//! 5. an SRQ;
//! 6. leaves that call nothing: CQ and event sinks of the device, the ready queue, GID and QPN tables, waiter lists,
//!    windows, the queue in front of a link, the captures of a device, the meeting point of iWARP connections.
//!
//! A thread of a port locks a receive queue before all of these, and holds none of them while it reads from the link.
//!
//! The locks of 2 and 3 are fair: a reader waits behind a waiting writer. A thread therefore must not wait for a lock
//! of 1, 2 or 3 while it holds one of a higher number, and a thread that locks a responder without holding a requester
//! takes its view first. `sg::MemoryGuard` is the only place that takes 2 and 3. A responder's state for the wire is
//! also locked alone, to read its path.
//!
//! # Lifetimes
//!
//! Guest memory is accessed only while 2 and 3 are held. Removing a region from its table needs the table's write lock
//! and therefore waits for every copy in flight; destroying a QP needs both of its halves; unbinding a GID increments
//! the generation that routes are cached under and then waits for the views of its adapter.
//!
//! # Example
//!
//! A network whose devices reach each other, and hosts at the other end of `cable`:
//!
//! ```
//! use std::sync::Arc;
//!
//! use pvrdma_link::memory;
//! use pvrdma_rxe::{PortConfig, Rxe, RxeConfig};
//!
//! let backend = Rxe::new(RxeConfig::default())?;
//! let (uplink, cable) = memory::pair(256)?;
//! let config = PortConfig::new(Arc::new(uplink), 1500);
//! // The adapter that attaches to the station uses the link for as long as the station lives.
//! let station = backend.station("52:54:00:00:00:01".parse()?);
//! station.plug(config)?;
//! # drop((station, cable));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod adapter;
mod addresses;
mod bindings;
mod budget;
pub mod capture;
mod conflicts;
mod counters;
mod cq;
mod drive;
mod engine;
mod fabric;
mod failures;
pub mod faults;
mod flows;
mod gid;
mod hca;
mod iwarp;
mod limits;
mod moved;
mod mr;
mod own_thread;
mod path;
mod pause;
mod paused;
mod place;
mod port;
mod qp;
mod quota;
mod ready_queue;
mod rxe;
mod saved;
mod sg;
mod share;
mod shared;
mod srq;
mod station;
mod task;
#[cfg(test)]
mod tests;
mod timer;
mod ud_header;

use pvrdma_base::Counter;

pub use conflicts::{AddressConflict, ObservedConflicts};
pub use cq::RxeCq;
pub use failures::{FailureCause, ObservedFailures, QpFailure};
pub use flows::{FlowCount, Road};
pub use hca::{RxeHca, RxeMr, RxePd, RxeQp};
pub use iwarp::sockets::{IwarpConfig, Sockets};
pub use port::config::PortConfig;
pub use port::rules::{ForgedTransmits, HeldRequests, PortRules, VlanMode};
pub use rxe::{Rxe, RxeConfig};
pub use share::{DEFAULT_WEIGHT, ShareConfig, ShareUsage};
pub use srq::RxeSrq;
pub use station::RxeStation;

/// Returns all counters of adapters, ports and the switch of a network, at zero. Counters of links are not included:
/// each link's crate lists its own.
pub fn all_counters() -> Vec<Counter> {
    let mut list = counters::Counters::default().list();
    list.extend(port::counters::all_counters());
    list.extend(pvrdma_link::all_counters());
    list
}
