//! Reliable connections over the wire: joins the requester of the transport with the requester half of a queue pair.

use std::ops::ControlFlow;
use std::time::Duration;

use pvrdma_base::micros;
use pvrdma_link::Frames;
use pvrdma_pacing::{Built, Pacer, PeerWindows, RateLimiter, Stop, WindowShare};
use pvrdma_roce::{DropReason, Path, PathInspect, RequesterInspect, admit_connected, wire::Packet};
use pvrdma_verbs_types::{QpAttrs, QpState, Qpn};
use serde::Serialize;

use super::hooks::RequesterHooks;
use super::new_path::NewPath;
use super::room::{self, Room};
use super::timeout_grace::TimeoutGrace;
use crate::budget::Budget;
use crate::counters::Tally;
use crate::flows::Road;
use crate::gid::BoundGid;
use crate::path::directory::Directory;
use crate::port::counters::PortCounters;
use crate::port::{BATCH, Port};
use crate::qp::Qp;
use crate::qp::requester::Requester;
use crate::qp::send_gate::SendGate;
use crate::sg::{Memory, MemoryGuard};
use crate::task::{Run, Task};

/// Requester state of a QP whose peer is on the wire.
#[derive(Debug)]
pub(crate) struct WireRequester {
    pub(super) transport: pvrdma_roce::Requester,
    pub(super) path: Path,
    /// Source GID of the path. `None`: no packet can be sent on it.
    pub(super) source: Option<BoundGid>,
    pub(super) remote: Qpn,
    pub(super) pacer: Pacer<Task>,
    pub(super) grace: TimeoutGrace,
    /// Number of pauses in the process at the last run. `None`: not recorded yet, or the peer is paused.
    pub(super) pauses: Option<u64>,
    pub(super) room: Room,
    /// The next request that begins was counted for the faults of the device before, when its path was not known.
    pub(super) counted: bool,
}

/// State of a route to the wire at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct WireRequesterInspect {
    /// Destination of the packets.
    address: PathInspect,
    /// QPN of the peer.
    peer_qpn: Qpn,
    /// PSNs that count against the window of the peer, which all connections to it share.
    counted_in_peer_window: u64,
    /// Microseconds for which the rate of the QP, or a quiet period for another one to that peer, delays it.
    paced_us: Option<u64>,
    #[serde(flatten)]
    transport: RequesterInspect,
}

impl WireRequester {
    /// Returns the state of the route for inspection.
    pub(crate) fn inspect(&self, now: Duration) -> WireRequesterInspect {
        WireRequesterInspect {
            address: self.transport.path().inspect(),
            peer_qpn: self.remote,
            counted_in_peer_window: self.pacer.counted(),
            paced_us: self.pacer.paced().map(|until| micros(until.saturating_sub(now))),
            transport: self.transport.inspect(now),
        }
    }

    /// Creates the state of a QP whose peer is on the wire.
    pub(crate) fn new(
        port: &Port,
        qp: &Qp,
        attrs: &QpAttrs,
        (path, source): (Path, BoundGid),
        windows: &PeerWindows<Task>,
    ) -> Box<Self> {
        let mut transport =
            pvrdma_roce::Requester::new(attrs, path, room::tuning(port.negotiates(), port.takes_paths()));
        transport.set_draining(qp.state() == QpState::Sqd);
        let pacer = Pacer::new(WindowShare::new(windows, attrs.av.dgid, qp.task(), qp.pd));
        let (grace, room) = (TimeoutGrace::default(), Room::new(qp.max_send_sge));
        let (source, remote) = (Some(source), attrs.dest_qpn);
        Box::new(Self { transport, path, source, remote, pacer, grace, pauses: None, room, counted: false })
    }

    /// Applies attributes that a modify request changed.
    pub(crate) fn set_attrs(&mut self, qp: &Qp, attrs: &QpAttrs, path: NewPath) {
        path.replace(&mut self.path, &mut self.source);
        self.remote = attrs.dest_qpn;
        self.transport.set_attrs(attrs, self.path);
        self.transport.set_draining(qp.state() == QpState::Sqd);
    }

    /// Returns `true` if the peer is a paused device of this process that is reached over links because local delivery
    /// is off. The requester is woken when the pause ends.
    pub(crate) fn waits_for_peer<Q>(&mut self, qp: &Qp, requester: &mut Requester, directory: &Directory<Q>) -> bool {
        let pauses = directory.pauses();
        if self.pauses == Some(pauses) {
            return false;
        }
        let to = self.source.map(|source| source.beside(requester.attrs.av.dgid));
        if let Some(peer) = to.and_then(|to| directory.find(to)) {
            if peer.adapter.paused.wait(qp.task()) {
                self.pauses = None;
                requester.wait_for_resume();
                return true;
            }
            // Packets that arrived in a pause are lost.
            self.resume(qp.adapter.engine.now());
        }
        self.pauses = Some(pauses);
        false
    }

    /// Starts the timers anew after a pause.
    pub(crate) fn resume(&mut self, now: Duration) {
        self.transport.resume(now);
    }

    /// Returns `true` if nothing is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.transport.is_idle()
    }

    /// Returns the path of requests and the peer's QPN.
    pub(crate) const fn path(&self) -> (Path, Qpn) {
        (self.transport.path(), self.remote)
    }

    /// Ends all requests that were taken from the ring, because the QP is in its error state.
    pub(crate) fn flush(&mut self, qp: &Qp, requester: &mut Requester, memory: Memory<'_>, tally: &mut Tally) {
        let counted = &mut self.counted;
        self.transport.flush(&mut RequesterHooks { qp, requester, memory, tally, counted });
        self.pacer.pause(0);
    }

    /// Passes a response to the requester, which continues when it is run next.
    pub(crate) fn take_response(
        &mut self,
        port: &Port,
        qp: &Qp,
        requester: &mut Requester,
        packet: &Packet<'_>,
    ) -> Result<(), DropReason> {
        admit_connected(packet, qp.qpn, &self.path)?;
        if self.source.is_none() {
            return Err(DropReason::Address);
        }
        if packet.omits_icrc() {
            PortCounters::bump(&port.counters.wire_received_without_icrc);
        }
        if qp.state.sends() {
            let mut tally = Tally::default();
            let before = self.transport.stats();
            let guard = MemoryGuard::open(&qp.adapter, None);
            let (memory, counted) = (guard.own(), &mut self.counted);
            let mut hooks = RequesterHooks { qp, requester, memory, tally: &mut tally, counted };
            self.transport.handle_packet(qp.adapter.engine.now(), packet, &mut hooks);
            let after = self.transport.stats();
            port.counters.requester(&before, &after);
            qp.state.flight.requester(|| qp.adapter.engine.now(), &before, &after);
            self.pacer.acked(&self.transport);
            requester.count(qp, &tally, Some(Road::Wire));
            qp.adapter.counters.fold(&mut tally);
        }
        Ok(())
    }
}

/// Requests of a QP whose peer is on the wire.
pub(crate) struct WireBatch<'a> {
    pub(crate) port: &'a Port,
    pub(crate) qp: &'a Qp,
    pub(crate) rate: &'a RateLimiter,
    pub(crate) requester: &'a mut Requester,
    pub(crate) wire: &'a mut WireRequester,
    pub(crate) budget: &'a mut Budget,
    pub(crate) tally: &'a mut Tally,
}

/// Runs requests of a QP whose peer is on the wire.
#[inline(never)]
pub(crate) fn run(mut batch: WireBatch<'_>) -> Run {
    let (port, qp) = (batch.port, batch.qp);
    let before = batch.wire.transport.stats();
    let run = loop {
        if !qp.state.sends() {
            break Run::Again;
        }
        if batch.budget.spent() {
            break Run::More;
        }
        let mut frames = port.buffer();
        let turn = batch.turn(&mut frames);
        // Guest memory has been released, but the requester stays locked so that no later packets of the QP overtake
        // these.
        port.send(frames);
        if let ControlFlow::Break(gate) = turn {
            if !qp.state.sends() {
                break Run::Again;
            }
            batch.requester.set_gate(gate);
            break Run::Idle;
        }
    };
    let WireBatch { wire, requester, .. } = batch;
    let after = wire.transport.stats();
    port.counters.requester(&before, &after);
    qp.state.flight.requester(|| qp.adapter.engine.now(), &before, &after);
    if run != Run::More {
        wire.room.rest(&qp.adapter.budget, &mut wire.transport);
        wire.pacer.pause(wire.transport.in_flight());
    }
    let deadline = wire.grace.deadline(wire.transport.poll_timeout()).into_iter().chain(wire.pacer.deadline()).min();
    if run == Run::Idle
        && let Some(deadline) = deadline
    {
        requester.arm(qp, deadline);
    }
    run
}

impl WireBatch<'_> {
    /// Takes requests from the ring and builds a batch of packets. Breaks if there was nothing to do, with the reason
    /// if there are requests.
    fn turn(&mut self, frames: &mut Frames) -> ControlFlow<Option<SendGate>> {
        let (port, qp) = (self.port, self.qp);
        let guard = MemoryGuard::open(&qp.adapter, None);
        let memory = guard.own();
        // From here on an unbind waits until this view is released.
        let index = self.requester.attrs.av.sgid_index;
        let is_bound =
            |source: BoundGid| qp.adapter.gids.contains_at(index, source) && !qp.adapter.faults.is_cut(source.gid);
        let bound = self.wire.source.is_some_and(is_bound);
        let now = qp.adapter.engine.now();
        // Timeouts are handled even if no packet can be sent. Otherwise the timer would fire again immediately.
        let WireRequester { transport, pacer, grace, counted, .. } = &mut *self.wire;
        if grace.is_over(transport.poll_timeout(), now, (port, qp.qpn)) {
            let (requester, tally) = (&mut *self.requester, &mut *self.tally);
            let mut hooks = RequesterHooks { qp, requester, memory, tally, counted };
            if pacer.handle_timeout(now, transport, &mut hooks) {
                PortCounters::bump(&port.counters.wire_quiet);
            }
        }
        pacer.begin(now, transport);
        if port.uplink.wait_for_room(qp.task()) {
            return ControlFlow::Break(Some(SendGate::LinkFull));
        }
        let Some(posted) = self.post(memory) else { return ControlFlow::Break(None) };
        let Built { any, stop } = self.build(memory, now, frames);
        if !bound {
            // As in local delivery, packets from a GID that is no longer bound are lost, and retransmitted later.
            frames.clear();
        }
        if qp.state() == QpState::Sqd && self.wire.transport.is_idle() {
            self.requester.drained(qp, memory.view);
        }
        if posted || any {
            return ControlFlow::Continue(());
        }
        let transport = &self.wire.transport;
        // A control loop holds up only what is left to send.
        let stop = stop.filter(|_| transport.has_unsent()).map(SendGate::from);
        ControlFlow::Break(stop.or_else(|| transport.send_wait().map(SendGate::from)))
    }

    /// Takes requests from the ring. Returns `true` if there was one, and `None` if the ring cannot be read.
    fn post(&mut self, memory: Memory<'_>) -> Option<bool> {
        let qp = self.qp;
        let WireRequester { transport, room, counted, .. } = &mut *self.wire;
        let mut posted = false;
        while qp.state() == QpState::Rts
            && !self.budget.spent()
            && (transport.has_room() || room.grow(&qp.adapter.budget, transport))
        {
            let mut work = transport.spare();
            *counted |= self.requester.is_checked();
            match self.requester.pop_due(qp, memory.view, &mut work) {
                Ok(true) => {
                    let (requester, tally) = (&mut *self.requester, &mut *self.tally);
                    let mut hooks = RequesterHooks { qp, requester, memory, tally, counted };
                    transport.post(work, &mut hooks);
                }
                Ok(false) => break,
                Err(error) => {
                    qp.fail_ring(memory.view, error);
                    return None;
                }
            }
            self.budget.take_request();
            posted = true;
        }
        Some(posted)
    }

    /// Builds a batch of packets.
    fn build(&mut self, memory: Memory<'_>, now: Duration, frames: &mut Frames) -> Built {
        let (qp, budget) = (self.qp, &mut *self.budget);
        let WireRequester { transport, pacer, counted, .. } = &mut *self.wire;
        let (requester, tally) = (&mut *self.requester, &mut *self.tally);
        let mut hooks = RequesterHooks { qp, requester, memory, tally, counted };
        let built = pacer.build(now, (transport, self.rate), &mut hooks, (frames, BATCH), |bytes| {
            budget.take_bytes(bytes);
            qp.state.sends() && !budget.spent()
        });
        if built.stop == Some(Stop::Rate) {
            PortCounters::bump(&self.port.counters.wire_paced);
        }
        built
    }
}
