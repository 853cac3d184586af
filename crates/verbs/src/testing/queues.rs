//! Rings that the test fills, and sinks that it can wait for.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::DEADLINE;
use crate::error::{CqOverrun, QueueError};
use crate::queue::{AsyncEvent, CompletionSink, EventSink, RecvSource, SendSource};
use crate::work::{Completion, RecvWr, SendWr, WcStatus};
use pvrdma_guest_memory::DmaView;

/// A ring that the "guest" fills.
#[derive(Debug)]
pub struct Ring<T> {
    /// What was posted and not taken yet.
    pub posted: Mutex<VecDeque<T>>,
    popped: AtomicU64,
    retired: AtomicU64,
    resets: AtomicU32,
}

impl<T> Default for Ring<T> {
    fn default() -> Self {
        Self {
            posted: Mutex::default(),
            popped: AtomicU64::new(0),
            retired: AtomicU64::new(0),
            resets: AtomicU32::new(0),
        }
    }
}

impl<T> Ring<T> {
    /// Requests that were given back.
    pub fn retired(&self) -> u64 {
        self.retired.load(Ordering::SeqCst)
    }

    /// How often the ring started over.
    pub fn resets(&self) -> u32 {
        self.resets.load(Ordering::SeqCst)
    }

    fn take(&self) -> Option<T> {
        let element = self.posted.lock().pop_front();
        self.popped.fetch_add(u64::from(element.is_some()), Ordering::SeqCst);
        element
    }

    fn clear(&self) {
        self.posted.lock().clear();
        self.resets.fetch_add(1, Ordering::SeqCst);
    }
}

/// The adapter's side of a ring.
pub(super) struct Consumer<T>(pub(super) Arc<Ring<T>>);

impl SendSource for Consumer<SendWr> {
    fn pop(&mut self, _view: &DmaView<'_>, work: &mut SendWr) -> Result<bool, QueueError> {
        Ok(self.0.take().map(|element| *work = element).is_some())
    }

    fn retire(&mut self, _view: &DmaView<'_>) {
        let retired = self.0.retired.fetch_add(1, Ordering::SeqCst);
        assert!(retired < self.0.popped.load(Ordering::SeqCst), "retired more than was popped");
    }

    fn reset(&mut self) {
        self.0.clear();
    }
}

impl RecvSource for Consumer<RecvWr> {
    fn pop(&mut self, _view: &DmaView<'_>, work: &mut RecvWr) -> Result<bool, QueueError> {
        Ok(self.0.take().map(|element| *work = element).is_some())
    }

    fn posted(&mut self, _view: &DmaView<'_>) -> Result<u32, QueueError> {
        Ok(u32::try_from(self.0.posted.lock().len()).unwrap())
    }

    fn reset(&mut self) {
        self.0.clear();
    }
}

/// What came, and whoever waits for it.
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
    /// Waits until there are `count` and takes all.
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

/// A completion queue that keeps everything.
#[derive(Debug, Default)]
pub struct Completions(Arrivals<Completion>);

impl Completions {
    /// Takes what is there.
    pub fn poll(&self) -> Vec<Completion> {
        std::mem::take(&mut *self.0.list.lock())
    }

    /// Waits for exactly `count` entries.
    ///
    /// # Panics
    /// They did not come, or there are more.
    pub fn wait(&self, count: usize) -> Vec<Completion> {
        let entries = self.0.wait("completions", count);
        assert_eq!(entries.len(), count, "{entries:?}");
        entries
    }

    /// Waits for the only entry.
    ///
    /// # Panics
    /// It did not come, or there are more.
    pub fn one(&self) -> Completion {
        self.wait(1)[0]
    }

    /// Waits for `count` entries, as name and status.
    ///
    /// # Panics
    /// They did not come, or there are more.
    pub fn statuses(&self, count: usize) -> Vec<(u64, WcStatus)> {
        self.wait(count).iter().map(|c| (c.wr_id, c.status)).collect()
    }
}

impl CompletionSink for Completions {
    fn complete(&self, _view: &DmaView<'_>, completion: &Completion) -> Result<(), CqOverrun> {
        self.0.list.lock().push(*completion);
        self.0.more.notify_all();
        Ok(())
    }
}

/// Events as they came.
#[derive(Debug, Default)]
pub struct Events(Arrivals<AsyncEvent>);

impl Events {
    /// Takes what is there.
    pub fn poll(&self) -> Vec<AsyncEvent> {
        std::mem::take(&mut *self.0.list.lock())
    }

    /// Waits for at least `count` events and takes all.
    ///
    /// # Panics
    /// They did not come.
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
