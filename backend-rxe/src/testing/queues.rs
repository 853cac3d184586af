//! What a device gives an adapter: queues that the test fills, and sinks that keep what comes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;
use pvrdma_guest_memory::{DmaError, DmaView};
use pvrdma_verbs::{
    AsyncEvent, Completion, CompletionSink, CqOverrun, EventSink, QueueError, RecvSource, RecvWr, SendSource, SendWr,
    WcStatus,
};

/// A ring that the "guest" fills.
#[derive(Debug)]
pub(crate) struct Ring<T> {
    pub(crate) posted: Mutex<VecDeque<T>>,
    pub(crate) broken: AtomicU32,
    pub(crate) popped: AtomicU64,
    pub(crate) retired: AtomicU64,
    pub(crate) resets: AtomicU32,
}

impl<T> Default for Ring<T> {
    fn default() -> Self {
        Self {
            posted: Mutex::default(),
            broken: AtomicU32::new(0),
            popped: AtomicU64::new(0),
            retired: AtomicU64::new(0),
            resets: AtomicU32::new(0),
        }
    }
}

impl<T> Ring<T> {
    fn take(&self) -> Result<Option<T>, QueueError> {
        if self.broken.load(Ordering::SeqCst) != 0 {
            return Err(DmaError::Unmapped { addr: 0, len: 4 }.into());
        }
        let element = self.posted.lock().pop_front();
        self.popped.fetch_add(u64::from(element.is_some()), Ordering::SeqCst);
        Ok(element)
    }

    fn clear(&self) {
        self.posted.lock().clear();
        self.resets.fetch_add(1, Ordering::SeqCst);
    }
}

pub(super) struct Consumer<T>(pub(super) Arc<Ring<T>>);

impl SendSource for Consumer<SendWr> {
    fn pop(&mut self, _view: &DmaView<'_>, work: &mut SendWr) -> Result<bool, QueueError> {
        Ok(self.0.take()?.map(|element| *work = element).is_some())
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
        Ok(self.0.take()?.map(|element| *work = element).is_some())
    }

    fn posted(&mut self, _view: &DmaView<'_>) -> Result<u32, QueueError> {
        Ok(u32::try_from(self.0.posted.lock().len()).unwrap())
    }

    fn reset(&mut self) {
        self.0.clear();
    }
}

/// A completion queue that keeps everything, up to its size.
#[derive(Debug)]
pub(crate) struct Completions {
    entries: Mutex<Vec<Completion>>,
    pub(crate) size: AtomicU32,
    pub(crate) total: AtomicU64,
}

impl Completions {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { entries: Mutex::default(), size: AtomicU32::new(u32::MAX), total: AtomicU64::new(0) })
    }

    /// Takes all entries.
    pub(crate) fn poll(&self) -> Vec<Completion> {
        std::mem::take(&mut *self.entries.lock())
    }

    /// Takes all entries as name and status.
    pub(crate) fn statuses(&self) -> Vec<(u64, WcStatus)> {
        self.poll().iter().map(|c| (c.wr_id, c.status)).collect()
    }

    /// Takes the only entry.
    pub(crate) fn one(&self) -> Completion {
        let entries = self.poll();
        assert_eq!(entries.len(), 1, "{entries:?}");
        entries[0]
    }
}

impl CompletionSink for Completions {
    fn complete(&self, _view: &DmaView<'_>, completion: &Completion) -> Result<(), CqOverrun> {
        let mut entries = self.entries.lock();
        if entries.len() >= self.size.load(Ordering::SeqCst) as usize {
            return Err(CqOverrun);
        }
        self.total.fetch_add(1, Ordering::SeqCst);
        entries.push(*completion);
        Ok(())
    }
}

/// Events as they came.
#[derive(Debug, Default)]
pub(crate) struct Events(Mutex<Vec<AsyncEvent>>);

impl Events {
    pub(crate) fn poll(&self) -> Vec<AsyncEvent> {
        std::mem::take(&mut *self.0.lock())
    }
}

impl EventSink for Events {
    fn event(&self, _view: &DmaView<'_>, event: AsyncEvent) {
        self.0.lock().push(event);
    }
}
