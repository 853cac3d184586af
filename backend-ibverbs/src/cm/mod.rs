//! Connection manager datagrams to and from peers outside this process.
//!
//! QP 1 of the host's port belongs to the host's kernel. Its `ib_umad` lets one process register for one class of
//! management datagrams. For the connection manager's class this is possible while the kernel's own manager (`ib_cm`)
//! is not loaded. One file of `ib_umad` receives for all devices. Each device sends through a file of its own, because
//! the kernel locks a file while it resolves the MAC address of a peer, and it refuses two datagrams with the same
//! transaction ID on one file.
//!
//! A guest sends only from its own address, so the host must have that address ([`Bound::is_own`]). A received datagram
//! goes to the device that owns its destination address. The kernel replaces the upper half of transaction IDs;
//! connection managers identify each other by communication IDs, which stay unchanged.
//!
//! [`Bound::is_own`]: crate::gid::Bound::is_own

mod error;
mod manager;
mod message;
mod receiver;
mod sender;
mod umad;

pub(crate) use manager::ConnectionManager;
pub(crate) use message::Outgoing;
pub(crate) use sender::Sender;
