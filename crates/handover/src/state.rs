//! A state that its owner advances and that other threads can end.

use crate::sync::{AtomicU8, Ordering};

/// A state, as a number. Its owner moves it from state to state. Other threads may change it at any moment, and a step
/// of the owner never undoes their change by accident.
#[derive(Debug)]
pub struct State {
    state: AtomicU8,
}

impl State {
    /// Starts in this state.
    pub fn new(state: u8) -> Self {
        Self { state: AtomicU8::new(state) }
    }

    /// Returns the state at some moment.
    #[inline]
    pub fn get(&self) -> u8 {
        self.state.load(Ordering::Acquire)
    }

    /// Sets the state, regardless of changes by other threads. Called by the owner.
    pub fn set(&self, state: u8) {
        self.state.store(state, Ordering::Release);
    }

    /// Moves to the state that `next` returns for the current one, in one atomic step. Returns `false` if `next`
    /// returns `None`.
    pub fn step(&self, next: impl Fn(u8) -> Option<u8>) -> bool {
        self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, next).is_ok()
    }
}
