//! A run of a queue pair whose peer is reached by iWARP.

use std::ops::ControlFlow;
use std::time::Duration;

use pvrdma_iwarp::{End, Event, StreamStats};
use pvrdma_verbs::QpEvent;
use pvrdma_verbs_types::QpState;

use super::StreamRoute;
use super::hooks::StreamHooks;
use super::socket::{Exchanged, StreamSocket};
use crate::budget::Budget;
use crate::counters::Tally;
use crate::path::wire::hooks::{RequesterHooks, ResponderHooks};
use crate::path::wire::turns::PortTurns;
use crate::qp::Qp;
use crate::qp::requester::Requester;
use crate::qp::send_gate::SendGate;
use crate::sg::{Memory, MemoryGuard};
use crate::task::Run;

/// Shortest time after which TCP gives up a peer that acknowledges nothing.
const SHORTEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Requests of a queue pair whose peer is reached by iWARP.
pub(crate) struct StreamBatch<'a> {
    pub(crate) qp: &'a Qp,
    pub(crate) requester: &'a mut Requester,
    pub(crate) route: &'a mut StreamRoute,
    pub(crate) turns: &'a PortTurns,
    pub(crate) budget: &'a mut Budget,
    pub(crate) tally: &'a mut Tally,
}

/// Runs both halves of a queue pair whose peer is reached by iWARP.
#[inline(never)]
pub(crate) fn run(mut batch: StreamBatch<'_>) -> Run {
    let qp = batch.qp;
    let run = loop {
        if !qp.state.receives() {
            break Run::Again;
        }
        if batch.budget.spent() {
            break Run::More;
        }
        if let ControlFlow::Break(gate) = batch.turn() {
            if !qp.state.receives() {
                break Run::Again;
            }
            batch.requester.set_gate(gate);
            break Run::Idle;
        }
    };
    let StreamBatch { requester, route, .. } = batch;
    let deadline = route.open.as_ref().and_then(|open| open.connection.poll_timeout());
    if run == Run::Idle
        && let Some(deadline) = deadline
    {
        requester.arm(qp, deadline);
    }
    run
}

/// Ends all requests that were taken from the ring, because the queue pair is in its error state, and sends the
/// Terminate if there is one. The caller drops the route.
pub(crate) fn flush(
    route: &mut StreamRoute,
    qp: &Qp,
    requester: &mut Requester,
    memory: Memory<'_>,
    tally: &mut Tally,
) {
    let StreamRoute { open, counted, .. } = route;
    let Some(open) = open.as_deref_mut() else { return };
    let responder = &mut *qp.responder.lock();
    let mut hooks = StreamHooks {
        requester: RequesterHooks { qp, requester, memory, tally, counted },
        responder: ResponderHooks { qp, responder, memory, wait: None, waits: false },
    };
    open.connection.flush(&mut hooks);
    while open.build(&mut hooks).is_some() {}
}

impl StreamBatch<'_> {
    /// Does what the socket, the ring and the peer permit once. Breaks if that was nothing, with the reason if there
    /// are requests.
    fn turn(&mut self) -> ControlFlow<Option<SendGate>> {
        let (qp, timeout) = (self.qp, timeout(self.requester));
        let StreamRoute { counted, .. } = &mut *self.route;
        let mut was_counted = std::mem::take(counted);
        let Some(open) = self.route.update(timeout) else { return ControlFlow::Break(None) };
        let exchanged = open.exchange();
        self.budget.take_bytes(exchanged.arrived as u64);
        let before = stats(open);
        let guard = MemoryGuard::open(&qp.adapter, None);
        let memory = guard.own();
        let responder = &mut *qp.responder.lock();
        let (requester, tally) = (&mut *self.requester, &mut *self.tally);
        let mut hooks = StreamHooks {
            requester: RequesterHooks { qp, requester, memory, tally, counted: &mut was_counted },
            responder: ResponderHooks { qp, responder, memory, wait: Some(self.turns), waits: false },
        };
        let advanced = advance(open, qp, exchanged, &mut hooks, self.budget);
        let end = events(open, qp, memory);
        count(qp, before, stats(open));
        open.hang_up();
        let gate = open.is_full().then_some(SendGate::LinkFull);
        let waits = open.connection.stream().is_some_and(|stream| !stream.is_empty());
        let gate = gate.or_else(|| waits.then_some(SendGate::AckWait));
        self.route.counted = was_counted;
        if end == Some(End::PeerClosed) {
            self.route.meeting.peer_closed(&self.route.link);
        }
        if advanced { ControlFlow::Continue(()) } else { ControlFlow::Break(gate) }
    }
}

/// Passes bytes to the connection, and requests of the ring, and builds FPDUs. Returns `true` if there was something to
/// do.
fn advance(
    open: &mut StreamSocket,
    qp: &Qp,
    exchanged: Exchanged,
    hooks: &mut StreamHooks<'_>,
    budget: &mut Budget,
) -> bool {
    let now = qp.adapter.engine.now();
    // A requested fault may have withheld a receive, and then no post reports it.
    let posted = open.waits_for_receive() && (qp.task().take_wake() || qp.adapter.faults.is_active());
    let mut moved = open.deliver(now, exchanged, posted, hooks);
    let draining = qp.state() == QpState::Sqd;
    if let Some(stream) = open.connection.stream_mut() {
        stream.set_draining(draining);
    }
    if let Some(any) = post(open, qp, hooks, budget) {
        moved |= any;
    }
    while qp.state.receives()
        && !budget.spent()
        && let Some(length) = open.build(hooks)
    {
        budget.take_bytes(length as u64);
        moved = true;
    }
    if draining && open.connection.stream().is_some_and(pvrdma_iwarp::Stream::is_idle) {
        hooks.requester.requester.drained(qp, hooks.requester.memory.view);
    }
    moved
}

/// Takes requests from the ring. Returns `true` if there was one, and `None` if the ring cannot be read.
fn post(open: &mut StreamSocket, qp: &Qp, hooks: &mut StreamHooks<'_>, budget: &mut Budget) -> Option<bool> {
    let mut posted = false;
    while qp.state() == QpState::Rts
        && !budget.spent()
        && let Some(stream) = open.connection.stream_mut().filter(|stream| stream.has_room())
    {
        let RequesterHooks { requester, memory, counted, .. } = &mut hooks.requester;
        let mut work = stream.spare();
        **counted |= requester.is_checked();
        match requester.pop_due(qp, memory.view, &mut work) {
            Ok(true) => stream.post(work, hooks),
            Ok(false) => break,
            Err(error) => {
                qp.fail_ring(hooks.requester.memory.view, error);
                return None;
            }
        }
        budget.take_request();
        posted = true;
    }
    Some(posted)
}

/// Handles events of the connection. Returns its end, if it has ended now.
fn events(open: &mut StreamSocket, qp: &Qp, memory: Memory<'_>) -> Option<End> {
    let mut last = None;
    while let Some(event) = open.connection.poll_event() {
        let Event::Ended(end) = event else { continue };
        if matches!(end, End::Terminated { unreported: true, .. }) {
            qp.event(memory.view, QpEvent::Fatal);
        }
        last = Some(end);
    }
    last
}

fn stats(open: &StreamSocket) -> StreamStats {
    open.connection.stream().map(pvrdma_iwarp::Stream::stats).unwrap_or_default()
}

/// Counts what has happened on the connection since `before`.
fn count(qp: &Qp, before: StreamStats, after: StreamStats) {
    let counters = &qp.adapter.counters;
    let waited = after.waited_for_receive.saturating_sub(before.waited_for_receive);
    let unsupported = after.unsupported.saturating_sub(before.unsupported);
    if waited > 0 {
        counters.iwarp_waited_for_receive.add(waited);
    }
    if unsupported > 0 {
        counters.iwarp_unsupported.add(unsupported);
        let refused = format_args!("QP {}: iWARP has no atomics and no immediate data; the QP fails", qp.qpn);
        qp.adapter.log.warn(module_path!(), refused);
    }
}

/// Returns the time after which TCP gives up the peer: at least as long as the guest's own retries take.
fn timeout(requester: &Requester) -> Duration {
    let attrs = &requester.attrs;
    let once = match attrs.timeout {
        0 => Duration::ZERO,
        exponent => Duration::from_nanos(4096 << exponent.min(31)),
    };
    once.saturating_mul(u32::from(attrs.retry_cnt).saturating_add(1)).max(SHORTEST_TIMEOUT)
}
