//! Driver session: the state that ACTIVATE sets up, until the driver quiesces or resets the device.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use pvrdma_base::locks::{Mutex, MutexGuard, RwLock};
use pvrdma_guest_memory::{Direction, DmaSpace, DmaView};
use pvrdma_saved_state::vmxnet3 as saved;

use crate::abi::command::ConfigPlace;
use crate::abi::completion::HashType;
use crate::abi::queue_desc::{
    QUEUE_DESC_ALIGN, QUEUE_DESC_LEN, QUEUE_DESC_SIZE, RxQueueConfig, STATS_AT, STATUS_AT, TX_THRESHOLD_AT,
    TxQueueConfig, UPDATE_RX_PRODUCER_AT, check_vector,
};
use crate::abi::regs::MAX_QUEUES;
use crate::abi::rss_conf::{RSS_CONF_LEN, RssConf};
use crate::abi::shared::{DriverShared, EVENTS_AT, Features, FilterConfig, SHARED_LEN};
use crate::error::{CommandError, QueueError};
use crate::filter::RxFilter;
use crate::offload::headers::Headers;
use crate::ring::check_range;
use crate::rss;
use crate::rx::RxQueue;
use crate::saved_state::error::{RestoreError, narrow, require};
use crate::stats::STATS_LEN;
use crate::tx::TxQueue;

/// Valid MTUs, in bytes.
const MTUS: std::ops::RangeInclusive<u32> = 60..=9000;
/// Maximum number of buffers per frame if the driver does not set one: one more than the number of fragments of a
/// socket buffer.
const DEFAULT_RX_BUFFERS: u16 = 18;
/// Upper limit on the number of buffers per frame, whatever the driver sets.
const MAX_RX_BUFFERS: u16 = 64;
/// Number of packets between two doorbells. It must be 1: a driver has no timer that would ring for remaining packets.
const TX_THRESHOLD: u32 = 1;

/// Error codes of stopped queues that the interface defines. The device uses some of them.
const QUEUE_ERRORS: std::ops::RangeInclusive<u32> = 0x8000_0000..=0x8000_0007;

/// Identifies a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Which {
    /// A transmit queue.
    Tx(usize),
    /// A receive queue.
    Rx(usize),
}

/// Settings that the driver may change while frames flow.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) features: Features,
    pub(crate) filter: RxFilter,
    pub(crate) rss: Option<RssConf>,
}

impl Settings {
    /// Returns the receive queue for a frame, the type of its hash, and the hash.
    pub(crate) fn queue_of(&self, frame: &[u8], headers: &Headers) -> (usize, HashType, u32) {
        match self.rss.as_ref().filter(|_| self.features.rss) {
            None => (0, HashType::None, 0),
            Some(conf) => match rss::hash(conf, frame, headers) {
                (HashType::None, _) => (0, HashType::None, 0),
                (kind, hash) => (rss::queue(conf, hash), kind, hash),
            },
        }
    }
}

/// An activated device.
#[derive(Debug)]
pub(crate) struct Session {
    /// Bus address of the shared area.
    shared: u64,
    /// Bus address of the queue descriptors.
    queue_desc: u64,
    pub(crate) revision: u8,
    /// Length of a packet without the link header, in bytes.
    pub(crate) mtu: usize,
    pub(crate) event_vector: u8,
    pub(crate) auto_mask: bool,
    tx: Vec<Mutex<TxQueue>>,
    rx: Vec<Mutex<RxQueue>>,
    /// For each receive queue: its vector, and whether the driver is asked to ring doorbells. The flag changes only
    /// while the queue is locked.
    doorbell_requests: Vec<(u8, AtomicBool)>,
    /// Error code of each stopped queue, 0 while the queue runs. Transmit queues come first.
    stopped: Vec<AtomicU32>,
    /// State of the link of which the driver was last notified.
    link_reported: AtomicBool,
    pub(crate) settings: RwLock<Settings>,
}

/// Copies the shared area at a bus address.
fn load_shared(view: &DmaView<'_>, address: u64) -> Result<DriverShared, CommandError> {
    let mut bytes = [0; SHARED_LEN];
    view.read(address, &mut bytes).map_err(|error| CommandError::Memory("shared area", error))?;
    let shared = DriverShared::parse(&bytes).filter(|_| can_have_shared(address));
    shared.ok_or(CommandError::NoShared(address))
}

/// Copies the RSS configuration.
pub(crate) fn load_rss(view: &DmaView<'_>, place: ConfigPlace, queues: u8) -> Result<Option<RssConf>, CommandError> {
    let mut bytes = [0; RSS_CONF_LEN];
    let len = usize::try_from(place.len).unwrap_or(usize::MAX).min(RSS_CONF_LEN);
    view.read(place.address, bytes.get_mut(..len).unwrap_or_default())
        .map_err(|error| CommandError::Memory("RSS configuration", error))?;
    Ok(RssConf::parse(&bytes, queues)?)
}

/// Copies the multicast table.
pub(crate) fn load_multicast(view: &DmaView<'_>, filter: &FilterConfig) -> Result<Vec<u8>, CommandError> {
    if filter.table_len == 0 || !filter.mode.multicast {
        return Ok(Vec::new());
    }
    let mut table = vec![0; filter.table_len.into()];
    view.read(filter.table, &mut table).map_err(|error| CommandError::Memory("multicast table", error))?;
    Ok(table)
}

/// Returns `true` if there can be queue descriptors of `len` bytes at a bus address.
const fn can_have_descriptors(address: u64, len: u64) -> bool {
    address.is_multiple_of(QUEUE_DESC_ALIGN) && address.checked_add(len).is_some()
}

/// Returns `true` if there can be a shared area at a bus address. The alignment allows the events to be updated in a
/// single access.
const fn can_have_shared(address: u64) -> bool {
    address.is_multiple_of(8) && address.checked_add(SHARED_LEN as u64).is_some()
}

fn in_range(name: &'static str, value: u64, valid: bool) -> Result<(), CommandError> {
    if valid { Ok(()) } else { Err(CommandError::Invalid(name, value)) }
}

fn check(shared: &DriverShared, vectors: u16) -> Result<(), CommandError> {
    for (name, count) in [("transmit queues", shared.tx_queues), ("receive queues", shared.rx_queues)] {
        in_range(name, count.into(), (1..=MAX_QUEUES).contains(&count))?;
    }
    let needed = (u64::from(shared.tx_queues) + u64::from(shared.rx_queues)) * QUEUE_DESC_LEN;
    let len = u64::from(shared.queue_desc_len);
    in_range("length of queue descriptors", len, len >= needed)?;
    in_range("queue descriptors", shared.queue_desc, can_have_descriptors(shared.queue_desc, needed))?;
    in_range("MTU", shared.mtu.into(), MTUS.contains(&shared.mtu))?;
    let vector = u16::from(shared.interrupts.event_vector);
    in_range("vector of events", vector.into(), vector < vectors)
}

/// Copies a queue descriptor.
fn load_queue(view: &DmaView<'_>, base: u64, number: u8) -> Result<[u8; QUEUE_DESC_SIZE], CommandError> {
    let mut bytes = [0; QUEUE_DESC_SIZE];
    let at = base.wrapping_add(u64::from(number) * QUEUE_DESC_LEN);
    view.read(at, &mut bytes).map_err(|error| CommandError::Memory("queue descriptor", error))?;
    Ok(bytes)
}

/// Queues of a saved session.
struct RestoredQueues {
    tx: Vec<Mutex<TxQueue>>,
    rx: Vec<Mutex<RxQueue>>,
    doorbell_requests: Vec<(u8, AtomicBool)>,
    stopped: Vec<AtomicU32>,
}

impl RestoredQueues {
    fn new(
        transmit: Vec<saved::TransmitQueue>,
        receive: Vec<saved::ReceiveQueue>,
        vectors: u16,
        revision: u8,
    ) -> Result<Self, RestoreError> {
        queue_count("transmit queues", transmit.len())?;
        let count = queue_count("receive queues", receive.len())?;
        let mut queues = Self { tx: Vec::new(), rx: Vec::new(), doorbell_requests: Vec::new(), stopped: Vec::new() };
        for queue in transmit {
            queues.stopped.push(AtomicU32::new(queue_error(queue.error)?));
            queues.tx.push(Mutex::new(TxQueue::restore(queue, vectors)?));
        }
        for (number, queue) in (0..count).zip(receive) {
            queues.stopped.push(AtomicU32::new(queue_error(queue.error)?));
            let asked = queue.doorbell_wanted;
            let queue = RxQueue::restore(queue, (number, count), vectors, revision, MAX_RX_BUFFERS)?;
            queues.doorbell_requests.push((queue.vector(), AtomicBool::new(asked)));
            queues.rx.push(Mutex::new(queue));
        }
        Ok(queues)
    }
}

fn queue_count(name: &'static str, count: usize) -> Result<u8, RestoreError> {
    let few = u8::try_from(count).ok().filter(|few| (1..=MAX_QUEUES).contains(few));
    few.ok_or(RestoreError::Invalid { field: name, value: count as u64 })
}

/// Checks the error code of a saved queue.
fn queue_error(error: u32) -> Result<u32, RestoreError> {
    require("error of a queue", error, error == 0 || QUEUE_ERRORS.contains(&error))?;
    Ok(error)
}

impl Session {
    /// Parses the shared area at `address`, for a function with `vectors` vectors and a driver of `revision`.
    /// `link_up`: state of the link.
    ///
    /// # Errors
    /// The shared area, a queue descriptor or a ring is invalid or inaccessible.
    pub(crate) fn new(
        view: &DmaView<'_>,
        address: u64,
        vectors: u16,
        revision: u8,
        link_up: bool,
    ) -> Result<Self, CommandError> {
        let shared = load_shared(view, address)?;
        check(&shared, vectors)?;
        let (tx_count, rx_count) = (shared.tx_queues, shared.rx_queues);
        let mut tx = Vec::new();
        for number in 0..tx_count {
            let config = TxQueueConfig::parse(&load_queue(view, shared.queue_desc, number)?, vectors)
                .map_err(|error| CommandError::Queue("transmit", number, error))?;
            tx.push(Mutex::new(TxQueue::new(&config, view)?));
        }
        let most = if shared.max_rx_buffers == 0 { DEFAULT_RX_BUFFERS } else { shared.max_rx_buffers };
        let (mut rx, mut doorbell_requests) = (Vec::new(), Vec::new());
        for number in 0..rx_count {
            let config =
                RxQueueConfig::parse(&load_queue(view, shared.queue_desc, tx_count + number)?, vectors, revision)
                    .map_err(|error| CommandError::Queue("receive", number, error))?;
            rx.push(Mutex::new(RxQueue::new(&config, number, rx_count, most.min(MAX_RX_BUFFERS).into(), view)?));
            doorbell_requests.push((config.vector, AtomicBool::new(false)));
        }
        let rss = if shared.features.rss { load_rss(view, shared.rss, rx_count)? } else { None };
        // The driver sets the table after this command. The address that is there now may be a stale one, so a failure
        // to read it is not an error.
        let table = load_multicast(view, &shared.filter).unwrap_or_default();
        let session = Self {
            shared: address,
            queue_desc: shared.queue_desc,
            revision,
            // `check` limits the MTU, so the conversion cannot fail.
            mtu: usize::try_from(shared.mtu).unwrap_or(0),
            event_vector: shared.interrupts.event_vector,
            auto_mask: shared.interrupts.auto_mask,
            tx,
            rx,
            doorbell_requests,
            stopped: (0..tx_count + rx_count).map(|_| AtomicU32::new(0)).collect(),
            link_reported: AtomicBool::new(link_up),
            settings: RwLock::new(Settings {
                features: shared.features,
                filter: RxFilter::new(shared.filter, &table),
                rss,
            }),
        };
        session.start(view).map_err(|error| CommandError::Memory("queue descriptor", error))?;
        Ok(session)
    }

    /// Returns the saved form of the session, and its multicast table. No thread uses the session.
    pub(crate) fn save(&self) -> (saved::Session, Vec<u8>) {
        let Self {
            shared,
            queue_desc,
            revision,
            mtu,
            event_vector,
            // The interrupts have it as well.
            auto_mask: _,
            tx,
            rx,
            doorbell_requests,
            stopped: _,
            link_reported,
            settings,
        } = self;
        let Settings { features, filter, rss } = &*settings.read();
        let (receive_mode, vlans, multicast) = filter.save();
        let transmit = tx.iter().enumerate().map(|(index, queue)| queue.lock().save(self.error(Which::Tx(index))));
        // The vector of a request is that of the queue.
        let receive = rx.iter().zip(doorbell_requests).enumerate().map(|(index, (queue, (_, asked)))| {
            queue.lock().save(asked.load(Ordering::Acquire), self.error(Which::Rx(index)))
        });
        let session = saved::Session {
            shared: *shared,
            queue_descriptors: *queue_desc,
            revision: (*revision).into(),
            mtu: u32::try_from(*mtu).unwrap_or(0),
            event_vector: (*event_vector).into(),
            link_reported: link_reported.load(Ordering::Acquire),
            features: features.bits(),
            receive_mode,
            vlans,
            rss: rss.as_ref().map(RssConf::save),
            transmit: transmit.collect(),
            receive: receive.collect(),
        };
        (session, multicast)
    }

    /// Restores a session of a function with `vectors` vectors. Its addresses have not been looked up in the memory map
    /// yet, see [`Self::check_memory`].
    ///
    /// # Errors
    /// A value is one that ACTIVATE, a command or the data path cannot have set.
    pub(crate) fn restore(
        session: saved::Session,
        multicast: &[u8],
        auto_mask: bool,
        vectors: u16,
    ) -> Result<Self, RestoreError> {
        let saved::Session {
            shared,
            queue_descriptors,
            revision,
            mtu,
            event_vector,
            link_reported,
            features,
            receive_mode,
            vlans,
            rss,
            transmit,
            receive,
        } = session;
        require("shared area", shared, can_have_shared(shared))?;
        require("revision", revision, (1..=3).contains(&revision))?;
        let revision = narrow("revision", revision)?;
        require("MTU", mtu, MTUS.contains(&mtu))?;
        require("features", features, features <= Features::ALL)?;
        let RestoredQueues { tx, rx, doorbell_requests, stopped } =
            RestoredQueues::new(transmit, receive, vectors, revision)?;
        let needed = stopped.len() as u64 * QUEUE_DESC_LEN;
        require("queue descriptors", queue_descriptors, can_have_descriptors(queue_descriptors, needed))?;
        let rx_count = u8::try_from(rx.len()).unwrap_or(MAX_QUEUES);
        let rss = rss.map(|rss| RssConf::restore(rss, rx_count)).transpose()?;
        Ok(Self {
            shared,
            queue_desc: queue_descriptors,
            revision,
            mtu: narrow("MTU", mtu)?,
            event_vector: check_vector(event_vector, vectors)?,
            auto_mask,
            tx,
            rx,
            doorbell_requests,
            stopped,
            link_reported: AtomicBool::new(link_reported),
            settings: RwLock::new(Settings {
                features: Features::parse(features.into()),
                filter: RxFilter::restore(receive_mode, &vlans, multicast)?,
                rss,
            }),
        })
    }

    /// Checks that the device can access all memory of the session.
    ///
    /// # Errors
    /// Part of it cannot be accessed.
    pub(crate) fn check_memory(&self, view: &DmaView<'_>) -> Result<(), RestoreError> {
        let memory = |part| move |source| RestoreError::Memory { part, source };
        check_range(view, self.shared, SHARED_LEN as u64, Direction::Write).map_err(memory("shared area"))?;
        let descriptors = self.stopped.len() as u64 * QUEUE_DESC_LEN;
        check_range(view, self.queue_desc, descriptors, Direction::Write).map_err(memory("queue descriptors"))?;
        for queue in &self.tx {
            queue.lock().check(view).map_err(memory("transmit ring"))?;
        }
        for queue in &self.rx {
            queue.lock().check(view).map_err(memory("receive ring"))?;
        }
        Ok(())
    }

    /// Writes the doorbell thresholds for the driver.
    fn start(&self, view: &DmaView<'_>) -> Result<(), pvrdma_guest_memory::DmaError> {
        for index in 0..self.tx.len() {
            view.write(self.queue_address(Which::Tx(index)) + TX_THRESHOLD_AT, &TX_THRESHOLD.to_le_bytes())?;
        }
        for index in 0..self.rx.len() {
            view.write(self.queue_address(Which::Rx(index)) + UPDATE_RX_PRODUCER_AT, &[0])?;
        }
        Ok(())
    }

    /// Bus address of the shared area.
    pub(crate) const fn shared(&self) -> u64 {
        self.shared
    }

    /// Number of receive queues, at most [`MAX_QUEUES`].
    pub(crate) fn rx_count(&self) -> u8 {
        u8::try_from(self.rx.len()).unwrap_or(MAX_QUEUES)
    }

    /// Returns all queues.
    pub(crate) fn queues(&self) -> impl Iterator<Item = Which> {
        (0..self.tx.len()).map(Which::Tx).chain((0..self.rx.len()).map(Which::Rx))
    }

    /// Returns a transmit queue, if it is running.
    pub(crate) fn tx(&self, index: usize) -> Option<&Mutex<TxQueue>> {
        self.tx.get(index).filter(|_| self.error(Which::Tx(index)) == 0)
    }

    /// Returns a receive queue, if it is running.
    pub(crate) fn rx(&self, index: usize) -> Option<&Mutex<RxQueue>> {
        self.rx.get(index).filter(|_| self.error(Which::Rx(index)) == 0)
    }

    /// Locks the transmit queues one after the other, also those that have stopped.
    pub(crate) fn lock_transmit_queues(&self) -> impl Iterator<Item = MutexGuard<'_, TxQueue>> {
        self.tx.iter().map(Mutex::lock)
    }

    /// Returns the state of the link of which the driver was last notified.
    pub(crate) fn link_reported(&self) -> bool {
        self.link_reported.load(Ordering::Acquire)
    }

    /// Records the state of the link of which the driver is notified.
    pub(crate) fn set_link_reported(&self, up: bool) {
        self.link_reported.store(up, Ordering::Release);
    }

    fn number(&self, which: Which) -> usize {
        match which {
            Which::Tx(index) => index,
            Which::Rx(index) => self.tx.len().saturating_add(index),
        }
    }

    /// Returns the bus address of a queue's descriptor. It cannot wrap, because `check` validated the end of the last
    /// one.
    fn queue_address(&self, which: Which) -> u64 {
        self.queue_desc.wrapping_add(self.number(which) as u64 * QUEUE_DESC_LEN)
    }

    /// Returns the error code of a stopped queue, 0 if it is running.
    fn error(&self, which: Which) -> u32 {
        self.stopped.get(self.number(which)).map_or(0, |error| error.load(Ordering::Acquire))
    }

    /// Stops a queue until the driver resets the device.
    pub(crate) fn stop(&self, view: &DmaView<'_>, which: Which, error: &QueueError) {
        if let Some(stopped) = self.stopped.get(self.number(which)) {
            stopped.store(error.code(), Ordering::Release);
        }
        self.write_status(view, which);
    }

    /// Writes the status of a queue. A failed write is ignored: the driver then does not get the status.
    pub(crate) fn write_status(&self, view: &DmaView<'_>, which: Which) {
        let error = self.error(which);
        let [a, b, c, d] = error.to_le_bytes();
        let status = [u8::from(error != 0), 0, 0, 0, a, b, c, d];
        let _ = view.write(self.queue_address(which) + STATUS_AT, &status);
    }

    /// Writes the statistics of a queue.
    pub(crate) fn write_stats(&self, view: &DmaView<'_>, which: Which, stats: &[u8; STATS_LEN]) {
        let _ = view.write(self.queue_address(which) + STATS_AT, stats);
    }

    /// Asks the driver to ring a doorbell when it posts buffers to a receive queue. The caller has locked the queue.
    pub(crate) fn ask_for_doorbell(&self, view: &DmaView<'_>, index: usize) {
        if let Some((_, asked)) = self.doorbell_requests.get(index) {
            asked.store(true, Ordering::Release);
            self.write_wish(view, index, true);
        }
    }

    /// Withdraws that request for the receive queues whose vector satisfies `which`.
    pub(crate) fn forgo_doorbells(&self, memory: &DmaSpace, which: impl Fn(u8) -> bool) {
        for (index, (vector, asked)) in self.doorbell_requests.iter().enumerate() {
            if !asked.load(Ordering::Acquire) || !which(*vector) {
                continue;
            }
            let _queue = self.rx.get(index).map(Mutex::lock);
            if asked.swap(false, Ordering::AcqRel) {
                self.write_wish(&memory.view(), index, false);
            }
        }
    }

    fn write_wish(&self, view: &DmaView<'_>, index: usize, wanted: bool) {
        let at = self.queue_address(Which::Rx(index)) + UPDATE_RX_PRODUCER_AT;
        let _ = view.write(at, &[u8::from(wanted)]);
    }

    /// Sets pending events and clears those that the driver has acknowledged.
    pub(crate) fn change_events(&self, view: &DmaView<'_>, set: u32, clear: u32) {
        // The events are the low half of an aligned 8-byte word.
        let _ = view.update_u64(self.shared + EVENTS_AT, |old| Some((old | u64::from(set)) & !u64::from(clear)));
    }
}
