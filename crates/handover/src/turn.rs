//! Turn of a participant that waits in a queue.

use crate::sync::{AtomicU8, Ordering};

/// The participant neither waits nor has a turn to begin.
const IDLE: u8 = 0;
const QUEUED: u8 = 1;
const GRANTED: u8 = 2;

/// State of one participant that takes turns. It is a single atomic, so that a participant is never queued while it has
/// a turn: it would get another turn, and would have to give one back.
///
/// The holder of the queue's lock makes all changes but the last: the owner begins its turn without the lock.
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
    /// Starts outside the queue.
    pub fn new() -> Self {
        Self { state: AtomicU8::new(IDLE) }
    }

    /// Returns `true` if the participant was in the queue at some moment.
    #[inline]
    pub fn is_queued(&self) -> bool {
        self.state.load(Ordering::Acquire) == QUEUED
    }

    /// Returns `true` if the participant had a turn that it had not begun, at some moment.
    #[inline]
    pub fn is_granted(&self) -> bool {
        self.state.load(Ordering::Acquire) == GRANTED
    }

    /// Enters the queue. Called by the owner, under the lock, while it is neither queued nor has a turn.
    pub fn queue(&self) {
        self.state.store(QUEUED, Ordering::Release);
    }

    /// Leaves the queue without a turn. Called by the owner, under the lock.
    pub fn withdraw(&self) {
        self.state.store(IDLE, Ordering::Release);
    }

    /// Leaves the queue with a turn. Called under the lock.
    pub fn grant(&self) {
        self.state.store(GRANTED, Ordering::Release);
    }

    /// Begins a turn. Called by the owner, which alone ends the state that [`Self::grant`] set. Returns `false` if
    /// there is no turn.
    #[inline]
    pub fn begin(&self) -> bool {
        let granted = self.is_granted();
        if granted {
            self.state.store(IDLE, Ordering::Release);
        }
        granted
    }
}
