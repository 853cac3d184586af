//! Interrupts of a test guest.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use pvrdma_pci_function::InterruptSink;

use super::DEADLINE;

#[derive(Debug, Default)]
struct State {
    counts: [u64; 3],
    /// Messages for vectors that the function does not have.
    strange: u64,
    line: bool,
    line_raised: u64,
}

/// Counts interrupts and makes threads wait for them.
#[derive(Debug, Default)]
pub struct Irqs {
    state: Mutex<State>,
    changed: Condvar,
}

impl InterruptSink for Irqs {
    fn msix(&self, vector: u16) {
        let mut state = self.state.lock();
        match state.counts.get_mut(usize::from(vector)) {
            Some(count) => *count += 1,
            None => state.strange += 1,
        }
        self.changed.notify_all();
    }

    fn intx(&self, asserted: bool) {
        let mut state = self.state.lock();
        state.line_raised += u64::from(asserted && !state.line);
        state.line = asserted;
        self.changed.notify_all();
    }
}

impl Irqs {
    /// Creates counters at zero.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Returns how often a vector was raised.
    pub fn count(&self, vector: usize) -> u64 {
        self.state.lock().counts[vector]
    }

    /// Returns how often each vector was raised.
    pub fn counts(&self) -> [u64; 3] {
        self.state.lock().counts
    }

    /// Returns the number of messages for vectors that do not exist.
    pub fn strange(&self) -> u64 {
        self.state.lock().strange
    }

    /// Returns the level of the legacy line, and how often it rose.
    pub fn line(&self) -> (bool, u64) {
        let state = self.state.lock();
        (state.line, state.line_raised)
    }

    /// Waits until a vector was raised more than `seen` times. Returns `false` if that did not happen within
    /// [`DEADLINE`].
    pub fn wait_beyond(&self, vector: usize, seen: u64) -> bool {
        self.wait_until(|state| state.counts[vector] > seen)
    }

    /// Waits until the legacy line is asserted.
    pub fn wait_line(&self) -> bool {
        self.wait_until(|state| state.line)
    }

    fn wait_until(&self, reached: impl Fn(&State) -> bool) -> bool {
        let end = Instant::now() + DEADLINE;
        let mut state = self.state.lock();
        while !reached(&state) {
            if self.changed.wait_until(&mut state, end).timed_out() {
                return reached(&state);
            }
        }
        true
    }
}
