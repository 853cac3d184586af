//! Queues of a guest, and what must hold for them whatever a peer does.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{
    AsyncEvent, Completion, CompletionSink, CqOverrun, EventSink, QueueError, RecvSource, RecvWr, SendSource, SendWr,
};

/// A queue that the guest fills.
pub(crate) struct Ring<T> {
    pub(crate) posted: VecDeque<T>,
    popped: u64,
    retired: u64,
}

impl<T> Ring<T> {
    pub(crate) fn new() -> Self {
        Self { posted: VecDeque::new(), popped: 0, retired: 0 }
    }
}

pub(crate) struct Consumer<T>(pub(crate) Arc<Mutex<Ring<T>>>);

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nothing panics with a lock held")
}

impl<T> Consumer<T> {
    fn next(&self, into: &mut T) -> bool {
        let mut ring = lock(&self.0);
        let element = ring.posted.pop_front();
        ring.popped += u64::from(element.is_some());
        element.map(|element| *into = element).is_some()
    }

    fn clear(&self) {
        *lock(&self.0) = Ring::new();
    }
}

impl SendSource for Consumer<SendWr> {
    fn pop(&mut self, _: &DmaView<'_>, work: &mut SendWr) -> Result<bool, QueueError> {
        Ok(self.next(work))
    }

    fn retire(&mut self, _: &DmaView<'_>) {
        let mut ring = lock(&self.0);
        ring.retired += 1;
        assert!(ring.retired <= ring.popped, "more slots were given back than taken");
    }

    fn reset(&mut self) {
        self.clear();
    }
}

impl RecvSource for Consumer<RecvWr> {
    fn pop(&mut self, _: &DmaView<'_>, work: &mut RecvWr) -> Result<bool, QueueError> {
        Ok(self.next(work))
    }

    fn posted(&mut self, _: &DmaView<'_>) -> Result<u32, QueueError> {
        Ok(lock(&self.0).posted.len() as u32)
    }

    fn reset(&mut self) {
        self.clear();
    }
}

/// A completion queue that checks the order of its entries.
#[derive(Default)]
pub(crate) struct Log {
    /// Name of the next request to complete, and of the next to be posted.
    pub(crate) names: Mutex<(u64, u64)>,
}

impl CompletionSink for Log {
    fn complete(&self, _: &DmaView<'_>, completion: &Completion) -> Result<(), CqOverrun> {
        let (next, posted) = &mut *lock(&self.names);
        assert_eq!(completion.wr_id, *next, "completions come in the order of the requests");
        *next += 1;
        assert!(*next <= *posted, "a request completed that was not posted");
        Ok(())
    }
}

pub(crate) struct NoEvents;

impl EventSink for NoEvents {
    fn event(&self, _: &DmaView<'_>, _: AsyncEvent) {}
}

/// The name of the next request of a queue.
pub(crate) fn name(log: &Log) -> u64 {
    let (_, posted) = &mut *lock(&log.names);
    *posted += 1;
    *posted - 1
}
