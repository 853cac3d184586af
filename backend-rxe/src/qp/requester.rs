// Long: one file has the state of a requester, its waits and its retries.
//! The requester half: the request in flight, and the time of its next attempt.

use std::time::Duration;

use pvrdma_base::micros;
use pvrdma_guest_memory::{Direction, DmaView};
use pvrdma_roce::RnrBackoff;
use pvrdma_verbs::{QpEvent, QueueError, SendProgress, SendSource};
use pvrdma_verbs_types::{Access, Completion, Gid, MAX_MESSAGE, QpAttrs, SendFlags, SendOp, SendWr, Sge, WcStatus};
use serde::Serialize;
use vm_memory::VolatileSlice;

use super::Qp;
use super::epoch::Epoch;
use super::flight::FlightEvent;
use super::no_queue::NoQueue;
use super::pending_completions::PendingCompletions;
use super::send_gate::SendGate;
use super::spoil::spoil_request;
use crate::adapter::Adapter;
use crate::counters::{Counters, Tally};
use crate::faults::Turn;
use crate::flows::{LastFlow, Road};
use crate::sg::Memory;
use crate::timer::TimerKey;

/// Wait before an unanswered request is retransmitted, if the QP has no timeout.
const NO_TIMEOUT: Duration = Duration::from_millis(500);

/// Bytes of the result of an atomic operation.
const ATOMIC: u64 = 8;

/// Progress of the request in flight.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Progress {
    /// The local checks have passed.
    pub(crate) checked: bool,
    /// No requested fault delays it, or the delay is over.
    pub(crate) due: bool,
    /// The peer has executed it, and a requested fault lost the response.
    pub(crate) executed: bool,
    /// Length of the message in bytes.
    pub(crate) length: u64,
    /// Number of bytes moved.
    pub(crate) done: u64,
    /// Value of [`super::responder::Responder::epoch`] when the first byte moved. When it changes, the peer has lost
    /// its part of the message.
    pub(crate) epoch: Epoch,
}

/// Reason to wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wait {
    /// The requester may run. The reason why its last run has sent nothing, or no more, is here because as a field of
    /// [`Requester`] it would need another word.
    Nothing(Option<SendGate>),
    /// The peer had no receive. The wait ends at the deadline, or when the peer posts one.
    Receive(Duration),
    /// There was no response. Ends at the deadline.
    Response(Duration),
    /// The peer's adapter is paused. Ends with the pause.
    Resume,
    /// A requested fault delays the next request. Does not hold up the requests in flight. The parts of [`Turn`], which
    /// as one value would need another word.
    Turn { begins: Duration, version: u32 },
}

impl Wait {
    /// No reason to wait, and none that has ended the last run.
    const NOTHING: Self = Self::Nothing(None);
}

/// State of the requester before a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Readiness {
    Ready,
    Waiting,
    /// The request in flight has used up its retries.
    Failed(WcStatus),
}

/// State of a requester at one moment, without its route.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct RequesterInspect {
    /// The send ring can no longer be read.
    broken: bool,
    /// The request in flight in local delivery. Requests on the wire are in the route.
    current: Option<RequestInspect>,
    /// Reason to wait, if it waits.
    wait: Option<WaitInspect>,
    /// Number of retransmissions left.
    retries_left: u8,
    /// Number of retransmissions left while the peer has no receive.
    rnr_retries_left: u8,
    /// Microseconds until its timer fires, 0 if it has. `null`: it has no timer.
    timer_due_in_us: Option<u64>,
    /// The guest wants an event when the send queue is drained.
    notify_drained: bool,
    /// Number of requests that succeeded since RESET. Datagrams count as soon as they are sent.
    requests: u64,
    /// Bytes in them.
    bytes: u64,
}

/// The request in flight.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct RequestInspect {
    /// Opcode of its completion.
    opcode: String,
    /// Length of the message in bytes, once the request was checked.
    length: Option<u64>,
    /// Number of bytes moved.
    done: u64,
}

/// Reason to wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
struct WaitInspect {
    /// `receive`: the peer had no receive; `response`: there was no response; `resume`: the peer is paused.
    #[serde(rename = "for")]
    what: &'static str,
    /// Microseconds until the wait ends, 0 if that time has passed. `null`: it has no deadline.
    due_in_us: Option<u64>,
}

/// The requester half of a QP. The route to the peer is separate ([`crate::path::Route`]).
pub(crate) struct Requester {
    pub(super) source: Box<dyn SendSource>,
    /// The ring can no longer be read.
    pub(super) broken: bool,
    /// The request in flight, if `current` is set.
    pub(crate) work: SendWr,
    pub(crate) current: Option<Progress>,
    pub(super) wait: Wait,
    /// Value of [`Directory::pauses`](crate::path::directory::Directory::pauses) at the last run.
    pub(super) pauses: u64,
    pub(super) retries: u8,
    pub(super) rnr_retries: u8,
    /// Next wait if the peer has no receive.
    pub(super) rnr_backoff: RnrBackoff,
    /// The timer of this requester, which may have fired since.
    pub(super) armed: Option<TimerKey>,
    pub(crate) attrs: QpAttrs,
    /// Raise an event when the send queue is drained in SQD.
    pub(super) notify_drained: bool,
    /// Requests that have ended and whose completions are not published yet. Empty while the requester is not locked.
    pub(crate) pending: PendingCompletions,
    /// Number of requests that succeeded, and of datagrams, since RESET, and the bytes in them.
    pub(super) moved: [u64; 2],
    pub(super) flow: LastFlow,
}

impl Requester {
    pub(crate) fn new(source: Box<dyn SendSource>) -> Self {
        Self {
            source,
            broken: false,
            work: SendWr::default(),
            current: None,
            wait: Wait::NOTHING,
            pauses: 0,
            retries: 0,
            rnr_retries: 0,
            rnr_backoff: RnrBackoff::default(),
            armed: None,
            attrs: QpAttrs::default(),
            notify_drained: false,
            pending: PendingCompletions::default(),
            moved: [0; 2],
            flow: LastFlow::default(),
        }
    }

    /// Returns the state of the requester for inspection.
    pub(crate) fn inspect(&self, now: Duration) -> RequesterInspect {
        let due_in_us = |deadline: Duration| micros(deadline.saturating_sub(now));
        RequesterInspect {
            broken: self.broken,
            current: self.current.map(|Progress { checked, length, done, .. }| RequestInspect {
                opcode: format!("{:?}", self.work.op.completion_opcode()),
                length: checked.then_some(length),
                done,
            }),
            wait: match self.wait {
                Wait::Nothing(_) => None,
                Wait::Receive(deadline) => Some(WaitInspect { what: "receive", due_in_us: Some(due_in_us(deadline)) }),
                Wait::Response(deadline) => {
                    Some(WaitInspect { what: "response", due_in_us: Some(due_in_us(deadline)) })
                }
                Wait::Resume => Some(WaitInspect { what: "resume", due_in_us: None }),
                Wait::Turn { begins, .. } => Some(WaitInspect { what: "delay", due_in_us: Some(due_in_us(begins)) }),
            },
            retries_left: self.retries,
            rnr_retries_left: self.rnr_retries,
            timer_due_in_us: self.armed.map(|armed| due_in_us(armed.deadline)),
            notify_drained: self.notify_drained,
            requests: self.moved[0],
            bytes: self.moved[1],
        }
    }

    /// Records the reason why a run has sent nothing, or no more. A wait that it has begun is the reason otherwise.
    #[inline]
    pub(crate) const fn set_gate(&mut self, gate: Option<SendGate>) {
        if let Wait::Nothing(last) = &mut self.wait {
            *last = gate;
        }
    }

    /// Returns the reason why it sends nothing.
    pub(crate) const fn gate(&self) -> Option<SendGate> {
        match self.wait {
            Wait::Nothing(gate) => gate,
            Wait::Receive(_) => Some(SendGate::RnrWait),
            Wait::Response(_) => Some(SendGate::AckWait),
            Wait::Resume => Some(SendGate::PeerPaused),
            Wait::Turn { .. } => Some(SendGate::Delay),
        }
    }

    /// Returns the progress of its requests on this path.
    pub(crate) const fn progress(&self, path: &'static str) -> SendProgress {
        let [requests, bytes] = self.moved;
        SendProgress { requests, bytes, retries_left: self.retries, path }
    }

    /// Adds the requests of a batch to the traffic, by peer and path if the QP is connected.
    #[inline]
    pub(crate) fn count(&mut self, qp: &Qp, batch: &Tally, road: Option<Road>) {
        let [requests, bytes_out, bytes_in] = batch.moved();
        if requests == 0 {
            return;
        }
        for (all, more) in self.moved.iter_mut().zip([requests, bytes_out.wrapping_add(bytes_in)]) {
            *all = all.wrapping_add(more);
        }
        if let Some(road) = road {
            self.flow.to(&qp.adapter.flows, self.attrs.av.dgid, road).add(requests, bytes_out, bytes_in);
        }
    }

    /// Accounts for a datagram that was sent.
    #[inline]
    pub(crate) fn count_datagram(&mut self, qp: &Qp, to: Gid, road: Road) {
        let length = self.current.map_or(0, |progress| progress.length);
        self.flow.to(&qp.adapter.flows, to, road).add(1, length, 0);
    }

    /// Resets the requester and its ring, as the guest does with a QP in RESET.
    pub(super) fn reset(&mut self, qp: &Qp) {
        let source = std::mem::replace(&mut self.source, Box::new(NoQueue));
        self.end(qp);
        self.source = source;
        self.source.reset();
    }

    /// Releases the ring for good.
    pub(super) fn end(&mut self, qp: &Qp) {
        if let Some(armed) = self.armed {
            qp.adapter.engine.disarm(armed);
        }
        *self = Self::new(Box::new(NoQueue));
    }

    /// Applies new attributes, and restarts the retry counters, whose limits may have changed.
    pub(super) const fn set_attrs(&mut self, attrs: QpAttrs) {
        self.attrs = attrs;
        self.retries = attrs.retry_cnt;
        self.rnr_retries = attrs.rnr_retry;
    }

    /// Makes the next request the one in flight. Returns `false` if there is none.
    #[inline]
    pub(crate) fn next(&mut self, view: &DmaView<'_>) -> Result<bool, QueueError> {
        if self.broken {
            return Ok(false);
        }
        let found = self.source.pop(view, &mut self.work).inspect_err(|_| self.broken = true)?;
        if found {
            self.current = Some(Progress::default());
        }
        Ok(found)
    }

    /// As [`Self::next`], for a guest that posts many requests: an empty ring is checked twice, so that a request that
    /// is posted at this moment is found without the delay of its doorbell.
    #[inline]
    pub(crate) fn next_of_many(&mut self, view: &DmaView<'_>) -> Result<bool, QueueError> {
        if self.next(view)? {
            return Ok(true);
        }
        std::hint::spin_loop();
        self.next(view)
    }

    /// Returns `true` if a requested fault delays the request in flight, which runs when the delay is over.
    #[cold]
    pub(crate) fn is_delayed(&mut self, qp: &Qp) -> bool {
        let Adapter { faults, engine, .. } = &*qp.adapter;
        let Some(progress) = self.current.as_mut().filter(|next| !next.checked && !next.due) else { return false };
        let now = engine.now();
        let known = match self.wait {
            Wait::Turn { begins, version } => Some(Turn { begins, version }),
            _ => None,
        };
        let Turn { begins, version } = faults.turn(qp.state.id(), known, now);
        progress.due = now >= begins;
        if progress.due {
            self.wait = Wait::NOTHING;
            return false;
        }
        self.wait = Wait::Turn { begins, version };
        self.arm(qp, begins);
        true
    }

    /// Returns `true` if the next request was checked before, when its path was not known.
    pub(crate) fn is_checked(&self) -> bool {
        self.current.as_ref().is_some_and(|progress| progress.checked)
    }

    /// Moves the next request into `work`. Returns `false` if there is none.
    pub(crate) fn pop(&mut self, view: &DmaView<'_>, work: &mut SendWr) -> Result<bool, QueueError> {
        if self.current.take().is_some() {
            // Local delivery took the request from the ring before the peer turned out to be on the wire, or a fault
            // delayed it, whose rules may have ended before the delay.
            self.wait = Wait::NOTHING;
            std::mem::swap(work, &mut self.work);
            return Ok(true);
        }
        if self.broken {
            return Ok(false);
        }
        self.source.pop(view, work).inspect_err(|_| self.broken = true)
    }

    /// As [`Self::pop`], unless a requested fault delays the next request.
    pub(crate) fn pop_due(&mut self, qp: &Qp, view: &DmaView<'_>, work: &mut SendWr) -> Result<bool, QueueError> {
        if qp.adapter.faults.is_active() && (self.current.is_some() || self.next(view)?) && self.is_delayed(qp) {
            return Ok(false);
        }
        self.pop(view, work)
    }

    /// Ends a request that was popped, in the order of the ring.
    pub(crate) fn finish(&mut self, qp: &Qp, view: &DmaView<'_>, work: &SendWr, status: WcStatus, byte_len: u32) {
        // The slot is released before the completion is published, as in `end_with_success`.
        self.source.retire(view);
        if status != WcStatus::Success || qp.signal_all || work.flags.contains(SendFlags::SIGNALED) {
            let _ = qp.complete_send(view, work.wr_id, work.op.completion_opcode(), status, byte_len);
        }
    }

    /// Checks whether the request in flight can run now. `pauses` is the number of pauses in the process.
    pub(crate) fn readiness(&mut self, qp: &Qp, pauses: u64) -> Readiness {
        if self.pauses != pauses {
            // The peer may have been paused during a part of the wait, so the wait does not count.
            self.pauses = pauses;
            if !matches!(self.wait, Wait::Turn { .. }) {
                self.wait = Wait::NOTHING;
            }
        }
        let (Wait::Receive(deadline) | Wait::Response(deadline)) = self.wait else { return Readiness::Ready };
        let woken = qp.task().take_wake() && matches!(self.wait, Wait::Receive(_));
        if woken {
            // The wait is kept: if another QP takes the receive, this one continues to wait until the same deadline,
            // and no retry is counted.
            return Readiness::Ready;
        }
        let counters = &qp.adapter.counters;
        if qp.adapter.engine.now() < deadline {
            self.arm(qp, deadline);
            return Readiness::Waiting;
        }
        match self.wait {
            Wait::Nothing(_) | Wait::Resume | Wait::Turn { .. } => {}
            Wait::Receive(_) => {
                Counters::bump(&counters.rnr_retries);
                if self.attrs.rnr_retry < 7 {
                    self.rnr_retries = self.rnr_retries.saturating_sub(1);
                }
            }
            Wait::Response(_) => {
                if self.attrs.timeout != 0 {
                    let Some(left) = self.retries.checked_sub(1) else {
                        return Readiness::Failed(WcStatus::RetryExceeded);
                    };
                    self.retries = left;
                }
                Counters::bump(&counters.retries);
            }
        }
        self.wait = Wait::NOTHING;
        Readiness::Ready
    }

    /// Ends the wait, because the path has changed or the request ends.
    pub(crate) const fn stop_waiting(&mut self) {
        self.wait = Wait::NOTHING;
    }

    /// Starts the request in flight from its beginning.
    pub(crate) fn start_over(&mut self) {
        if let Some(progress) = &mut self.current {
            progress.done = 0;
        }
        self.stop_waiting();
    }

    /// Waits for a receive of the peer, which has asked for a wait of `delay`. A posted receive ends the wait early.
    ///
    /// # Errors
    /// The request has used up its retries.
    pub(crate) fn wait_for_receive(&mut self, qp: &Qp, delay: Duration) -> Result<(), WcStatus> {
        if let Wait::Receive(deadline) = self.wait {
            self.arm(qp, deadline);
            return Ok(());
        }
        if self.attrs.rnr_retry < 7 && self.rnr_retries == 0 {
            return Err(WcStatus::RnrRetryExceeded);
        }
        Counters::bump(&qp.adapter.counters.rnr_waits);
        qp.record(FlightEvent::RnrNak);
        let delay = self.rnr_backoff.next_wait(delay, RnrBackoff::WOKEN);
        let deadline = qp.adapter.engine.now().saturating_add(delay);
        self.wait = Wait::Receive(deadline);
        self.arm(qp, deadline);
        Ok(())
    }

    /// Waits for the end of the peer's pause. The request in flight then continues where it was.
    pub(crate) const fn wait_for_resume(&mut self) {
        self.wait = Wait::Resume;
    }

    /// Waits for the ACK timeout, because there was no response. The request then starts again from its beginning.
    pub(crate) fn wait_for_response(&mut self, qp: &Qp) {
        Counters::bump(&qp.adapter.counters.unanswered);
        qp.record(FlightEvent::Unanswered);
        if let Some(progress) = &mut self.current {
            progress.done = 0;
        }
        let timeout = match self.attrs.timeout {
            0 => NO_TIMEOUT,
            exponent => Duration::from_nanos(4096 << exponent.min(31)),
        };
        let deadline = qp.adapter.engine.now().saturating_add(timeout);
        self.wait = Wait::Response(deadline);
        self.arm(qp, deadline);
    }

    /// Ensures that the QP runs at `deadline`. An earlier timer suffices, because the run that it causes calls this
    /// again.
    pub(crate) fn arm(&mut self, qp: &Qp, deadline: Duration) {
        let engine = &qp.adapter.engine;
        let serves = |armed: TimerKey| armed.deadline <= deadline && armed.deadline > engine.now();
        if !self.armed.is_some_and(serves) {
            self.armed = Some(engine.arm(qp.task(), deadline, self.armed));
        }
    }

    /// Ends the request in flight with success. [`Self::publish`] publishes its completion.
    // Always inline: the local path calls this for every request, and callers of rare paths prevent it otherwise.
    #[inline(always)]
    pub(crate) fn end_with_success(&mut self, qp: &Qp, view: &DmaView<'_>, byte_len: u32) {
        self.current = None;
        self.wait = Wait::NOTHING;
        self.retries = self.attrs.retry_cnt;
        self.rnr_retries = self.attrs.rnr_retry;
        self.rnr_backoff.reset();
        // The slot is released before the completion is published: a consumer that polls the completion may post the
        // next request at once.
        self.source.retire(view);
        let opcode = self.work.op.completion_opcode();
        let completion =
            Completion { byte_len, ..Completion::new(qp.cookie, self.work.wr_id, opcode, WcStatus::Success) };
        let wanted = qp.signal_all || self.work.flags.contains(SendFlags::SIGNALED);
        self.pending.push(completion, wanted, self.work.op.takes_receive());
    }

    /// Publishes the completions of requests that have ended. If the peer's queue had no room for all of their
    /// receives, `receives_published` is the number that fitted. Returns `false` if a request failed for that reason.
    #[inline]
    pub(crate) fn publish(&mut self, qp: &Qp, view: &DmaView<'_>, receives_published: Option<usize>) -> bool {
        self.pending.publish(qp, view, receives_published)
    }

    /// Ends the request in flight with a status that always produces a completion.
    pub(super) fn end_request(&mut self, qp: &Qp, view: &DmaView<'_>, status: WcStatus) {
        if self.current.take().is_none() {
            return;
        }
        self.wait = Wait::NOTHING;
        self.rnr_backoff.reset();
        self.source.retire(view);
        let _ = qp.complete_send(view, self.work.wr_id, self.work.op.completion_opcode(), status, 0);
    }

    /// Handles a drained send queue.
    pub(crate) fn drained(&mut self, qp: &Qp, view: &DmaView<'_>) {
        qp.state.set_draining(false);
        if std::mem::take(&mut self.notify_drained) {
            qp.event(view, QpEvent::SendQueueDrained);
        }
    }
}

/// Result of the local checks of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Begun<'m> {
    /// Length of the message in bytes.
    pub(crate) length: u64,
    /// The request was local, and is done.
    pub(crate) done: bool,
    /// The data to send, if they are contiguous.
    pub(crate) data: Option<VolatileSlice<'m>>,
}

/// Checks a request and its local memory, and executes local requests: fast registration and local invalidation.
///
/// # Errors
/// The status that the request ends with.
// Always inline: see `Requester::end_with_success`.
#[inline(always)]
pub(crate) fn begin_request<'m>(
    qp: &Qp,
    attrs: &QpAttrs,
    work: &mut SendWr,
    own: Memory<'m>,
    tally: &mut Tally,
) -> Result<Begun<'m>, WcStatus> {
    if qp.adapter.faults.is_active() {
        spoil_request(qp, attrs, work)?;
    }
    begin_counted_request(qp, attrs, work, own, tally)
}

/// As [`begin_request`], for a request that was counted for the faults of the device before.
///
/// # Errors
/// The status that the request ends with.
#[inline(always)]
pub(crate) fn begin_counted_request<'m>(
    qp: &Qp,
    attrs: &QpAttrs,
    work: &mut SendWr,
    own: Memory<'m>,
    tally: &mut Tally,
) -> Result<Begun<'m>, WcStatus> {
    let begun = check_request(work, own, qp.pd, attrs, MAX_MESSAGE)?;
    match &mut work.op {
        op @ (SendOp::LocalInvalidate(_) | SendOp::FastRegister(_)) => {
            tally.key_operations += 1;
            if change_key(qp, op, own) { Ok(Begun { done: true, ..begun }) } else { Err(WcStatus::LocalQpOperation) }
        }
        _ => Ok(begun),
    }
}

/// Executes a fast registration or a local invalidation. Returns `false` if it is not allowed.
#[cold]
fn change_key(qp: &Qp, op: &mut SendOp, own: Memory<'_>) -> bool {
    match op {
        SendOp::LocalInvalidate(invalidate) => own.mrs.invalidate(invalidate.key, qp.pd),
        SendOp::FastRegister(request) => own.mrs.fast_register(request, qp.pd, |pages| qp.adapter.pin(own.view, pages)),
        _ => false,
    }
}

/// Checks the parts of a request that do not depend on the peer. Its message has at most `max_message` bytes.
///
/// # Errors
/// The status that the request ends with.
#[inline]
pub(crate) fn check_request<'m>(
    work: &SendWr,
    own: Memory<'m>,
    pd: u64,
    attrs: &QpAttrs,
    max_message: u32,
) -> Result<Begun<'m>, WcStatus> {
    let length = Sge::total_length(&work.sges);
    let begun = Begun { length, done: false, data: None };
    match &work.op {
        SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } if length != ATOMIC => return Err(WcStatus::LocalLength),
        SendOp::LocalInvalidate(_) | SendOp::FastRegister(_) => return Ok(Begun { length: 0, ..begun }),
        SendOp::Unsupported { .. } | SendOp::Malformed => return Err(WcStatus::LocalQpOperation),
        _ => {}
    }
    if work.op.has_result() && attrs.max_rd_atomic == 0 {
        // Without initiator resources the request could never be sent.
        return Err(WcStatus::LocalQpOperation);
    }
    if length > u64::from(max_message) {
        return Err(WcStatus::LocalLength);
    }
    if work.op.has_result() {
        // The keys of the result are checked when it is written. As in hardware adapters, the peer's checks come first,
        // so the peer has executed the request by then.
        return Ok(begun);
    }
    let checked = own.check(&work.sges, (pd, Access::empty()), length, Direction::Read);
    checked.map(|data| Begun { data, ..begun }).map_err(|_| WcStatus::LocalProtection)
}
