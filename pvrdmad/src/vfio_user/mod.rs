//! A vfio-user server for one PCI function per socket.
//!
//! Own code rather than the server of the `vfio_user` crate, which a legal message can panic and which loses errnos.
//! The clients that matter are QEMU's `vfio-user-pci` and Cloud Hypervisor; both are unforgiving in their own way:
//!
//! - A request without NO_REPLY is answered exactly once and in order, one with it never. [`stream`] makes that a
//!   matter of types. A reply that comes after the client's timeout would be taken for another message, so the
//!   connection ends instead.
//! - Nothing that works normally is answered with an error: accesses outside a region read zero and ignore writes.
//! - Clients may disconnect without notice. The device is reset, its memory given back, and the next client served at
//!   once.
//! - Writes are never posted, thanks to a flag in [`regions`]; see there.
//!
//! Not implemented: messages to the client (memory must be shared), migration, dirty pages. Of the BARs a client maps
//! doorbell pages alone, where the device lends them.

mod call_thread;
mod connection;
mod dma;
mod endpoint;
pub(crate) mod eventfd;
pub(crate) mod examine;
mod files;
mod irqs;
pub mod message;
mod pinner;
mod regions;
pub mod request;
mod server;
mod stats;
mod stream;

pub use endpoint::{Endpoint, REPLY_DEADLINE};
pub use files::FileRules;
pub use irqs::{IrqCounters, IrqTable};
pub use server::{Server, StuckClient};
pub use stats::{ClientCounters, ConnectionStats};
