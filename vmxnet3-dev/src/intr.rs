//! Interrupts: a mask for each vector, MSI-X or the legacy line, and bus mastering.
//!
//! `intrCtrl` of the shared area is not used as a mask. The driver unmasks every vector first, and then updates
//! `intrCtrl` without notifying the device, so a cause in between would be lost.

use std::sync::Arc;

use pvrdma_base::Count;
use pvrdma_base::locks::Mutex;
use pvrdma_pci_function::{InterruptPin, InterruptSink};
use pvrdma_saved_state::vmxnet3 as saved;

use crate::saved_state::error::{RestoreError, require};

#[derive(Clone, Copy, Debug)]
struct Vector {
    masked: bool,
    /// An interrupt cause was held back.
    pending: bool,
    /// The vector was masked by being raised, so the driver unmasks it at the end of its round.
    in_round: bool,
    /// Number of rounds that have ended.
    rounds: u32,
}

impl Vector {
    const MASKED: Self = Self { masked: true, pending: false, in_round: false, rounds: 0 };

    const fn save(self) -> saved::Vector {
        let Self { masked, pending, in_round, rounds } = self;
        saved::Vector { masked, pending, in_round, rounds }
    }

    const fn restore(vector: &saved::Vector) -> Self {
        let saved::Vector { masked, pending, in_round, rounds } = *vector;
        Self { masked, pending, in_round, rounds }
    }
}

/// State of a driver's rounds. A round begins with an interrupt that masks its vector, and ends when the driver unmasks
/// it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Round {
    /// A round is in progress.
    pub(crate) now: bool,
    /// The next interrupt begins a round.
    pub(crate) next: bool,
    /// Number of rounds that have ended.
    pub(crate) ended: u32,
}

#[derive(Debug)]
struct State {
    vectors: Vec<Vector>,
    /// Raising a vector masks it.
    auto_mask: bool,
    bus_master: bool,
    pin: InterruptPin,
    /// Cause register of the legacy line.
    cause: bool,
    /// The device is paused: the sink is not called.
    held: bool,
}

/// Interrupt state of the function. Its lock is held while the sink is called, so that no interrupt is delivered after
/// a call that disables it has returned. The sink must not call back into the device.
pub(crate) struct Interrupts {
    sink: Arc<dyn InterruptSink>,
    state: Mutex<State>,
    raised: Count,
}

impl std::fmt::Debug for Interrupts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Interrupts").field("state", &self.state).finish_non_exhaustive()
    }
}

impl Interrupts {
    /// Creates the state after power-on: all vectors masked, bus mastering off.
    pub(crate) fn new(sink: Arc<dyn InterruptSink>, vectors: u16, pin: bool) -> Self {
        let state = State {
            vectors: vec![Vector::MASKED; vectors.into()],
            auto_mask: false,
            bus_master: false,
            pin: InterruptPin::new(pin),
            cause: false,
            held: false,
        };
        Self { sink, state: Mutex::new(state), raised: Count::default() }
    }

    /// Signals a vector, immediately or once the guest unmasks it.
    pub(crate) fn raise(&self, vector: u8) {
        let mut state = self.state.lock();
        if let Some(it) = state.vectors.get_mut(usize::from(vector)) {
            it.pending = true;
            self.deliver(&mut state, vector);
        }
    }

    /// Delivers a pending vector, if it is neither masked nor disabled nor held.
    fn deliver(&self, state: &mut State, vector: u8) {
        let State { bus_master, auto_mask, held, .. } = *state;
        let Some(it) = state.vectors.get_mut(usize::from(vector)) else { return };
        if held || !bus_master || it.masked || !it.pending {
            return;
        }
        *it = Vector { masked: auto_mask, pending: false, in_round: auto_mask, ..*it };
        self.raised.increment();
        if state.pin.is_msix() {
            self.sink.msix(vector.into());
        } else {
            state.cause = true;
            self.update_line(state);
        }
    }

    fn deliver_all(&self, state: &mut State) {
        for vector in (0_u8..).take(state.vectors.len()) {
            self.deliver(state, vector);
        }
    }

    fn update_line(&self, state: &mut State) {
        if !state.held {
            state.pin.update(state.cause, &*self.sink);
        }
    }

    /// Stops calling the sink, and makes vectors pending, one bit per vector. When this returns, no call is in
    /// progress.
    pub(crate) fn hold(&self, vectors: u32) {
        let mut state = self.state.lock();
        state.held = true;
        for (_, it) in (0..32).zip(&mut state.vectors).filter(|(number, _)| vectors >> number & 1 == 1) {
            it.pending = true;
        }
    }

    /// Calls the sink again. `all`: makes every unmasked vector pending, for causes that are no longer known.
    pub(crate) fn release(&self, all: bool) {
        let mut state = self.state.lock();
        state.held = false;
        for it in state.vectors.iter_mut().filter(|it| all && !it.masked) {
            it.pending = true;
        }
        self.deliver_all(&mut state);
        self.update_line(&mut state);
    }

    /// Returns `true` if a vector is masked or does not exist.
    pub(crate) fn is_masked(&self, vector: u8) -> bool {
        self.state.lock().vectors.get(usize::from(vector)).is_none_or(|it| it.masked)
    }

    /// Masks a vector, or unmasks it and delivers a pending interrupt.
    pub(crate) fn set_masked(&self, vector: u8, masked: bool) {
        let mut state = self.state.lock();
        if let Some(it) = state.vectors.get_mut(usize::from(vector)) {
            it.masked = masked;
            // A driver that masks the vector itself is not required to unmask it at the end of a round.
            it.in_round = false;
            if !masked {
                it.rounds = it.rounds.wrapping_add(1);
            }
            self.deliver(&mut state, vector);
        }
    }

    /// Returns the state of the driver's rounds on a vector.
    pub(crate) fn round(&self, vector: u8) -> Round {
        let state = self.state.lock();
        let vector = state.vectors.get(usize::from(vector));
        vector.map_or(Round { now: false, next: false, ended: 0 }, |it| Round {
            now: it.in_round,
            next: state.auto_mask && state.bus_master && !it.masked,
            ended: it.rounds,
        })
    }

    /// Sets whether raising a vector masks it.
    pub(crate) fn set_auto_mask(&self, auto_mask: bool) {
        self.state.lock().auto_mask = auto_mask;
    }

    /// Reads the cause register, which clears it and deasserts the line.
    pub(crate) fn take_cause(&self) -> u32 {
        let mut state = self.state.lock();
        let cause = std::mem::take(&mut state.cause);
        self.update_line(&mut state);
        cause.into()
    }

    /// Returns `true` if a legacy interrupt is pending, for the status register.
    pub(crate) fn is_pending(&self) -> bool {
        let state = self.state.lock();
        state.pin.is_pending(state.cause)
    }

    /// Sets Bus Master Enable.
    pub(crate) fn set_bus_master(&self, enabled: bool) {
        let mut state = self.state.lock();
        state.bus_master = enabled;
        if enabled {
            self.deliver_all(&mut state);
        } else {
            state.cause = false;
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

    /// Discards pending interrupts.
    pub(crate) fn clear(&self) {
        let mut state = self.state.lock();
        for vector in &mut state.vectors {
            (vector.pending, vector.in_round) = (false, false);
        }
        state.cause = false;
        self.update_line(&mut state);
    }

    /// Masks all vectors, discards pending interrupts, and ends a hold. Settings of configuration space stay.
    pub(crate) fn reset(&self) {
        self.state.lock().held = false;
        self.clear();
        let mut state = self.state.lock();
        state.vectors.iter_mut().for_each(|vector| vector.masked = true);
        state.auto_mask = false;
    }

    /// Returns the saved form of held interrupts.
    pub(crate) fn save(&self) -> saved::Interrupts {
        let Self { sink: _, state, raised } = self;
        let State {
            vectors,
            auto_mask,
            // Both follow configuration space.
            bus_master: _,
            pin: _,
            cause,
            held: _,
        } = &*state.lock();
        saved::Interrupts {
            auto_mask: *auto_mask,
            cause: *cause,
            vectors: vectors.iter().copied().map(Vector::save).collect(),
            delivered: raised.get(),
        }
    }

    /// Checks saved interrupts of a function with `vectors` vectors.
    ///
    /// # Errors
    /// The function had another number of vectors, or a vector is in a round without being masked by it.
    pub(crate) fn check(interrupts: &saved::Interrupts, vectors: u16) -> Result<(), RestoreError> {
        let count = interrupts.vectors.len();
        require("number of interrupt vectors", count as u64, count == usize::from(vectors))?;
        for (number, vector) in (0_u64..).zip(&interrupts.vectors) {
            let possible = vector.masked && interrupts.auto_mask;
            require("round of interrupt vector", number, possible || !vector.in_round)?;
        }
        Ok(())
    }

    /// Restores held interrupts that [`Self::check`] has accepted.
    pub(crate) fn restore(&self, interrupts: &saved::Interrupts) {
        let saved::Interrupts { auto_mask, cause, vectors, delivered } = interrupts;
        let mut state = self.state.lock();
        for (it, saved) in state.vectors.iter_mut().zip(vectors) {
            *it = Vector::restore(saved);
        }
        (state.auto_mask, state.cause) = (*auto_mask, *cause);
        self.raised.add(*delivered);
    }

    /// Returns the number of interrupts delivered.
    pub(crate) fn raised(&self) -> u64 {
        self.raised.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Records the calls of an interrupt sink.
    #[derive(Debug, Default)]
    struct RecordingSink(Mutex<Vec<String>>);

    impl RecordingSink {
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

    fn interrupts(msix: bool) -> (Arc<RecordingSink>, Interrupts) {
        let sink = Arc::new(RecordingSink::default());
        let interrupts = Interrupts::new(Arc::clone(&sink) as Arc<dyn InterruptSink>, 3, true);
        interrupts.set_bus_master(true);
        interrupts.set_msix(msix);
        (sink, interrupts)
    }

    /// Trap 8: a vector is masked by being raised, and a cause in the meantime is remembered.
    #[test]
    fn raising_a_vector_masks_it_and_keeps_later_causes() {
        let (sink, interrupts) = interrupts(true);
        interrupts.set_auto_mask(true);
        interrupts.raise(1);
        assert!(sink.take().is_empty(), "masked at power-on");
        interrupts.set_masked(1, false);
        assert_eq!(sink.take(), ["msix 1"]);
        interrupts.raise(1);
        interrupts.raise(1);
        assert!(sink.take().is_empty());
        interrupts.set_masked(1, false);
        assert_eq!(sink.take(), ["msix 1"], "once for both");
        interrupts.set_masked(1, false);
        assert!(sink.take().is_empty(), "nothing new");
        interrupts.raise(1);
        assert_eq!(sink.take(), ["msix 1"]);
    }

    #[test]
    fn without_auto_mask_each_cause_is_an_interrupt() {
        let (sink, interrupts) = interrupts(true);
        interrupts.set_masked(0, false);
        interrupts.raise(0);
        interrupts.raise(0);
        assert_eq!(sink.take(), ["msix 0", "msix 0"]);
        interrupts.set_masked(0, true);
        interrupts.raise(0);
        interrupts.raise(7);
        assert!(sink.take().is_empty());
    }

    #[test]
    fn bus_mastering_holds_back_and_clearing_forgets() {
        let (sink, interrupts) = interrupts(true);
        interrupts.set_masked(2, false);
        interrupts.set_bus_master(false);
        interrupts.raise(2);
        assert!(sink.take().is_empty());
        interrupts.set_bus_master(true);
        assert_eq!(sink.take(), ["msix 2"]);
        interrupts.set_masked(2, true);
        interrupts.raise(2);
        interrupts.clear();
        interrupts.set_masked(2, false);
        assert!(sink.take().is_empty());
    }

    #[test]
    fn reading_the_cause_takes_the_line_back() {
        let (sink, interrupts) = interrupts(false);
        interrupts.set_masked(0, false);
        interrupts.raise(0);
        assert_eq!(sink.take(), ["intx true"]);
        assert!(interrupts.is_pending());
        assert_eq!((interrupts.take_cause(), interrupts.take_cause()), (1, 0));
        assert_eq!(sink.take(), ["intx false"]);
        interrupts.raise(0);
        interrupts.set_line_disabled(true);
        assert_eq!(sink.take(), ["intx true", "intx false"]);
        interrupts.set_line_disabled(false);
        interrupts.set_bus_master(false);
        assert_eq!(sink.take(), ["intx true", "intx false"]);
    }
}
