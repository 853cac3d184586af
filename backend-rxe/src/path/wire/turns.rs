//! Turns of the halves of a queue pair on its port's thread.

use std::sync::atomic::{AtomicBool, Ordering};

/// Turns of a QP on the thread that empties its receive queue. Only that thread writes the flags for turns, so relaxed
/// loads and stores suffice.
#[derive(Debug, Default)]
pub(crate) struct PortTurns {
    requests: AtomicBool,
    responses: AtomicBool,
    /// The responder waits for the next run of the queue pair.
    held: AtomicBool,
}

impl PortTurns {
    /// Records that the requester waits for a turn. Returns `false` if it was waiting before.
    pub(crate) fn begin_requests(&self) -> bool {
        begin(&self.requests)
    }

    /// Records that the requester's turn has begun.
    pub(crate) fn end_requests(&self) {
        self.requests.store(false, Ordering::Relaxed);
    }

    /// Records that the responder waits for a turn. Returns `false` if it was waiting before.
    pub(crate) fn begin_responses(&self) -> bool {
        begin(&self.responses)
    }

    /// Records that the responder waits for its rate or for a receive: the next run of the queue pair resumes it.
    pub(crate) fn hold_responder(&self) {
        self.held.store(true, Ordering::SeqCst);
    }

    /// Returns `true` if the responder waited for this run.
    #[inline]
    pub(crate) fn release_responder(&self) -> bool {
        self.held.load(Ordering::Relaxed) && self.held.swap(false, Ordering::SeqCst)
    }

    /// Records that the responder has sent all that it owed.
    pub(crate) fn end_responses(&self) {
        self.responses.store(false, Ordering::Relaxed);
    }
}

fn begin(flag: &AtomicBool) -> bool {
    let new = !flag.load(Ordering::Relaxed);
    if new {
        flag.store(true, Ordering::Relaxed);
    }
    new
}
