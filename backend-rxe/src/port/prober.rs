//! Probes that ask hosts beyond the uplink for addresses that the device claims, before it gets them.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use pvrdma_link::Frames;

use super::Port;
use crate::addresses::probe;
use crate::budget::Budget;
use crate::engine::Engine;
use crate::share::Share;
use crate::task::{Runnable, Task};
use crate::timer::TimerKey;

/// Task that sends probes when they are due.
#[derive(Debug)]
pub(super) struct Prober {
    port: Weak<Port>,
    task: Arc<Task>,
    timer: Mutex<Option<TimerKey>>,
}

impl Prober {
    pub(super) fn new(port: &Weak<Port>, engine: &Arc<Engine>, share: &Arc<Share>) -> Arc<Self> {
        Arc::new_cyclic(|me: &Weak<Self>| {
            let task = Task::new(engine.ready_queue(), share, me.clone() as _);
            Self { port: port.clone(), task, timer: Mutex::default() }
        })
    }

    pub(super) const fn task(&self) -> &Arc<Task> {
        &self.task
    }
}

impl Runnable for Prober {
    fn run(&self, _: &mut Budget) -> bool {
        let Some(port) = self.port.upgrade() else { return false };
        let (due, next) = port.addresses.due_probes(port.mac);
        let mut frames = Frames::default();
        due.iter().for_each(|&address| frames.push(&probe::build(port.mac, address)));
        if !frames.is_empty() {
            port.send_urgent(&frames);
        }
        let timer = &mut *self.timer.lock();
        match next {
            Some(deadline) => *timer = Some(port.engine.arm(&self.task, deadline, timer.take())),
            None => timer.take().into_iter().for_each(|timer| port.engine.disarm(timer)),
        }
        false
    }
}

impl Port {
    /// Ends the address claims of a device that is unplugged: it sends no more probes.
    pub(super) fn leave_addresses(&self) {
        self.addresses.set_prober(self.mac, None);
        if self.policy.rules.addresses.is_some() {
            self.addresses.leave(self.mac);
        }
        if let Some(timer) = self.prober.timer.lock().take() {
            self.engine.disarm(timer);
        }
    }
}
