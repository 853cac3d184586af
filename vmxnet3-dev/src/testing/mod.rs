//! In-process guest: memory, interrupts, and a driver that is as strict as the kernel's.
//!
//! Conditions on which the kernel's driver would panic or warn are assertions here.

#![expect(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "for tests only")]

mod driver;
pub mod frames;
mod guest;
mod irq;
mod memory;
mod port;
mod rx_queue;
mod tx_queue;

pub use driver::{DetachedDriver, Driver, DriverConfig, command, feature, rx_mode};
pub use guest::Guest;
pub use irq::Irqs;
pub use memory::{MEMORY_BASE, Memory};
pub use port::{Cable, RecordingPort, SentFrame};
pub use rx_queue::{DriverRxQueue, RxKind, RxLayout, RxPacket};
pub use tx_queue::{DriverTxQueue, TxOffload, TxPacket};
