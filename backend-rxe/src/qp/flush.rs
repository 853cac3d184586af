//! The error states: how a request fails and how queues are emptied.

use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{QpEvent, QpState, QueueError, WcStatus};

use super::requester::Requester;
use super::{Budget, Qp, Run};
use crate::counters::{Counters, Tally};
use crate::sg::MemoryGuard;

impl Qp {
    /// Ends the request under way with an error and the QP, or the send half of a datagram QP, with it. The state does the
    /// rest: the next turn of the caller's loop flushes.
    pub(crate) fn fail_request(&self, requester: &mut Requester, view: &DmaView<'_>, status: WcStatus) {
        Counters::bump(&self.adapter.counters.request_errors);
        requester.end_request(self, view, status);
        if self.qp_type.is_datagram() {
            // Datagram QPs keep receiving; the consumer moves them back to RTS.
            if self.change_state(QpState::Rts, QpState::Sqe) || self.change_state(QpState::Sqd, QpState::Sqe) {
                return;
            }
        }
        self.set_error();
    }

    /// The send ring cannot be read any more.
    pub(crate) fn fail_ring(&self, view: &DmaView<'_>, error: QueueError) {
        log::warn!("{}: send queue of QP {}: {error}", self.adapter.name, self.qpn);
        Counters::bump(&self.adapter.counters.request_errors);
        if self.set_error() {
            self.event(view, QpEvent::Fatal);
        }
    }

    /// Flushes what the state says: in SQE the send queue, in the error state both.
    #[cold]
    pub(super) fn flush(&self, requester: &mut Requester, budget: &mut Budget, tally: &mut Tally) -> Run {
        let held = MemoryGuard::open(&self.adapter, None);
        let view = held.own().view;
        if !requester.flush(self, held.own(), budget, tally) {
            return Run::More;
        }
        let state = self.state();
        if state == QpState::Error && !self.responder.lock().flush(self, view, budget, tally) {
            return Run::More;
        }
        // Between two steps an SQE QP may have got an error of its responder.
        if state == self.state() { Run::Idle } else { Run::Again }
    }
}
