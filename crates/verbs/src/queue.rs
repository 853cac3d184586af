//! Queues and events: the interface through which a backend pulls work and pushes results.

use pvrdma_guest_memory::DmaView;
use pvrdma_pages::PageList;
use pvrdma_verbs_types::{Completion, RecvWr, SendWr};

use crate::error::{CqOverrun, IndexError, QueueError};

/// Consumer side of a send queue.
pub trait SendSource: Send {
    /// Copies the next posted request into `work` (reusing its buffer). Returns `false` if the queue is empty.
    ///
    /// # Errors
    /// The ring is invalid: the QP must go to its error state.
    fn pop(&mut self, view: &DmaView<'_>, work: &mut SendWr) -> Result<bool, QueueError>;

    /// Returns the slot of the oldest popped request to the guest. Call it once per request, in order, *before* the
    /// request's completion is pushed: a guest that polls the completion may post a new request immediately.
    fn retire(&mut self, view: &DmaView<'_>);

    /// Starts over at index 0, as the guest does when it moves the QP to RESET.
    fn reset(&mut self);

    /// Returns the state of the ring. `None`: it cannot be saved.
    fn save(&self) -> Option<SavedRing> {
        None
    }
}

/// Consumer side of a receive queue. A slot returns to the guest when its request is popped.
pub trait RecvSource: Send {
    /// Copies the next posted request into `work` (reusing its buffer). Returns `false` if the queue is empty.
    ///
    /// # Errors
    /// The ring is invalid: the QP or SRQ must go to its error state.
    fn pop(&mut self, view: &DmaView<'_>, work: &mut RecvWr) -> Result<bool, QueueError>;

    /// Returns the number of requests posted and not popped yet.
    ///
    /// # Errors
    /// As for [`RecvSource::pop`].
    fn posted(&mut self, view: &DmaView<'_>) -> Result<u32, QueueError>;

    /// Starts over at index 0.
    fn reset(&mut self);

    /// Returns the state of the ring. `None`: it cannot be saved.
    fn save(&self) -> Option<SavedRing> {
        None
    }
}

/// Producer side of a completion queue.
pub trait CompletionSink: Send + Sync {
    /// Publishes one entry and notifies the guest if the queue is armed for it.
    ///
    /// # Errors
    /// The queue is full or already dead; the entry is lost, the CQ error event was raised, and every QP of this queue
    /// must go to its error state.
    fn complete(&self, view: &DmaView<'_>, completion: &Completion) -> Result<(), CqOverrun>;

    /// Publishes entries in order, perhaps all at once, and returns how many fit. If that is fewer than all, the rest
    /// is lost and the queue is unusable, as with [`Self::complete`].
    fn complete_all(&self, view: &DmaView<'_>, completions: &[Completion]) -> usize {
        completions.iter().take_while(|completion| self.complete(view, completion).is_ok()).count()
    }

    /// Treats the queue as full, as [`Self::complete`] does when an entry does not fit: raises the CQ error event and
    /// accepts no more entries. A test has requested that.
    fn overrun(&self, _view: &DmaView<'_>) {}
}

/// Sink of asynchronous events.
pub trait EventSink: Send + Sync {
    /// Reports one event. Events are never lost; the sink queues them while the guest's ring is full.
    fn event(&self, view: &DmaView<'_>, event: AsyncEvent);
}

/// Asynchronous event.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum AsyncEvent {
    /// Event of the QP with this [`crate::QpInit::cookie`].
    Qp(QpEvent, u32),
    /// Event of the SRQ with this [`crate::SrqInit::cookie`].
    Srq(SrqEvent, u32),
    /// Event of the port.
    Port(PortEvent),
}

/// Events of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum QpEvent {
    /// The adapter cannot continue to process this QP.
    Fatal,
    /// The QP, as responder, received an invalid request.
    RequestError,
    /// The QP, as responder, detected an access violation.
    AccessError,
    /// The first packet arrived while the QP was in RTR.
    CommunicationEstablished,
    /// The send queue reached SQD with nothing outstanding.
    SendQueueDrained,
    /// A QP on a shared receive queue takes no more receives from it.
    LastWqeReached,
}

/// Events of a shared receive queue.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum SrqEvent {
    /// The ring is invalid.
    Error,
    /// Fewer receives than the armed limit are left; the limit is disarmed.
    LimitReached,
}

/// Events of the port.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PortEvent {
    /// The port came up.
    Active,
    /// The port went down.
    Error,
    /// The GID table has changed, and not by a command of the guest.
    GidChange,
}

/// Position of the adapter in a queue that the guest fills. Indices run from 0 to twice the size of the ring, minus 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RingPosition {
    /// Index of the next request to take.
    pub next: u32,
    /// Index of the oldest request that was taken and whose slot was not returned. Equal to `next` if all were.
    pub head: u32,
    /// The invalid index of the guest that has made the ring unusable.
    pub broken: Option<IndexError>,
}

/// State of a queue that the guest fills.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SavedRing {
    /// Pages of its elements.
    pub pages: PageList,
    /// Position of the adapter.
    pub position: RingPosition,
}
