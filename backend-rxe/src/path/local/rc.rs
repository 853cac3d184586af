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
use pvrdma_verbs_types::{Gid, NakReason, QpAttrs, QpState, WcStatus};

use super::exchange::{Exchange, Step};
use super::own_side::Joint;
use super::route::LocalRoute;
use crate::budget::Budget;
use crate::capture::StepOutcome;
use crate::capture::local::ConnectionTrace;
use crate::counters::Tally;
use crate::faults::Site;
use crate::gid::BoundGid;
use crate::qp::Qp;
use crate::qp::contact::Connection;
use crate::qp::requester::{Progress, Requester, begin_request};
use crate::qp::responder::Responder;
use crate::sg::{Memory, MemoryGuard};
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

/// Returns `true` if one of the two devices has requested faults.
pub(super) fn have_faults(qp: &Qp, peer: Option<&Qp>) -> bool {
    qp.adapter.faults.is_active() || peer.is_some_and(|peer| peer.adapter.faults.is_active())
}

/// Returns `true` if a requested fault of one of the two devices loses the request, which is about to arrive. `from`
/// and `to` are the GIDs of its connection.
#[cold]
pub(super) fn is_lost(qp: &Qp, peer: &Qp, (from, to): (Gid, Gid), progress: &Progress) -> bool {
    qp.adapter.faults.is_cut(from)
        || peer.adapter.faults.is_cut(to)
        || peer.adapter.faults.is_active() && progress.done == 0 && peer.fault(Site::Arrival).is_some()
}

/// Features that few batches use. A batch reads their flags once, because a small request takes about 100 ns, and each
/// read about one.
#[derive(Clone, Copy)]
struct Watch {
    /// The device of the QP has captures.
    captures: bool,
    /// One of the two devices has requested faults.
    faults: bool,
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
        let watch =
            Watch { captures: qp.adapter.captures.is_active(), faults: have_faults(qp, self.peer.map(|peer| &**peer)) };
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
            if watch.faults && qp.adapter.faults.is_active() && self.requester.is_delayed(qp) {
                return BatchEnd::Run(Run::Idle);
            }
            // The budget is checked only when there is a request: if the budget and the requests end together, no
            // worker needs to be woken.
            if self.budget.spent() {
                return BatchEnd::Run(Run::More);
            }
            match self.step(target, watch) {
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
                Step::Refused(nak) => return self.refused(nak, watch),
            }
        }
    }

    /// Handles a request in flight that the responder did not execute.
    fn refused(&mut self, nak: NakReason, watch: Watch) -> BatchEnd {
        if watch.captures && nak == NakReason::Silence {
            trace_loss(self.qp, self.requester, self.route, self.guard.own());
        }
        match refused(self.qp, self.requester, nak) {
            Ok(run) => BatchEnd::Run(run),
            Err(status) => BatchEnd::Failed(status),
        }
    }

    /// Advances the request in flight by one step.
    #[inline]
    fn step(&mut self, target: &mut Option<Target<'a>>, watch: Watch) -> Step {
        let (qp, own, memory) = (self.qp, self.guard.own(), self.guard.peer());
        let Requester { work, current, attrs, .. } = &mut *self.requester;
        let LocalRoute { source, trace, generation, connection, .. } = &mut *self.route;
        let Some(progress) = current else { return Step::Failed(WcStatus::General) };
        let mut data = None;
        if !progress.checked {
            match begin_request(qp, attrs, work, own, self.tally) {
                Ok(begun) if begun.done => return Step::Done(0),
                Ok(begun) => {
                    data = begun.data;
                    *progress = Progress { checked: true, length: begun.length, ..Progress::default() };
                }
                Err(status) => return Step::Failed(status),
            }
        }
        let (Some(peer), Some(source)) = (self.peer, *source) else { return Step::Refused(NakReason::Silence) };
        let target = target.get_or_insert_with(|| Target::lock(peer, (qp, attrs), (source, *generation), connection));
        let lost = watch.faults && is_lost(qp, peer, (source.gid, attrs.av.dgid), progress);
        if !target.connected || !peer.state.receives() || lost {
            return Step::Refused(NakReason::Silence);
        }
        target.responder.first_request(peer, memory.view);
        let trace = watch.captures.then_some(ConnectionTrace { qp, own, attrs, source, trace });
        let responder = &mut *target.responder;
        let own = Joint { memory: own, data };
        let (budget, faults) = (&mut *self.budget, watch.faults);
        let mut exchange = Exchange { qp, own, peer, memory, responder, work, progress, budget, faults, trace };
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
