//! Core of the device: the state that registers, commands and doorbells operate on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, RwLock};
use pvrdma_base::DeviceLog;
use pvrdma_guest_memory::{DmaSpace, Kept, MemoryBudget};
use pvrdma_packet::MacAddr;
use pvrdma_verbs::{DeviceContext, Hca, Station, VerbsError};

use crate::abi::dsr::Caps;
use crate::config::DeviceConfig;
use crate::events::EventHub;
use crate::intr::Interrupts;
use crate::limits::{LimitStatus, Limits};
use crate::objects::{Objects, affordable};
use crate::pending_doorbells::PendingDoorbells;
use crate::stats::Stats;
use crate::uar::UarPages;
use crate::watch::Watch;

/// Determines if commands and doorbells are served: only while the device is active and bus mastering is enabled.
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

/// Limits and capabilities offered to the guest. They are constant while its driver runs.
#[derive(Clone, Debug)]
pub(crate) struct Offer {
    /// Limits in force.
    pub(crate) limits: Limits,
    /// The same limits, in the form that the guest reads.
    pub(crate) caps: Caps,
}

/// State shared by all threads of one device. The operations on it are in `cmd/`, `doorbell.rs` and `reclaim.rs`.
///
/// Lock order, outermost first: the control lock of the device, the tables and the GID set (never held while the
/// backend is called), a view of guest memory, a CQ, the event hub, an event ring, the interrupts.
pub(crate) struct Core<H: Hca> {
    pub(crate) config: DeviceConfig,
    pub(crate) mac: MacAddr,
    pub(crate) offer: RwLock<Offer>,
    /// Configured limits, which take effect when the next driver starts.
    pub(crate) wanted: Mutex<Limits>,
    pub(crate) memory: Arc<DmaSpace>,
    pub(crate) interrupts: Arc<Interrupts>,
    pub(crate) hub: Arc<EventHub>,
    pub(crate) hca: H,
    pub(crate) objects: Objects<H>,
    pub(crate) uar: UarPages,
    pub(crate) pending_doorbells: PendingDoorbells<H>,
    /// Watches rings whose doorbells are not trapped.
    pub(crate) watch: Watch<H>,
    pub(crate) gate: Gate,
    /// The device is paused. Changed with the control lock of the device held.
    pub(crate) paused: AtomicBool,
    pub(crate) stats: Stats,
    /// Budget of the memory that the guest and its peers may make this process allocate.
    pub(crate) budget: Arc<MemoryBudget>,
    pub(crate) log: Arc<DeviceLog>,
}

impl<H: Hca> Core<H> {
    /// Gets an adapter from the station and creates empty tables for it.
    ///
    /// # Errors
    /// The configuration is invalid, or the backend cannot serve another device.
    pub(crate) fn new<S: Station<Hca = H>>(
        config: DeviceConfig,
        memory: Arc<DmaSpace>,
        interrupts: Arc<Interrupts>,
        station: &S,
    ) -> Result<Self, VerbsError> {
        let log = DeviceLog::new(config.name.clone());
        let hub = EventHub::new(&log);
        let budget = MemoryBudget::new(config.limits.max_memory);
        let mac = station.mac();
        let events = Arc::<EventHub>::clone(&hub);
        let context = DeviceContext::new(config.name.clone(), Arc::clone(&memory), events, Arc::clone(&budget))
            .with_roce(config.roce)
            .with_log(Arc::clone(&log))
            .with_random(config.random)
            .with_rules(config.rules.clone());
        let hca = station.attach(context)?;
        let offer = offer(&config, mac, &hca, &budget)?;
        Ok(Self {
            objects: Objects::new(&offer.limits, config.random)?,
            uar: UarPages::new(offer.limits.max_uar),
            pending_doorbells: PendingDoorbells::new(),
            watch: Watch::new(),
            gate: Gate::default(),
            paused: AtomicBool::new(false),
            stats: Stats::default(),
            budget,
            log,
            wanted: Mutex::new(config.limits),
            offer: RwLock::new(offer),
            config,
            mac,
            memory,
            interrupts,
            hub,
            hca,
        })
    }

    /// Returns the limits in force.
    pub(crate) fn limits(&self) -> Limits {
        self.offer.read().limits
    }

    /// Returns the offer to the current driver.
    pub(crate) fn offer(&self) -> Offer {
        self.offer.read().clone()
    }

    /// Returns the offer to a driver that starts now.
    fn next_offer(&self) -> Result<Offer, VerbsError> {
        offer(&self.config.clone().with_limits(*self.wanted.lock()), self.mac, &self.hca, &self.budget)
    }

    /// Renews the offer when a driver starts: there are no objects then, and the configured limits take effect.
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

    /// Puts the limits in force that the driver of a restored device has read. There must be no objects.
    ///
    /// # Errors
    /// The adapter has less, or BAR 2 has another size.
    pub(crate) fn restore_offer(&self, limits: Limits) -> Result<(), VerbsError> {
        if limits.max_uar != self.limits().max_uar {
            return Err(VerbsError::Invalid("size of BAR 2"));
        }
        if limits.bounded_by(&self.hca.limits())? != limits {
            return Err(VerbsError::Exhausted("object: the adapter has lower limits"));
        }
        self.objects.set_limits(&limits);
        *self.offer.write() = Offer { limits, caps: limits.caps(&self.config, self.mac) };
        Ok(())
    }

    /// Sets limits. Limits that the guest cannot see take effect immediately, and the others when the next driver
    /// starts.
    pub(crate) fn set_limits(&self, new: Limits) {
        *self.wanted.lock() = Limits { max_uar: self.config.limits.max_uar, ..new };
        self.offer.write().limits.max_memory = new.max_memory;
        self.budget.set_limit(new.max_memory);
    }

    /// Returns the configured limits.
    pub(crate) fn wanted_limits(&self) -> Limits {
        *self.wanted.lock()
    }

    /// Returns the configured limits, bounded by those of the adapter. A driver may get less, as the memory limit
    /// allows.
    ///
    /// # Errors
    /// A limit is out of range, or the adapter supports less of a resource than drivers need.
    pub(crate) fn configured_limits(&self) -> Result<Limits, VerbsError> {
        self.wanted_limits().bounded_by(&self.hca.limits())
    }

    /// Returns the limits in force and those of the next driver.
    pub(crate) fn limit_status(&self) -> Vec<LimitStatus> {
        let now = self.limits();
        now.beside(self.next_offer().map_or(now, |offer| offer.limits))
    }

    /// Posts the events that still wait because an event ring was full. Any activity of the guest may have freed
    /// entries of an event ring.
    pub(crate) fn retry_events(&self) {
        if self.hub.has_pending() {
            self.hub.retry_pending(&self.memory.view());
        }
    }
}

/// Returns the offer of a device with this configuration: no more than its adapter supports, and no more objects than
/// `max_memory` can hold beside the queues of its links.
///
/// # Errors
/// A limit is out of range, or the adapter supports less of a resource than drivers need.
fn offer<H: Hca>(config: &DeviceConfig, mac: MacAddr, hca: &H, budget: &MemoryBudget) -> Result<Offer, VerbsError> {
    let (limits, _) = config.effective(mac, &hca.limits())?;
    let bytes = limits.max_memory.saturating_sub(budget.used_for(Kept::Queues));
    let (limits, caps) = config.effective(mac, &affordable(hca, &limits, bytes))?;
    Ok(Offer { limits, caps })
}
