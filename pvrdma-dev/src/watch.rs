//! Replacement for doorbells that do not trap: the watched rings and the inferred notifications of a device.

use std::sync::{Arc, OnceLock};

use pvrdma_base::Counter;
use pvrdma_verbs::Hca;

use crate::due::{DueLooks, InferCounters};
use crate::stats::WindowCounters;
use crate::watch_list::WatchList;

/// Replacement for doorbells that do not trap.
pub(crate) struct Watch<H: Hca> {
    pub(crate) rings: WatchList<H>,
    /// Set once there is a watcher.
    pub(crate) looks: OnceLock<Arc<DueLooks>>,
    /// Counters of a watcher in the VMM's process.
    pub(crate) window: Arc<WindowCounters>,
}

impl<H: Hca> Watch<H> {
    pub(crate) fn new() -> Self {
        Self { rings: WatchList::new(), looks: OnceLock::new(), window: Arc::default() }
    }

    /// Returns the counters of inferred notifications and of refusals by the system.
    pub(crate) fn counters(&self) -> Vec<Counter> {
        let looks = self.looks.get().map_or_else(|| InferCounters::default().list(), |looks| looks.counters());
        [looks, self.window.list()].concat()
    }
}
