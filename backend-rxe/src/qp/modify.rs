//! Modify and query commands of a QP.

use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::VerbsError;
use pvrdma_verbs_types::{QpAttrMask, QpAttrs, QpState, qp_state};

use super::Qp;
use super::error_cause::ErrorCause;
use super::flight::FlightEvent;
use super::requester::Requester;
use super::responder::Responder;
use crate::limits::MAX_RD_ATOMIC;

/// Effect of a modify command.
pub(crate) enum Modified {
    /// The QP was reset.
    Reset,
    /// The QP is in its error state and has to be flushed.
    Error,
    /// Attributes have changed.
    Attributes(QpAttrs),
}

impl Qp {
    /// Executes a modify command with both halves locked. `idle`: no request is in flight.
    pub(crate) fn modify(
        &self,
        (requester, responder): (&mut Requester, &mut Responder),
        view: &DmaView<'_>,
        idle: bool,
        new: &QpAttrs,
        mask: QpAttrMask,
    ) -> Result<Modified, VerbsError> {
        if self.state.is_dead() {
            return Err(VerbsError::Gone);
        }
        let from = self.state();
        let to = if mask.contains(QpAttrMask::STATE) { new.state } else { from };
        let ends = matches!(to, QpState::Reset | QpState::Error);
        if mask.contains(QpAttrMask::CUR_STATE) && new.cur_state != from && !ends {
            return Err(VerbsError::Invalid("current state"));
        }
        if !(ends && to == from) {
            qp_state::check(self.qp_type, from, to, mask)?;
        }
        if to == QpState::Reset {
            self.state.reset();
            self.forget_source();
            requester.reset(self);
            responder.reset();
            return Ok(Modified::Reset);
        }
        if to == QpState::Error {
            self.state.enter_error(ErrorCause::Command);
            return Ok(Modified::Error);
        }
        new.check(mask, MAX_RD_ATOMIC)?;
        let mut attrs = responder.attrs;
        attrs.merge(new, mask);
        // An overrun may have moved the QP to the error state since its state was read. The error state takes
        // precedence.
        if !self.state.change(from, to) {
            return Err(VerbsError::Invalid("current state"));
        }
        if from != to {
            self.entered(to);
        }
        if mask.contains(QpAttrMask::AV) {
            self.state.flight.note(self.adapter.engine.now(), FlightEvent::Path);
            self.forget_source();
            self.source(attrs.av.sgid_index);
        }
        requester.set_attrs(attrs);
        responder.set_attrs(attrs);
        if to == QpState::Sqd && from != QpState::Sqd {
            let notify = mask.contains(QpAttrMask::EN_SQD_ASYNC_NOTIFY) && new.en_sqd_async_notify;
            self.begin_draining(requester, view, idle, notify);
        } else if to != QpState::Sqd {
            requester.notify_drained = false;
            self.state.set_draining(false);
        }
        Ok(Modified::Attributes(attrs))
    }

    /// Records a new state, and counts a connection for the faults of the device.
    fn entered(&self, state: QpState) {
        self.state.flight.note(self.adapter.engine.now(), FlightEvent::State(state));
        if state == QpState::Rtr && self.adapter.faults.is_active() {
            self.adapter.faults.connected(self.state.id());
        }
    }

    /// Enters SQD. `idle`: no request is in flight, so the send queue has already drained.
    fn begin_draining(&self, requester: &mut Requester, view: &DmaView<'_>, idle: bool, notify: bool) {
        requester.notify_drained = notify;
        if idle {
            requester.drained(self, view);
        } else {
            self.state.set_draining(true);
        }
    }

    pub(crate) fn query(&self) -> QpAttrs {
        let attrs = self.responder.lock().attrs;
        self.with_state(attrs)
    }

    /// Returns the same as [`Self::query`], unless another thread holds the responder.
    pub(crate) fn try_query(&self) -> Option<QpAttrs> {
        let attrs = self.responder.try_lock()?.attrs;
        Some(self.with_state(attrs))
    }

    fn with_state(&self, mut attrs: QpAttrs) -> QpAttrs {
        attrs.state = self.state();
        attrs.cur_state = attrs.state;
        attrs.sq_draining = self.state.is_draining();
        attrs
    }
}
