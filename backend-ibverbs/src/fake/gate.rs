//! Gate for calls of the fake adapter: a test holds a call to run other code in the meantime.

use std::time::Instant;

use pvrdma_verbs::testing::DEADLINE;

use super::host::FakeHost;

/// A call that can be held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Call {
    PostSend,
    PostReceive,
    /// A change to the error state.
    Stop,
}

/// State of the gate.
#[derive(Default)]
pub(super) struct Gate {
    held: Option<Call>,
    /// A caller is waiting in the held call.
    came: bool,
}

impl FakeHost {
    /// Holds the next call of this kind before it takes effect.
    pub(crate) fn hold(&self, call: Call) {
        self.with(|state| state.gate = Gate { held: Some(call), came: false });
    }

    /// Waits until a call is held.
    pub(crate) fn wait_held(&self) {
        self.wait("nobody makes the call that is held", |state| state.gate.came);
    }

    /// Releases the held call, and lets later ones pass.
    pub(crate) fn let_go(&self) {
        self.with(|state| state.gate = Gate::default());
    }

    /// Waits while this call is held, with a limit. Further calls of the same kind are not held in the meantime.
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
