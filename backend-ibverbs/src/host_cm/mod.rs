//! Connections of guests that the host's connection manager makes (`cm=host`).
//!
//! A guest sees a RoCE adapter, so its `rdma_cm` exchanges management datagrams of InfiniBand over QP 1. They end here:
//! `pvrdma_ib_cm::terminated` is the guest's peer, and `librdmacm` makes the connection on the host, whatever the
//! adapter speaks. So the kernel's own connection manager stays loaded.
//!
//! ```text
//! guest                          thread of the device                                 host
//! REQ ────────────────────────►  resolve address, resolve route, connect ────────────►
//!                                ◄─────────────────── accepted (iWARP: established)
//! REP ◄────────────────────────  attributes for RTR and RTS are kept for the QP
//! modify to RTR, RTS             applied to the host's QP (`qp/modify.rs`)
//! RTU ────────────────────────►  establish ──────────────────────────────────────────►
//!
//! REQ ◄────────────────────────  ◄─────────────────── request for a port of `cm-listen`
//! modify to RTR, RTS
//! REP ────────────────────────►  accept ─────────────────────────────────────────────►
//! RTU ◄────────────────────────  ◄─────────────────── established
//! ```
//!
//! One thread of each device owns all identifiers of the host and all state of the guest's connections. It is the only
//! caller of `librdmacm` for them. Queue pairs and QP 1 reach it through [`CmPaths`](crate::cm_paths::CmPaths).

mod listeners;
mod manager;
mod side;
mod thread;

#[cfg(test)]
mod tests;

pub(crate) use thread::HostCm;
