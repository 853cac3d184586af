//! The part of an endpoint that a migration needs.

use std::fmt;
use std::sync::Arc;

use pvrdma_guest_memory::MemoryBudget;
use pvrdma_pci_function::Migratable;

/// A function whose client may migrate it.
#[derive(Clone)]
pub struct MigratableDevice {
    /// The function of the endpoint.
    pub function: Arc<dyn Migratable>,
    /// Memory that the device may keep. States in transit and logs of written pages are charged to it.
    pub budget: Arc<MemoryBudget>,
    /// Called after the VM has moved away.
    pub left: Arc<dyn Fn() + Send + Sync>,
}

impl MigratableDevice {
    /// Describes a function whose place in a network need not change when its VM moves away.
    pub fn new(function: Arc<dyn Migratable>, budget: Arc<MemoryBudget>) -> Self {
        Self { function, budget, left: Arc::new(|| {}) }
    }
}

impl fmt::Debug for MigratableDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MigratableDevice").field("budget", &self.budget).finish_non_exhaustive()
    }
}
