//! Probes for claimed addresses, which ask hosts beyond the uplink if they use an address before the device gets it.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use pvrdma_link::Frames;
use pvrdma_packet::MacAddr;

use crate::addresses::{Addresses, probe};
use crate::budget::Budget;
use crate::engine::Engine;
use crate::share::Share;
use crate::task::{Runnable, Task};
use crate::timer::TimerKey;

/// The port through which a prober sends.
pub(super) trait ProbeSender: Send + Sync + std::fmt::Debug {
    /// Sends frames to other hosts, ahead of those that wait.
    fn send_probes(&self, frames: &Frames);
}

/// Task that sends probes when they are due.
#[derive(Debug)]
pub(super) struct Prober {
    mac: MacAddr,
    port: Weak<dyn ProbeSender>,
    addresses: Arc<Addresses>,
    engine: Arc<Engine>,
    task: Arc<Task>,
    timer: Mutex<Option<TimerKey>>,
}

impl Prober {
    pub(super) fn new(
        mac: MacAddr,
        port: Weak<dyn ProbeSender>,
        addresses: &Arc<Addresses>,
        engine: &Arc<Engine>,
        share: &Arc<Share>,
    ) -> Arc<Self> {
        Arc::new_cyclic(|me: &Weak<Self>| Self {
            mac,
            port,
            addresses: Arc::clone(addresses),
            engine: Arc::clone(engine),
            task: Task::new(engine.ready_queue(), share, me.clone() as _),
            timer: Mutex::default(),
        })
    }

    /// Sends probes for the device from now on, or lets it claim addresses unprobed.
    pub(super) fn enable(&self, enabled: bool) {
        self.addresses.set_prober(self.mac, enabled.then_some(&self.task));
    }

    /// Ends the probes of a device that is unplugged.
    pub(super) fn stop(&self) {
        self.enable(false);
        self.engine.set_timer(&self.task, None, &mut self.timer.lock());
    }
}

impl Runnable for Prober {
    fn run(&self, _: &mut Budget) -> bool {
        let Some(port) = self.port.upgrade() else { return false };
        let (due, next) = self.addresses.due_probes(self.mac);
        let mut frames = Frames::default();
        due.iter().for_each(|&address| frames.push(&probe::build(self.mac, address)));
        if !frames.is_empty() {
            port.send_probes(&frames);
        }
        self.engine.set_timer(&self.task, next, &mut self.timer.lock());
        false
    }
}
