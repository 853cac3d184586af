//! vfio-user server: exports a [`PciFunction`](pvrdma_pci_function::PciFunction) to a VMM through a Unix socket.
//!
//! A [`Server`] serves one function at one socket, to one client at a time and any number of clients in turn. An
//! [`Endpoint`] holds the parts of the function that the server drives: the function itself, its view of guest memory
//! and the table of its interrupts. The server treats each client as hostile: it checks every message, accepts guest
//! memory only from files that cannot block, survives a client that truncates such a file ([`sigbus`]), and can
//! delegate the receipt of all descriptors to another process ([`keeper`]). A server can give its client to another
//! server, which the client does not notice ([`Server::hold`], [`Server::adopt`]), and it can serve a client whose
//! server has crashed ([`Server::recover`]).
//!
//! The `vfio_user` crate is not used, because its server panics on a legal message and loses errnos. The relevant
//! clients are QEMU's `vfio-user-pci` and Cloud Hypervisor, which are strict in different ways:
//!
//! - A request without NO_REPLY is answered exactly once and in order, and a request with it is never answered. Types
//!   ensure both. A client would take a reply that arrives after its timeout for that to another message, so the server
//!   then closes the connection instead.
//! - Regular operation never causes an error reply: accesses outside a region read zero and ignore writes.
//! - Clients may disconnect without notice. The server then resets the device, releases the client's memory, and serves
//!   the next client at once.
//! - Writes are never posted: a flag in the region information prevents it.
//!
//! A client can migrate a function that can be saved ([`MigratableDevice`]), by version 2 of VFIO's migration interface
//! and a log of written pages ([`MigrationState`], [`Feature`]).
//!
//! Not implemented: messages to the client (memory must be shared), pre-copy of the device's own state, the bitmap of
//! DMA_UNMAP. Of the BARs a client maps only the part that [`Mappable`] names.
//!
//! # Example
//!
//! A function with one read-only BAR, its server, and a client that connects. In production, the client is a VMM.
//!
//! ```
//! # use std::{os::unix::net::UnixStream, sync::Arc};
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("answer.sock");
//! use pvrdma_guest_memory::{DmaSpace, PinPolicy};
//! use pvrdma_pci_function::{Bar, Deferred, MsixPlace, PciFunction};
//! use pvrdma_vfio_user_server::{Endpoint, IrqTable, Server};
//!
//! struct Answer;
//! impl PciFunction for Answer {
//!     fn bars(&self) -> [Option<Bar>; 6] { [Some(Bar { size: 4096, is_64bit: false }), None, None, None, None, None] }
//!     fn config_size(&self) -> usize { 256 }
//!     fn config_read(&self, _: usize, data: &mut [u8]) { data.fill(0) }
//!     fn config_write(&self, _: usize, _: &[u8]) {}
//!     fn bar_read(&self, _: usize, _: u64, data: &mut [u8]) { data.fill(42) }
//!     fn bar_write(&self, _: usize, _: u64, _: &[u8]) -> Deferred { Deferred::Nothing }
//!     fn run_deferred(&self) {}
//!     fn msix(&self) -> Option<MsixPlace> { None }
//!     fn reset(&self) {}
//! }
//!
//! let (memory, irqs) = (DmaSpace::new(PinPolicy::Off), Arc::new(IrqTable::default()));
//! let server = Server::listen(&path, Endpoint::new("answer", Arc::new(Answer), memory, irqs))?;
//! let client = UnixStream::connect(&path)?;
//! # drop(client);
//! assert!(server.end().is_none(), "the thread of the client ended in time");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod call_thread;
mod client_connection;
mod connection;
mod dma;
mod endpoint;
pub mod eventfd;
mod examine;
mod fields;
mod files;
mod irqs;
pub mod keeper;
mod kept;
mod mappable;
pub mod message;
mod migratable_device;
mod migration;
mod pinner;
mod recover;
mod regions;
pub mod request;
mod server;
mod session;
pub mod sigbus;
pub mod socket;
mod stats;
mod stream;
mod transfer;

pub use client_connection::{ClientConnection, ClientInterrupts, ClientRange, FilePart};
pub use endpoint::{Endpoint, REPLY_DEADLINE};
pub use files::FileRules;
pub use irqs::{IrqCounters, IrqTable};
pub use mappable::Mappable;
pub use migratable_device::MigratableDevice;
pub use migration::{Feature, LogRanges, MigrationState};
pub use pinner::pin_advice;
pub use recover::Recovery;
pub use server::{Server, StuckClient};
pub use stats::{ClientCounters, ConnectionStats, MemoryCost};
pub use transfer::{AdoptError, AdoptedClient, HeldClient, HoldError};
