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

/// Repetition that is due.
#[derive(Clone, Copy, Debug)]
struct Repetition {
    timer: TimerKey,
    /// Index in [`INTERVALS`] of the time to the one after it.
    following: usize,
}

/// Task that repeats announcements.
#[derive(Debug)]
pub(super) struct Announcer {
    port: Weak<dyn Announce>,
    engine: Arc<Engine>,
    task: Arc<Task>,
    next: Mutex<Option<Repetition>>,
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
        let mut next = self.next.lock();
        let before = next.take().map(|repetition| repetition.timer);
        match INTERVALS.get(interval) {
            Some(&time) => {
                let timer = self.engine.arm(&self.task, self.engine.now().saturating_add(time), before);
                *next = Some(Repetition { timer, following: interval + 1 });
            }
            None => before.into_iter().for_each(|timer| self.engine.disarm(timer)),
        }
    }
}

impl Runnable for Announcer {
    fn run(&self, _: &mut Budget) -> bool {
        let Some(port) = self.port.upgrade() else { return false };
        // An announcement since the timer fired has scheduled a later repetition.
        let due = self.next.lock().filter(|next| next.timer.deadline <= self.engine.now());
        if let Some(Repetition { following, .. }) = due {
            port.send_announcement();
            self.schedule(following);
        }
        false
    }
}
