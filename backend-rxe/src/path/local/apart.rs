//! Reliable connections between two devices, one of which has slow memory.
//!
//! An access to slow memory can block for as long as its owner likes ([`pvrdma_guest_memory::Stall`]). The memory of
//! only one of the two devices is therefore held at a time, and each step of a request copies by way of a buffer: first
//! it reads from the requester's memory, then it does the responder's part, then it writes to the requester's memory.
//!
//! If the responder's memory is slow, the responder's part runs on the thread of its device, with no lock of the
//! requester's device. The request waits meanwhile, without a timer: the part returns, because a device whose memory
//! stalls again and again is disconnected.

use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_base::EndOnPanic;
use pvrdma_guest_memory::{Charge, Kept};
use pvrdma_roce::Path;
use pvrdma_verbs_types::{Access, NakReason, QpAttrs, QpState, SendOp, SendWr, WcStatus};

use super::exchange::{Exchange, Step};
use super::own_side::{Apart, own_list};
use super::rc::{Target, have_faults, is_lost, refused};
use super::route::LocalRoute;
use crate::budget::Budget;
use crate::capture::local::{Answering, ConnectionTrace};
use crate::counters::Tally;
use crate::gid::BoundGid;
use crate::path::directory::Generations;
use crate::qp::Qp;
use crate::qp::contact::Connection;
use crate::qp::requester::{Progress, Requester, begin_request};
use crate::sg::{Memory, MemoryGuard};
use crate::task::Run;

/// Maximum number of bytes that a step moves.
const CHUNK: u64 = 64 << 10;

/// A step of the request in flight of a connected QP, or of its next request.
pub(crate) struct ApartStep<'a> {
    pub(crate) qp: &'a Arc<Qp>,
    pub(crate) requester: &'a mut Requester,
    pub(crate) route: &'a mut LocalRoute,
    /// The responder's part, while another thread executes it.
    pub(crate) elsewhere: &'a mut Option<PartElsewhere>,
    pub(crate) budget: &'a mut Budget,
    pub(crate) tally: &'a mut Tally,
}

/// Handle of a responder's part on the thread of its device.
pub(crate) struct PartElsewhere(Arc<Mutex<Answer>>);

/// Answer of a thread that executes a responder's part.
#[derive(Default)]
enum Answer {
    #[default]
    Awaited,
    /// The part is done. `None`: it was not executed.
    Given(Option<Box<Part>>),
}

/// Gives the answer when the part is done, or when it was dropped because there is no thread for it.
struct Answerer {
    answer: Arc<Mutex<Answer>>,
    requester: Arc<Qp>,
    part: Option<Box<Part>>,
}

impl Answerer {
    /// Returns `false` if the requester was reset or destroyed. Both ends may belong to another connection by now.
    fn is_awaited(&self) -> bool {
        Arc::strong_count(&self.answer) > 1
    }

    /// Answers with the part, which is done.
    fn give(mut self, part: Part) {
        self.part = Some(Box::new(part));
    }
}

impl Drop for Answerer {
    fn drop(&mut self) {
        *self.answer.lock() = Answer::Given(self.part.take());
        self.requester.task().schedule();
    }
}

/// The responder's part of a step, with copies of all that it needs from the requester.
struct Part {
    qp: Arc<Qp>,
    peer: Arc<Qp>,
    generations: Generations,
    /// Generation of the directory in which the peer and the source address were found.
    found: u64,
    source: Option<BoundGid>,
    connection: Connection,
    attrs: QpAttrs,
    work: SendWr,
    progress: Progress,
    /// Bytes of the message that were moved before this step.
    before: u64,
    /// The bytes that this step moves.
    bytes: Vec<u8>,
    /// Charge for the bytes while they wait for another thread.
    charge: Option<Charge>,
    /// `None`: the directory has changed, and the peer must be looked up again.
    met: Option<Met>,
}

/// Result of the responder's part of a step.
struct Met {
    step: Step,
    /// Number of completions that the responder's queue took, if not all.
    published: Option<usize>,
    /// Path of the responses, for captures.
    back: Option<Path>,
}

impl Part {
    /// Executes the part, with the responder's memory held.
    fn execute(&mut self) {
        let peer = Arc::clone(&self.peer);
        let guard = MemoryGuard::open(&peer.adapter, None);
        // From here on an unbind waits until this guard is released, so that the addresses of this generation stay
        // valid.
        if self.found == (self.generations)() {
            self.met = Some(self.meet(guard.own()));
        }
    }

    fn meet(&mut self, memory: Memory<'_>) -> Met {
        let Self { qp, peer, found, connection, attrs, work, progress, bytes, .. } = self;
        let silence = Met { step: Step::Refused(NakReason::Silence), published: None, back: None };
        let Some(source) = self.source else { return silence };
        let mut target = Target::lock(peer, (qp, attrs), (source, *found), connection);
        let faults = have_faults(qp, Some(peer));
        let lost = faults && is_lost(qp, peer, (source.gid, attrs.av.dgid), progress);
        if !target.connected || !peer.state.receives() || lost {
            return silence;
        }
        target.responder.first_request(peer, memory.view);
        let mut budget = Budget::new(CHUNK, 1);
        let mut exchange = Exchange {
            faults,
            qp,
            own: Apart(bytes),
            peer,
            memory,
            responder: &mut target.responder,
            work,
            progress,
            budget: &mut budget,
            // The requester traces the step when it has its memory again.
            trace: None,
        };
        // The requester counts the request when it ends.
        let step = exchange.execute(&mut Tally::default()).unwrap_or_else(Step::Refused);
        let published = target.responder.end_batch(peer, memory.view);
        let capturing = qp.adapter.captures.is_active();
        let back = capturing.then(|| Answering::of(peer, &target.responder, qp.qpn).back).flatten();
        Met { step, published, back }
    }
}

impl ApartStep<'_> {
    /// Begins a step with `peer`, or a request that needs no peer.
    pub(crate) fn run(mut self, peer: &Arc<Qp>, generations: Generations) -> Run {
        let bytes = match self.begin(&generations) {
            Ok(bytes) => bytes,
            Err(run) => return run,
        };
        let Some(progress) = self.requester.current else { return Run::Again };
        let mut part = Part {
            qp: Arc::clone(self.qp),
            peer: Arc::clone(peer),
            generations,
            found: self.route.generation,
            source: self.route.source,
            connection: self.route.connection,
            attrs: self.requester.attrs,
            work: self.requester.work.clone(),
            progress,
            before: progress.done,
            bytes,
            charge: None,
            met: None,
        };
        if !peer.adapter.memory.is_slow() {
            part.execute();
            return self.end(&part);
        }
        // A guest can have a part for each of its queue pairs.
        match self.qp.adapter.budget.charge(Kept::Requests, part.bytes.len() as u64) {
            Ok(charge) => part.charge = Some(charge),
            Err(_) => {
                self.requester.wait_for_response(self.qp);
                return Run::Idle;
            }
        }
        // The answer ends the wait, not the deadline of an earlier one.
        self.requester.stop_waiting();
        let elsewhere = PartElsewhere(Arc::default());
        let answer = Arc::clone(&elsewhere.0);
        *self.elsewhere = Some(elsewhere);
        let answerer = Answerer { answer, requester: Arc::clone(self.qp), part: None };
        peer.adapter.own_thread.give(&peer.adapter.engine.threadless, move || {
            let _guard = EndOnPanic::new("the data path");
            if answerer.is_awaited() {
                part.execute();
            }
            answerer.give(part);
        });
        Run::Idle
    }

    /// Continues the step whose responder's part another thread executes, if that has answered.
    pub(crate) fn resume(mut self) -> Run {
        let Some(PartElsewhere(answer)) = &*self.elsewhere else { return Run::Again };
        let Answer::Given(part) = std::mem::take(&mut *answer.lock()) else { return Run::Idle };
        *self.elsewhere = None;
        match part {
            Some(part) => self.end(&part),
            None => {
                self.requester.wait_for_response(self.qp);
                Run::Idle
            }
        }
    }

    /// First part, with the requester's memory held: takes a request, checks it, and copies the bytes of this step.
    /// `Err`: the responder has nothing to do.
    fn begin(&mut self, generations: &Generations) -> Result<Vec<u8>, Run> {
        let qp = self.qp;
        let guard = MemoryGuard::open(&qp.adapter, None);
        let own = guard.own();
        if self.route.generation != generations() {
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
        if qp.adapter.faults.is_active() && self.requester.is_delayed(qp) {
            return Err(Run::Idle);
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

    /// Third part, with the requester's memory held again: writes the result there, and ends the request if this was
    /// its last step.
    fn end(&mut self, part: &Part) -> Run {
        let Some(met) = &part.met else { return Run::Again };
        let qp = self.qp;
        let guard = MemoryGuard::open(&qp.adapter, None);
        let own = guard.own();
        self.route.connection = part.connection;
        let before = self.requester.current.replace(part.progress);
        self.budget.take_bytes(part.progress.done.saturating_sub(part.before));
        let work = &self.requester.work;
        let gets = matches!(work.op, SendOp::Read { .. } | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. });
        // An atomic whose response a requested fault loses stores its result all the same, because the peer does not
        // execute it again.
        let was_executed = before.is_some_and(|before| before.executed);
        let has_result = matches!(met.step, Step::Done(_) | Step::Moved) || part.progress.executed;
        if gets
            && has_result
            && !was_executed
            && own_list(own, qp, work, Access::LOCAL_WRITE).write(part.before, &part.bytes).is_err()
        {
            return self.fail(own, WcStatus::LocalProtection);
        }
        self.trace(part, met, own);
        let status = match met.step {
            Step::Done(byte_len) => {
                self.tally.count_request(&self.requester.work.op, part.progress.length);
                return self.succeed(own, byte_len, met.published);
            }
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

    /// Records the step in active captures.
    fn trace(&mut self, part: &Part, met: &Met, own: Memory<'_>) {
        if !self.qp.adapter.captures.is_active() {
            return;
        }
        let (Some(outcome), Some(source)) = (met.step.outcome(), part.source) else { return };
        let Requester { work, attrs, .. } = &*self.requester;
        let mut trace = ConnectionTrace { qp: self.qp, own, attrs, source, trace: &mut self.route.trace };
        let answering = Answering { point: &part.peer.adapter.point, back: met.back };
        trace.step(work, &part.progress, part.before, outcome, Some(answering));
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
            self.qp.fail_lost_receive();
        }
        Run::Again
    }

    fn fail(&mut self, own: Memory<'_>, status: WcStatus) -> Run {
        self.qp.fail_request(self.requester, own.view, status);
        Run::Again
    }
}
