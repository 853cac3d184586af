//! Reliable connections, delivered locally.
//!
//! A batch holds the guest memory of both sides and the responder of the peer for as many requests as the budget
//! allows. Each request is checked in the order of the transport (local memory, then the responder's checks), moved in
//! chunks, and completed, at the responder first. Completions of small requests are published several at a time.
//! Requests run strictly one after another, so FENCE needs no extra work.

use std::sync::Arc;

use parking_lot::FairMutexGuard;
use pvrdma_roce::wire::rnr_delay;
use pvrdma_verbs::QueueError;
use pvrdma_verbs_types::{
    Access, AtomicChange, Gid, NakReason, QpAttrs, QpState, Received, RemoteAddress, SendData, SendFlags, SendOp,
    SendWr, WcOpcode, WcStatus,
};

use super::own_side::{Joint, Moving, OwnSide};
use super::route::LocalRoute;
use crate::budget::Budget;
use crate::capture::StepOutcome;
use crate::capture::local::{Answering, ConnectionTrace, refusal};
use crate::counters::Tally;
use crate::faults::{Fault, Site};
use crate::gid::BoundGid;
use crate::qp::Qp;
use crate::qp::contact::Connection;
use crate::qp::requester::{Progress, Requester, begin_request};
use crate::qp::responder::{Responder, check_remote, execute_atomic, remote_list, remote_sge};
use crate::sg::{FaultyList, Memory, MemoryGuard};
use crate::task::Run;

/// The locked responder of the peer.
pub(super) struct Target<'a> {
    pub(super) responder: FairMutexGuard<'a, Responder>,
    /// The responder is connected to the QP of the batch.
    pub(super) connected: bool,
}

impl<'a> Target<'a> {
    /// Locks the responder of a peer. The addresses are those of the directory's `generation`.
    pub(super) fn lock(
        peer: &'a Qp,
        (qp, attrs): (&Qp, &QpAttrs),
        (source, generation): (BoundGid, u64),
        connection: &mut Connection,
    ) -> Self {
        let mut responder = peer.responder.lock();
        let connected = responder.is_connected_to(peer, qp, source, generation)
            && responder.own_address().is_some_and(|own| own.gid == attrs.av.dgid)
            && peer.qp_type == qp.qp_type
            && peer.state.receives()
            && {
                let psns = (attrs.sq_psn, responder.attrs.rq_psn);
                responder.connection.meet(connection, psns)
            };
        Self { responder, connected }
    }
}

/// Returns `true` if a requested fault of one of the two devices loses the request, which is about to arrive. `from`
/// and `to` are the GIDs of its connection.
#[inline]
pub(super) fn is_lost(qp: &Qp, peer: &Qp, (from, to): (Gid, Gid), progress: &Progress) -> bool {
    qp.adapter.faults.is_cut(from)
        || peer.adapter.faults.is_cut(to)
        || peer.adapter.faults.is_active() && progress.done == 0 && peer.fault(Site::Arrival).is_some()
}

/// One step of a request.
pub(super) enum Step {
    /// The request succeeded; bytes for its completion.
    Done(u32),
    /// A part of the message was moved.
    Moved,
    /// The requester's side of the request is invalid.
    Failed(WcStatus),
    /// The responder did not execute the request.
    Refused(NakReason),
}

impl Step {
    /// Returns the outcome that captures show. `None`: the responder was not involved.
    pub(super) const fn outcome(&self) -> Option<StepOutcome> {
        match self {
            Self::Done(_) => Some(StepOutcome::Completed),
            Self::Moved => Some(StepOutcome::Moved),
            Self::Failed(_) => None,
            Self::Refused(nak) => Some(refusal(*nak)),
        }
    }
}

/// Reason why a batch ended.
enum BatchEnd {
    /// Without an error.
    Run(Run),
    /// The request in flight needs a peer, and none was found.
    NoPeer,
    /// The request in flight failed.
    Failed(WcStatus),
    /// The ring can no longer be read.
    Broken(QueueError),
}

/// Requests of a connected QP, with their peer and the memory of both.
pub(crate) struct LocalBatch<'a> {
    pub(crate) qp: &'a Qp,
    pub(crate) requester: &'a mut Requester,
    pub(crate) route: &'a mut LocalRoute,
    pub(crate) peer: Option<&'a Arc<Qp>>,
    /// Memory of the QP and of the peer.
    pub(crate) guard: &'a MemoryGuard<'a>,
    pub(crate) budget: &'a mut Budget,
    pub(crate) tally: &'a mut Tally,
}

/// Runs requests of a connected QP. Returns `None` if the request in flight needs a peer, and none was found.
pub(crate) fn run(mut batch: LocalBatch<'_>) -> Option<Run> {
    let (mut target, view) = (None, batch.guard.own().view);
    let end = batch.run(&mut target);
    let published = batch.publish(target.as_mut());
    // The peer's responder is released first, because this QP's own responder may be flushed next. A thread never holds
    // two responders: two threads that lock them in opposite order would deadlock.
    drop(target);
    let LocalBatch { qp, requester, .. } = batch;
    if !published {
        qp.fail_lost_receive();
        return Some(Run::Again);
    }
    match end {
        BatchEnd::Run(run) => return Some(run),
        BatchEnd::NoPeer => return None,
        BatchEnd::Failed(status) => qp.fail_request(requester, view, status),
        BatchEnd::Broken(error) => qp.fail_ring(view, error),
    }
    Some(Run::Again)
}

impl<'a> LocalBatch<'a> {
    /// Publishes completions, at the responder first. Returns `false` if the responder's queue had no room for all of
    /// them.
    #[inline]
    fn publish(&mut self, target: Option<&mut Target<'a>>) -> bool {
        let peer = self.peer.zip(target);
        let published = peer.and_then(|(peer, target)| target.responder.end_batch(peer, self.guard.peer().view));
        self.requester.publish(self.qp, self.guard.own().view, published)
    }

    /// Runs requests until a request, the budget or a state change ends the batch. The last completions are not yet
    /// published when this returns.
    fn run(&mut self, target: &mut Option<Target<'a>>) -> BatchEnd {
        let (qp, own) = (self.qp, self.guard.own());
        let capturing = qp.adapter.captures.is_active();
        // A guest that waits for the completion of its only request posts no other one before that is published.
        let mut ended = 0_u32;
        loop {
            let state = qp.state();
            if !matches!(state, QpState::Rts | QpState::Sqd) {
                return BatchEnd::Run(Run::Again);
            }
            if self.requester.current.is_none() {
                if state == QpState::Sqd {
                    return BatchEnd::Run(Run::Idle);
                }
                let next =
                    if ended > 1 { self.requester.next_of_many(own.view) } else { self.requester.next(own.view) };
                match next {
                    Ok(true) => {}
                    Ok(false) => return BatchEnd::Run(Run::Idle),
                    Err(error) => return BatchEnd::Broken(error),
                }
            }
            if qp.adapter.faults.is_active() && self.requester.is_delayed(qp) {
                return BatchEnd::Run(Run::Idle);
            }
            // The budget is checked only when there is a request: if the budget and the requests end together, no
            // worker needs to be woken.
            if self.budget.spent() {
                return BatchEnd::Run(Run::More);
            }
            match self.step(target, capturing) {
                Step::Done(byte_len) => {
                    self.budget.take_request();
                    ended = ended.saturating_add(1);
                    let length = self.requester.current.map_or(0, |progress| progress.length);
                    self.requester.end_with_success(qp, own.view, byte_len);
                    let drained = qp.state() == QpState::Sqd;
                    if (drained || self.requester.pending.is_due(length)) && !self.publish(target.as_mut()) {
                        return BatchEnd::Failed(WcStatus::RemoteOperation);
                    }
                    if drained {
                        self.requester.drained(qp, own.view);
                    }
                }
                Step::Moved => {}
                Step::Failed(status) => return BatchEnd::Failed(status),
                Step::Refused(NakReason::Silence) if self.peer.is_none() => return BatchEnd::NoPeer,
                Step::Refused(nak) => return self.refused(nak, capturing),
            }
        }
    }

    /// Handles a request in flight that the responder did not execute.
    fn refused(&mut self, nak: NakReason, capturing: bool) -> BatchEnd {
        if capturing && nak == NakReason::Silence {
            trace_loss(self.qp, self.requester, self.route, self.guard.own());
        }
        match refused(self.qp, self.requester, nak) {
            Ok(run) => BatchEnd::Run(run),
            Err(status) => BatchEnd::Failed(status),
        }
    }

    /// Advances the request in flight by one step.
    #[inline]
    fn step(&mut self, target: &mut Option<Target<'a>>, capturing: bool) -> Step {
        let (qp, own, memory) = (self.qp, self.guard.own(), self.guard.peer());
        let Requester { work, current, attrs, .. } = &mut *self.requester;
        let LocalRoute { source, trace, generation, connection, .. } = &mut *self.route;
        let Some(progress) = current else { return Step::Failed(WcStatus::General) };
        if !progress.checked {
            match begin_request(qp, attrs, work, own, self.tally) {
                Ok(begun) if begun.done => return Step::Done(0),
                Ok(begun) => *progress = Progress { checked: true, length: begun.length, ..Progress::default() },
                Err(status) => return Step::Failed(status),
            }
        }
        let (Some(peer), Some(source)) = (self.peer, *source) else { return Step::Refused(NakReason::Silence) };
        let target = target.get_or_insert_with(|| Target::lock(peer, (qp, attrs), (source, *generation), connection));
        let route = (source.gid, attrs.av.dgid);
        if !target.connected || !peer.state.receives() || is_lost(qp, peer, route, progress) {
            return Step::Refused(NakReason::Silence);
        }
        target.responder.first_request(peer, memory.view);
        let trace = capturing.then_some(ConnectionTrace { qp, own, attrs, source, trace });
        let responder = &mut *target.responder;
        let own = Joint(own);
        let mut exchange = Exchange { qp, own, peer, memory, responder, work, progress, budget: self.budget, trace };
        exchange.execute(self.tally).unwrap_or_else(Step::Refused)
    }
}

/// Records in active captures that the request in flight got no response.
#[cold]
pub(crate) fn trace_loss(qp: &Qp, requester: &mut Requester, route: &mut LocalRoute, own: Memory<'_>) {
    let Requester { work, current: Some(progress), attrs, .. } = requester else { return };
    let LocalRoute { source: Some(source), trace, .. } = route else { return };
    let mut trace = ConnectionTrace { qp, own, attrs, source: *source, trace };
    trace.step(work, progress, progress.done, StepOutcome::NoResponse, None);
}

/// Handles a request that the responder did not execute. Returns the next action of the run, or the status that the
/// request ends with.
pub(super) fn refused(qp: &Qp, requester: &mut Requester, nak: NakReason) -> Result<Run, WcStatus> {
    match nak {
        NakReason::Silence => {
            requester.wait_for_response(qp);
            Ok(Run::Idle)
        }
        NakReason::NotReady(code) => requester.wait_for_receive(qp, rnr_delay(code)).map(|()| Run::Idle),
        NakReason::InvalidRequest => Err(WcStatus::RemoteInvalidRequest),
        NakReason::RemoteAccess => Err(WcStatus::RemoteAccess),
        NakReason::RemoteOperation => Err(WcStatus::RemoteOperation),
    }
}

/// Execution of a request at the responder.
pub(super) struct Exchange<'a, O> {
    pub(super) qp: &'a Qp,
    pub(super) own: O,
    pub(super) peer: &'a Qp,
    pub(super) memory: Memory<'a>,
    pub(super) responder: &'a mut Responder,
    pub(super) work: &'a SendWr,
    pub(super) progress: &'a mut Progress,
    pub(super) budget: &'a mut Budget,
    /// Present while captures are active.
    pub(super) trace: Option<ConnectionTrace<'a>>,
}

impl<O: OwnSide> Exchange<'_, O> {
    /// Advances the request by one step.
    // Always inline: see `Requester::end_with_success`.
    #[inline(always)]
    pub(super) fn execute(&mut self, tally: &mut Tally) -> Result<Step, NakReason> {
        if self.qp.adapter.faults.is_active() {
            return self.execute_with_faults(tally);
        }
        self.execute_once(tally)
    }

    /// As [`Self::execute`], with the faults of the requester's device.
    #[cold]
    fn execute_with_faults(&mut self, tally: &mut Tally) -> Result<Step, NakReason> {
        let step = if self.progress.executed {
            // The responder recognises a duplicate, and answers it again (IBA 9.7.5.1.4). The previous value of an
            // atomic is in the request's memory already.
            let is_atomic = matches!(self.work.op, SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. });
            Step::Done(if is_atomic { 8 } else { 0 })
        } else {
            self.execute_once(tally)?
        };
        if !matches!(step, Step::Done(_)) {
            return Ok(step);
        }
        match self.qp.fault(Site::Response) {
            Some(Fault::BadResponse) => Ok(Step::Failed(WcStatus::BadResponse)),
            Some(_) => {
                // A duplicate READ is executed again.
                self.progress.executed = !matches!(self.work.op, SendOp::Read { .. });
                Err(NakReason::Silence)
            }
            None => Ok(step),
        }
    }

    // Always inline: see `Requester::end_with_success`.
    #[inline(always)]
    fn execute_once(&mut self, tally: &mut Tally) -> Result<Step, NakReason> {
        if self.progress.done == 0 {
            self.progress.epoch = self.responder.epoch;
        } else if self.progress.epoch != self.responder.epoch {
            // The responder was reset in the middle of the message and no longer has the received part.
            return Err(NakReason::Silence);
        }
        let before = self.progress.done;
        let result = match self.work.op {
            SendOp::Send { data, .. } => self.send(data),
            SendOp::Write { remote, immediate } => self.write(remote, immediate),
            SendOp::Read { remote } => self.read(remote),
            SendOp::CompareSwap { remote, compare, swap } => {
                self.atomic(remote, AtomicChange::CompareSwap { compare, swap })
            }
            SendOp::FetchAdd { remote, add } => self.atomic(remote, AtomicChange::FetchAdd { add }),
            // Handled before a peer is needed.
            SendOp::LocalInvalidate(_) | SendOp::FastRegister(_) | SendOp::Unsupported { .. } | SendOp::Malformed => {
                Ok(Step::Failed(WcStatus::LocalQpOperation))
            }
        };
        self.record(&result, before);
        let step = result?;
        if matches!(step, Step::Done(_)) {
            tally.count_request(&self.work.op, self.progress.length);
        }
        Ok(step)
    }

    /// Records a step in active captures.
    #[inline]
    fn record(&mut self, result: &Result<Step, NakReason>, before: u64) {
        // The trace is moved out of `self` for the call: passing a reference to a field to a function that is not
        // inlined would force the whole exchange into memory instead of registers.
        let Some(mut trace) = self.trace.take() else { return };
        let outcome = match result {
            Ok(step) => step.outcome(),
            Err(NakReason::Silence) => None,
            Err(nak) => Some(refusal(*nak)),
        };
        let Some(outcome) = outcome else { return };
        let answering = Answering::of(self.peer, self.responder, self.qp.qpn);
        trace.step(self.work, self.progress, before, outcome, Some(answering));
    }

    fn send(&mut self, data: SendData) -> Result<Step, NakReason> {
        let (peer, view) = (self.peer, self.memory.view);
        self.responder.take_receive(peer, view, Some(&self.qp.state))?;
        let length = self.progress.length;
        if self.progress.done == 0 {
            self.responder.check_receive(peer, self.memory, length)?;
        }
        let list = self.responder.receive_list(peer, self.memory);
        let moving = Moving { qp: self.qp, work: self.work, progress: self.progress, budget: self.budget };
        match self.own.put(moving, list, false) {
            Ok(true) => {}
            Ok(false) => return Ok(Step::Moved),
            Err(FaultyList::Source) => return Ok(Step::Failed(WcStatus::LocalProtection)),
            Err(FaultyList::Target) => return Err(self.responder.receive_fault(peer, view)),
        }
        if let SendData::Invalidate(key) = data {
            self.responder.invalidate(peer, self.memory, key)?;
        }
        self.receive(WcOpcode::Recv, data);
        Ok(Step::Done(0))
    }

    #[inline(always)]
    fn write(&mut self, remote: RemoteAddress, immediate: Option<[u8; 4]>) -> Result<Step, NakReason> {
        let (peer, view) = (self.peer, self.memory.view);
        let length = self.progress.length;
        // A message of one packet needs its receive immediately; a longer one needs it only with its last packet.
        let takes_first = immediate.is_some() && length <= u64::from(self.responder.attrs.path_mtu.bytes());
        if self.progress.done == 0 {
            self.responder.check_enabled(peer, view, Access::REMOTE_WRITE)?;
            if takes_first {
                self.responder.take_receive(peer, view, Some(&self.qp.state))?;
            }
            if check_remote(peer, self.memory, remote, length, Access::REMOTE_WRITE).is_err() {
                return Err(self.deny_write(takes_first));
            }
        }
        let sges = [remote_sge(remote, length)];
        let list = remote_list(peer, self.memory, &sges, Access::REMOTE_WRITE);
        let moving = Moving { qp: self.qp, work: self.work, progress: self.progress, budget: self.budget };
        match self.own.put(moving, list, true) {
            Ok(true) => {}
            Ok(false) => return Ok(Step::Moved),
            Err(FaultyList::Source) => return Ok(Step::Failed(WcStatus::LocalProtection)),
            Err(FaultyList::Target) => return Err(self.deny_write(takes_first)),
        }
        if let Some(immediate) = immediate {
            self.responder.take_receive(peer, view, Some(&self.qp.state))?;
            self.receive(WcOpcode::RecvRdmaWithImmediate, SendData::Immediate(immediate));
        }
        Ok(Step::Done(0))
    }

    /// Refuses a WRITE to memory that cannot be accessed.
    fn deny_write(&mut self, took_receive: bool) -> NakReason {
        let (peer, view) = (self.peer, self.memory.view);
        if took_receive {
            self.responder.refuse_immediate(peer, view)
        } else {
            self.responder.refuse(peer, view, NakReason::RemoteAccess)
        }
    }

    fn read(&mut self, remote: RemoteAddress) -> Result<Step, NakReason> {
        let (peer, view) = (self.peer, self.memory.view);
        let length = self.progress.length;
        if self.progress.done == 0 {
            self.responder.check_enabled(peer, view, Access::REMOTE_READ)?;
            if check_remote(peer, self.memory, remote, length, Access::REMOTE_READ).is_err() {
                return Err(self.responder.refuse(peer, view, NakReason::RemoteAccess));
            }
        }
        let sges = [remote_sge(remote, length)];
        let source = remote_list(peer, self.memory, &sges, Access::REMOTE_READ);
        let moving = Moving { qp: self.qp, work: self.work, progress: self.progress, budget: self.budget };
        match self.own.get(moving, source) {
            Ok(true) => Ok(Step::Done(u32::try_from(length).unwrap_or(u32::MAX))),
            Ok(false) => Ok(Step::Moved),
            Err(FaultyList::Source) => Err(self.responder.refuse(peer, view, NakReason::RemoteAccess)),
            Err(FaultyList::Target) => Ok(Step::Failed(WcStatus::LocalProtection)),
        }
    }

    /// Changes eight bytes of the peer and writes the previous value to the request's SGE list.
    fn atomic(&mut self, remote: RemoteAddress, change: AtomicChange) -> Result<Step, NakReason> {
        let (peer, memory) = (self.peer, self.memory);
        self.responder.check_enabled(peer, memory.view, Access::REMOTE_ATOMIC)?;
        if !remote.addr.is_multiple_of(8) {
            return Err(self.responder.refuse(peer, memory.view, NakReason::InvalidRequest));
        }
        let checked = check_remote(peer, memory, remote, 8, Access::REMOTE_ATOMIC);
        let Ok(old) = checked.and_then(|()| execute_atomic(peer, memory, remote, change)) else {
            return Err(self.responder.refuse(peer, memory.view, NakReason::RemoteAccess));
        };
        let stored = self.own.store(self.qp, self.work, old.to_le_bytes());
        Ok(stored.map_or(Step::Failed(WcStatus::LocalProtection), |()| Step::Done(8)))
    }

    /// Completes the receive in use.
    fn receive(&mut self, opcode: WcOpcode, data: SendData) {
        let (immediate, invalidated) = match data {
            SendData::None => (None, None),
            SendData::Immediate(bytes) => (Some(bytes), None),
            SendData::Invalidate(key) => (None, Some(key)),
        };
        let length = u32::try_from(self.progress.length).unwrap_or(u32::MAX);
        let solicited = self.work.flags.contains(SendFlags::SOLICITED);
        self.responder.push_receive(self.peer, &Received { opcode, length, immediate, invalidated, solicited });
    }
}
