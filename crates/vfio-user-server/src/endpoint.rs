//! Endpoint of a socket: the device that clients reach there.

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
use crate::migratable_device::MigratableDevice;

/// Default of [`Endpoint::reply_deadline`]. QEMU waits 5 s, and would take a later reply for that to another request.
pub const REPLY_DEADLINE: Duration = Duration::from_millis(4500);

/// Device behind a socket, with the parts that the server drives.
#[non_exhaustive]
pub struct Endpoint {
    /// Name of the device in the log.
    pub name: String,
    /// The device.
    pub function: Arc<dyn PciFunction>,
    /// The device's view of guest memory.
    pub memory: Arc<DmaSpace>,
    /// Rules for the files of guest memory that a client sends.
    pub files: FileRules,
    /// Targets of the device's interrupts.
    pub irqs: Arc<IrqTable>,
    /// Keeper that receives the descriptors of clients. `None`: this process receives them, and a client can block it
    /// forever.
    pub keeper: Option<Seat>,
    /// Statistics.
    pub stats: Arc<ConnectionStats>,
    /// The device, if its client may migrate it. `None`: no feature of a migration is offered.
    pub migration: Option<MigratableDevice>,
    /// Part of a region that a client may map.
    pub mappable: Option<Mappable>,
    /// The legacy interrupt is offered.
    pub intx: bool,
    /// Time after which a reply ends the connection, for clients that stop waiting for replies.
    pub reply_deadline: Duration,
}

pvrdma_base::setters!(Endpoint {
    with_files => files: FileRules,
    with_keeper => keeper: Option<Seat>,
    with_stats => stats: Arc<ConnectionStats>,
    with_migration => migration: Option<MigratableDevice>,
    with_mappable => mappable: Option<Mappable>,
    with_intx => intx: bool,
    with_reply_deadline => reply_deadline: Duration,
});

impl Endpoint {
    /// Creates the endpoint of a device that its client cannot migrate, without a keeper, a legacy interrupt and memory
    /// to map.
    pub fn new(
        name: impl Into<String>,
        function: Arc<dyn PciFunction>,
        memory: Arc<DmaSpace>,
        irqs: Arc<IrqTable>,
    ) -> Self {
        Self {
            name: name.into(),
            function,
            memory,
            files: FileRules::default(),
            irqs,
            keeper: None,
            stats: Arc::default(),
            migration: None,
            mappable: None,
            intx: false,
            reply_deadline: REPLY_DEADLINE,
        }
    }

    /// Logs a warning about an action of a client, subject to the log limit.
    pub(super) fn warn(&self, target: &'static str, message: Arguments<'_>) {
        self.stats.log.warn(target, &self.name, message);
    }

    /// Logs an error on the server's side, subject to the log limit.
    pub(super) fn error(&self, target: &'static str, message: Arguments<'_>) {
        self.stats.log.error(target, &self.name, message);
    }

    /// Logs an action of a client, subject to the log limit.
    pub(super) fn info(&self, target: &'static str, message: Arguments<'_>) {
        self.stats.log.log(target, Level::Info, &self.name, message);
    }
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint").field("name", &self.name).field("stats", &self.stats).finish_non_exhaustive()
    }
}
