//! The state behind the PCI function: what registers, commands and doorbells act on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, RwLock};
use pvrdma_guest_memory::{DmaSpace, Kept, MemoryBudget};
use pvrdma_verbs::{Backend, DeviceContext, DeviceLog, Hca, VerbsError};

use crate::abi::dsr::Caps;
use crate::config::DeviceConfig;
use crate::events::EventHub;
use crate::intr::Interrupts;
use crate::limits::{LimitStatus, Limits};
use crate::objects::{Objects, affordable};
use crate::pending_doorbells::PendingDoorbells;
use crate::stats::Stats;
use crate::uar::UarPages;
use crate::watched::Watch;

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

/// What the guest is offered, from one start of its driver to the next.
#[derive(Clone, Debug)]
pub(crate) struct Offer {
    /// Limits in force.
    pub(crate) limits: Limits,
    /// The same as the guest sees them.
    pub(crate) caps: Caps,
}

/// Everything that one device shares between its threads. What acts on it is in `cmd/`, `doorbell.rs` and `reclaim.rs`.
///
/// Locks, outermost first: the control lock of the device, the tables and the GID set (never while the backend is
/// called), a view of guest memory, a CQ, the event hub, an event ring, the interrupts.
pub(crate) struct Core<H: Hca> {
    pub(crate) config: DeviceConfig,
    offer: RwLock<Offer>,
    /// Limits as they were set, for the next driver.
    wanted: Mutex<Limits>,
    pub(crate) memory: Arc<DmaSpace>,
    pub(crate) interrupts: Arc<Interrupts>,
    pub(crate) hub: Arc<EventHub>,
    pub(crate) hca: H,
    pub(crate) objects: Objects<H>,
    pub(crate) uar: UarPages,
    pub(crate) pending_doorbells: PendingDoorbells<H>,
    /// What stands in for doorbells that are not heard.
    pub(crate) watch: Watch<H>,
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
            random: config.random,
            rules: config.rules.clone(),
            budget: Arc::clone(&budget),
        })?;
        let offer = offer(&config, &hca, &budget)?;
        Ok(Self {
            objects: Objects::new(&offer.limits, config.random)?,
            uar: UarPages::new(offer.limits.max_uar),
            pending_doorbells: PendingDoorbells::new(),
            watch: Watch::new(),
            gate: Gate::default(),
            stats: Stats::default(),
            budget,
            log,
            wanted: Mutex::new(config.limits),
            offer: RwLock::new(offer),
            config,
            memory,
            interrupts,
            hub,
            hca,
        })
    }

    /// Limits in force.
    pub(crate) fn limits(&self) -> Limits {
        self.offer.read().limits
    }

    /// What the guest is offered.
    pub(crate) fn offer(&self) -> Offer {
        self.offer.read().clone()
    }

    /// What a driver that starts now is offered.
    fn next_offer(&self) -> Result<Offer, VerbsError> {
        offer(&self.config.with_limits(*self.wanted.lock()), &self.hca, &self.budget)
    }

    /// A driver starts: there are no objects, and limits that were set are in force from now on.
    pub(crate) fn renew_offer(&self) {
        match self.next_offer() {
            Ok(offer) => {
                self.objects.set_limits(&offer.limits);
                self.budget.set_limit(offer.limits.max_memory);
                *self.offer.write() = offer;
            }
            Err(error) => self.log.warn(module_path!(), format_args!("limits stay as they were: {error}")),
        }
    }

    /// Sets limits: those that the guest was not told of at once, others for the next driver.
    pub(crate) fn set_limits(&self, new: Limits) {
        *self.wanted.lock() = Limits { max_uar: self.config.limits.max_uar, ..new };
        self.offer.write().limits.max_memory = new.max_memory;
        self.budget.set_limit(new.max_memory);
    }

    /// Limits as they were set.
    pub(crate) fn wanted_limits(&self) -> Limits {
        *self.wanted.lock()
    }

    /// Limits in force, and those of the next driver.
    pub(crate) fn limit_status(&self) -> Vec<LimitStatus> {
        let now = self.limits();
        now.beside(self.next_offer().map_or(now, |offer| offer.limits))
    }

    /// Posts the events that found no room, if there are any. Any activity of the guest may have freed entries of an
    /// event ring.
    pub(crate) fn retry_events(&self) {
        if self.hub.has_pending() {
            self.hub.retry_pending(&self.memory.view());
        }
    }
}

/// What a device with this configuration offers: no more than its adapter has, and no more objects than `max_memory`
/// pays for beside the queues of its links.
///
/// # Errors
/// A limit is out of range, or the adapter has less of something than drivers need.
fn offer<H: Hca>(config: &DeviceConfig, hca: &H, budget: &MemoryBudget) -> Result<Offer, VerbsError> {
    let (limits, _) = config.effective(&hca.limits())?;
    let bytes = limits.max_memory.saturating_sub(budget.used_for(Kept::Queues));
    let (limits, caps) = config.effective(&affordable(hca, &limits, bytes))?;
    Ok(Offer { limits, caps })
}
