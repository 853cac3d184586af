//! Shared state of a device, used by registers, commands and frames.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use pvrdma_base::LogLimit;
use pvrdma_guest_memory::{DmaSpace, DmaView};
use pvrdma_handover::WaitFlag;

use crate::abi::command::Coalesce;
use crate::abi::regs::{MAX_QUEUES, event};
use crate::config::Vmxnet3Config;
use crate::error::QueueError;
use crate::frame::FramePort;
use crate::intr::Interrupts;
use crate::session::{Session, Which};
use crate::stats::{DeviceCounters, RxStats, TxStats};

/// Bits of work that a register write deferred to [`crate::Vmxnet3Device`].
pub(crate) mod pending {
    /// Transmit queues to run, one bit per queue.
    pub(crate) const TX: u32 = 0xff;
    /// A driver's round has ended, in which it may have posted receive buffers, or the driver is gone.
    pub(crate) const RX_BUFFERS: u32 = 1 << 8;
    /// A doorbell for receive buffers is pending.
    pub(crate) const RX_DOORBELL: u32 = 1 << 9;
}

/// Number of completions of a queue within a batch until an interrupt is raised.
#[derive(Debug)]
pub(crate) struct Depths {
    pub(crate) tx: AtomicU32,
    pub(crate) rx: AtomicU32,
}

impl Depths {
    /// No limit: the driver leaves the choice to the device.
    const ANY: u32 = u32::MAX;

    /// Returns `true` if transmit completions may wait for the next interrupt, provided that the caller makes sure that
    /// one follows.
    pub(crate) fn tx_waits(&self) -> bool {
        self.tx.load(Ordering::Relaxed) == Self::ANY
    }
}

/// State that a device shares between its threads.
///
/// Lock order, outermost first: the device's control lock, configuration space; a transmit queue; the session; the
/// settings; a receive queue; a view of guest memory; the interrupts. A thread that calls the port holds the lock of a
/// transmit queue and no other. A thread that waits for a transmit queue may hold the control lock, but no other lock.
pub(crate) struct Core {
    pub(crate) config: Vmxnet3Config,
    pub(crate) memory: Arc<DmaSpace>,
    pub(crate) port: Arc<dyn FramePort>,
    pub(crate) interrupts: Interrupts,
    session: RwLock<Option<Arc<Session>>>,
    bus_master: AtomicBool,
    pub(crate) link_up: AtomicBool,
    /// MAC address currently set by the guest, in the layout of its two registers.
    pub(crate) mac: AtomicU64,
    /// See [`pending`].
    pub(crate) pending: AtomicU32,
    /// Set when a frame was refused because no buffers were available.
    pub(crate) starved: WaitFlag,
    /// Vectors of receive queues to raise at the end of a batch, one bit per vector.
    pub(crate) rx_vectors: AtomicU32,
    /// Vectors of transmit queues with completions for which the driver has not been interrupted, one bit per vector.
    /// Any interrupt on the vector clears its bit.
    pub(crate) tx_vectors: AtomicU32,
    /// Number of batches of received frames that have ended.
    pub(crate) batches: AtomicU32,
    pub(crate) depths: Depths,
    pub(crate) coalesce: Mutex<Coalesce>,
    pub(crate) tx_stats: [TxStats; MAX_QUEUES as usize],
    pub(crate) rx_stats: [RxStats; MAX_QUEUES as usize],
    pub(crate) counters: DeviceCounters,
    pub(crate) log: LogLimit,
}

impl Core {
    /// Creates the state after power-on, with the link up.
    pub(crate) fn new(
        config: Vmxnet3Config,
        memory: Arc<DmaSpace>,
        interrupts: Interrupts,
        port: Arc<dyn FramePort>,
    ) -> Self {
        let core = Self {
            memory,
            port,
            interrupts,
            session: RwLock::new(None),
            bus_master: AtomicBool::new(false),
            link_up: AtomicBool::new(true),
            mac: AtomicU64::new(0),
            pending: AtomicU32::new(0),
            starved: WaitFlag::new(),
            rx_vectors: AtomicU32::new(0),
            tx_vectors: AtomicU32::new(0),
            batches: AtomicU32::new(0),
            depths: Depths { tx: AtomicU32::new(Depths::ANY), rx: AtomicU32::new(Depths::ANY) },
            coalesce: Mutex::new(Coalesce::default()),
            tx_stats: Default::default(),
            rx_stats: Default::default(),
            counters: DeviceCounters::default(),
            log: LogLimit::new(),
            config,
        };
        core.reset_mac();
        core
    }

    /// Restores the permanent MAC address.
    pub(crate) fn reset_mac(&self) {
        let [a, b, c, d, e, f] = self.config.mac.0;
        self.mac.store(u64::from_le_bytes([a, b, c, d, e, f, 0, 0]), Ordering::Relaxed);
    }

    /// Returns the MAC address currently set by the guest.
    pub(crate) fn mac(&self) -> [u8; 6] {
        let [a, b, c, d, e, f, _, _] = self.mac.load(Ordering::Relaxed).to_le_bytes();
        [a, b, c, d, e, f]
    }

    /// Returns `true` if the guest has enabled bus mastering.
    pub(crate) fn is_bus_master(&self) -> bool {
        self.bus_master.load(Ordering::Acquire)
    }

    /// Sets Bus Master Enable.
    pub(crate) fn set_bus_master(&self, enabled: bool) {
        self.bus_master.store(enabled, Ordering::Release);
        if enabled {
            self.pending.fetch_or(pending::TX, Ordering::AcqRel);
        }
    }

    /// Returns the current session. The session cannot end while the guard is held.
    pub(crate) fn session(&self) -> RwLockReadGuard<'_, Option<Arc<Session>>> {
        self.session.read()
    }

    /// Starts or ends a session. When this returns, no thread accesses memory for the previous session.
    pub(crate) fn set_session(&self, session: Option<Arc<Session>>) {
        let mut current = self.session.write();
        *current = session;
        // The write lock is still held, so no thread can set a bit for the next session before the bits are cleared.
        self.rx_vectors.store(0, Ordering::Release);
        self.tx_vectors.store(0, Ordering::Release);
        drop(current);
        // Lets a port that holds a frame for lack of buffers retry: the driver that would have posted buffers is gone.
        self.pending.fetch_or(pending::RX_BUFFERS, Ordering::AcqRel);
    }

    /// Interrupts the guest, which then services all queues of the vector.
    pub(crate) fn raise(&self, vector: u8) {
        // Clear the bit before raising: the driver then sees every completion written before the bit was set. A
        // completion that is written later sets the bit again.
        self.tx_vectors.fetch_and(!(1 << vector), Ordering::AcqRel);
        self.interrupts.raise(vector);
    }

    /// Calls `run` with a view of memory if `session` is still the current one and bus mastering is enabled.
    pub(crate) fn during<T>(&self, session: &Arc<Session>, run: impl FnOnce(&DmaView<'_>) -> T) -> Option<T> {
        let current = self.session.read();
        let is_current = current.as_ref().is_some_and(|it| Arc::ptr_eq(it, session));
        (is_current && self.is_bus_master()).then(|| run(&self.memory.view()))
    }

    /// Sets the coalescing scheme.
    pub(crate) fn set_coalesce(&self, coalesce: Coalesce) {
        let (tx, rx) = match coalesce {
            Coalesce::Disabled => (1, 1),
            Coalesce::Adaptive | Coalesce::Rate(_) => (Depths::ANY, Depths::ANY),
            Coalesce::Static([_, tx, rx]) => (tx.max(1), rx.max(1)),
        };
        self.depths.tx.store(tx, Ordering::Relaxed);
        self.depths.rx.store(rx, Ordering::Relaxed);
        *self.coalesce.lock() = coalesce;
    }

    /// Stops a queue whose rings are invalid, and notifies the driver. A memory error caused by disabling bus mastering
    /// during an access is not an error of the rings and is ignored.
    pub(crate) fn fail(&self, session: &Session, view: &DmaView<'_>, which: Which, error: &QueueError) {
        if matches!(error, QueueError::Memory(_)) && !self.memory.is_enabled() {
            return;
        }
        self.counters.vmxnet3_queue_errors.increment();
        self.log.warn(module_path!(), &self.config.name, format_args!("{which:?} stops: {error}"));
        session.stop(view, which, error);
        let event = match which {
            Which::Tx(_) => event::TX_QUEUE,
            Which::Rx(_) => event::RX_QUEUE,
        };
        self.post_event(session, view, event);
    }

    /// Posts an event to the driver.
    pub(crate) fn post_event(&self, session: &Session, view: &DmaView<'_>, event: u32) {
        session.change_events(view, event, 0);
        self.raise(session.event_vector);
    }
}
