//! Announcements of a device at its uplink, after its frames have begun to leave at another place of the network.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_link::Frames;

use super::Port;
use crate::addresses::probe;
use crate::budget::Budget;
use crate::engine::Engine;
use crate::share::Share;
use crate::task::{Runnable, Task};
use crate::timer::TimerKey;

/// Time from each announcement to the next one. The first may be lost: a port of a bridge that has just got its carrier
/// does not forward yet, and a control plane may be about to withdraw the old place.
const INTERVALS: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(1)];

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
    port: Weak<Port>,
    task: Arc<Task>,
    next: Mutex<Option<Repetition>>,
}

impl Announcer {
    pub(super) fn new(port: &Weak<Port>, engine: &Arc<Engine>, share: &Arc<Share>) -> Arc<Self> {
        Arc::new_cyclic(|me: &Weak<Self>| {
            let task = Task::new(engine.ready_queue(), share, me.clone() as _);
            Self { port: port.clone(), task, next: Mutex::default() }
        })
    }

    /// Schedules the repetition after this interval, in place of any other.
    fn schedule(&self, engine: &Engine, interval: usize) {
        let mut next = self.next.lock();
        let before = next.take().map(|repetition| repetition.timer);
        match INTERVALS.get(interval) {
            Some(&time) => {
                let timer = engine.arm(&self.task, engine.now().saturating_add(time), before);
                *next = Some(Repetition { timer, following: interval + 1 });
            }
            None => before.into_iter().for_each(|timer| engine.disarm(timer)),
        }
    }
}

impl Runnable for Announcer {
    fn run(&self, _: &mut Budget) -> bool {
        let Some(port) = self.port.upgrade() else { return false };
        // An announcement since the timer fired has scheduled a later repetition.
        let due = self.next.lock().filter(|next| next.timer.deadline <= port.now());
        if let Some(Repetition { following, .. }) = due {
            port.send_announcements();
            self.schedule(&port.engine, following);
        }
        false
    }
}

impl Port {
    /// Announces the device at the uplink, now and at growing intervals after that.
    pub(crate) fn announce(&self) {
        self.send_announcements();
        self.announcer.schedule(&self.engine, 0);
    }

    /// Ends the repetitions.
    pub(super) fn end_announcements(&self) {
        self.announcer.schedule(&self.engine, INTERVALS.len());
    }

    /// Sends a frame for the MAC address, which the network function has too, in each VLAN of the device, and one for
    /// each bound address. A paused device sends none, because it may run on another host meanwhile.
    fn send_announcements(&self) {
        let function = self.function.lock().as_ref().and_then(Weak::upgrade);
        let Some(addresses) = function.map_or_else(|| Some(BTreeSet::new()), |function| function.addresses()) else {
            return;
        };
        let vlans: BTreeSet<_> = addresses.iter().map(|&(_, vlan)| vlan).chain([self.vlan()]).collect();
        let mut frames = Frames::default();
        vlans.into_iter().for_each(|vlan| frames.push(&probe::reverse_request(self.mac, vlan)));
        addresses.into_iter().for_each(|address| frames.push(&probe::announcement(self.mac, address)));
        self.send_urgent(&frames);
    }
}
