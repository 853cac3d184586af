//! Calls of the fake adapter that a test holds, to do something else meanwhile.

use std::time::Instant;

use pvrdma_verbs::testing::DEADLINE;

use super::host::FakeHost;

/// A call that can be held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Call {
    PostSend,
    PostReceive,
    /// To the error state.
    Stop,
}

/// What is held.
#[derive(Default)]
pub(super) struct Gate {
    held: Option<Call>,
    /// Somebody waits in it.
    came: bool,
}

impl FakeHost {
    /// Holds the next call of this kind before it does anything.
    pub(crate) fn hold(&self, call: Call) {
        self.with(|state| state.gate = Gate { held: Some(call), came: false });
    }

    /// Waits until somebody is held.
    pub(crate) fn wait_held(&self) {
        self.wait("nobody makes the call that is held", |state| state.gate.came);
    }

    /// Lets go who is held, and whoever comes.
    pub(crate) fn let_go(&self) {
        self.with(|state| state.gate = Gate::default());
    }

    /// Waits for as long as this call is held, but not for ever. Those that come while one is held are not.
    pub(super) fn pass(&self, call: Call) {
        let end = Instant::now() + DEADLINE;
        let mut state = self.state.lock();
        if state.gate.held != Some(call) || state.gate.came {
            return;
        }
        state.gate.came = true;
        self.changed.notify_all();
        while state.gate.came && !self.changed.wait_until(&mut state, end).timed_out() {}
    }
}
