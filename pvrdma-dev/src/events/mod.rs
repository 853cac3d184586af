// Long: both event rings, and the entries that wait for room in them.
//! The two event rings: asynchronous events and CQ notifications (spec §6.4, §9.5, §10).
//!
//! [`EventRings`] are the rings of one handshake. [`EventHub`] lives as long as the device: completion queues and the
//! adapter keep a reference to it while rings are installed and removed.
//!
//! No event is lost while rings are installed. The guest has no doorbell to report that it consumed events, so events
//! that do not fit wait here until the next event or [`EventHub::retry_pending`], which the device calls at every
//! access of the guest. There is no timer, because it would have to poll for a guest that may never consume anything.
//! It is not needed either: a guest that takes hundreds of events out of a full ring reacts to them, so it polls, arms,
//! modifies or destroys. The number of waiting events is bounded: a queue has at most one notification, and an object
//! one event of each kind.

use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::hash::Hash;
use std::sync::Arc;

use log::debug;
use parking_lot::{Mutex, RwLock};
use pvrdma_base::{Counter, DeviceLog, counters};
use pvrdma_guest_memory::{DmaSpace, DmaView};
use pvrdma_handover::WaitFlag;
use pvrdma_pages::{PageList, PageListBuilder};
use pvrdma_verbs::{AsyncEvent, EventSink, PortEvent, QpEvent, QueueError, SrqEvent};
use serde::Serialize;

use crate::abi::ring::{CQNE_SIZE, EQE_SIZE, Eqe, STATE_PAGE, eqe};
use crate::intr::{Interrupts, Vector};
use crate::ring::{ProducerRing, RingInspect, RingShape, RingShapeError, StateWords};

/// Port number of every port event.
const PORT: u32 = 1;

/// State of an event ring.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct EventRingInspect {
    /// Purpose of the ring.
    pub name: &'static str,
    /// `open`, `shut` after an invalid index or a reset, or `busy`.
    pub state: &'static str,
    /// Number of events that wait for room.
    pub waiting: Option<usize>,
    /// Ring. The device produces, the guest consumes.
    pub ring: Option<RingInspect>,
}

impl From<AsyncEvent> for Eqe {
    fn from(event: AsyncEvent) -> Self {
        match event {
            AsyncEvent::Qp(kind, info) => {
                let kind = match kind {
                    QpEvent::Fatal => eqe::QP_FATAL,
                    QpEvent::RequestError => eqe::QP_REQ_ERR,
                    QpEvent::AccessError => eqe::QP_ACCESS_ERR,
                    QpEvent::CommunicationEstablished => eqe::COMM_EST,
                    QpEvent::SendQueueDrained => eqe::SQ_DRAINED,
                    QpEvent::LastWqeReached => eqe::QP_LAST_WQE_REACHED,
                };
                Self { kind, info }
            }
            AsyncEvent::Srq(kind, info) => {
                let kind = match kind {
                    SrqEvent::Error => eqe::SRQ_ERR,
                    SrqEvent::LimitReached => eqe::SRQ_LIMIT_REACHED,
                };
                Self { kind, info }
            }
            AsyncEvent::Port(PortEvent::Active) => Self { kind: eqe::PORT_ACTIVE, info: PORT },
            AsyncEvent::Port(PortEvent::Error) => Self { kind: eqe::PORT_ERR, info: PORT },
            AsyncEvent::Port(PortEvent::GidChange) => Self { kind: eqe::GID_CHANGE, info: PORT },
        }
    }
}

/// State of an event ring that is saved. The events are those of the ring: [`Eqe`], or [`Cqne`].
#[derive(Debug)]
pub(crate) struct SavedEventRing<E> {
    /// All pages of the ring; none if it is shut.
    pub(crate) pages: PageList,
    /// Index that the device publishes. `None`: the ring is shut.
    pub(crate) tail: Option<u32>,
    /// Events that wait for room, in order.
    pub(crate) waiting: Vec<E>,
}

/// Entry of an event ring.
trait Entry: Copy + Eq + Hash {
    const SIZE: usize;
    fn push(self, ring: &mut ProducerRing, view: &DmaView<'_>) -> Result<bool, QueueError>;
}

impl Entry for Eqe {
    const SIZE: usize = EQE_SIZE;

    fn push(self, ring: &mut ProducerRing, view: &DmaView<'_>) -> Result<bool, QueueError> {
        ring.push(view, &self.to_bytes())
    }
}

/// CQ handle, in the format of `pvrdma_cqne`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Cqne(pub(crate) u32);

impl Entry for Cqne {
    const SIZE: usize = CQNE_SIZE;

    fn push(self, ring: &mut ProducerRing, view: &DmaView<'_>) -> Result<bool, QueueError> {
        ring.push(view, &self.0.to_le_bytes())
    }
}

/// Creates a ring from all its pages.
fn ring<E: Entry>(pages: PageList) -> Result<ProducerRing, RingShapeError> {
    let first_page = 1;
    let page_count = pages.pages().saturating_sub(first_page);
    // The driver divides the data pages into elements, whose number is not a power of two, and passes the number to
    // helpers that assume one. The effect is a ring of the largest power of two that divides it (spec §6.4).
    let stride = u32::try_from(E::SIZE).map_err(|_| RingShapeError::Elements(0))?;
    let nominal = (u64::from(page_count) * STATE_PAGE / u64::from(stride)) & u64::from(u32::MAX);
    let nominal = u32::try_from(nominal).unwrap_or(0);
    let entries = nominal & nominal.wrapping_neg();
    ProducerRing::new(RingShape { pages, first_page, page_count, entries, stride, words: StateWords::Rx })
}

/// Creates the ring of asynchronous events of a driver whose device has failed.
pub(crate) fn asynchronous_ring(pages: PageList) -> Result<ProducerRing, RingShapeError> {
    ring::<Eqe>(pages)
}

/// One event ring, with the events that do not fit it.
#[derive(Debug)]
struct EventRing<E> {
    name: &'static str,
    /// `None` after an invalid consumer index, or after the rings were shut: nothing is posted until the next
    /// handshake.
    ring: Option<ProducerRing>,
    /// The device is paused: all entries wait.
    paused: bool,
    waiting: VecDeque<E>,
    queued: HashSet<E>,
    /// Log of the device, set when the ring is installed.
    log: Option<Arc<DeviceLog>>,
}

impl<E: Entry> EventRing<E> {
    fn new(name: &'static str, pages: PageList) -> Result<Self, RingShapeError> {
        let ring = ring::<E>(pages)?;
        Ok(Self { name, ring: Some(ring), paused: false, waiting: VecDeque::new(), queued: HashSet::new(), log: None })
    }

    /// Restores a ring.
    ///
    /// # Errors
    /// The pages are not those of such a ring, or the index is not one of it.
    fn restore(name: &'static str, saved: SavedEventRing<E>) -> Result<Self, RingShapeError> {
        let SavedEventRing { pages, tail, waiting } = saved;
        let Some(tail) = tail else {
            let (waiting, queued) = (VecDeque::new(), HashSet::new());
            return Ok(Self { name, ring: None, paused: false, waiting, queued, log: None });
        };
        let new = Self::new(name, pages)?;
        let ring = new.ring.map(|ring| ring.at(tail)).transpose()?;
        let queued = waiting.iter().copied().collect();
        Ok(Self { ring, waiting: waiting.into(), queued, ..new })
    }

    fn save(&self) -> SavedEventRing<E> {
        let Self { name: _, ring, paused: _, waiting, queued: _, log: _ } = self;
        let shut = || SavedEventRing { pages: PageList::default(), tail: None, waiting: Vec::new() };
        let Some(ring) = ring else { return shut() };
        let (elements, tail) = ring.save();
        let mut pages = PageListBuilder::default();
        // The pages are those of one list, so a list accepts them.
        match pages.push(ring.words().state_page()).and_then(|()| pages.append(elements)) {
            Ok(()) => {}
            Err(_) => return shut(),
        }
        SavedEventRing { pages: pages.finish(), tail: Some(tail), waiting: waiting.iter().copied().collect() }
    }

    /// Posts an entry after those that wait already. Returns `true` if anything was published.
    fn post(&mut self, view: &DmaView<'_>, entry: E) -> bool {
        if self.waiting.is_empty() {
            match self.push(view, entry) {
                Some(true) => return true,
                Some(false) => {}
                None => return false,
            }
        }
        if self.queued.insert(entry) {
            self.waiting.push_back(entry);
        }
        self.flush(view)
    }

    /// Publishes waiting entries as long as there is room. Returns `true` if anything was published.
    fn flush(&mut self, view: &DmaView<'_>) -> bool {
        let mut any = false;
        while let Some(&entry) = self.waiting.front() {
            match self.push(view, entry) {
                Some(true) => any = true,
                Some(false) => break,
                None => return any,
            }
            self.waiting.pop_front();
            self.queued.remove(&entry);
        }
        any
    }

    /// Pushes an entry. Returns `false` if there is no room now, and `None` if there is no ring.
    fn push(&mut self, view: &DmaView<'_>, entry: E) -> Option<bool> {
        let ring = self.ring.as_mut()?;
        if self.paused {
            return Some(false);
        }
        match entry.push(ring, view) {
            Ok(pushed) => Some(pushed),
            // Bus mastering is disabled, or the map is changing. This may be temporary, so the entry waits; the number
            // of waiting entries is bounded.
            Err(QueueError::Memory(_)) => Some(false),
            Err(error @ QueueError::BadIndex(_)) => {
                if let Some(log) = &self.log {
                    log.warn(
                        module_path!(),
                        format_args!("{} ring stops until the device is reset: {error}", self.name),
                    );
                }
                self.shut();
                None
            }
        }
    }

    fn shut(&mut self) {
        let Self { name: _, log: _, paused: _, ring, waiting, queued } = self;
        (*ring, *waiting, *queued) = (None, VecDeque::new(), HashSet::new());
    }
}

/// Returns the state of an event ring, without waiting for its lock.
fn inspect<E>(name: &'static str, ring: &Mutex<EventRing<E>>, memory: &DmaSpace) -> EventRingInspect {
    // In the lock order, a view of guest memory comes first. So the lock is released before the indices are read.
    let (state, waiting, words) = match ring.try_lock().as_deref() {
        None => ("busy", None, None),
        Some(EventRing { ring: None, waiting, .. }) => ("shut", Some(waiting.len()), None),
        Some(EventRing { ring: Some(ring), waiting, .. }) => ("open", Some(waiting.len()), Some(ring.words())),
    };
    EventRingInspect { name, state, waiting, ring: words.map(|words| words.inspect(memory)) }
}

/// Name of the ring of asynchronous events.
const ASYNCHRONOUS: &str = "asynchronous event";
/// Name of the ring of CQ notifications.
const NOTIFICATIONS: &str = "CQ notification";

/// State of both rings that is saved.
#[derive(Debug)]
pub(crate) struct SavedEventRings {
    /// Ring of asynchronous events.
    pub(crate) asynchronous: SavedEventRing<Eqe>,
    /// Ring of CQ notifications.
    pub(crate) notifications: SavedEventRing<Cqne>,
}

/// Event rings of one handshake.
#[derive(Debug)]
pub(crate) struct EventRings {
    asynchronous: Mutex<EventRing<Eqe>>,
    notifications: Mutex<EventRing<Cqne>>,
    /// Asynchronous events that wait for an access of the guest, each once.
    later: Mutex<Vec<Eqe>>,
    /// Set while an entry waits, so that the check costs one load.
    pending: WaitFlag,
    interrupts: Arc<Interrupts>,
}

impl EventRings {
    /// Creates the rings from all their pages; page 0 of each holds the ring state.
    pub(crate) fn new(
        async_pages: PageList,
        notification_pages: PageList,
        interrupts: Arc<Interrupts>,
    ) -> Result<Self, RingShapeError> {
        Ok(Self {
            asynchronous: Mutex::new(EventRing::new(ASYNCHRONOUS, async_pages)?),
            notifications: Mutex::new(EventRing::new(NOTIFICATIONS, notification_pages)?),
            later: Mutex::default(),
            pending: WaitFlag::new(),
            interrupts,
        })
    }

    /// Restores the rings of a handshake.
    ///
    /// # Errors
    /// The pages are not those of such rings, or an index is not one of its ring.
    pub(crate) fn restore(saved: SavedEventRings, interrupts: Arc<Interrupts>) -> Result<Self, RingShapeError> {
        let SavedEventRings { asynchronous, notifications } = saved;
        let rings = Self {
            asynchronous: Mutex::new(EventRing::restore(ASYNCHRONOUS, asynchronous)?),
            notifications: Mutex::new(EventRing::restore(NOTIFICATIONS, notifications)?),
            later: Mutex::default(),
            pending: WaitFlag::new(),
            interrupts,
        };
        // The first access of the guest finds out whether events wait.
        rings.pending.set();
        Ok(rings)
    }

    /// Returns the state to be saved.
    pub(crate) fn save(&self) -> SavedEventRings {
        let Self { asynchronous, notifications, later, pending: _, interrupts: _ } = self;
        let mut asynchronous = asynchronous.lock().save();
        let later: Vec<_> = later.lock().iter().copied().filter(|it| !asynchronous.waiting.contains(it)).collect();
        asynchronous.waiting.extend(later);
        SavedEventRings { asynchronous, notifications: notifications.lock().save() }
    }

    /// Posts an asynchronous event of the adapter.
    pub(crate) fn post_async(&self, view: &DmaView<'_>, event: AsyncEvent) {
        self.post(view, event.into());
    }

    /// Posts an asynchronous event.
    pub(crate) fn post(&self, view: &DmaView<'_>, event: Eqe) {
        self.run(view, &self.asynchronous, Vector::Async, |ring| ring.post(view, event));
    }

    /// Notifies the guest of new completions in an armed completion queue.
    pub(crate) fn notify_cq(&self, view: &DmaView<'_>, cq_handle: u32) {
        self.run(view, &self.notifications, Vector::Completion, |ring| ring.post(view, Cqne(cq_handle)));
    }

    /// Tries again to publish waiting entries.
    pub(crate) fn retry_pending(&self, view: &DmaView<'_>) {
        if self.has_pending() {
            self.pending.clear();
            let later = std::mem::take(&mut *self.later.lock());
            later.into_iter().for_each(|event| self.post(view, event));
            self.run(view, &self.asynchronous, Vector::Async, |ring| ring.flush(view));
            self.run(view, &self.notifications, Vector::Completion, |ring| ring.flush(view));
        }
    }

    /// Returns `true` if an entry waits. For code that handles an access of the guest.
    pub(crate) fn has_pending(&self) -> bool {
        self.pending.is_set_when_heard()
    }

    fn inspect(&self, memory: &DmaSpace) -> Vec<EventRingInspect> {
        vec![
            inspect("asynchronous events", &self.asynchronous, memory),
            inspect("CQ notifications", &self.notifications, memory),
        ]
    }

    /// Makes all entries wait, or ends that. Once this has returned from making them wait, nothing writes to the rings.
    pub(crate) fn set_paused(&self, paused: bool) {
        self.asynchronous.lock().paused = paused;
        self.notifications.lock().paused = paused;
    }

    /// Shuts the rings. When this returns, neither the rings nor the interrupts are used.
    pub(crate) fn shut(&self) {
        self.asynchronous.lock().shut();
        self.notifications.lock().shut();
    }

    /// Runs `work` on a ring and raises the interrupt. The interrupt follows the index that it announces, and the lock
    /// covers both, so no interrupt is in progress after [`Self::shut`].
    fn run<E: Entry>(
        &self,
        view: &DmaView<'_>,
        ring: &Mutex<EventRing<E>>,
        vector: Vector,
        work: impl FnOnce(&mut EventRing<E>) -> bool,
    ) {
        let mut ring = ring.lock();
        let mut published = work(&mut ring);
        if !ring.waiting.is_empty() {
            self.pending.set();
            // The ring is flushed again, because the guest may have freed entries and accessed the device before
            // `pending` was set.
            published |= ring.flush(view);
        }
        if published {
            self.interrupts.raise(vector);
        }
    }
}

counters! {
    /// Results of events.
    pub(crate) struct EventCounters {
        /// Asynchronous events that were lost because the driver had not set up rings.
        events_dropped,
    }
}

/// Sink of the events of a device, for the whole life of the device.
#[derive(Debug)]
pub(crate) struct EventHub {
    log: Arc<DeviceLog>,
    rings: RwLock<Option<Arc<EventRings>>>,
    counters: EventCounters,
}

impl EventHub {
    /// Creates a hub without rings.
    pub(crate) fn new(log: &Arc<DeviceLog>) -> Arc<Self> {
        let (log, counters) = (Arc::clone(log), EventCounters::default());
        Arc::new(Self { log, rings: RwLock::new(None), counters })
    }

    /// Logs a warning that a guest can cause any number of times.
    pub(crate) fn warn(&self, target: &'static str, message: fmt::Arguments<'_>) {
        self.log.warn(target, message);
    }

    /// Installs the rings of a handshake; the rings of an earlier one are shut.
    pub(crate) fn install(&self, mut rings: EventRings) {
        rings.asynchronous.get_mut().log = Some(Arc::clone(&self.log));
        rings.notifications.get_mut().log = Some(Arc::clone(&self.log));
        if let Some(old) = self.rings.write().replace(Arc::new(rings)) {
            old.shut();
        }
    }

    /// Removes the rings: when this returns, they are not accessed and vectors 1 and 2 are not raised.
    pub(crate) fn remove(&self) {
        if let Some(old) = self.rings.write().take() {
            old.shut();
        }
    }

    /// Returns the state of the rings to be saved. `None`: there are no rings.
    pub(crate) fn save(&self) -> Option<SavedEventRings> {
        let Self { rings, log: _, counters: _ } = self;
        rings.read().as_ref().map(|rings| rings.save())
    }

    /// Makes all events wait, or ends that; [`Self::retry_pending`] then posts them. No rings are installed in a pause.
    pub(crate) fn set_paused(&self, paused: bool) {
        if let Some(rings) = &*self.rings.read() {
            rings.set_paused(paused);
        }
    }

    /// Posts an asynchronous event with the next access of the guest. Does not access guest memory, and waits for no
    /// thread that does. While a driver sets up its rings, the event is lost; the driver queries the state then.
    pub(crate) fn event_later(&self, event: AsyncEvent) {
        if let Some(rings) = self.rings.try_read().as_ref().and_then(|rings| rings.as_ref()) {
            let (mut later, event) = (rings.later.lock(), Eqe::from(event));
            later.retain(|kept| *kept != event);
            later.push(event);
            rings.pending.set();
        }
    }

    /// Posts an asynchronous event.
    pub(crate) fn post(&self, view: &DmaView<'_>, event: Eqe) {
        self.with(|rings| rings.post(view, event));
    }

    /// Notifies the guest of new completions in an armed completion queue.
    pub(crate) fn notify_cq(&self, view: &DmaView<'_>, cq_handle: u32) {
        self.with(|rings| rings.notify_cq(view, cq_handle));
    }

    /// Returns the state of its rings, without waiting for their locks. The list is empty before a handshake.
    pub(crate) fn inspect(&self, memory: &DmaSpace) -> Vec<EventRingInspect> {
        let rings = self.rings.read().clone();
        rings.map_or_else(Vec::new, |rings| rings.inspect(memory))
    }

    /// Tries again to publish entries that did not fit a ring.
    pub(crate) fn retry_pending(&self, view: &DmaView<'_>) {
        if let Some(rings) = &*self.rings.read() {
            rings.retry_pending(view);
        }
    }

    /// Returns `true` if an event waits.
    pub(crate) fn has_pending(&self) -> bool {
        self.rings.read().as_ref().is_some_and(|rings| rings.has_pending())
    }

    /// Returns the event counters.
    pub(crate) fn counters(&self) -> Vec<Counter> {
        self.counters.list()
    }

    fn with(&self, work: impl FnOnce(&EventRings)) {
        if let Some(rings) = &*self.rings.read() {
            work(rings);
        } else {
            self.counters.events_dropped.increment();
            debug!("an event came while there were no event rings");
        }
    }
}

impl EventSink for EventHub {
    fn event(&self, view: &DmaView<'_>, event: AsyncEvent) {
        self.with(|rings| rings.post_async(view, event));
    }
}

#[cfg(test)]
mod tests;
