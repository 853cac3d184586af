//! Rings that the test fills, and sinks that it can wait for.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use pvrdma_guest_memory::{DmaError, DmaView};
use pvrdma_pages::PageList;
use pvrdma_verbs_types::{Completion, RecvWr, SendWr, WcStatus};

use super::DEADLINE;
use crate::error::{CqOverrun, QueueError};
use crate::queue::{AsyncEvent, CompletionSink, EventSink, RecvSource, RingPosition, SavedRing, SendSource};

/// Ring that the test fills in the role of the guest.
#[derive(Debug)]
pub struct Ring<T> {
    /// Requests posted and not taken yet.
    pub posted: Mutex<VecDeque<T>>,
    broken: AtomicBool,
    popped: AtomicU64,
    retired: AtomicU64,
    resets: AtomicU32,
}

impl<T> Default for Ring<T> {
    fn default() -> Self {
        Self {
            posted: Mutex::default(),
            broken: AtomicBool::new(false),
            popped: AtomicU64::new(0),
            retired: AtomicU64::new(0),
            resets: AtomicU32::new(0),
        }
    }
}

impl<T> Ring<T> {
    /// Makes the ring unreadable.
    pub fn break_off(&self) {
        self.broken.store(true, Ordering::SeqCst);
    }

    /// Returns the number of requests retired since the ring last started over.
    pub fn retired(&self) -> u64 {
        self.retired.load(Ordering::SeqCst)
    }

    /// Returns how often the ring started over.
    pub fn resets(&self) -> u32 {
        self.resets.load(Ordering::SeqCst)
    }

    /// Moves the oldest request into `work`, if there is one.
    fn pop(&self, work: &mut T) -> Result<bool, QueueError> {
        if self.broken.load(Ordering::SeqCst) {
            return Err(DmaError::Unmapped { addr: 0, len: 4 }.into());
        }
        let Some(element) = self.posted.lock().pop_front() else { return Ok(false) };
        self.popped.fetch_add(1, Ordering::SeqCst);
        *work = element;
        Ok(true)
    }

    /// Returns the position of the adapter, if it has taken fewer requests than an index can count.
    fn save(&self) -> SavedRing {
        let index = |count: &AtomicU64| u32::try_from(count.load(Ordering::SeqCst)).unwrap_or(u32::MAX);
        let position = RingPosition { next: index(&self.popped), head: index(&self.retired), broken: None };
        SavedRing { pages: PageList::default(), position }
    }

    fn clear(&self) {
        self.posted.lock().clear();
        self.popped.store(0, Ordering::SeqCst);
        self.retired.store(0, Ordering::SeqCst);
        self.resets.fetch_add(1, Ordering::SeqCst);
    }
}

/// Adapter's side of a ring.
pub(super) struct Consumer<T>(pub(super) Arc<Ring<T>>);

impl SendSource for Consumer<SendWr> {
    fn pop(&mut self, _view: &DmaView<'_>, work: &mut SendWr) -> Result<bool, QueueError> {
        self.0.pop(work)
    }

    fn retire(&mut self, _view: &DmaView<'_>) {
        let retired = self.0.retired.fetch_add(1, Ordering::SeqCst);
        assert!(retired < self.0.popped.load(Ordering::SeqCst), "retired more than was popped");
    }

    fn reset(&mut self) {
        self.0.clear();
    }

    fn save(&self) -> Option<SavedRing> {
        Some(self.0.save())
    }
}

impl RecvSource for Consumer<RecvWr> {
    fn pop(&mut self, _view: &DmaView<'_>, work: &mut RecvWr) -> Result<bool, QueueError> {
        self.0.pop(work)
    }

    fn posted(&mut self, _view: &DmaView<'_>) -> Result<u32, QueueError> {
        Ok(u32::try_from(self.0.posted.lock().len()).unwrap())
    }

    fn reset(&mut self) {
        self.0.clear();
    }

    fn save(&self) -> Option<SavedRing> {
        Some(self.0.save())
    }
}

/// Received elements, and a condition to wait for them.
#[derive(Debug)]
struct Arrivals<T> {
    list: Mutex<Vec<T>>,
    more: Condvar,
}

impl<T> Default for Arrivals<T> {
    fn default() -> Self {
        Self { list: Mutex::default(), more: Condvar::new() }
    }
}

impl<T: Copy + std::fmt::Debug> Arrivals<T> {
    /// Waits until there are `count` elements, and takes all.
    fn wait(&self, what: &str, count: usize) -> Vec<T> {
        let end = Instant::now() + DEADLINE;
        let mut list = self.list.lock();
        while list.len() < count {
            let late = self.more.wait_until(&mut list, end).timed_out();
            assert!(!late, "{what}: {count} wanted, {:?} came in {DEADLINE:?}", *list);
        }
        std::mem::take(&mut *list)
    }
}

/// Completion queue that stores all entries up to its limit.
#[derive(Debug)]
pub struct Completions {
    entries: Arrivals<Completion>,
    room: AtomicUsize,
    total: AtomicU64,
}

impl Default for Completions {
    fn default() -> Self {
        Self { entries: Arrivals::default(), room: AtomicUsize::new(usize::MAX), total: AtomicU64::new(0) }
    }
}

impl Completions {
    /// Limits the number of entries that wait to be polled; further ones overrun the queue.
    pub fn limit(&self, entries: usize) {
        self.room.store(entries, Ordering::SeqCst);
    }

    /// Returns the number of entries so far, polled or not.
    pub fn total(&self) -> u64 {
        self.total.load(Ordering::SeqCst)
    }

    /// Takes all entries.
    pub fn poll(&self) -> Vec<Completion> {
        std::mem::take(&mut *self.entries.list.lock())
    }

    /// Takes all entries, as identifier and status.
    pub fn poll_statuses(&self) -> Vec<(u64, WcStatus)> {
        names(&self.poll())
    }

    /// Waits for exactly `count` entries.
    ///
    /// # Panics
    /// The entries do not arrive, or there are more.
    pub fn wait(&self, count: usize) -> Vec<Completion> {
        let entries = self.entries.wait("completions", count);
        assert_eq!(entries.len(), count, "{entries:?}");
        entries
    }

    /// Waits for exactly one entry.
    ///
    /// # Panics
    /// The entry does not arrive, or there are more.
    pub fn one(&self) -> Completion {
        self.wait(1)[0]
    }

    /// Waits for `count` entries. Returns identifier and status of each.
    ///
    /// # Panics
    /// The entries do not arrive, or there are more.
    pub fn statuses(&self, count: usize) -> Vec<(u64, WcStatus)> {
        names(&self.wait(count))
    }
}

fn names(entries: &[Completion]) -> Vec<(u64, WcStatus)> {
    entries.iter().map(|completion| (completion.wr_id, completion.status)).collect()
}

impl CompletionSink for Completions {
    fn complete(&self, _view: &DmaView<'_>, completion: &Completion) -> Result<(), CqOverrun> {
        let mut list = self.entries.list.lock();
        if list.len() >= self.room.load(Ordering::SeqCst) {
            return Err(CqOverrun);
        }
        self.total.fetch_add(1, Ordering::SeqCst);
        list.push(*completion);
        self.entries.more.notify_all();
        Ok(())
    }
}

/// Events in the order of their arrival.
#[derive(Debug, Default)]
pub struct Events(Arrivals<AsyncEvent>);

impl Events {
    /// Takes all events.
    pub fn poll(&self) -> Vec<AsyncEvent> {
        std::mem::take(&mut *self.0.list.lock())
    }

    /// Waits for at least `count` events and takes all.
    ///
    /// # Panics
    /// The events do not arrive.
    pub fn wait(&self, count: usize) -> Vec<AsyncEvent> {
        self.0.wait("events", count)
    }
}

impl EventSink for Events {
    fn event(&self, _view: &DmaView<'_>, event: AsyncEvent) {
        self.0.list.lock().push(event);
        self.0.more.notify_all();
    }
}
