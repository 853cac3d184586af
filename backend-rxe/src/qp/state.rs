//! State of a queue pair, and the single function that moves it to its error state.
//!
//! A thread that ends a QP calls [`StateCell::enter_error`] with the cause. The rest is the same for all causes: the
//! thread that runs the QP next flushes it ([`super::flush`]). States and their transitions are those of IBA 10.3.1.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use pvrdma_handover::State;
use pvrdma_verbs_types::{QpState, QpType, Qpn};

use super::error_cause::ErrorCause;
use super::flight::FlightRecorder;
use crate::task::Task;

/// The part of a queue pair that can be accessed without its halves.
#[derive(Debug)]
pub(crate) struct StateCell {
    /// [`QpState`]. Can be read at any time. Set with a half held, except for the transition to the error state.
    state: State,
    dead: AtomicBool,
    /// The QP is in SQD with a request still in flight.
    draining: AtomicBool,
    /// Address of the SRQ that has the QP in its list of waiters; 0 for none. The QP may still be in the list of an
    /// earlier SRQ.
    queued_at_srq: AtomicUsize,
    task: Arc<Task>,
    qp_type: QpType,
    qpn: Qpn,
    /// Events that led to the current state.
    pub(crate) flight: FlightRecorder,
}

impl StateCell {
    pub(crate) fn new(task: Arc<Task>, (qp_type, qpn): (QpType, Qpn)) -> Arc<Self> {
        Arc::new(Self {
            state: State::new(QpState::Reset as u8),
            dead: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            queued_at_srq: AtomicUsize::new(0),
            task,
            qp_type,
            qpn,
            flight: FlightRecorder::default(),
        })
    }

    /// Returns the type and the number of the QP.
    #[inline]
    pub(crate) const fn id(&self) -> (QpType, Qpn) {
        (self.qp_type, self.qpn)
    }

    /// Returns the task that runs the QP.
    pub(crate) const fn task(&self) -> &Arc<Task> {
        &self.task
    }

    #[inline]
    pub(crate) fn get(&self) -> QpState {
        // Only states are stored.
        QpState::try_from(u32::from(self.state.get())).unwrap_or(QpState::Error)
    }

    /// Returns `true` if the QP sends requests and accepts responses.
    #[inline]
    pub(crate) fn sends(&self) -> bool {
        matches!(self.get(), QpState::Rts | QpState::Sqd)
    }

    /// Returns `true` if the responder accepts requests.
    #[inline]
    pub(crate) fn receives(&self) -> bool {
        matches!(self.get(), QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe)
    }

    /// Enters the error state, and schedules the flush unless the caller flushes. Returns `false` if the state does not
    /// change: in RESET there is nothing to flush, and an overrun has no effect on a QP that is in the error state
    /// already.
    pub(crate) fn enter_error(&self, cause: ErrorCause) -> bool {
        let before = self.get();
        let entered = match cause {
            ErrorCause::Command => {
                self.state.set(QpState::Error as u8);
                true
            }
            ErrorCause::CqOverrun if self.get() == QpState::Error => false,
            ErrorCause::Requester | ErrorCause::Responder | ErrorCause::CqOverrun => {
                self.state.step(|state| (state != QpState::Reset as u8).then_some(QpState::Error as u8))
            }
        };
        match cause {
            // Nothing failed: the guest ends the QP.
            ErrorCause::Command => self.flight.clear(),
            _ if entered && before != QpState::Error => self.flight.fail(cause),
            _ => {}
        }
        if entered && matches!(cause, ErrorCause::Responder | ErrorCause::CqOverrun) {
            self.task.schedule();
        }
        entered
    }

    /// Enters RESET. The caller holds both halves, so other threads can only move the QP to the error state.
    pub(super) fn reset(&self) {
        self.state.set(QpState::Reset as u8);
        self.set_draining(false);
        self.flight.clear();
    }

    /// Changes the state from `from` to `to`. Returns `false` if the state is not `from`, because another thread has
    /// changed it.
    pub(super) fn change(&self, from: QpState, to: QpState) -> bool {
        self.state.step(|state| (state == from as u8).then_some(to as u8))
    }

    #[inline]
    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// Marks the QP as destroyed. Returns `false` if it was destroyed before.
    pub(super) fn kill(&self) -> bool {
        !self.dead.swap(true, Ordering::AcqRel)
    }

    pub(super) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    pub(super) fn set_draining(&self, draining: bool) {
        self.draining.store(draining, Ordering::Release);
    }

    /// Records that the QP is in the list of waiters of this SRQ. Returns `false` if that was recorded before.
    pub(crate) fn queue_at_srq(&self, srq: usize) -> bool {
        self.queued_at_srq.swap(srq, Ordering::AcqRel) != srq
    }

    /// Returns `true` if the QP waits at this SRQ, and has not moved to another one since.
    pub(crate) fn is_queued_at_srq(&self, srq: usize) -> bool {
        self.queued_at_srq.load(Ordering::Acquire) == srq
    }

    /// Records that the QP has left the list of this SRQ. Returns `false` if it does not wait there.
    pub(crate) fn unqueue_at_srq(&self, srq: usize) -> bool {
        self.queued_at_srq.compare_exchange(srq, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use super::*;
    use crate::budget::Budget;
    use crate::ready_queue::ReadyQueue;
    use crate::task::Runnable;

    struct Nothing;

    impl Runnable for Nothing {
        fn run(&self, _budget: &mut Budget) -> bool {
            false
        }
    }

    #[test]
    fn every_cause_leads_into_the_error_state_and_to_a_flush() {
        use ErrorCause::{Command, CqOverrun, Requester, Responder};
        let live: Arc<dyn Runnable> = Arc::new(Nothing);
        // Cause, state before, whether the error state is entered, and whether the task is scheduled.
        for (cause, from, entered, scheduled) in [
            (Command, QpState::Reset, true, false),
            (Requester, QpState::Reset, false, false),
            (Responder, QpState::Reset, false, false),
            (CqOverrun, QpState::Reset, false, false),
            (Command, QpState::Rts, true, false),
            (Requester, QpState::Rts, true, false),
            (Responder, QpState::Rts, true, true),
            (CqOverrun, QpState::Rts, true, true),
            (Responder, QpState::Error, true, true),
            (CqOverrun, QpState::Error, false, false),
        ] {
            let queue = Arc::new(ReadyQueue::default());
            let weak: Weak<dyn Runnable> = Arc::downgrade(&live);
            let task = Task::new(&queue, &Arc::default(), weak);
            let state = StateCell::new(task, (QpType::Rc, Qpn::new(0x100)));
            assert!(state.change(QpState::Reset, from));
            assert_eq!(state.enter_error(cause), entered, "{cause:?} in {from:?}");
            let after = if entered { QpState::Error } else { from };
            assert_eq!(state.get(), after, "{cause:?} in {from:?}");
            let task = queue.queue.lock().take(std::time::Duration::ZERO, 0);
            assert_eq!(task.is_some(), scheduled, "{cause:?} in {from:?}");
        }
    }
}
