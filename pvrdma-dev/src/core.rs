//! The state behind the PCI function: what registers, commands and doorbells act on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pvrdma_guest_memory::{DmaSpace, MemoryBudget};
use pvrdma_verbs::{Backend, DeviceContext, DeviceLog, Hca, VerbsError};

use crate::abi::dsr::Caps;
use crate::config::DeviceConfig;
use crate::events::EventHub;
use crate::intr::Interrupts;
use crate::limits::Limits;
use crate::objects::Objects;
use crate::pending_doorbells::PendingDoorbells;
use crate::stats::Stats;
use crate::uar::UarPages;

/// Decides whether commands and doorbells are served: only while the device is active and may master the bus.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    active: AtomicBool,
    bus_master: AtomicBool,
}

impl Gate {
    pub(crate) fn is_open(&self) -> bool {
        self.active.load(Ordering::Acquire) && self.bus_master.load(Ordering::Acquire)
    }

    pub(crate) fn is_bus_master(&self) -> bool {
        self.bus_master.load(Ordering::Acquire)
    }

    pub(crate) fn set_active(&self, active: bool) {
        self.active.store(active, Ordering::Release);
    }

    pub(crate) fn set_bus_master(&self, enabled: bool) {
        self.bus_master.store(enabled, Ordering::Release);
    }
}

/// Everything that one device shares between its threads. What acts on it is in `cmd/`, `doorbell.rs` and `reclaim.rs`.
///
/// Locks, outermost first: the control lock of the device, the tables and the GID set (never while the backend is
/// called), a view of guest memory, a CQ, the event hub, an event ring, the interrupts.
pub(crate) struct Core<H: Hca> {
    pub(crate) config: DeviceConfig,
    /// Limits in force.
    pub(crate) limits: Limits,
    /// The same as the guest sees them.
    pub(crate) caps: Caps,
    pub(crate) memory: Arc<DmaSpace>,
    pub(crate) interrupts: Arc<Interrupts>,
    pub(crate) hub: Arc<EventHub>,
    pub(crate) hca: H,
    pub(crate) objects: Objects<H>,
    pub(crate) uar: UarPages,
    pub(crate) pending_doorbells: PendingDoorbells<H>,
    pub(crate) gate: Gate,
    pub(crate) stats: Stats,
    /// What the guest and its peers may make this process keep.
    pub(crate) budget: Arc<MemoryBudget>,
    pub(crate) log: Arc<DeviceLog>,
}

impl<H: Hca> Core<H> {
    /// Asks the backend for an adapter and makes empty tables for it.
    ///
    /// # Errors
    /// The configuration makes no sense, or the backend cannot serve another device.
    pub(crate) fn new<B: Backend<Hca = H>>(
        config: DeviceConfig,
        memory: Arc<DmaSpace>,
        interrupts: Arc<Interrupts>,
        backend: &B,
    ) -> Result<Self, VerbsError> {
        let log = DeviceLog::new(config.name.clone());
        let hub = EventHub::new(&log);
        let budget = MemoryBudget::new(config.limits.max_memory);
        let hca = backend.attach(DeviceContext {
            name: config.name.clone(),
            mac: config.mac,
            roce: config.roce,
            memory: Arc::clone(&memory),
            events: Arc::<EventHub>::clone(&hub),
            log: Arc::clone(&log),
            budget: Arc::clone(&budget),
        })?;
        let (limits, caps) = config.effective(&hca.limits())?;
        Ok(Self {
            objects: Objects::new(&limits),
            uar: UarPages::new(limits.max_uar),
            pending_doorbells: PendingDoorbells::new(),
            gate: Gate::default(),
            stats: Stats::default(),
            budget,
            log,
            config,
            limits,
            caps,
            memory,
            interrupts,
            hub,
            hca,
        })
    }

    /// Posts the events that found no room, if there are any. Any activity of the guest may have freed entries of an
    /// event ring.
    pub(crate) fn retry_events(&self) {
        if self.hub.has_pending() {
            self.hub.retry_pending(&self.memory.view());
        }
    }
}
