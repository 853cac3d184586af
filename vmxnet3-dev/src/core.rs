//! What registers, commands and frames act on.

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

/// What was left for [`crate::Vmxnet3Device`] to do after a register write.
pub(crate) mod pending {
    /// Transmit queues: a bit for each.
    pub(crate) const TX: u32 = 0xff;
    /// A driver's round is over, in which it may have given receive buffers, or the driver has gone.
    pub(crate) const RX_BUFFERS: u32 = 1 << 8;
    /// The driver rings for receive buffers.
    pub(crate) const RX_DOORBELL: u32 = 1 << 9;
}

/// Completions of a queue until an interrupt, as far as a batch goes on.
#[derive(Debug)]
pub(crate) struct Depths {
    pub(crate) tx: AtomicU32,
    pub(crate) rx: AtomicU32,
}

impl Depths {
    /// Any number: the driver leaves it to the device.
    const ANY: u32 = u32::MAX;

    /// Returns `true` if completions may wait for the next interrupt, if somebody sees to it that one comes.
    pub(crate) fn tx_waits(&self) -> bool {
        self.tx.load(Ordering::Relaxed) == Self::ANY
    }
}

/// Everything that a device shares between its threads.
///
/// Locks, outermost first: the control lock of the device, configuration space; a transmit queue; the session; the
/// settings; a receive queue; a view of guest memory; the interrupts. Whoever calls the port holds a transmit queue and
/// nothing else, and nobody waits for a transmit queue while he holds anything but the control lock.
pub(crate) struct Core {
    pub(crate) config: Vmxnet3Config,
    pub(crate) memory: Arc<DmaSpace>,
    pub(crate) port: Arc<dyn FramePort>,
    pub(crate) interrupts: Interrupts,
    session: RwLock<Option<Arc<Session>>>,
    bus_master: AtomicBool,
    pub(crate) link_up: AtomicBool,
    /// MAC address that the guest has chosen, in the order of its two registers.
    pub(crate) mac: AtomicU64,
    /// See [`pending`].
    pub(crate) pending: AtomicU32,
    /// A frame was refused for want of buffers.
    pub(crate) starved: WaitFlag,
    /// Vectors of receive queues to raise at the end of a batch: a bit for each.
    pub(crate) rx_vectors: AtomicU32,
    /// Vectors of transmit queues with completions that the driver has not been told of: a bit for each. Whatever
    /// raises the vector tells it.
    pub(crate) tx_vectors: AtomicU32,
    /// Batches of received frames that have ended.
    pub(crate) batches: AtomicU32,
    pub(crate) depths: Depths,
    pub(crate) coalesce: Mutex<Coalesce>,
    pub(crate) tx_stats: [TxStats; MAX_QUEUES as usize],
    pub(crate) rx_stats: [RxStats; MAX_QUEUES as usize],
    pub(crate) counters: DeviceCounters,
    pub(crate) log: LogLimit,
}

impl Core {
    /// As after power-on, with the link up.
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

    /// The burnt-in MAC address again.
    pub(crate) fn reset_mac(&self) {
        let [a, b, c, d, e, f] = self.config.mac.0;
        self.mac.store(u64::from_le_bytes([a, b, c, d, e, f, 0, 0]), Ordering::Relaxed);
    }

    /// The MAC address that the guest has chosen.
    pub(crate) fn mac(&self) -> [u8; 6] {
        let [a, b, c, d, e, f, _, _] = self.mac.load(Ordering::Relaxed).to_le_bytes();
        [a, b, c, d, e, f]
    }

    /// Returns `true` if the guest lets the function reach memory.
    pub(crate) fn is_bus_master(&self) -> bool {
        self.bus_master.load(Ordering::Acquire)
    }

    /// Bus Master Enable.
    pub(crate) fn set_bus_master(&self, enabled: bool) {
        self.bus_master.store(enabled, Ordering::Release);
        if enabled {
            self.pending.fetch_or(pending::TX, Ordering::AcqRel);
        }
    }

    /// What a driver has set up. Nobody ends it while this is held.
    pub(crate) fn session(&self) -> RwLockReadGuard<'_, Option<Arc<Session>>> {
        self.session.read()
    }

    /// Starts or ends. When this returns, nobody touches memory for the session before.
    pub(crate) fn set_session(&self, session: Option<Arc<Session>>) {
        let mut current = self.session.write();
        *current = session;
        // Nobody adds a bit of the next session before this is over.
        self.rx_vectors.store(0, Ordering::Release);
        self.tx_vectors.store(0, Ordering::Release);
        drop(current);
        // Who keeps a frame for want of buffers tries again: the driver that would have given some has gone.
        self.pending.fetch_or(pending::RX_BUFFERS, Ordering::AcqRel);
    }

    /// Interrupts the guest, which then looks at all queues of a vector.
    pub(crate) fn raise(&self, vector: u8) {
        // In this order: the driver sees what was completed before the bit was set.
        self.tx_vectors.fetch_and(!(1 << vector), Ordering::AcqRel);
        self.interrupts.raise(vector);
    }

    /// Runs something with memory while `session` is the one in force.
    pub(crate) fn during<T>(&self, session: &Arc<Session>, run: impl FnOnce(&DmaView<'_>) -> T) -> Option<T> {
        let current = self.session.read();
        let is_current = current.as_ref().is_some_and(|it| Arc::ptr_eq(it, session));
        (is_current && self.is_bus_master()).then(|| run(&self.memory.view()))
    }

    /// Sets coalescing.
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

    /// Stops a queue whose rings make no sense, and tells the driver. Bus mastering that ended in the middle is no
    /// fault of the rings.
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

    /// Tells the driver of an event.
    pub(crate) fn post_event(&self, session: &Session, view: &DmaView<'_>, event: u32) {
        session.change_events(view, event, 0);
        self.raise(session.event_vector);
    }
}
