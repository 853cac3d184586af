//! Where the interrupts of a vector go.

use std::io;

/// What an MSI-X vector writes to interrupt the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Message {
    /// Address of the write.
    pub address: u64,
    /// What is written there.
    pub data: u32,
}

/// The way from one vector to the guest's processors.
pub trait InterruptLine: Send + Sync {
    /// The messages of [`Self::trigger`] are these from now on.
    ///
    /// # Errors
    /// The system refuses. Nothing is triggered then.
    fn route(&self, message: Message) -> io::Result<()>;

    /// Interrupts the guest. Does not wait.
    fn trigger(&self);
}
