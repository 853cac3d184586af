//! Delivery of the interrupts of a vector.

use std::io;

/// Message with which an MSI-X vector interrupts the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Message {
    /// Address of the message.
    pub address: u64,
    /// Data of the message.
    pub data: u32,
}

/// The path from one vector to the guest's processors.
pub trait InterruptLine: Send + Sync {
    /// Sets the message that [`Self::trigger`] sends from now on.
    ///
    /// # Errors
    /// The system refuses. [`Self::trigger`] has no effect then.
    fn route(&self, message: Message) -> io::Result<()>;

    /// Interrupts the guest. Does not block.
    fn trigger(&self);
}
