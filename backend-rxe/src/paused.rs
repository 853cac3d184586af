//! Pause state of an adapter, and the tasks of other adapters that wait for the end of the pause.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use pvrdma_handover::Room;

use crate::ready_queue::Scheduled;
use crate::task::Task;

/// Time for which a datagram waits for a paused receiver, from the beginning of the pause.
///
/// A hand-over pauses a device for milliseconds, and no datagram should be lost in it. A suspended VM may pause its
/// device for hours, and a queue pair that sends it a datagram must still reach other receivers.
const DATAGRAMS_WAIT: Duration = Duration::from_secs(1);

/// Tasks to schedule when the pause ends, each once, by address.
pub(crate) type Waiters = HashMap<usize, Arc<Task>>;

/// The pause of an adapter.
#[derive(Debug, Default)]
pub(crate) struct Paused {
    /// Full while the adapter is paused: waiting for its end is the same protocol as waiting for room.
    room: Room<Waiters>,
    /// Time at which the last pause began, in nanoseconds.
    since: AtomicU64,
    /// `true` from the moment at which a pause is complete. Locked while a pause begins or ends.
    complete: Mutex<bool>,
}

impl Paused {
    /// Returns `true` if the adapter is paused or about to be. `false` stays valid for as long as the caller holds a
    /// view of the adapter's memory, or one of the locks that a pause waits for.
    #[inline]
    pub(crate) fn is_set(&self) -> bool {
        self.room.is_full()
    }

    /// Locks the state for a change. `true`: a pause is complete.
    pub(crate) fn change(&self) -> MutexGuard<'_, bool> {
        self.complete.lock()
    }

    /// Marks the adapter as paused.
    pub(crate) fn set(&self, now: Duration) {
        self.since.store(u64::try_from(now.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        self.room.fill();
    }

    /// Removes the mark. Returns the tasks that wait.
    pub(crate) fn clear(&self) -> Waiters {
        self.room.open().unwrap_or_default()
    }

    /// Schedules a task when the pause ends. Returns `false` if the adapter is not paused.
    #[cold]
    pub(crate) fn wait(&self, task: &Arc<Task>) -> bool {
        self.room.wait(|waiters| {
            if waiters.len() == waiters.capacity() {
                // Guests can create and destroy any number of queue pairs meanwhile.
                waiters.retain(|_, task| task.is_alive());
            }
            waiters.insert(Arc::as_ptr(task).addr(), Arc::clone(task));
        })
    }

    /// Returns the time until which datagrams wait.
    pub(crate) fn datagrams_wait_until(&self) -> Duration {
        self.since().saturating_add(DATAGRAMS_WAIT)
    }

    /// Returns `true` if the last pause began at least this time ago.
    pub(crate) fn has_lasted(&self, time: Duration, now: Duration) -> bool {
        now.saturating_sub(self.since()) >= time
    }

    fn since(&self) -> Duration {
        Duration::from_nanos(self.since.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Budget;
    use crate::ready_queue::ReadyQueue;
    use crate::task::Runnable;

    struct Nothing;

    impl Runnable for Nothing {
        fn run(&self, _budget: &mut Budget) -> bool {
            false
        }
    }

    /// Attack: a guest creates queue pairs that wait for a paused peer, and destroys them.
    #[test]
    fn waiters_that_have_ended_take_no_memory() {
        let (paused, queue) = (Paused::default(), Arc::new(ReadyQueue::default()));
        let task = |runnable: &Arc<dyn Runnable>| Task::new(&queue, &Arc::default(), Arc::downgrade(runnable));
        let alive: Arc<dyn Runnable> = Arc::new(Nothing);
        let waiting = task(&alive);
        assert!(!paused.wait(&waiting), "the adapter is not paused");
        paused.set(Duration::ZERO);
        assert!(paused.wait(&waiting) && paused.wait(&waiting));
        for _ in 0..10_000 {
            let ended: Arc<dyn Runnable> = Arc::new(Nothing);
            assert!(paused.wait(&task(&ended)));
        }
        let waiters = paused.clear();
        assert!(waiters.capacity() < 100, "{}", waiters.capacity());
        assert_eq!(waiters.values().filter(|task| task.is_alive()).count(), 1);
        assert!(!paused.wait(&waiting));
    }
}
