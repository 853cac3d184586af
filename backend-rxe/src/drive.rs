// Long: this is the only file that chooses the next action of a queue pair.
//! Running queue pairs: the only module that chooses the next action of a QP, and its path.
//!
//! | state | work that runs |
//! | --- | --- |
//! | RTS, SQD | requests, by the path of the [`Route`] |
//! | RTR | requests of an iWARP peer, because a stream has one state for both directions |
//! | SQE, error | the flush ([`crate::qp`]) |
//! | others | nothing |
//!
//! An [`Endpoint`] is a QP with its requester half, its route and the means to reach peers of its device. Paths borrow
//! these.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::FairMutex;
use pvrdma_base::{EndOnPanic, Snapshot};
use pvrdma_guest_memory::{Charge, Kept};
use pvrdma_pacing::RateLimiter;
use pvrdma_roce::{DropReason, Path, wire::Packet};
use pvrdma_verbs::{RecvSource, SendProgress, SendSource, VerbsError};
use pvrdma_verbs_types::{Mtu, QpAttrMask, QpAttrs, QpState, Qpn};
use serde::Serialize;

use crate::adapter::Adapter;
use crate::budget::Budget;
use crate::counters::{Counters, Tally};
use crate::fabric::Fabric;
use crate::gid::BoundGid;
use crate::limits::PORT_MTU;
use crate::path::datagram::{self, DatagramBatch};
use crate::path::directory::Node;
use crate::path::local::apart::{ApartStep, PartElsewhere};
use crate::path::local::rc::{self as local_rc, LocalBatch};
use crate::path::stream::StreamRoute;
use crate::path::stream::run::{self as stream_run, StreamBatch};
use crate::path::wire::Admitted;
use crate::path::wire::rc::{self as wire_rc, WireBatch, WireRequester};
use crate::path::wire::responder::{WireResponderInspect, WireSide};
use crate::path::wire::turns::PortTurns;
use crate::path::wire::{self, NewPath};
use crate::path::{Route, RouteInspect};
use crate::port::{Arrival, Port};
use crate::qp::modify::Modified;
use crate::qp::requester::{Readiness, Requester, RequesterInspect};
use crate::qp::responder::{Responder, ResponderInspect};
use crate::qp::send_gate::SendGate;
use crate::qp::{Qp, QpInspect, QpParts};
use crate::sg::MemoryGuard;
use crate::share::token_bucket::TokenBucket;
use crate::task::{Run, Runnable, Task};

/// Maximum number of bytes of responses that are sent before a QP ends: many acknowledgements, some data.
const LAST_RESPONSES: u64 = 64 << 10;

/// The requester half of a QP, with the route of its requests.
struct SendHalf {
    requester: Requester,
    route: Route,
    /// The rate limit of the queue pair, if it has one.
    limit: Option<Box<TokenBucket>>,
    /// Value of [`Share::qp_rates`](crate::share::Share::qp_rates) when the limit was created.
    limit_made: u32,
    /// Memory for READs and atomics beyond those that every queue pair can have outstanding, until RESET.
    more_reads: Option<Charge>,
    /// The responder's part of the request in flight, if the thread of a device with slow memory executes it.
    elsewhere: Option<PartElsewhere>,
}

/// The parts of a queue pair.
pub(crate) struct Parts<'a> {
    pub(crate) qp: &'a Arc<Qp>,
    pub(crate) fabric: &'a Fabric<Endpoint>,
    pub(crate) requester: &'a mut Requester,
    pub(crate) route: &'a mut Route,
    pub(crate) more_reads: &'a mut Option<Charge>,
    /// A thread of another device executes a part of the request in flight.
    pub(crate) elsewhere: bool,
    pub(crate) responder: &'a mut Responder,
    pub(crate) wire: &'a WireSide,
}

/// Result of a run on a thread of the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunElsewhere {
    /// There is more to do than the budget allows.
    pub(crate) more: bool,
    /// Cost of the run, in bytes.
    pub(crate) cost: u64,
}

/// A queue pair that can run.
pub(crate) struct Endpoint {
    qp: Arc<Qp>,
    fabric: Arc<Fabric<Self>>,
    // The mutex is fair, so that a command does not starve behind the batches of a busy QP.
    send: FairMutex<SendHalf>,
    wire: WireSide,
}

/// State of a queue pair at one moment, half by half.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct EndpointInspect {
    #[serde(flatten)]
    qp: QpInspect,
    /// The requester half with its route.
    requester: Snapshot<SendHalfInspect>,
    /// The responder half.
    responder: Snapshot<ResponderInspect>,
    /// State of the responder half for the wire: `null` before the first packet of the peer.
    wire_responder: Snapshot<Option<WireResponderInspect>>,
    /// Bytes per second that both halves may send to the wire: `null` if congestion control does not limit them.
    rate_bytes_per_s: Snapshot<Option<u64>>,
}

/// State of the requester half at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct SendHalfInspect {
    /// Reason why it sends nothing. `null`: it has no requests, or is about to run.
    gate: Option<SendGate>,
    #[serde(flatten)]
    requester: RequesterInspect,
    route: RouteInspect,
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.qp.fmt(f)
    }
}

impl AsRef<Arc<Qp>> for Endpoint {
    fn as_ref(&self) -> &Arc<Qp> {
        &self.qp
    }
}

impl Endpoint {
    pub(crate) fn new(
        parts: QpParts,
        fabric: Arc<Fabric<Self>>,
        send_queue: Box<dyn SendSource>,
        recv_queue: Option<Box<dyn RecvSource>>,
    ) -> Arc<Self> {
        // The generation is read before the limit: a change in between is noticed by the first run.
        let limit_made = parts.adapter.share.qp_rates();
        let limit = parts.adapter.share.qp_limit().map(Box::new);
        let send = SendHalf {
            requester: Requester::new(send_queue),
            route: Route::new(parts.qp_type),
            limit,
            limit_made,
            more_reads: None,
            elsewhere: None,
        };
        Arc::new_cyclic(|me| {
            let task = Task::new(parts.adapter.engine.ready_queue(), &parts.adapter.share, me.clone() as _);
            let qp = Qp::new(parts, task, Responder::new(recv_queue));
            Self { qp, fabric, send: FairMutex::new(send), wire: WireSide::default() }
        })
    }

    pub(crate) const fn qp(&self) -> &Arc<Qp> {
        &self.qp
    }

    /// Returns the state of the queue pair for inspection. Does not block.
    pub(crate) fn inspect(&self) -> EndpointInspect {
        let now = self.qp.adapter.engine.now();
        let throttled = self.is_throttled(now).then_some(SendGate::DeviceRate);
        let half = self.qp.task().look(&self.send, |SendHalf { requester, route, .. }| SendHalfInspect {
            gate: throttled.or_else(|| requester.gate()),
            requester: requester.inspect(now),
            route: route.inspect(now),
        });
        EndpointInspect {
            qp: self.qp.inspect(),
            requester: half.into(),
            responder: self.qp.responder.try_lock().map(|responder| responder.inspect()).into(),
            wire_responder: self.wire.inspect(),
            rate_bytes_per_s: self.wire.rate.inspect(),
        }
    }

    /// Returns `true` if the queue pair is about to run, and the rate limit of the device delays it.
    fn is_throttled(&self, now: Duration) -> bool {
        self.qp.task().inspect().scheduled && self.qp.adapter.share.throttled_until(|| now).is_some()
    }

    /// Returns the progress of the requests. `None` while a thread runs them.
    pub(crate) fn progress(&self) -> Option<SendProgress> {
        self.qp.task().look(&self.send, |SendHalf { requester, route, .. }| requester.progress(route.word()))
    }

    /// Returns the rate limiter of the QP on the wire.
    pub(crate) const fn rate(&self) -> &RateLimiter {
        &self.wire.rate
    }

    /// Runs the requester on the calling thread, within a small budget; workers do the rest.
    pub(crate) fn run_inline(&self) {
        if self.run_elsewhere(self.qp.adapter.engine.inline_budget).is_none_or(|run| run.more) {
            self.qp.task().schedule();
        }
    }

    /// Runs the requester on a thread of the device. Returns `None` if the device has used up its share, so that
    /// workers have to run it.
    #[inline]
    fn run_elsewhere(&self, budget: Budget) -> Option<RunElsewhere> {
        let Adapter { engine, share, .. } = &*self.qp.adapter;
        let contention = &engine.ready_queue().contention;
        let may = share.may_run_elsewhere(contention) && share.throttled_until(|| engine.now()).is_none();
        // A flush moves no data, and the guest that ends a queue pair waits for it.
        if !may && !matches!(self.qp.state(), QpState::Sqe | QpState::Error) {
            return None;
        }
        let given = share.limit(budget, || engine.now());
        let mut budget = given;
        let more = self.run(&mut budget);
        let cost = budget.cost(&given);
        share.spend(budget.used(), cost);
        share.ran_elsewhere(contention, cost, self.fabric.port.is_some());
        Some(RunElsewhere { more, cost })
    }

    /// Runs the requester on the port's thread, or schedules it for workers.
    pub(crate) fn run_on_port(&self, budget: Budget) -> RunElsewhere {
        self.run_elsewhere(budget).unwrap_or_else(|| {
            self.qp.task().schedule();
            RunElsewhere { more: false, cost: 0 }
        })
    }

    /// Returns the state of the QP's turns on the port's thread.
    pub(crate) const fn turns(&self) -> &PortTurns {
        &self.wire.turns
    }

    /// Handles a posted receive.
    pub(crate) fn receive_posted(&self) {
        self.qp.receive_posted();
        if self.qp.state() == QpState::Error {
            self.run_inline();
        }
    }

    /// Runs the requester until it is idle, blocked, or out of budget. Returns `true` if the budget ran out.
    fn run_half(&self, half: &mut SendHalf, budget: &mut Budget) -> bool {
        if self.wire.turns.release_responder()
            && let Some(port) = &self.fabric.port
        {
            port.resume(self.qp.qpn);
        }
        let share = &self.qp.adapter.share;
        if half.limit_made != share.qp_rates() {
            half.limit_made = share.qp_rates();
            half.limit = share.qp_limit().map(Box::new);
        }
        let gate = if half.limit.is_some() { self.limit(half, budget) } else { None };
        half.requester.set_gate(gate);
        if gate.is_some() {
            return false;
        }
        let (mut tally, before) = (Tally::default(), budget.used());
        let more = loop {
            let run = match self.qp.state() {
                QpState::Rts | QpState::Sqd => match half.requester.readiness(&self.qp, self.fabric.directory.pauses())
                {
                    Readiness::Ready => self.run_requests(half, budget, &mut tally),
                    Readiness::Waiting => Run::Idle,
                    Readiness::Failed(status) => {
                        let guard = MemoryGuard::open(&self.qp.adapter, None);
                        self.qp.fail_request(&mut half.requester, guard.own().view, status);
                        Run::Again
                    }
                },
                QpState::Sqe | QpState::Error => self.flush(half, budget, &mut tally),
                QpState::Rtr if matches!(half.route, Route::Stream(_)) => self.run_requests(half, budget, &mut tally),
                QpState::Reset | QpState::Init | QpState::Rtr => Run::Idle,
            };
            match run {
                Run::Idle => break false,
                Run::More => break true,
                Run::Again if budget.spent() => break true,
                Run::Again => {}
            }
        };
        half.requester.count(&self.qp, &tally, half.route.road());
        self.qp.adapter.counters.fold(&mut tally);
        if let Some(limit) = &mut half.limit {
            limit.spend(budget.used().saturating_sub(before));
        }
        more
    }

    /// Reduces the budget to the rate limit of the queue pair. Returns a gate if the QP has to wait for the limit.
    #[cold]
    fn limit(&self, half: &mut SendHalf, budget: &mut Budget) -> Option<SendGate> {
        let SendHalf { requester, limit: Some(limit), .. } = half else { return None };
        if !matches!(self.qp.state(), QpState::Rts | QpState::Sqd) {
            return None;
        }
        let now = self.qp.adapter.engine.now();
        if let Some(until) = limit.blocked_until(now) {
            requester.arm(&self.qp, until);
            return Some(SendGate::QpRate);
        }
        *budget = budget.at_most(limit.available(now).max(1));
        None
    }

    /// Runs requests by the path of the route.
    #[inline]
    fn run_requests(&self, half: &mut SendHalf, budget: &mut Budget, tally: &mut Tally) -> Run {
        let (qp, port) = (&*self.qp, self.fabric.port.as_deref());
        let SendHalf { requester, route, .. } = half;
        match route {
            Route::Unresolved(_) | Route::Local(_) => self.run_local(half, budget, tally),
            Route::Wire(wire) => match port {
                Some(_) if !self.fabric.local && wire.waits_for_peer(qp, requester, &self.fabric.directory) => {
                    Run::Idle
                }
                Some(port) => {
                    wire_rc::run(WireBatch { port, qp, rate: &self.wire.rate, requester, wire, budget, tally })
                }
                None => Run::Idle,
            },
            Route::Stream(_) if !qp.adapter.is_link_up() => Run::Idle,
            Route::Stream(route) => {
                let turns = &self.wire.turns;
                stream_run::run(StreamBatch { qp, requester, route, turns, budget, tally })
            }
            Route::Datagram(route) => {
                datagram::run(DatagramBatch { qp, requester, route, port, resolver: &*self.fabric, budget, tally })
            }
        }
    }

    /// Runs requests of a connected QP whose peer is in this process, or not known yet.
    fn run_local(&self, half: &mut SendHalf, budget: &mut Budget, tally: &mut Tally) -> Run {
        let (qp, directory) = (&*self.qp, &self.fabric.directory);
        if half.elsewhere.is_some() {
            return self.apart(half, budget, tally).map_or(Run::Again, ApartStep::resume);
        }
        let peer = self.resolve(half);
        if let Some(peer) = peer.as_ref().filter(|peer| qp.adapter.is_apart_from(&peer.adapter)) {
            let generations = directory.generations();
            return self.apart(half, budget, tally).map_or(Run::Again, |step| step.run(peer, generations));
        }
        let SendHalf { requester, route, .. } = half;
        let (Route::Unresolved(local) | Route::Local(local)) = route else { return Run::Again };
        let guard = MemoryGuard::open(&qp.adapter, peer.as_ref().map(|peer| &*peer.adapter));
        // From here on an unbind waits until this guard is released; an unbind before that has changed the generation.
        if local.generation != directory.generation() {
            return Run::Again;
        }
        let batch = LocalBatch { qp, requester, route: local, peer: peer.as_ref(), guard: &guard, budget, tally };
        if let Some(run) = local_rc::run(batch) {
            return run;
        }
        self.leave_local(half, &guard)
    }

    /// Returns a step of a request between devices of which one has slow memory.
    #[cold]
    fn apart<'a>(
        &'a self,
        half: &'a mut SendHalf,
        budget: &'a mut Budget,
        tally: &'a mut Tally,
    ) -> Option<ApartStep<'a>> {
        let SendHalf { requester, route, elsewhere, .. } = half;
        let (Route::Unresolved(route) | Route::Local(route)) = route else { return None };
        Some(ApartStep { qp: &self.qp, requester, route, elsewhere, budget, tally })
    }

    /// Handles a request in flight without a local peer: no local device owns the destination GID. Falls back to the
    /// wire if the device has an uplink.
    #[cold]
    fn leave_local(&self, half: &mut SendHalf, guard: &MemoryGuard<'_>) -> Run {
        let SendHalf { requester, route, .. } = half;
        if let Route::Unresolved(local) | Route::Local(local) = &route
            && let Some(adapter) = local.paused.upgrade()
        {
            if !adapter.paused.wait(self.qp.task()) {
                return Run::Again;
            }
            requester.wait_for_resume();
            return Run::Idle;
        }
        if matches!(route, Route::Unresolved(_))
            && let Some(port) = &self.fabric.port
            && let Some(path) = self.wire_path(&requester.attrs, Qp::usable_source)
        {
            let wire = WireRequester::new(port, &self.qp, &requester.attrs, path, &self.fabric.windows);
            *route = Route::Wire(wire);
            requester.stop_waiting();
            return Run::Again;
        }
        let (Route::Unresolved(local) | Route::Local(local)) = route else { return Run::Again };
        if self.is_refused(&requester.attrs) {
            Counters::bump(&self.qp.adapter.counters.peers_refused);
        }
        if self.qp.adapter.captures.is_active() {
            local_rc::trace_loss(&self.qp, requester, local, guard.own());
        }
        if self.is_held(&requester.attrs) {
            return Run::Idle;
        }
        requester.wait_for_response(&self.qp);
        Run::Idle
    }

    /// Returns `true` if hosts are being probed for the source address of the requests. The requests wait without a
    /// timer until the result is known, and are run then.
    #[cold]
    fn is_held(&self, attrs: &QpAttrs) -> bool {
        self.qp.source(attrs.av.sgid_index).is_some_and(|source| self.qp.adapter.gids.holds(source))
    }

    /// Returns the peer of a connected QP in this process, and stores it in the route.
    #[inline]
    fn resolve(&self, half: &mut SendHalf) -> Option<Arc<Qp>> {
        let generation = self.fabric.directory.generation();
        let (Route::Unresolved(local) | Route::Local(local)) = &half.route else { return None };
        local.peer(generation).or_else(|| self.look_up(half, generation))
    }

    fn look_up(&self, half: &mut SendHalf, generation: u64) -> Option<Arc<Qp>> {
        let attrs = &half.requester.attrs;
        let source = self.qp.usable_source(attrs.av.sgid_index);
        let node = source.and_then(|from| self.meet(from, from.beside(attrs.av.dgid)));
        if let Some(node) = node.as_ref().filter(|node| node.adapter.paused.is_set()) {
            if let Route::Unresolved(local) | Route::Local(local) = &mut half.route {
                local.set_peer(generation, source, None);
                local.paused = Arc::downgrade(&node.adapter);
            }
            return None;
        }
        let node = node.filter(|node| {
            let linked = self.qp.adapter.is_link_up() && node.adapter.is_link_up();
            if !linked {
                Counters::bump(&self.qp.adapter.counters.dropped_link_down);
            }
            linked
        });
        let peer = node.and_then(|node| node.qp(attrs.dest_qpn)).map(|endpoint| Arc::clone(&endpoint.qp));
        if let Route::Unresolved(local) = &mut half.route
            && peer.is_some()
        {
            half.route = Route::Local(std::mem::take(local));
        }
        if let Route::Unresolved(local) | Route::Local(local) = &mut half.route {
            local.set_peer(generation, source, peer.as_ref());
        }
        peer
    }

    /// Returns the device of this process that owns an address, if the rules allow the two to communicate.
    fn meet(&self, from: BoundGid, to: BoundGid) -> Option<Arc<Node<Self>>> {
        self.fabric.neighbour(to).filter(|node| self.fabric.may_meet(from, node, to))
    }

    /// Returns `true` if the rules of one of the two devices do not allow them to communicate.
    fn is_refused(&self, attrs: &QpAttrs) -> bool {
        let Some(from) = self.qp.usable_source(attrs.av.sgid_index) else { return false };
        let to = from.beside(attrs.av.dgid);
        match self.fabric.neighbour(to) {
            Some(node) => !self.fabric.may_meet(from, &node, to),
            None => !self.qp.adapter.rules.allow_peer(to.gid),
        }
    }

    /// Returns the path of a connected QP over the wire, and its source GID, which `source` finds by its index. `None`:
    /// there is no route to that address, or the rules do not allow it.
    fn wire_path(&self, attrs: &QpAttrs, source: impl FnOnce(&Qp, u8) -> Option<BoundGid>) -> Option<(Path, BoundGid)> {
        let source = source(&self.qp, attrs.av.sgid_index)?;
        // A GID of this process is reached by local delivery, or not at all.
        if self.fabric.neighbour(source.beside(attrs.av.dgid)).is_some() {
            return None;
        }
        self.path_from(attrs, source)
    }

    /// Returns the path of a connected QP over the wire from this GID, wherever the peer is.
    fn path_from(&self, attrs: &QpAttrs, source: BoundGid) -> Option<(Path, BoundGid)> {
        self.fabric.port.as_ref()?;
        let adapter = &self.qp.adapter;
        if !adapter.rules.allow_peer(attrs.av.dgid) || adapter.is_iwarp_peer(attrs.av.dgid) {
            return None;
        }
        let origin = self.qp.adapter.origin(source);
        Some((Path::connected(&origin, &attrs.av, self.qp.qpn, attrs.dest_qpn)?, source))
    }

    /// Flushes the queues that the state requires: in SQE the send queue, in the error state both.
    #[cold]
    fn flush(&self, half: &mut SendHalf, budget: &mut Budget, tally: &mut Tally) -> Run {
        let qp = &*self.qp;
        if qp.state() == QpState::Error {
            // No guest memory is held here, because the observer of failures may take a while.
            qp.tell_failure(&half.requester.attrs);
        }
        let guard = MemoryGuard::open(&qp.adapter, None);
        let view = guard.own().view;
        let SendHalf { requester, route, .. } = half;
        match route {
            Route::Wire(wire) => wire.flush(qp, requester, guard.own(), tally),
            Route::Stream(stream) => stream_run::flush(stream, qp, requester, guard.own(), tally),
            Route::Unresolved(_) | Route::Local(_) | Route::Datagram(_) => {}
        }
        if matches!(route, Route::Wire(_) | Route::Stream(_)) {
            *route = Route::new(qp.qp_type);
        }
        if !requester.flush(qp, view, budget, tally) {
            return Run::More;
        }
        let state = qp.state();
        if state == QpState::Error && !qp.responder.lock().flush(qp, view, budget, tally) {
            return Run::More;
        }
        // An SQE QP may have entered the error state between two steps, because of its responder.
        if state == qp.state() { Run::Idle } else { Run::Again }
    }

    /// Locks all parts of the queue pair, to save or restore them. The adapter is paused.
    pub(crate) fn with_parts<R>(&self, f: impl FnOnce(Parts<'_>) -> R) -> R {
        let SendHalf { requester, route, limit: _, limit_made: _, more_reads, elsewhere } = &mut *self.send.lock();
        let responder = &mut *self.qp.responder.lock();
        let (qp, fabric, wire) = (&self.qp, &*self.fabric, &self.wire);
        f(Parts { qp, fabric, requester, route, more_reads, elsewhere: elsewhere.is_some(), responder, wire })
    }

    /// Returns the largest path MTU of the port.
    pub(crate) fn port_mtu(&self) -> Mtu {
        self.fabric.port.as_ref().map_or(PORT_MTU, |port| port.path_mtu())
    }

    /// Executes a modify command.
    pub(crate) fn modify(&self, new: &QpAttrs, mask: QpAttrMask) -> Result<(), VerbsError> {
        let result = self.modify_locked(new, mask);
        // Handles doorbells that found the requester busy, requests that can start in the new state, and the flush.
        self.run_inline();
        result
    }

    fn modify_locked(&self, new: &QpAttrs, mask: QpAttrMask) -> Result<(), VerbsError> {
        let _end = EndOnPanic::new("a change of a queue pair");
        if mask.contains(QpAttrMask::STATE) && matches!(new.state, QpState::Reset | QpState::Error) {
            self.send_owed();
        }
        if mask.contains(QpAttrMask::PATH_MTU) && new.path_mtu.bytes() > self.port_mtu().bytes() {
            return Err(VerbsError::Invalid("a path MTU above that of the port"));
        }
        let SendHalf { requester, route, more_reads, elsewhere, .. } = &mut *self.send.lock();
        if self.qp.adapter.paused.is_set() {
            return Err(VerbsError::NotAllowed("the adapter is paused"));
        }
        let guard = MemoryGuard::open(&self.qp.adapter, None);
        let responder = &mut *self.qp.responder.lock();
        self.pay_for_reads(more_reads, &responder.attrs, new, mask)?;
        let on_path = match route {
            Route::Wire(wire) => wire.is_idle(),
            Route::Stream(stream) => stream.is_idle(),
            Route::Unresolved(_) | Route::Local(_) | Route::Datagram(_) => true,
        };
        let idle = requester.current.is_none() && on_path;
        match self.qp.modify((requester, responder), guard.own().view, idle, new, mask)? {
            Modified::Reset => {
                *route = Route::new(self.qp.qp_type);
                (*more_reads, *elsewhere) = (None, None);
                self.wire.reset(&self.qp.adapter.engine);
                self.forget_iwarp();
            }
            Modified::Error => self.forget_iwarp(),
            Modified::Attributes(attrs) => {
                // Packets cannot be sent from an address that is waiting, but the path is set up for the time when the
                // address can be used.
                let path = NewPath::of(self.wire_path(&attrs, Qp::source), mask);
                match route {
                    Route::Unresolved(local) | Route::Local(local) => local.forget(),
                    Route::Wire(wire) => wire.set_attrs(&self.qp, &attrs, path),
                    Route::Stream(_) => {}
                    // Both datagram senders keep a copy of the Q_Key.
                    Route::Datagram(_) => *route = Route::new(self.qp.qp_type),
                }
                self.wire.set_attrs(&attrs, path);
                self.begin_stream(route, &attrs)?;
            }
        }
        Ok(())
    }

    /// Takes the connection to an iWARP peer for a queue pair that is moved to RTR.
    fn begin_stream(&self, route: &mut Route, attrs: &QpAttrs) -> Result<(), VerbsError> {
        if self.qp.state() != QpState::Rtr || !matches!(route, Route::Unresolved(_)) {
            return Ok(());
        }
        if let Some(stream) = StreamRoute::begin(&self.qp, attrs)? {
            *route = Route::Stream(stream);
        }
        Ok(())
    }

    /// Ends the connection to an iWARP peer that a queue pair has not taken yet.
    fn forget_iwarp(&self) {
        if let Some(iwarp) = &self.qp.adapter.iwarp {
            iwarp.queue_pair_ended(self.qp.qpn.get());
        }
    }

    /// Charges the memory for READs and atomics on the wire. Queues that have grown do not shrink, so the charge is not
    /// released before RESET.
    pub(crate) fn pay_for_reads(
        &self,
        paid: &mut Option<Charge>,
        old: &QpAttrs,
        new: &QpAttrs,
        mask: QpAttrMask,
    ) -> Result<(), VerbsError> {
        if self.fabric.port.is_none() {
            return Ok(());
        }
        let mut attrs = *old;
        attrs.merge(new, mask);
        let bytes = wire::more_reads_bytes(&attrs);
        if bytes > paid.as_ref().map_or(0, Charge::bytes) {
            *paid = Some(self.qp.adapter.budget.charge(Kept::Objects, bytes)?);
        }
        Ok(())
    }

    /// Sends the responses that the responder owes, before the QP ends. A guest sees a message before the port's thread
    /// has acknowledged it: if a program ended immediately after the last message, its peer would retry forever.
    fn send_owed(&self) {
        if let Some(port) = &self.fabric.port {
            self.respond(port, LAST_RESPONSES, &mut 0);
        }
    }

    /// Ends the QP. After this returns, no thread uses its rings, the memory of its requests or its CQs on its behalf.
    pub(crate) fn destroy(&self, node: &Node<Self>) {
        let _guard = EndOnPanic::new("the end of a queue pair");
        self.send_owed();
        if !self.qp.kill() {
            return;
        }
        {
            let half = &mut *self.send.lock();
            let responder = &mut *self.qp.responder.lock();
            self.qp.end(&mut half.requester, responder);
            half.route = Route::new(self.qp.qp_type);
            (half.more_reads, half.elsewhere) = (None, None);
            self.wire.reset(&self.qp.adapter.engine);
            self.forget_iwarp();
        }
        node.forget(self.qp.qpn, self);
        self.qp.detach();
    }

    /// Passes a response of the peer to the requester, if that is on the wire. The caller schedules the next run of the
    /// requester.
    pub(crate) fn take_response(&self, port: &Port, packet: &Packet<'_>) -> Result<(), DropReason> {
        let (taken, left) = self.qp.task().hold(&self.send, |SendHalf { requester, route, .. }| match route {
            Route::Wire(wire) => wire.take_response(port, &self.qp, requester, packet),
            _ if self.qp.state.sends() => Err(DropReason::Address),
            _ => Err(DropReason::State),
        });
        // The caller does not run the QP for a response that was dropped.
        if left && taken.is_err() {
            self.qp.task().schedule();
        }
        taken
    }

    /// Passes requests of the peer to the responder, and reports for each whether it was accepted.
    pub(crate) fn take_requests<'p>(
        &self,
        port: &Port,
        admitted: Admitted,
        packets: impl Iterator<Item = (Packet<'p>, Arrival<'p>)>,
        taken: impl FnMut(Result<(), DropReason>),
    ) {
        let on_wire = admitted == Admitted::Connections && self.wire.path().is_none() && self.has_peer_on_wire();
        let path = |attrs: &QpAttrs| match on_wire {
            true => self.path_from(attrs, self.qp.usable_source(attrs.av.sgid_index)?),
            false => self.wire_path(attrs, Qp::usable_source),
        };
        self.wire.take_requests(port, &self.qp, packets, path, taken);
    }

    /// Returns `true` if the peer is a queue pair of another device of this process that sends its requests on the
    /// wire, because one of the two devices has come to this process after the first request. Only the peer itself can
    /// tell: a host beyond the uplink may have forged the packet.
    fn has_peer_on_wire(&self) -> bool {
        let attrs = self.qp.responder.lock().attrs;
        let Some(source) = self.qp.usable_source(attrs.av.sgid_index) else { return false };
        let peer = self.fabric.neighbour(source.beside(attrs.av.dgid)).and_then(|node| node.qp(attrs.dest_qpn));
        peer.and_then(|peer| peer.request_path()).is_some_and(|(_, to)| to == self.qp.qpn)
    }

    /// Sends responses that the responder owes to the wire, at least one packet and about `most` bytes, and adds their
    /// bytes to `sent`. Returns `false` if there are more.
    pub(crate) fn respond(&self, port: &Port, most: u64, sent: &mut u64) -> bool {
        // A device that is cut off sends its responses when the peer asks again.
        self.qp.adapter.faults.is_cut_off() || self.wire.respond(port, &self.qp, most, sent)
    }

    /// Writes an RNR NAK for the request that is next, while the adapter is paused. Returns its length in bytes; `None`
    /// for all other packets.
    pub(crate) fn hold_off(&self, packet: &Packet<'_>, timer: u8, out: &mut [u8]) -> Option<usize> {
        self.wire.hold_off(&self.qp, packet, timer, out)
    }

    /// Waits until no thread runs the requester. The adapter is paused: work that is left to this thread meanwhile is
    /// done after the pause.
    pub(crate) fn wait_for_run(&self) {
        drop(self.send.lock());
    }

    /// Starts the timers of the wire anew, at the end of a pause.
    pub(crate) fn restart_timers(&self) {
        if let Route::Wire(wire) = &mut self.send.lock().route {
            wire.resume(self.qp.adapter.engine.now());
        }
    }

    /// Asks a peer in the process that the device has left for its requests, at the end of the pause.
    pub(crate) fn prompt_peer(&self) {
        if let Some(port) = &self.fabric.port {
            self.wire.prompt(port, &self.qp, |attrs| self.wire_path(attrs, Qp::usable_source));
        }
    }

    /// Catches up on the events of a pause: doorbells, timers, and turns of the port.
    pub(crate) fn ring(&self) {
        self.qp.receive_posted();
        if let Some(srq) = &self.qp.srq {
            srq.notify();
        }
        if let Some(port) = &self.fabric.port
            && self.wire.path().is_some()
        {
            port.resume(self.qp.qpn);
        }
        self.qp.task().schedule();
    }

    /// Returns the path of requests and the peer's QPN, if the peer is on the wire.
    pub(crate) fn request_path(&self) -> Option<(Path, Qpn)> {
        let (path, left) = self.qp.task().hold(&self.send, |half| match &half.route {
            Route::Wire(wire) => Some(wire.path()),
            _ => None,
        });
        if left {
            self.qp.task().schedule();
        }
        path
    }

    /// Returns the path of responses and the peer's QPN, if there were requests from the wire.
    pub(crate) fn response_path(&self) -> Option<(Path, Qpn)> {
        self.wire.path()
    }

    /// Returns the path of a response to this request, and the peer's QPN.
    pub(crate) fn path_of(&self, packet: &Packet<'_>) -> Option<(Path, Qpn)> {
        self.wire.path_of(packet)
    }

    /// Locks the requester half, as a thread that runs it does.
    #[cfg(test)]
    pub(crate) fn hold_requester(&self) -> impl Drop + '_ {
        self.send.lock()
    }

    /// Returns the numbers of deferred packets and of owed responses, if there were requests from the wire.
    #[cfg(test)]
    pub(crate) fn wire_load(&self) -> Option<(usize, usize)> {
        self.wire.load()
    }
}

impl Runnable for Endpoint {
    fn run(&self, budget: &mut Budget) -> bool {
        let _guard = EndOnPanic::new("the data path");
        let paused = &self.qp.adapter.paused;
        self.qp.task().run_exclusive(&self.send, |half| !paused.is_set() && self.run_half(half, budget))
    }

    fn leave(&self) -> bool {
        let adapter = &self.qp.adapter;
        if !adapter.memory.is_slow() {
            return false;
        }
        let (engine, task) = (Arc::clone(&adapter.engine), Arc::clone(self.qp.task()));
        adapter.own_thread.give(&adapter.engine.threadless, move || engine.run_on_own_thread(&task))
    }
}
