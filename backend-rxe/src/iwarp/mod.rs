//! Connections of guests to iWARP peers, over TCP sockets that the embedder provides.
//!
//! A guest sees a RoCE adapter, so its `rdma_cm` exchanges management datagrams of InfiniBand over QP 1. Those to an
//! iWARP peer end here: `pvrdma_ib_cm::terminated` is the guest's peer, and the connection is made by TCP and MPA.
//!
//! ```text
//! guest                       thread of the device                            peer
//! REQ ─────────────────────►  TCP connect, MPA request ─────────────────────►
//! REP ◄─────────────────────  ◄──────────────────────────────────── MPA reply
//! modify to RTR, RTS          the QP takes the connection (`path/stream/`), and sends
//! RTU ─────────────────────►
//!
//! REQ ◄─────────────────────  ◄──────────────────── TCP connect, MPA request
//! modify to RTR, RTS          the QP waits for the connection
//! REP ─────────────────────►  MPA reply ────────────────────────────────────►
//! RTU ◄─────────────────────  the QP takes the connection
//! ```
//!
//! | module | purpose |
//! | --- | --- |
//! | `sockets` | the configuration, and the trait of the embedder's sockets |
//! | `device` | start and end of a device's part: a thread, or a service of an engine without threads |
//! | `manager` | work of the guest, events of sockets, and deadlines |
//! | `side` | the host's part of the guest's connections |
//! | `startup` | a socket until its connection is established |
//! | `lingering` | sockets of connections that have ended, until the peers have closed them as well |
//! | `listeners` | ports of the guest |
//! | `poller` | sockets and their events |
//! | `meeting` | the meeting point of queue pairs, QP 1 and the manager |
//!
//! Once a queue pair has taken a connection, its runs read and write the socket. The manager only reports that the
//! socket is ready.

pub(crate) mod device;
mod lingering;
mod listeners;
mod manager;
pub(crate) mod meeting;
mod no_ops;
mod poller;
pub(crate) mod registry;
mod side;
pub(crate) mod sockets;
mod startup;
