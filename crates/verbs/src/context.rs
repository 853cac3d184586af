//! Context that a device brings to a backend.

use std::sync::Arc;

use pvrdma_base::{DeviceLog, Random};
use pvrdma_guest_memory::{DmaSpace, MemoryBudget};
use pvrdma_verbs_types::GidType;

use crate::queue::EventSink;
use crate::rules::Rules;

/// Context that a device passes to its station to get an adapter.
#[derive(Clone)]
#[non_exhaustive]
pub struct DeviceContext {
    /// Name of the device in logs and configuration.
    pub name: String,
    /// Encapsulation of its GIDs.
    pub roce: GidType,
    /// Memory of its guest.
    pub memory: Arc<DmaSpace>,
    /// Sink of its asynchronous events.
    pub events: Arc<dyn EventSink>,
    /// Log for events that its guest or its peers cause.
    pub log: Arc<DeviceLog>,
    /// Source of its keys.
    pub random: Random,
    /// Address and peer rules of the device.
    pub rules: Rules,
    /// Budget of the memory that its guest and its peers may make this process allocate. The device charges objects
    /// ([`Hca::bytes_of`](crate::Hca::bytes_of)); the adapter charges everything else.
    pub budget: Arc<MemoryBudget>,
}

pvrdma_base::setters!(DeviceContext {
    with_roce => roce: GidType,
    with_log => log: Arc<DeviceLog>,
    with_random => random: Random,
    with_rules => rules: Rules,
});

impl DeviceContext {
    /// Creates the context of a device for RoCE v2, with a log of its own, keys that a peer cannot guess, and the
    /// default rules.
    pub fn new(
        name: impl Into<String>,
        memory: Arc<DmaSpace>,
        events: Arc<dyn EventSink>,
        budget: Arc<MemoryBudget>,
    ) -> Self {
        let name = name.into();
        let log = DeviceLog::new(name.clone());
        let (roce, random, rules) = (GidType::RoceV2, Random::System, Rules::default());
        Self { name, roce, memory, events, log, random, rules, budget }
    }
}

impl std::fmt::Debug for DeviceContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceContext").field("name", &self.name).finish_non_exhaustive()
    }
}
