//! Shared state of a device, used by registers, commands and frames.

use std::iter::repeat;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use pvrdma_base::LogLimit;
use pvrdma_base::locks::{Mutex, RwLock, RwLockReadGuard};
use pvrdma_guest_memory::{DmaSpace, DmaView};
use pvrdma_handover::WaitFlag;
use pvrdma_saved_state::vmxnet3 as saved;

use crate::abi::command::Coalesce;
use crate::abi::regs::{MAX_QUEUES, event};
use crate::config::Vmxnet3Config;
use crate::error::QueueError;
use crate::frame::FramePort;
use crate::intr::Interrupts;
use crate::saved_state::error::{RestoreError, require};
use crate::session::{Session, Which};
use crate::stats::{self, DeviceCounters, RxStats, TxStats};

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

    /// Returns `true` if transmit completions may wait for the next interrupt, provided that the caller ensures that
    /// one follows.
    #[cfg(feature = "link")]
    pub(crate) fn tx_waits(&self) -> bool {
        self.tx.load(Ordering::Relaxed) == Self::ANY
    }
}

/// A pause: see [`Core::pause`].
#[derive(Debug)]
pub(crate) struct Pause {
    /// The session, which no thread uses during the pause.
    pub(crate) session: Option<Arc<Session>>,
    /// The session was restored: its addresses have not been looked up in the memory map yet.
    pub(crate) restored: bool,
}

/// State that a device shares between its threads.
///
/// Lock order, outermost first: the device's control lock, configuration space; a transmit queue; the session; the
/// settings; a receive queue; a view of guest memory; the interrupts; the pause. A thread that calls the port holds the
/// lock of a transmit queue and no other. A thread that waits for a transmit queue may hold the control lock, but no
/// other lock.
pub(crate) struct Core {
    pub(crate) config: Vmxnet3Config,
    pub(crate) memory: Arc<DmaSpace>,
    pub(crate) port: Arc<dyn FramePort>,
    pub(crate) interrupts: Interrupts,
    session: RwLock<Option<Arc<Session>>>,
    /// Set while the device is paused. Changed with the control lock held.
    pub(crate) paused: Mutex<Option<Pause>>,
    /// A thread is about to pause the device: see [`Core::pause`].
    pausing: AtomicBool,
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
            paused: Mutex::new(None),
            pausing: AtomicBool::new(false),
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
        // A port that holds a frame for lack of buffers retries: the driver that would have posted buffers is gone.
        self.pending.fetch_or(pending::RX_BUFFERS, Ordering::AcqRel);
    }

    /// Pauses the device: sets the session aside and holds back interrupts. When this returns, no thread accesses
    /// guest memory, queues or statistics of the session, and none calls the interrupt sink. The caller holds the
    /// control lock.
    ///
    /// All other accesses to guest memory are made with the session locked for reading, or are commands.
    pub(crate) fn pause(&self) {
        if self.is_paused() {
            return;
        }
        self.pausing.store(true, Ordering::Relaxed);
        let session = self.session().clone();
        // Between the call of the port and its completion, a packet that was sent is still in the ring, and would be
        // sent twice. The lock of its queue is held during that time. A thread that locks a queue after this one takes
        // no packet, because it sees `pausing`.
        session.iter().flat_map(|session| session.lock_transmit_queues()).for_each(drop);
        let mut current = self.session.write();
        let vectors = self.rx_vectors.swap(0, Ordering::AcqRel) | self.tx_vectors.swap(0, Ordering::AcqRel);
        self.interrupts.hold(vectors);
        *self.paused.lock() = Some(Pause { session: current.take(), restored: false });
        drop(current);
        self.pausing.store(false, Ordering::Relaxed);
    }

    /// Ends a pause with this session. The caller holds the control lock, and calls
    /// [`run_deferred`](pvrdma_pci_function::PciFunction::run_deferred) after releasing it.
    pub(crate) fn end_pause(&self, session: Option<Arc<Session>>) {
        *self.session.write() = session.clone();
        self.interrupts.release(session.is_some());
        // Doorbells of the pause may be lost. The request for doorbells stays: withdrawing it while the driver polls
        // would let packets overtake each other, see `receive::end_round`.
        self.pending.fetch_or(pending::TX | pending::RX_BUFFERS, Ordering::AcqRel);
        let changed = |it: &&Arc<Session>| it.link_reported() != self.link_up.load(Ordering::Acquire);
        if let Some(session) = session.as_ref().filter(changed) {
            self.during(session, |view| self.report_link(session, view));
        }
    }

    /// Returns the saved form, without the session and the state of other components.
    pub(crate) fn save(&self) -> saved::Function {
        let Self {
            // Those of the destination: its configuration and its surroundings.
            config: _,
            memory: _,
            port: _,
            log: _,
            interrupts,
            // The session is set aside during a pause.
            session: _,
            paused: _,
            pausing: _,
            // It follows configuration space.
            bus_master: _,
            // The session has the link state of which the driver was last notified.
            link_up: _,
            mac: _,
            // The end of a pause looks at all queues, and interrupts for all vectors.
            pending: _,
            rx_vectors: _,
            tx_vectors: _,
            batches: _,
            // The port has the frame that found no buffer.
            starved: _,
            // They follow the coalescing scheme.
            depths: Depths { tx: _, rx: _ },
            coalesce,
            tx_stats,
            rx_stats,
            counters,
        } = self;
        saved::Function {
            mac: self.mac().to_vec(),
            coalesce: coalesce.lock().encode().to_vec(),
            interrupts: Some(interrupts.save()),
            transmit_statistics: tx_stats.iter().map(TxStats::save).collect(),
            receive_statistics: rx_stats.iter().map(RxStats::save).collect(),
            counters: Some(counters.save()),
            ..saved::Function::default()
        }
    }

    /// Checks the part of a saved function that [`Self::restore`] uses.
    ///
    /// # Errors
    /// There are more statistics than queues, or their number of values is wrong.
    pub(crate) fn check(function: &saved::Function) -> Result<(), RestoreError> {
        for statistics in [&function.transmit_statistics, &function.receive_statistics] {
            let count = statistics.len();
            require("number of statistics", count as u64, count <= usize::from(MAX_QUEUES))?;
            statistics.iter().try_for_each(stats::check)?;
        }
        Ok(())
    }

    /// Restores a MAC address, and the statistics and counters of a function that [`Self::check`] has accepted.
    pub(crate) fn restore(&self, function: &saved::Function, [a, b, c, d, e, f]: [u8; 6]) {
        self.mac.store(u64::from_le_bytes([a, b, c, d, e, f, 0, 0]), Ordering::Relaxed);
        let none = saved::Statistics::default();
        let transmit = function.transmit_statistics.iter().chain(repeat(&none));
        self.tx_stats.iter().zip(transmit).for_each(|(to, from)| to.restore(from));
        let receive = function.receive_statistics.iter().chain(repeat(&none));
        self.rx_stats.iter().zip(receive).for_each(|(to, from)| to.restore(from));
        if let Some(counters) = &function.counters {
            self.counters.restore(counters);
        }
    }

    /// Returns `true` if the device is paused.
    pub(crate) fn is_paused(&self) -> bool {
        self.paused.lock().is_some()
    }

    /// Returns `true` if a thread is about to pause the device. The caller has locked a transmit queue, and takes no
    /// packet from it then.
    pub(crate) fn is_pausing(&self) -> bool {
        self.pausing.load(Ordering::Relaxed)
    }

    /// Notifies the driver of the state of the link.
    pub(crate) fn report_link(&self, session: &Session, view: &DmaView<'_>) {
        session.set_link_reported(self.link_up.load(Ordering::Acquire));
        self.post_event(session, view, event::LINK);
    }

    /// Interrupts the guest, which then services all queues of the vector.
    pub(crate) fn raise(&self, vector: u8) {
        // The bit is cleared before the interrupt is raised: the driver then sees every completion that was written
        // before the bit was set, and a completion that is written later sets the bit again.
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
