//! What a socket leads to.

use std::fmt::Arguments;
use std::sync::Arc;
use std::time::Duration;

use log::Level;
use pvrdma_guest_memory::DmaSpace;
use pvrdma_pci_function::PciFunction;

use super::files::FileRules;
use super::irqs::IrqTable;
use super::stats::ConnectionStats;
use crate::keeper::client::Seat;
use crate::mappable::Mappable;

/// For [`Endpoint::reply_deadline`]: QEMU waits for 5 s, and takes what comes later for something else.
pub const REPLY_DEADLINE: Duration = Duration::from_millis(4500);

/// What a socket leads to.
pub struct Endpoint {
    /// Name of the device in the log.
    pub name: String,
    /// The device.
    pub function: Arc<dyn PciFunction>,
    /// Its view of guest memory.
    pub memory: Arc<DmaSpace>,
    /// What of guest memory is taken from a client.
    pub files: FileRules,
    /// Where its interrupts go.
    pub irqs: Arc<IrqTable>,
    /// What receives the descriptors of clients. None: this process, which a client can make wait for ever then.
    pub keeper: Option<Seat>,
    /// What happened so far.
    pub stats: Arc<ConnectionStats>,
    /// What a client may map.
    pub mappable: Option<Mappable>,
    /// The legacy interrupt is offered.
    pub intx: bool,
    /// A reply that comes later than this ends the connection, if its client is one that gives up waiting.
    pub reply_deadline: Duration,
}

impl Endpoint {
    /// Logs what a client caused, if it may.
    pub(super) fn warn(&self, target: &'static str, message: Arguments<'_>) {
        self.stats.log.warn(target, &self.name, message);
    }

    /// Logs what is wrong on our side, if it may.
    pub(super) fn error(&self, target: &'static str, message: Arguments<'_>) {
        self.stats.log.error(target, &self.name, message);
    }

    /// Logs what a client does, if it may.
    pub(super) fn info(&self, target: &'static str, message: Arguments<'_>) {
        self.stats.log.log(target, Level::Info, &self.name, message);
    }
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint").field("name", &self.name).field("stats", &self.stats).finish_non_exhaustive()
    }
}
