//! Interrupt sink of a test guest.

use pvrdma_base::locks::Mutex;
use pvrdma_pci_function::InterruptSink;

/// Counts interrupts.
#[derive(Debug, Default)]
pub struct Irqs(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    counts: [u64; 32],
    line: bool,
    line_raised: u64,
}

impl InterruptSink for Irqs {
    fn msix(&self, vector: u16) {
        self.0.lock().counts[usize::from(vector)] += 1;
    }

    fn intx(&self, asserted: bool) {
        let mut state = self.0.lock();
        state.line_raised += u64::from(asserted && !state.line);
        state.line = asserted;
    }
}

impl Irqs {
    /// Returns how often a vector was raised since the last call.
    pub fn take(&self, vector: u8) -> u64 {
        std::mem::take(&mut self.0.lock().counts[usize::from(vector)])
    }

    /// Returns how often any vector was raised.
    pub fn total(&self) -> u64 {
        self.0.lock().counts.iter().sum()
    }

    /// Returns the level of the legacy line, and how often it rose.
    pub fn line(&self) -> (bool, u64) {
        let state = self.0.lock();
        (state.line, state.line_raised)
    }
}
