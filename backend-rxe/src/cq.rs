//! Completion queues.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use pvrdma_base::Snapshot;
use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{CompletionQueue, CompletionSink, CqOverrun};
use pvrdma_verbs_types::{Completion, Qpn};
use serde::Serialize;
use serde_json::Value;

use crate::adapter::Adapter;
use crate::counters::Counters;
use crate::faults::Site;
use crate::qp::error_cause::ErrorCause;
use crate::qp::state::StateCell;
use crate::quota::Permit;

/// A completion queue of the engine: the device's sink, and the QPs that publish to it.
pub(crate) struct Cq {
    adapter: Arc<Adapter>,
    sink: Arc<dyn CompletionSink>,
    /// Publishing QPs, by QPN.
    attached: Mutex<HashMap<u32, Weak<StateCell>>>,
    /// An overrun has happened. The queue no longer accepts entries.
    dead: AtomicBool,
    _permit: Permit,
}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cq").field("qps", &self.attached.lock().len()).finish_non_exhaustive()
    }
}

/// State of a completion queue at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct CqInspect {
    /// Numbers of the QPs that publish to it, in ascending order.
    qps: Snapshot<Vec<Qpn>>,
    /// An overrun has happened, and the queue no longer accepts entries.
    dead: bool,
}

impl Cq {
    /// Returns the state of the queue for inspection.
    pub(crate) fn inspect(&self) -> CqInspect {
        let qps = self.attached.try_lock().map(|attached| {
            let mut qps: Vec<_> = attached.keys().map(|&qpn| Qpn::new(qpn)).collect();
            qps.sort_unstable();
            qps
        });
        CqInspect { qps: qps.into(), dead: self.dead.load(Ordering::Relaxed) }
    }

    pub(crate) fn new(adapter: Arc<Adapter>, sink: Arc<dyn CompletionSink>, permit: Permit) -> Self {
        Self { adapter, sink, attached: Mutex::default(), dead: AtomicBool::new(false), _permit: permit }
    }

    pub(crate) fn attach(&self, qpn: u32, qp: &Arc<StateCell>) {
        self.attached.lock().insert(qpn, Arc::downgrade(qp));
    }

    pub(crate) fn detach(&self, qpn: u32) {
        self.attached.lock().remove(&qpn);
    }

    /// Publishes an entry of `qp`. If there is no room, every QP of this queue enters its error state. A QP that is
    /// attached to the dead queue later enters it with its first entry.
    #[inline]
    pub(crate) fn push(&self, qp: &StateCell, view: &DmaView<'_>, completion: &Completion) -> Result<(), CqOverrun> {
        if self.dead.load(Ordering::Relaxed) {
            qp.enter_error(ErrorCause::CqOverrun);
            return Err(CqOverrun);
        }
        if self.adapter.faults.is_active() && self.room(qp, 1) == 0 {
            self.sink.overrun(view);
            self.overrun();
            return Err(CqOverrun);
        }
        self.sink.complete(view, completion).inspect_err(|_| self.overrun())
    }

    /// Publishes entries of `qp` in order, as [`Self::push`] does for one. Returns the number of entries that fitted.
    // Always inline: see `Requester::end_with_success`.
    #[inline(always)]
    pub(crate) fn push_all(&self, qp: &StateCell, view: &DmaView<'_>, completions: &[Completion]) -> usize {
        if self.dead.load(Ordering::Relaxed) {
            qp.enter_error(ErrorCause::CqOverrun);
            return 0;
        }
        let room = if self.adapter.faults.is_active() { self.room(qp, completions.len()) } else { usize::MAX };
        let published = self.sink.complete_all(view, completions.get(..room).unwrap_or(completions));
        if room < completions.len() && published == room {
            self.sink.overrun(view);
        }
        if published < completions.len() {
            self.overrun();
        }
        published
    }

    /// Returns the number of `count` entries of `qp` that fit before a requested fault fills the queue.
    #[cold]
    fn room(&self, qp: &StateCell, count: usize) -> usize {
        let now = || self.adapter.engine.now();
        let full = |_: &usize| self.adapter.faults.at(Site::Completion, qp.id(), now).is_some();
        (0..count).find(full).unwrap_or(count)
    }

    #[cold]
    fn overrun(&self) {
        if !self.dead.swap(true, Ordering::AcqRel) {
            Counters::bump(&self.adapter.counters.cq_overruns);
        }
        let attached: Vec<_> = self.attached.lock().values().filter_map(Weak::upgrade).collect();
        for qp in attached {
            qp.enter_error(ErrorCause::CqOverrun);
        }
    }
}

/// A completion queue.
#[derive(Debug)]
pub struct RxeCq(pub(crate) Arc<Cq>);

/// Completions are published as soon as they occur.
impl CompletionQueue for RxeCq {
    fn inspect(&self) -> Value {
        serde_json::to_value(self.0.inspect()).unwrap_or_default()
    }
}
