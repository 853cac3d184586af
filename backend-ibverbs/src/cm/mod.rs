//! The connection manager's datagrams beyond this process.
//!
//! QP 1 of the host's port belongs to the host's kernel. Its `ib_umad` lends one class of management datagrams to one
//! process, which for the connection manager's class is possible while the kernel's own manager (`ib_cm`) is not
//! loaded. One file of `ib_umad` receives for all devices. Each device sends with a file of its own: the kernel holds a
//! file while it looks for the MAC address of a peer, and it refuses two datagrams with one transaction number on a
//! file.
//!
//! A guest sends from its own address only, so the host must have that address ([`Bound::is_own`]); what arrives goes
//! to the device whose address it was sent to. The kernel replaces the upper half of transaction numbers; managers find
//! each other by communication ids, which stay as they are.
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
