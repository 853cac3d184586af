//! Reliable connections between two devices, one of which has slow memory.
//!
//! An access to slow memory can block for as long as its owner likes ([`pvrdma_guest_memory::Stall`]), so the memory of
//! only one of the two devices is held at a time. Each step of a request copies through a buffer, in three parts: it
//! reads the requester's memory, does the responder's work, and writes to the requester's memory.

use std::sync::Arc;

use pvrdma_roce::NakReason;
use pvrdma_verbs::{Access, QpState, SendOp, WcStatus};

use super::own_side::{Apart, own_list};
use super::rc::{Exchange, Step, Target, refused};
use super::route::LocalRoute;
use crate::budget::Budget;
use crate::counters::{Counters, Tally};
use crate::qp::Qp;
use crate::qp::error_cause::ErrorCause;
use crate::qp::requester::{Progress, Requester, begin_request};
use crate::sg::{Memory, MemoryGuard};
use crate::task::Run;

/// Maximum number of bytes that a step moves.
const CHUNK: u64 = 64 << 10;

/// A step of the request in flight of a connected QP, or of its next request.
pub(crate) struct ApartStep<'a> {
    pub(crate) qp: &'a Qp,
    pub(crate) requester: &'a mut Requester,
    pub(crate) route: &'a mut LocalRoute,
    pub(crate) peer: &'a Arc<Qp>,
    /// Returns the current generation of the directory.
    pub(crate) generation: &'a dyn Fn() -> u64,
    pub(crate) budget: &'a mut Budget,
    pub(crate) tally: &'a mut Tally,
}

/// Result of the responder's part of a step.
struct Met {
    step: Step,
    /// Number of completions that the responder's queue took, if not all.
    published: Option<usize>,
    /// Bytes of the message that were moved before this step.
    before: u64,
}

impl ApartStep<'_> {
    pub(crate) fn run(mut self) -> Run {
        let mut bytes = match self.begin() {
            Ok(bytes) => bytes,
            Err(run) => return run,
        };
        match self.meet(&mut bytes) {
            Some(met) => self.end(&met, &bytes),
            // The directory has changed: the peer is looked up again.
            None => Run::Again,
        }
    }

    /// First part, with the requester's memory held: takes a request, checks it, and copies the bytes of this step.
    /// `Err`: there is no work for the responder.
    fn begin(&mut self) -> Result<Vec<u8>, Run> {
        let qp = self.qp;
        let guard = MemoryGuard::open(&qp.adapter, None);
        let own = guard.own();
        if self.route.generation != (self.generation)() {
            return Err(Run::Again);
        }
        let state = qp.state();
        if !matches!(state, QpState::Rts | QpState::Sqd) {
            return Err(Run::Again);
        }
        if self.requester.current.is_none() {
            if state == QpState::Sqd {
                return Err(Run::Idle);
            }
            match self.requester.next(own.view) {
                Ok(true) => {}
                Ok(false) => return Err(Run::Idle),
                Err(error) => {
                    qp.fail_ring(own.view, error);
                    return Err(Run::Again);
                }
            }
        }
        if self.budget.spent() {
            return Err(Run::More);
        }
        match self.take(own) {
            Ok(Some(bytes)) => Ok(bytes),
            Ok(None) => Err(self.succeed(own, 0, None)),
            Err(status) => Err(self.fail(own, status)),
        }
    }

    /// Checks the request in flight and copies the bytes of this step. `None`: the request needed no peer and is
    /// complete.
    fn take(&mut self, own: Memory<'_>) -> Result<Option<Vec<u8>>, WcStatus> {
        let qp = self.qp;
        let Requester { work, current, attrs, .. } = &mut *self.requester;
        let progress = current.as_mut().ok_or(WcStatus::General)?;
        if !progress.checked {
            let begun = begin_request(qp, attrs, work, own, self.tally)?;
            if begun.done {
                return Ok(None);
            }
            *progress = Progress { checked: true, length: begun.length, ..Progress::default() };
        }
        let left = progress.length.saturating_sub(progress.done);
        let count = match work.op {
            SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => 8,
            _ => left.min(CHUNK).min(self.budget.bytes().max(1)),
        };
        let mut bytes = vec![0; usize::try_from(count).map_err(|_| WcStatus::General)?];
        if matches!(work.op, SendOp::Send { .. } | SendOp::Write { .. }) {
            let list = own_list(own, qp, work, Access::empty());
            list.read(progress.done, &mut bytes).map_err(|_| WcStatus::LocalProtection)?;
        }
        Ok(Some(bytes))
    }

    /// Second part, with the responder's memory held: executes the step there.
    fn meet(&mut self, bytes: &mut [u8]) -> Option<Met> {
        let (qp, peer) = (self.qp, self.peer);
        let guard = MemoryGuard::open(&peer.adapter, None);
        let memory = guard.own();
        let LocalRoute { source, generation, connection, .. } = &mut *self.route;
        // From here on, an unbind waits until this guard is released, so the addresses of this generation stay valid.
        if *generation != (self.generation)() {
            return None;
        }
        let Requester { work, current, attrs, .. } = &mut *self.requester;
        let progress = current.as_mut()?;
        let before = progress.done;
        let silence = Met { step: Step::Refused(NakReason::Silence), published: None, before };
        let Some(source) = *source else { return Some(silence) };
        let mut target = Target::lock(peer, (qp, attrs), (source, *generation), connection);
        if !target.connected || !peer.state.receives() {
            return Some(silence);
        }
        target.responder.first_request(peer, memory.view);
        let (responder, own) = (&mut *target.responder, Apart(bytes));
        let mut exchange =
            Exchange { qp, own, peer, memory, responder, work, progress, budget: self.budget, trace: None };
        let step = exchange.execute(self.tally).unwrap_or_else(Step::Refused);
        let published = target.responder.end_batch(peer, memory.view);
        Some(Met { step, published, before })
    }

    /// Third part, with the requester's memory held again: writes the result there, and ends the request if this was
    /// its last step.
    fn end(&mut self, met: &Met, bytes: &[u8]) -> Run {
        let qp = self.qp;
        let guard = MemoryGuard::open(&qp.adapter, None);
        let own = guard.own();
        let work = &self.requester.work;
        let gets = matches!(work.op, SendOp::Read { .. } | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. });
        if gets
            && matches!(met.step, Step::Done(_) | Step::Moved)
            && own_list(own, qp, work, Access::LOCAL_WRITE).write(met.before, bytes).is_err()
        {
            return self.fail(own, WcStatus::LocalProtection);
        }
        let status = match met.step {
            Step::Done(byte_len) => return self.succeed(own, byte_len, met.published),
            Step::Moved => return self.publish(own, met.published),
            Step::Failed(status) => status,
            Step::Refused(nak) => match refused(qp, self.requester, nak) {
                Ok(run) => {
                    self.publish(own, met.published);
                    return run;
                }
                Err(status) => status,
            },
        };
        self.publish(own, met.published);
        self.fail(own, status)
    }

    fn succeed(&mut self, own: Memory<'_>, byte_len: u32, published: Option<usize>) -> Run {
        self.budget.take_request();
        self.requester.end_with_success(self.qp, own.view, byte_len);
        let run = self.publish(own, published);
        if self.qp.state() == QpState::Sqd {
            self.requester.drained(self.qp, own.view);
        }
        run
    }

    /// Reports requests that have ended, as [`super::rc::run`] does.
    fn publish(&mut self, own: Memory<'_>, published: Option<usize>) -> Run {
        if !self.requester.publish(self.qp, own.view, published) {
            Counters::bump(&self.qp.adapter.counters.request_errors);
            self.qp.state.enter_error(ErrorCause::Requester);
        }
        Run::Again
    }

    fn fail(&mut self, own: Memory<'_>, status: WcStatus) -> Run {
        self.qp.fail_request(self.requester, own.view, status);
        Run::Again
    }
}
