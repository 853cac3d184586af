//! Completion queues.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rdma_backend::memory::DmaView;
use rdma_backend::{Completion, CompletionSink, CqOverrun};

use crate::counters::Counters;
use crate::hca::{Adapter, Permit};
use crate::qp::Qp;

/// A completion queue of the engine: the device's sink, and who publishes to it.
pub(crate) struct Cq {
    sink: Arc<dyn CompletionSink>,
    adapter: Weak<Adapter>,
    attached: Mutex<HashMap<u32, Weak<Qp>>>,
    _permit: Permit,
}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cq").field("qps", &self.attached.lock().len()).finish_non_exhaustive()
    }
}

impl Cq {
    pub(crate) fn new(sink: Arc<dyn CompletionSink>, adapter: Weak<Adapter>, permit: Permit) -> Self {
        Self { sink, adapter, attached: Mutex::default(), _permit: permit }
    }

    pub(crate) fn attach(&self, qpn: u32, qp: Weak<Qp>) {
        self.attached.lock().insert(qpn, qp);
    }

    pub(crate) fn detach(&self, qpn: u32) {
        self.attached.lock().remove(&qpn);
    }

    /// Publishes an entry. When there is no room, every QP of this queue goes to its error state.
    #[inline]
    pub(crate) fn push(&self, view: &DmaView<'_>, completion: &Completion) -> Result<(), CqOverrun> {
        self.sink.complete(view, completion).inspect_err(|_| self.overrun())
    }

    #[cold]
    fn overrun(&self) {
        if let Some(adapter) = self.adapter.upgrade() {
            Counters::bump(&adapter.counters.cq_overruns);
        }
        let attached: Vec<_> = self.attached.lock().values().filter_map(Weak::upgrade).collect();
        for qp in attached {
            // Their halves may be held, even by us: the ready queue flushes them.
            if qp.set_error() {
                qp.kick();
            }
        }
    }
}

/// A completion queue.
#[derive(Debug)]
pub struct RxeCq(pub(crate) Arc<Cq>);
