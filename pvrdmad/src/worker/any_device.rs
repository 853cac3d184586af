//! A device with any adapter.

use std::collections::BTreeMap;
use std::sync::Arc;

use pvrdma_dev::{DeviceStatus, DoorbellWatcher, LimitError, LimitStatus, MappedDoorbells, ObjectKind, PvrdmaDevice};
use pvrdma_guest_memory::MemoryBudget;
use pvrdma_pci_function::PciFunction;
use pvrdma_verbs::{Hca, VerbsError};
use serde_json::Value;

/// A device with any adapter.
pub(super) trait AnyDevice: PciFunction + MappedDoorbells {
    /// Returns the budget of the memory that its guest and its peers may make this process allocate.
    fn budget(&self) -> &Arc<MemoryBudget>;

    /// Sets the watcher of its doorbell pages, which may be memory from now on.
    fn set_watcher(&self, watcher: Arc<dyn DoorbellWatcher>);

    fn device_status(&self) -> DeviceStatus;

    /// Sets its link up or down.
    ///
    /// # Errors
    /// The link belongs to an adapter that other devices use as well.
    fn set_link(&self, up: bool) -> Result<bool, VerbsError>;

    /// Sets the MTU of the route to other hosts, in bytes. `None` restores the configured MTU.
    fn set_uplink_mtu(&self, bytes: Option<u32>);

    /// Informs the driver that its adapter has changed the GID table.
    fn gid_table_changed(&self);

    /// Makes the device fail: all objects are lost, and the driver is told.
    fn fail(&self);

    /// Sets limits.
    ///
    /// # Errors
    /// There is no such limit, or the value is out of range.
    fn set_limits(&self, values: &BTreeMap<String, u64>) -> Result<(), LimitError>;

    /// Returns its limits.
    fn limits(&self) -> Vec<LimitStatus>;

    /// Returns its objects of a kind as data.
    fn device_objects(&self, kind: ObjectKind) -> Value;
}

impl<H: Hca + 'static> AnyDevice for PvrdmaDevice<H> {
    fn budget(&self) -> &Arc<MemoryBudget> {
        self.memory_budget()
    }

    fn set_watcher(&self, watcher: Arc<dyn DoorbellWatcher>) {
        self.set_doorbell_watcher(watcher);
    }

    fn device_status(&self) -> DeviceStatus {
        self.status()
    }

    fn set_link(&self, up: bool) -> Result<bool, VerbsError> {
        Self::set_link(self, up)
    }

    fn set_uplink_mtu(&self, bytes: Option<u32>) {
        Self::set_uplink_mtu(self, bytes);
    }

    fn gid_table_changed(&self) {
        Self::gid_table_changed(self);
    }

    fn fail(&self) {
        Self::fail(self);
    }

    fn set_limits(&self, values: &BTreeMap<String, u64>) -> Result<(), LimitError> {
        Self::set_limits(self, values)
    }

    fn limits(&self) -> Vec<LimitStatus> {
        Self::limits(self)
    }

    fn device_objects(&self, kind: ObjectKind) -> Value {
        self.inspect_objects(kind)
    }
}
