//! Somebody waits in a queue for its turn.

use crate::sync::{AtomicU8, Ordering};

/// Neither waits nor has a turn that it has not begun.
const IDLE: u8 = 0;
const QUEUED: u8 = 1;
const GRANTED: u8 = 2;

/// Where somebody is who takes turns. One word, so that nobody is in the queue and has a turn: it would get another,
/// and give one back.
///
/// Who has the lock of the queue moves it on, but for the last step: the owner begins its turn without.
#[derive(Debug)]
pub struct Turn {
    state: AtomicU8,
}

impl Default for Turn {
    fn default() -> Self {
        Self::new()
    }
}

impl Turn {
    /// It does not wait.
    pub fn new() -> Self {
        Self { state: AtomicU8::new(IDLE) }
    }

    /// Returns `true` if it is in the queue, at some moment.
    #[inline]
    pub fn is_queued(&self) -> bool {
        self.state.load(Ordering::Acquire) == QUEUED
    }

    /// Returns `true` if it has a turn that it has not begun, at some moment.
    #[inline]
    pub fn is_granted(&self) -> bool {
        self.state.load(Ordering::Acquire) == GRANTED
    }

    /// It is in the queue from here on. Called by its owner, under the lock, who has neither.
    pub fn queue(&self) {
        self.state.store(QUEUED, Ordering::Release);
    }

    /// It is in the queue no more, without a turn. Called by its owner, under the lock.
    pub fn withdraw(&self) {
        self.state.store(IDLE, Ordering::Release);
    }

    /// It left the queue with a turn. Called under the lock.
    pub fn grant(&self) {
        self.state.store(GRANTED, Ordering::Release);
    }

    /// Begins a turn. Called by its owner, who alone ends what [`Self::grant`] began. Returns `false` if it has none.
    #[inline]
    pub fn begin(&self) -> bool {
        let granted = self.is_granted();
        if granted {
            self.state.store(IDLE, Ordering::Release);
        }
        granted
    }
}
