//! List of the completion queues to be looked at, ordered by time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use parking_lot::Mutex;
use pvrdma_base::{Counter, counters};

use crate::watcher::{Depth, DoorbellWatcher};

counters! {
    /// Notifications that the guest did not request.
    pub(crate) struct InferCounters {
        /// Notifications of unconsumed completions, for processes whose arming is not noticed.
        notifications_inferred,
        /// Inferred notifications after which the guest consumed completions.
        notifications_useful,
        /// Inferred notifications after which the guest consumed none.
        notifications_useless,
    }
}

/// The watcher is not resting: it will look soon, or a store to a page wakes it.
const AWAKE: u8 = 0;
/// The watcher rests after a pass of [`Depth::Rest`], and a completion must wake it.
const RESTS: u8 = 1;
/// A completion has woken the watcher.
const WOKEN: u8 = 2;

/// List of looks. No other lock is taken while its lock is held.
pub(crate) struct DueLooks {
    watcher: Arc<dyn DoorbellWatcher>,
    state: Mutex<State>,
    /// State of the watcher, one of the three above. Threads that publish completions read it.
    rest: AtomicU8,
    /// Counters of inferred notifications.
    pub(crate) counts: InferCounters,
}

#[derive(Debug, Default)]
struct State {
    looks: BinaryHeap<Reverse<(u64, u32)>>,
    /// Time until which the watcher sleeps. 0 while it does not.
    sleeps_until: u64,
}

impl fmt::Debug for DueLooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DueLooks").field("state", &self.state).finish_non_exhaustive()
    }
}

impl DueLooks {
    pub(crate) fn new(watcher: Arc<dyn DoorbellWatcher>) -> Self {
        Self { watcher, state: Mutex::default(), rest: AtomicU8::new(AWAKE), counts: InferCounters::default() }
    }

    /// Returns the watcher.
    pub(crate) fn watcher(&self) -> &dyn DoorbellWatcher {
        &*self.watcher
    }

    /// Adds a look at a queue, and wakes the watcher if it would sleep beyond the time of the look.
    pub(crate) fn add(&self, at: u64, cq_handle: u32) {
        let wake = {
            let mut state = self.state.lock();
            state.looks.push(Reverse((at, cq_handle)));
            let wake = at < state.sleeps_until;
            if wake {
                state.sleeps_until = at;
            }
            wake
        };
        if wake {
            self.watcher.wake();
        }
    }

    /// Removes and returns a queue whose look is due.
    pub(crate) fn take(&self, now: u64) -> Option<u32> {
        let mut state = self.state.lock();
        match state.looks.peek() {
            Some(&Reverse((at, handle))) if at <= now => {
                state.looks.pop();
                Some(handle)
            }
            _ => None,
        }
    }

    /// Returns the number of looks on the list.
    pub(crate) fn len(&self) -> usize {
        self.state.lock().looks.len()
    }

    /// Begins a pass. After one of [`Depth::Rest`], completions wake the watcher from now on. Returns `true` if a
    /// completion has ended the rest after the previous pass.
    pub(crate) fn begin(&self, depth: Depth) -> bool {
        let rest = if depth == Depth::Rest { RESTS } else { AWAKE };
        self.rest.swap(rest, Ordering::SeqCst) == WOKEN
    }

    /// Returns the time of the next look. If `sleeps`, the watcher sleeps until then, and a look added with an earlier
    /// time wakes it.
    pub(crate) fn plan(&self, sleeps: bool) -> Option<u64> {
        let mut state = self.state.lock();
        let due = state.looks.peek().map(|&Reverse((at, _))| at);
        state.sleeps_until = if sleeps { due.unwrap_or(u64::MAX) } else { 0 };
        due
    }

    /// Records that completions were published. Wakes a resting watcher, once.
    pub(crate) fn completed(&self) {
        // At a high rate of completions the watcher is almost always awake, and this then costs one load.
        let rests = self.rest.load(Ordering::SeqCst) == RESTS;
        if rests && self.rest.compare_exchange(RESTS, WOKEN, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            self.watcher.wake();
        }
    }

    /// Removes a queue that was destroyed.
    pub(crate) fn remove(&self, cq_handle: u32) {
        self.state.lock().looks.retain(|&Reverse((_, handle))| handle != cq_handle);
    }

    /// Returns the counters of inferred notifications.
    pub(crate) fn counters(&self) -> Vec<Counter> {
        self.counts.list()
    }
}
