//! Interrupts: the mask and cause registers, MSI-X or the legacy line, and the bus-master gate (section 1.3).

use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_base::{Counter, counters};
use pvrdma_pci_function::{InterruptPin, InterruptSink};

/// Number of vectors.
pub(crate) const VECTORS: u16 = 3;

/// Cause of an interrupt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Vector {
    /// The response to a command is in its slot.
    Response,
    /// The asynchronous event ring has entries.
    Async,
    /// The CQ notification ring has entries.
    Completion,
}

impl Vector {
    const ALL: [Self; VECTORS as usize] = [Self::Response, Self::Async, Self::Completion];

    const fn number(self) -> u16 {
        match self {
            Self::Response => 0,
            Self::Async => 1,
            Self::Completion => 2,
        }
    }

    const fn cause(self) -> u32 {
        1 << self.number()
    }
}

#[derive(Debug)]
struct State {
    /// IMR: a set bit masks its cause.
    mask: u32,
    /// ICR. Only bit 0 is ever set, because the driver's legacy handler accepts only the exact value 1.
    cause: u32,
    /// Causes that arrived while IMR or disabled bus mastering blocked them.
    held: u32,
    bus_master: bool,
    pin: InterruptPin,
}

/// State of the interrupts that is saved. The rest is determined by configuration space and other state, and causes
/// that were held back are raised again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SavedInterrupts {
    /// IMR.
    pub(crate) mask: u32,
    /// ICR.
    pub(crate) cause: u32,
}

counters! {
    /// Number of times that each vector was raised.
    pub(crate) struct InterruptCounters {
        /// Interrupts that announce the response to a command.
        interrupts_response,
        /// Interrupts that announce asynchronous events.
        interrupts_async,
        /// Interrupts that announce completions.
        interrupts_completion,
    }
}

/// Interrupt logic of the function. Its lock is held while the sink is called, so that no interrupt is sent once the
/// call that disables it has returned. Therefore the sink must not call back into the device.
pub(crate) struct Interrupts {
    sink: Arc<dyn InterruptSink>,
    state: Mutex<State>,
    counters: InterruptCounters,
}

impl std::fmt::Debug for Interrupts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Interrupts").field("state", &self.state).finish_non_exhaustive()
    }
}

impl Interrupts {
    /// Creates the power-on state: all causes masked, bus mastering disabled. `pin` is `true` if the function has an
    /// interrupt pin.
    pub(crate) fn new(sink: Arc<dyn InterruptSink>, pin: bool) -> Arc<Self> {
        let state = State { mask: u32::MAX, cause: 0, held: 0, bus_master: false, pin: InterruptPin::new(pin) };
        Arc::new(Self { sink, state: Mutex::new(state), counters: InterruptCounters::default() })
    }

    /// Raises a vector, unless the guest blocks it.
    pub(crate) fn raise(&self, vector: Vector) {
        let mut state = self.state.lock();
        if !state.bus_master || state.mask & vector.cause() != 0 {
            // A late response must not complete the next command (section 4.5), so it is dropped. The causes of the
            // rings are kept: otherwise masking for a moment would lose a wake-up.
            if vector != Vector::Response {
                state.held |= vector.cause();
            }
            return;
        }
        self.deliver(&mut state, vector);
    }

    fn deliver(&self, state: &mut State, vector: Vector) {
        match vector {
            Vector::Response => &self.counters.interrupts_response,
            Vector::Async => &self.counters.interrupts_async,
            Vector::Completion => &self.counters.interrupts_completion,
        }
        .increment();
        if state.pin.is_msix() {
            self.sink.msix(vector.number());
        } else if vector == Vector::Response {
            state.cause = vector.cause();
            self.update_line(state);
        }
    }

    /// Returns the state to be saved.
    pub(crate) fn save(&self) -> SavedInterrupts {
        let Self { sink: _, state, counters: _ } = self;
        let State { mask, cause, held: _, bus_master: _, pin: _ } = *state.lock();
        SavedInterrupts { mask, cause }
    }

    /// Sets the saved state, and raises the vectors of both event rings, because the guest may not have been notified
    /// of all their entries. The response to a command is not announced again, because it would complete the next one.
    pub(crate) fn restore(&self, saved: SavedInterrupts) {
        let SavedInterrupts { mask, cause } = saved;
        {
            let mut state = self.state.lock();
            state.mask = mask;
            state.cause = cause & Vector::Response.cause();
            self.update_line(&mut state);
        }
        self.raise(Vector::Async);
        self.raise(Vector::Completion);
    }

    fn update_line(&self, state: &mut State) {
        state.pin.update(state.cause != 0, &*self.sink);
    }

    /// Returns IMR.
    pub(crate) fn mask(&self) -> u32 {
        self.state.lock().mask
    }

    /// Sets IMR and delivers the causes that it no longer masks.
    pub(crate) fn set_mask(&self, mask: u32) {
        let mut state = self.state.lock();
        state.mask = mask;
        self.deliver_held(&mut state);
    }

    fn deliver_held(&self, state: &mut State) {
        for vector in Vector::ALL {
            if state.bus_master && state.held & !state.mask & vector.cause() != 0 {
                state.held &= !vector.cause();
                self.deliver(state, vector);
            }
        }
    }

    /// Reads ICR, which clears it and deasserts the line.
    pub(crate) fn take_cause(&self) -> u32 {
        let mut state = self.state.lock();
        let cause = std::mem::take(&mut state.cause);
        self.update_line(&mut state);
        cause
    }

    /// Returns `true` if a legacy interrupt is pending, for the status register.
    pub(crate) fn is_pending(&self) -> bool {
        let state = self.state.lock();
        state.pin.is_pending(state.cause != 0)
    }

    /// Sets Bus Master Enable.
    pub(crate) fn set_bus_master(&self, enabled: bool) {
        let mut state = self.state.lock();
        state.bus_master = enabled;
        if enabled {
            self.deliver_held(&mut state);
        } else {
            state.cause = 0;
            self.update_line(&mut state);
        }
    }

    /// Sets MSI-X Enable.
    pub(crate) fn set_msix(&self, enabled: bool) {
        let mut state = self.state.lock();
        state.pin.set_msix(enabled);
        self.update_line(&mut state);
    }

    /// Sets Interrupt Disable.
    pub(crate) fn set_line_disabled(&self, disabled: bool) {
        let mut state = self.state.lock();
        state.pin.set_disabled(disabled);
        self.update_line(&mut state);
    }

    /// Handles CTL=RESET: all causes masked, none pending. The configuration stays.
    pub(crate) fn reset(&self) {
        let mut state = self.state.lock();
        state.mask = u32::MAX;
        state.held = 0;
        state.cause = 0;
        self.update_line(&mut state);
    }

    /// Returns how often each vector was raised.
    pub(crate) fn counters(&self) -> Vec<Counter> {
        self.counters.list()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Records the calls.
    #[derive(Debug, Default)]
    struct RecordingSink(Mutex<Vec<String>>);

    impl RecordingSink {
        /// Returns the calls since the last time.
        fn take(&self) -> Vec<String> {
            std::mem::take(&mut self.0.lock())
        }
    }

    impl InterruptSink for RecordingSink {
        fn msix(&self, vector: u16) {
            self.0.lock().push(format!("msix {vector}"));
        }

        fn intx(&self, asserted: bool) {
            self.0.lock().push(format!("intx {asserted}"));
        }
    }

    fn interrupts(pin: bool) -> (Arc<RecordingSink>, Arc<Interrupts>) {
        let sink = Arc::new(RecordingSink::default());
        let interrupts = Interrupts::new(Arc::clone(&sink) as Arc<dyn InterruptSink>, pin);
        (sink, interrupts)
    }

    fn enabled_msix() -> (Arc<RecordingSink>, Arc<Interrupts>) {
        let (sink, interrupts) = interrupts(false);
        interrupts.set_bus_master(true);
        interrupts.set_msix(true);
        interrupts.set_mask(0);
        (sink, interrupts)
    }

    fn raise_all(interrupts: &Interrupts) {
        for vector in Vector::ALL {
            interrupts.raise(vector);
        }
    }

    /// Conformance 13.
    #[test]
    fn the_mask_holds_all_three_back() {
        let (sink, interrupts) = enabled_msix();
        interrupts.set_mask(u32::MAX);
        raise_all(&interrupts);
        assert!(sink.take().is_empty());
        interrupts.set_mask(0);
        assert_eq!(sink.take(), ["msix 1", "msix 2"], "ring causes are not lost, a stale response is");
        interrupts.set_mask(0);
        assert!(sink.take().is_empty());
        raise_all(&interrupts);
        assert_eq!(sink.take(), ["msix 0", "msix 1", "msix 2"]);
        assert_eq!(interrupts.counters().iter().map(|counter| counter.value).collect::<Vec<_>>(), [1, 2, 2]);
    }

    /// Conformance 12: the interrupt half.
    #[test]
    fn no_interrupt_without_bus_mastering() {
        let (sink, interrupts) = enabled_msix();
        interrupts.set_bus_master(false);
        raise_all(&interrupts);
        assert!(sink.take().is_empty());
        interrupts.set_bus_master(true);
        assert_eq!(sink.take(), ["msix 1", "msix 2"]);
        interrupts.set_bus_master(false);
        raise_all(&interrupts);
        interrupts.reset();
        interrupts.set_bus_master(true);
        interrupts.set_mask(0);
        assert!(sink.take().is_empty());
    }

    /// Conformance 14: only the response is reported, as exactly 1, and reading deasserts the line.
    #[test]
    fn the_legacy_line() {
        let (sink, interrupts) = interrupts(true);
        interrupts.set_bus_master(true);
        interrupts.set_mask(0);
        raise_all(&interrupts);
        assert_eq!(sink.take(), ["intx true"]);
        assert!(interrupts.is_pending());
        assert_eq!(interrupts.take_cause(), 1);
        assert_eq!(interrupts.take_cause(), 0);
        assert_eq!(sink.take(), ["intx false"]);
        interrupts.raise(Vector::Response);
        interrupts.set_line_disabled(true);
        assert_eq!(sink.take(), ["intx true", "intx false"]);
        interrupts.set_line_disabled(false);
        interrupts.set_msix(true);
        assert_eq!(sink.take(), ["intx true", "intx false"]);
        interrupts.reset();
        interrupts.set_msix(false);
        assert!(sink.take().is_empty());
    }

    #[test]
    fn a_function_without_pin_never_touches_the_line() {
        let (sink, interrupts) = interrupts(false);
        interrupts.set_bus_master(true);
        interrupts.set_mask(0);
        interrupts.raise(Vector::Response);
        assert!(sink.take().is_empty());
        assert_eq!(interrupts.take_cause(), 1);
    }
}
