//! Outcome of a replacement, and the thread that waits for it.

use std::io;
use std::process::ExitStatus;
use std::sync::mpsc::Sender;

use parking_lot::Mutex;

use crate::protocol::Upgraded;

/// Result of a replacement.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    /// The new supervisor serves the networks. Otherwise this one serves all of them as before.
    pub(crate) replaced: bool,
    /// Result for each network.
    pub(crate) networks: Vec<Upgraded>,
}

/// Receiver of the outcome for the thread that has started the next program.
#[derive(Debug, Default)]
pub(crate) struct Starter(Mutex<Option<Sender<Event>>>);

impl Starter {
    /// Sends events to this thread from now on. Returns `false` if another thread waits already.
    pub(super) fn wait(&self, thread: Sender<Event>) -> bool {
        let mut waiting = self.0.lock();
        let is_free = waiting.is_none();
        if is_free {
            *waiting = Some(thread);
        }
        is_free
    }

    /// The thread does not wait any more.
    pub(super) fn end(&self) {
        self.0.lock().take();
    }

    /// Tells the outcome to the thread that waits for it, if there is one.
    pub(super) fn tell(&self, outcome: &Outcome) {
        if let Some(waiting) = &*self.0.lock() {
            let _ = waiting.send(Event::Outcome(outcome.clone()));
        }
    }
}

/// Event of a program that was started.
#[derive(Debug)]
pub(super) enum Event {
    /// It has replaced this daemon, or was refused.
    Outcome(Outcome),
    /// It ended.
    Ended(io::Result<ExitStatus>),
}
