//! Schedule of a device's announcements at its uplink, after its frames have begun to leave at another place of the
//! network.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use crate::addresses::Address;
use crate::budget::Budget;
use crate::engine::Engine;
use crate::share::Share;
use crate::task::{Runnable, Task};
use crate::timer::TimerKey;

/// Time from each announcement to the next one. The first may be lost: a port of a bridge that has just got its carrier
/// does not forward yet, and a control plane may be about to withdraw the old place.
const INTERVALS: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(1)];

/// The RDMA function of a device, as its port sees it.
pub(crate) trait Function: Send + Sync + Debug {
    /// Returns the bound addresses. `None`: the function is paused.
    fn addresses(&self) -> Option<BTreeSet<Address>>;
}

/// The port of a device that is announced.
pub(super) trait Announce: Send + Sync + Debug {
    /// Sends the frames of an announcement.
    fn send_announcement(&self);
}

/// Next repetition.
#[derive(Debug, Default)]
struct Repetition {
    /// Timer of the repetition, if there is one.
    timer: Option<TimerKey>,
    /// Index in [`INTERVALS`] of the time to the one after it.
    following: usize,
}

/// Task that repeats announcements.
#[derive(Debug)]
pub(super) struct Announcer {
    port: Weak<dyn Announce>,
    engine: Arc<Engine>,
    task: Arc<Task>,
    next: Mutex<Repetition>,
}

impl Announcer {
    pub(super) fn new(port: Weak<dyn Announce>, engine: &Arc<Engine>, share: &Arc<Share>) -> Arc<Self> {
        Arc::new_cyclic(|me: &Weak<Self>| {
            let task = Task::new(engine.ready_queue(), share, me.clone() as _);
            Self { port, engine: Arc::clone(engine), task, next: Mutex::default() }
        })
    }

    /// Starts the repetitions of an announcement, in place of those of an earlier one.
    pub(super) fn start(&self) {
        self.schedule(0);
    }

    /// Ends the repetitions.
    pub(super) fn stop(&self) {
        self.schedule(INTERVALS.len());
    }

    /// Schedules the repetition after this interval, or none.
    fn schedule(&self, interval: usize) {
        let next = &mut *self.next.lock();
        let deadline = INTERVALS.get(interval).map(|&time| self.engine.now().saturating_add(time));
        next.following = interval + 1;
        self.engine.set_timer(&self.task, deadline, &mut next.timer);
    }

    /// Returns the interval after the repetition that is due. An announcement since the timer fired has scheduled a
    /// later one.
    fn due(&self) -> Option<usize> {
        let next = self.next.lock();
        let is_due = next.timer.is_some_and(|timer| timer.deadline <= self.engine.now());
        is_due.then_some(next.following)
    }
}

impl Runnable for Announcer {
    fn run(&self, _: &mut Budget) -> bool {
        let Some(port) = self.port.upgrade() else { return false };
        if let Some(following) = self.due() {
            port.send_announcement();
            self.schedule(following);
        }
        false
    }
}
