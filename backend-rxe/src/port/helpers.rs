//! Additional threads of a port, which sleep until the load is too high for one thread.

use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};

/// The sleeping threads.
#[derive(Debug, Default)]
pub(super) struct Helpers {
    state: Mutex<State>,
    called: Condvar,
    /// Number of threads that wait now. A missed helper is called again with the next batch, so relaxed accesses
    /// suffice.
    idle: AtomicUsize,
}

#[derive(Debug, Default)]
struct State {
    calls: u64,
    over: bool,
}

impl Helpers {
    /// Wakes a thread, if one waits.
    pub(super) fn call(&self) {
        if self.idle.load(Ordering::Relaxed) > 0 {
            self.state.lock().calls += 1;
            self.called.notify_one();
        }
    }

    /// Returns the number of calls.
    pub(super) fn calls(&self) -> u64 {
        self.state.lock().calls
    }

    /// Makes all threads end.
    pub(super) fn end(&self) {
        self.state.lock().over = true;
        self.called.notify_all();
    }

    /// Waits for a call. Returns `false` when the threads have to end.
    pub(super) fn wait(&self) -> bool {
        let mut state = self.state.lock();
        let calls = state.calls;
        self.idle.fetch_add(1, Ordering::Relaxed);
        self.called.wait_while(&mut state, |state| state.calls == calls && !state.over);
        self.idle.fetch_sub(1, Ordering::Relaxed);
        !state.over
    }
}
