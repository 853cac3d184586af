//! Completion queues that are to be looked at, by time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_verbs::{Counter, counters};

use crate::watcher::DoorbellWatcher;

counters! {
    /// What was notified without having been asked for.
    pub(crate) struct InferCounters {
        /// Notifications of completions that nobody consumed, for processes whose requests to arm are not heard.
        notifications_inferred,
        /// Those of them after which the guest consumed something.
        notifications_useful,
        /// Those of them after which it did not.
        notifications_useless,
    }
}

/// The list. A leaf among the locks.
pub(crate) struct DueLooks {
    watcher: Arc<dyn DoorbellWatcher>,
    state: Mutex<State>,
    /// What the looks led to.
    pub(crate) counts: InferCounters,
}

#[derive(Debug, Default)]
struct State {
    looks: BinaryHeap<Reverse<(u64, u32)>>,
    /// The watcher sleeps until then. 0 while it does not.
    sleeps_until: u64,
}

impl fmt::Debug for DueLooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DueLooks").field("state", &self.state).finish_non_exhaustive()
    }
}

impl DueLooks {
    pub(crate) fn new(watcher: Arc<dyn DoorbellWatcher>) -> Self {
        Self { watcher, state: Mutex::default(), counts: InferCounters::default() }
    }

    /// Who looks.
    pub(crate) fn watcher(&self) -> &dyn DoorbellWatcher {
        &*self.watcher
    }

    /// Has the queue with this handle looked at, and wakes the watcher if it would sleep too long.
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

    /// Takes a queue that is to be looked at now.
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

    /// How many looks are on the list.
    pub(crate) fn len(&self) -> usize {
        self.state.lock().looks.len()
    }

    /// When the next look is due. The watcher sleeps until then if it `sleeps`: what comes in earlier wakes it.
    pub(crate) fn plan(&self, sleeps: bool) -> Option<u64> {
        let mut state = self.state.lock();
        let due = state.looks.peek().map(|&Reverse((at, _))| at);
        state.sleeps_until = if sleeps { due.unwrap_or(u64::MAX) } else { 0 };
        due
    }

    /// A queue has ended.
    pub(crate) fn remove(&self, cq_handle: u32) {
        self.state.lock().looks.retain(|&Reverse((_, handle))| handle != cq_handle);
    }

    /// What the looks led to.
    pub(crate) fn counters(&self) -> Vec<Counter> {
        self.counts.list()
    }
}
