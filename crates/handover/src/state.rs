//! A state that one moves on and others end.

use crate::sync::{AtomicU8, Ordering};

/// A state, as a number. Its owner moves it from state to state; others may step in at any moment, and no step of the
/// owner undoes theirs unless it means to.
#[derive(Debug)]
pub struct State {
    state: AtomicU8,
}

impl State {
    /// In this state.
    pub fn new(state: u8) -> Self {
        Self { state: AtomicU8::new(state) }
    }

    /// The state, at some moment.
    #[inline]
    pub fn get(&self) -> u8 {
        self.state.load(Ordering::Acquire)
    }

    /// Sets it, whatever others did. Called by its owner.
    pub fn set(&self, state: u8) {
        self.state.store(state, Ordering::Release);
    }

    /// Goes where `next` says of the state in which it is, in one step. Returns `false` if `next` says nowhere.
    pub fn step(&self, next: impl Fn(u8) -> Option<u8>) -> bool {
        self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, next).is_ok()
    }
}
