//! Outcome of a replacement, and the thread that waits for it.

use std::io;
use std::process::ExitStatus;
use std::sync::mpsc::Sender;
use std::time::Duration;

use parking_lot::{Mutex, RwLock, RwLockReadGuard};

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
pub(crate) struct Starter {
    waiting: Mutex<Option<Sender<Event>>>,
    /// Read-locked during each replacement, until its outcome was told.
    replacing: RwLock<()>,
}

impl Starter {
    /// Sends events to this thread from now on. Returns `false` if another thread waits already.
    pub(super) fn wait(&self, thread: Sender<Event>) -> bool {
        let mut waiting = self.waiting.lock();
        let is_free = waiting.is_none();
        if is_free {
            *waiting = Some(thread);
        }
        is_free
    }

    /// Ends the wait of the thread.
    pub(super) fn end(&self) {
        self.waiting.lock().take();
    }

    /// Marks a replacement as unfinished for as long as the result lives.
    pub(super) fn replacing(&self) -> RwLockReadGuard<'_, ()> {
        self.replacing.read()
    }

    /// Waits until the outcome of every unfinished replacement was told, but no longer than `time`.
    pub(super) fn wait_told(&self, time: Duration) {
        drop(self.replacing.try_write_for(time));
    }

    /// Tells the outcome to the thread that waits for it, if there is one.
    pub(super) fn tell(&self, outcome: &Outcome) {
        if let Some(waiting) = &*self.waiting.lock() {
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
