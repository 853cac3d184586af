//! Threads of a port that sleep until there is too much for one.

use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};

/// The threads that sleep.
#[derive(Debug, Default)]
pub(super) struct Helpers {
    state: Mutex<State>,
    called: Condvar,
    /// That wait now. A call that misses one is made again with the next batch.
    idle: AtomicUsize,
}

#[derive(Debug, Default)]
struct State {
    calls: u64,
    over: bool,
}

impl Helpers {
    /// Has one come, if one waits.
    pub(super) fn call(&self) {
        if self.idle.load(Ordering::Relaxed) > 0 {
            self.state.lock().calls += 1;
            self.called.notify_one();
        }
    }

    /// How often one was called.
    pub(super) fn calls(&self) -> u64 {
        self.state.lock().calls
    }

    /// None is needed any more.
    pub(super) fn end(&self) {
        self.state.lock().over = true;
        self.called.notify_all();
    }

    /// Waits for a call. `false`: there will be none.
    pub(super) fn wait(&self) -> bool {
        let mut state = self.state.lock();
        let calls = state.calls;
        self.idle.fetch_add(1, Ordering::Relaxed);
        self.called.wait_while(&mut state, |state| state.calls == calls && !state.over);
        self.idle.fetch_sub(1, Ordering::Relaxed);
        !state.over
    }
}
