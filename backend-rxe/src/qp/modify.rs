//! Changing and querying a QP.

use std::sync::atomic::Ordering;

use pvrdma_verbs::{QpAttrMask, QpAttrs, QpState, VerbsError, qp_state};

use super::Qp;
use crate::hca::MAX_RD_ATOMIC;
use crate::sg::MemoryGuard;

impl Qp {
    pub(super) fn modify(&self, new: &QpAttrs, mask: QpAttrMask) -> Result<(), VerbsError> {
        let result = self.modify_locked(new, mask);
        // Doorbells that found the requester busy, requests that may start in the new state, and the flush.
        self.drive_inline();
        result
    }

    fn modify_locked(&self, new: &QpAttrs, mask: QpAttrMask) -> Result<(), VerbsError> {
        let mut requester = self.requester.lock();
        let held = MemoryGuard::open(&self.adapter, None);
        let mut responder = self.responder.lock();
        if self.is_dead() {
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
            // Nothing may come between: both halves are ours, and others only ever step to the error state.
            self.state.store(QpState::Reset as u8, Ordering::Release);
            self.draining.store(false, Ordering::Release);
            requester.reset(self);
            responder.reset();
            self.brake.reset();
            return Ok(());
        }
        if to == QpState::Error {
            // Even out of RESET, where `set_error` has nothing to flush.
            self.state.store(QpState::Error as u8, Ordering::Release);
            return Ok(());
        }
        new.check(mask, MAX_RD_ATOMIC)?;
        let mut attrs = responder.attrs;
        attrs.merge(new, mask);
        // An overrun may have put the QP into the error state behind our back; that stands.
        if !self.change_state(from, to) {
            return Err(VerbsError::Invalid("current state"));
        }
        requester.set_attrs(self, attrs);
        responder.set_attrs(self, attrs);
        if let Some(wire) = &mut requester.wire {
            wire.set_draining(to == QpState::Sqd);
        }
        if to == QpState::Sqd && from != QpState::Sqd {
            requester.notify_drained = mask.contains(QpAttrMask::EN_SQD_ASYNC_NOTIFY) && new.en_sqd_async_notify;
            if requester.is_idle() {
                requester.drained(self, held.own().view);
            } else {
                self.draining.store(true, Ordering::Release);
            }
        } else if to != QpState::Sqd {
            requester.notify_drained = false;
            self.draining.store(false, Ordering::Release);
        }
        Ok(())
    }

    pub(super) fn query(&self) -> QpAttrs {
        let mut attrs = self.responder.lock().attrs;
        attrs.state = self.state();
        attrs.cur_state = attrs.state;
        attrs.sq_draining = self.draining.load(Ordering::Acquire);
        attrs
    }
}
