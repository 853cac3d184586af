//! Reliable connections over the wire: joins the responder of the transport with the responder half of a queue pair.

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_base::Snapshot;
use pvrdma_link::Frames;
use pvrdma_pacing::RateLimiter;
use pvrdma_roce::{
    DropReason, Handled, Path, PathInspect, ReorderBuffer, ResponderInspect, admit_connected,
    wire::{MAX_FRAME, Packet, rnr_delay},
};
use pvrdma_verbs_types::{QpAttrs, Qpn};
use serde::Serialize;

use super::hooks::ResponderHooks;
use super::new_path::NewPath;
use super::turns::PortTurns;
use crate::engine::Engine;
use crate::gid::BoundGid;
use crate::port::counters::PortCounters;
use crate::port::{Arrival, BATCH, KeptPacket, Port};
use crate::qp::Qp;
use crate::qp::responder::Responder;
use crate::sg::MemoryGuard;
use crate::timer::TimerKey;

/// Maximum number of packets that wait until responses have left. Further packets are dropped, and retransmitted by the
/// peer.
const MAX_DEFERRED: usize = 128;
/// Maximum time for which a request waits for a receive before the peer gets an RNR NAK. It is shorter than any ACK
/// timeout, and shorter than the time after which this engine's requester retries.
const RECEIVE_WAIT: Duration = Duration::from_micros(400);

/// Responder state of a QP whose peer is on the wire.
#[derive(Debug)]
pub(crate) struct WireResponder {
    pub(super) transport: pvrdma_roce::Responder,
    pub(super) path: Path,
    /// Source GID of the path. `None`: no packet can be sent on it.
    pub(super) source: Option<BoundGid>,
    pub(super) remote: Qpn,
    /// Packets that must not overtake responses, or wait for a receive.
    pub(super) deferred: VecDeque<KeptPacket>,
    /// Time until which the first of them waits for a receive.
    pub(super) receive_wait: Option<Duration>,
    /// Packets behind a lost one.
    pub(super) reorder: ReorderBuffer<KeptPacket>,
    /// The QP ended while a request of the peer was handled. The response that reports this is owed and must still be
    /// sent.
    pub(super) refused: bool,
    /// Timer that ends a wait for the QP's rate, or for a receive.
    pub(super) timer: Option<TimerKey>,
}

/// Responder state for the wire at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct WireResponderInspect {
    /// Destination of the responses.
    address: PathInspect,
    /// QPN of the peer.
    peer_qpn: Qpn,
    /// Packets that must not overtake responses, or wait for a receive.
    deferred_packets: usize,
    /// The first of them waits for a receive.
    awaits_receive: bool,
    /// Packets behind a lost one.
    reorder_packets: usize,
    /// The owed response tells the peer that the QP has ended.
    refused: bool,
    #[serde(flatten)]
    transport: ResponderInspect,
}

impl WireResponder {
    fn inspect(&self) -> WireResponderInspect {
        WireResponderInspect {
            address: self.transport.path().inspect(),
            peer_qpn: self.remote,
            deferred_packets: self.deferred.len(),
            awaits_receive: self.receive_wait.is_some(),
            reorder_packets: self.reorder.packets(),
            refused: self.refused,
            transport: self.transport.inspect(),
        }
    }

    pub(super) fn new(port: &Port, attrs: &QpAttrs, (path, source): (Path, BoundGid)) -> Box<Self> {
        let transport = pvrdma_roce::Responder::new(attrs, path);
        let transport = if port.takes_paths() { transport.following_paths() } else { transport };
        Box::new(Self {
            transport: if port.negotiates() { transport.accepting_offers() } else { transport },
            path,
            source: Some(source),
            remote: attrs.dest_qpn,
            deferred: VecDeque::new(),
            receive_wait: None,
            reorder: ReorderBuffer::new(),
            refused: false,
            timer: None,
        })
    }

    /// Discards owed responses because their source address is gone. If the address comes back, the peer's
    /// retransmissions ask for them again.
    fn withdraw(&mut self) {
        self.transport.forget_responses();
        self.deferred.clear();
        self.receive_wait = None;
        if !self.reorder.is_empty() {
            self.reorder.clear();
            self.transport.forget_received();
        }
    }

    /// Ends the responder of a QP that is in its error state. The response to the packet that ended the QP is still
    /// sent. Packets that wait behind it are never executed.
    fn end(&mut self) {
        if !self.refused {
            self.transport.end();
        }
        self.deferred = VecDeque::new();
        self.receive_wait = None;
        self.reorder.clear();
    }

    /// Returns the numbers of deferred packets and of owed responses.
    #[cfg(test)]
    pub(crate) fn load(&self) -> (usize, usize) {
        (self.deferred.len(), self.transport.pending_responses())
    }

    /// Executes a packet, or keeps it for later.
    fn take(&mut self, port: &Port, packet: &Packet<'_>, arrival: Arrival<'_>, hooks: &mut ResponderHooks<'_>) {
        let psn = packet.header.bth.psn;
        let fits = packet.payload.len() <= hooks.responder.attrs.path_mtu.bytes() as usize;
        // A packet that is too long is refused when its turn comes. Its bytes are not kept until then, so it takes no
        // memory.
        let keep = |qp: &Qp| arrival.keep(&qp.adapter.packets).filter(|_| fits);
        if self.deferred.is_empty() {
            match self.handle(packet, hooks) {
                Handled::Deferred => {}
                Handled::OutOfOrder => {
                    if !self.reorder.insert(self.transport.expected_psn(), psn, || keep(hooks.qp)) {
                        PortCounters::bump(&port.counters.wire_dropped_ahead);
                    }
                    return;
                }
                Handled::Done | Handled::Dropped => return self.catch_up(hooks),
            }
        }
        let kept = if self.deferred.len() < MAX_DEFERRED { keep(hooks.qp) } else { None };
        match kept {
            Some(kept) => self.deferred.push_back(kept),
            None if self.deferred.is_empty() && self.receive_wait.is_some() => {
                // There is no memory to keep the packet: the peer gets an RNR NAK immediately.
                hooks.wait = None;
                self.handle(packet, hooks);
            }
            None => PortCounters::bump(&port.counters.wire_dropped_deferred),
        }
    }

    /// Executes packets that arrived early and are expected now.
    fn catch_up(&mut self, hooks: &mut ResponderHooks<'_>) {
        if self.reorder.is_empty() {
            return;
        }
        while hooks.qp.state.receives()
            && let Some(frame) = self.reorder.pop_expected(self.transport.expected_psn())
        {
            // The packet was parsed successfully when it arrived.
            let Ok(packet) = Packet::parse(&frame) else { continue };
            if self.handle(&packet, hooks) == Handled::Deferred {
                self.deferred.push_back(frame);
                return;
            }
        }
        if !self.reorder.is_empty() {
            self.transport.nak_expected();
        }
    }

    fn handle(&mut self, packet: &Packet<'_>, hooks: &mut ResponderHooks<'_>) -> Handled {
        if self.receive_wait.is_some_and(|until| hooks.qp.adapter.engine.now() >= until) {
            hooks.wait = None;
        }
        let handled = self.transport.handle_packet(packet, hooks);
        self.refused |= !hooks.qp.state.receives();
        if std::mem::take(&mut hooks.waits) {
            self.wait_for_receive(hooks);
            return Handled::Deferred;
        }
        if self.receive_wait.take().is_some() {
            self.disarm(&hooks.qp.adapter.engine);
        }
        handled
    }

    fn disarm(&mut self, engine: &Engine) {
        if let Some(timer) = self.timer.take() {
            engine.disarm(timer);
        }
    }

    /// Starts to wait for a receive. After an RNR NAK the peer would wait for a while and retransmit, so the request
    /// waits here for about that time instead. If the consumer is only slightly late, this saves both sides the NAK and
    /// the retransmission of all following packets.
    #[cold]
    fn wait_for_receive(&mut self, hooks: &ResponderHooks<'_>) {
        if self.receive_wait.is_none() {
            let engine = &hooks.qp.adapter.engine;
            let until = engine.now() + rnr_delay(hooks.responder.attrs.min_rnr_timer).min(RECEIVE_WAIT);
            self.receive_wait = Some(until);
            self.timer = Some(engine.arm(hooks.qp.task(), until, self.timer));
        }
    }

    /// Executes deferred packets until one must wait again.
    fn resume(&mut self, hooks: &mut ResponderHooks<'_>) {
        while hooks.qp.state.receives()
            && let Some(frame) = self.deferred.pop_front()
        {
            // The packet was parsed successfully when it arrived.
            let Ok(packet) = Packet::parse(&frame) else { continue };
            match self.handle(&packet, hooks) {
                Handled::Deferred => return self.deferred.push_front(frame),
                Handled::OutOfOrder => {
                    let psn = packet.header.bth.psn;
                    self.reorder.insert(self.transport.expected_psn(), psn, || Some(frame));
                }
                Handled::Done | Handled::Dropped => {}
            }
        }
        if self.deferred.is_empty() {
            self.catch_up(hooks);
        }
    }
}

/// State of a QP for the wire, except for its route.
#[derive(Debug, Default)]
pub(crate) struct WireSide {
    /// Rate limit of both halves.
    pub(crate) rate: RateLimiter,
    /// Turns of both halves on the port's thread.
    pub(crate) turns: PortTurns,
    /// Created by the first packet of the peer. The QP's responder is locked before this, if both are.
    pub(super) responder: Mutex<Option<Box<WireResponder>>>,
}

/// Returns the state for the wire of the responder that accepts this packet. The first packet of its peer creates that
/// state.
fn admit_request<'w>(
    port: &Port,
    qp: &Qp,
    responder: &mut Responder,
    wire: &'w mut Option<Box<WireResponder>>,
    packet: &Packet<'_>,
    path: &impl Fn(&QpAttrs) -> Option<(Path, BoundGid)>,
) -> Result<&'w mut WireResponder, DropReason> {
    if !qp.state.receives() {
        return Err(DropReason::State);
    }
    match wire {
        Some(wire) => {
            admit_connected(packet, qp.qpn, &wire.path)?;
            if wire.source.is_none() {
                return Err(DropReason::Address);
            }
            Ok(wire)
        }
        None => {
            let path = path(&responder.attrs).ok_or(DropReason::Address)?;
            // Memory is allocated only for the peer.
            admit_connected(packet, qp.qpn, &path.0)?;
            if !responder.connection.meet_wire() {
                return Err(DropReason::Address);
            }
            Ok(wire.insert(WireResponder::new(port, &responder.attrs, path)))
        }
    }
}

impl WireSide {
    /// Discards the state, together with the QP's state.
    pub(crate) fn reset(&self, engine: &Engine) {
        if let Some(mut responder) = self.responder.lock().take() {
            responder.disarm(engine);
        }
        self.rate.reset();
    }

    /// Applies attributes that a modify request changed.
    pub(crate) fn set_attrs(&self, attrs: &QpAttrs, path: NewPath) {
        if let Some(responder) = &mut *self.responder.lock() {
            path.replace(&mut responder.path, &mut responder.source);
            responder.remote = attrs.dest_qpn;
            responder.transport.set_attrs(attrs, responder.path);
        }
    }

    /// Returns the path of a response to this request, and the peer's QPN.
    pub(crate) fn path_of(&self, packet: &Packet<'_>) -> Option<(Path, Qpn)> {
        self.responder.lock().as_ref().map(|responder| (responder.transport.path_of(packet), responder.remote))
    }

    /// Returns the path of responses and the peer's QPN.
    pub(crate) fn path(&self) -> Option<(Path, Qpn)> {
        self.responder.lock().as_ref().map(|responder| (responder.transport.path(), responder.remote))
    }

    /// Returns the responder state for inspection: `null` before the first packet of the peer.
    pub(crate) fn inspect(&self) -> Snapshot<Option<WireResponderInspect>> {
        self.responder.try_lock().map(|responder| responder.as_ref().map(|responder| responder.inspect())).into()
    }

    /// Returns the load of the responder, if the peer has sent a packet.
    #[cfg(test)]
    pub(crate) fn load(&self) -> Option<(usize, usize)> {
        self.responder.lock().as_ref().map(|responder| responder.load())
    }

    /// Passes requests to the responder, and reports for each whether it was accepted. `path` returns the path back to
    /// the peer, if there is one.
    pub(crate) fn take_requests<'p>(
        &self,
        port: &Port,
        qp: &Qp,
        packets: impl Iterator<Item = (Packet<'p>, Arrival<'p>)>,
        path: impl Fn(&QpAttrs) -> Option<(Path, BoundGid)>,
        mut taken: impl FnMut(Result<(), DropReason>),
    ) {
        let guard = MemoryGuard::open(&qp.adapter, None);
        let responder = &mut *qp.responder.lock();
        let wire = &mut *self.responder.lock();
        let stats = |wire: &Option<Box<WireResponder>>| wire.as_ref().map(|wire| wire.transport.stats());
        let before = stats(wire);
        let (wait, mut without_icrc) = (Some(&self.turns), 0);
        for (packet, arrival) in packets {
            let admitted = admit_request(port, qp, responder, wire, &packet, &path);
            taken(admitted.map(|wire| {
                without_icrc += u64::from(packet.omits_icrc());
                let hooks = &mut ResponderHooks { qp, responder, memory: guard.own(), wait, waits: false };
                wire.take(port, &packet, arrival, hooks);
            }));
        }
        if let Some(after) = stats(wire) {
            port.counters.responder(&before.unwrap_or_default(), &after);
        }
        PortCounters::add(&port.counters.wire_received_without_icrc, without_icrc);
    }

    /// Writes an RNR NAK for a request of the peer that the responder would execute next. Returns its length in bytes;
    /// `None` for all other packets. The memory of the guest is not accessed.
    pub(crate) fn hold_off(&self, qp: &Qp, packet: &Packet<'_>, timer: u8, out: &mut [u8]) -> Option<usize> {
        let wire = self.responder.lock();
        let wire = wire.as_ref().filter(|wire| wire.source.is_some() && qp.state.receives())?;
        admit_connected(packet, qp.qpn, &wire.path).ok()?;
        wire.transport.hold_off(packet, timer, out)
    }

    /// Asks a peer in the process that the device has left for its requests, at the end of the pause. Their first
    /// packets are lost if they came before, and the peer would notice only by its timer.
    ///
    /// Nothing is kept, because the peer may follow the device into this process, where local delivery must find a
    /// connection that the wire has not used. `path` returns a path only if its source can be used now.
    pub(crate) fn prompt(&self, port: &Port, qp: &Qp, path: impl FnOnce(&QpAttrs) -> Option<(Path, BoundGid)>) {
        // Few queue pairs have left a peer, and most resumes have none of them.
        if !std::mem::take(&mut qp.responder.lock().left_peer) || !qp.state.receives() {
            return;
        }
        // An unbind waits until this view is released.
        let _view = MemoryGuard::open(&qp.adapter, None);
        let responder = qp.responder.lock();
        let path = path(&responder.attrs).filter(|_| self.responder.lock().is_none());
        if let Some((path, _)) = path {
            let transport = pvrdma_roce::Responder::new(&responder.attrs, path);
            let mut frames = port.buffer();
            frames.push_with(MAX_FRAME, |room| transport.prompt(room));
            port.send(frames);
        }
    }

    /// Sends responses that the responder owes, at least one packet and about `most` bytes, and adds their bytes to
    /// `sent`. Returns `false` if there are more.
    pub(crate) fn respond(&self, port: &Port, qp: &Qp, most: u64, sent: &mut u64) -> bool {
        loop {
            if port.uplink.is_full() {
                return false;
            }
            let mut frames = port.buffer();
            let done = self.build_responses(port, qp, most.saturating_sub(*sent), &mut frames);
            *sent = sent.saturating_add(frames.bytes() as u64);
            port.send(frames);
            if done || *sent >= most {
                return done;
            }
        }
    }

    /// Builds a batch of responses, at least one and about `most` bytes. Returns `true` if none is left.
    fn build_responses(&self, port: &Port, qp: &Qp, most: u64, frames: &mut Frames) -> bool {
        let guard = MemoryGuard::open(&qp.adapter, None);
        if qp.adapter.paused.is_set() {
            return true;
        }
        let responder = &mut *qp.responder.lock();
        let wire = &mut *self.responder.lock();
        let Some(wire) = wire else { return true };
        // An unbind waits until this view is released.
        let index = responder.attrs.av.sgid_index;
        if wire.source.is_none_or(|source| !qp.adapter.gids.contains_at(index, source)) {
            wire.withdraw();
            return true;
        }
        if !qp.state.receives() {
            wire.end();
        }
        if let Some(missing) = wire.transport.wants_received() {
            wire.transport.set_received(wire.reorder.received(missing));
        }
        let wait = Some(&self.turns);
        let mut hooks = ResponderHooks { qp, responder, memory: guard.own(), wait, waits: false };
        let (rate, engine) = (&self.rate, &qp.adapter.engine);
        let (mut paced, before) = (None, wire.transport.stats().without_icrc);
        while frames.len() < BATCH && (frames.is_empty() || (frames.bytes() as u64) < most) {
            let before = frames.bytes();
            if rate.is_on() && wire.transport.next_is_read_response() {
                paced = rate.blocked_until(engine.now());
                PortCounters::add(&port.counters.wire_paced, paced.is_some().into());
            }
            if paced.is_some() || !frames.push_with(MAX_FRAME, |room| wire.transport.poll_transmit(&mut hooks, room)) {
                break;
            }
            if rate.is_on() {
                rate.sent(engine.now(), frames.bytes().saturating_sub(before) as u64);
            }
        }
        let without_icrc = wire.transport.stats().without_icrc.saturating_sub(before);
        PortCounters::add(&port.counters.wire_sent_without_icrc, without_icrc);
        // The memory of a READ may have been invalidated, which ends the QP with one last response.
        wire.refused |= !qp.state.receives();
        if let Some(until) = paced {
            self.turns.hold_responder();
            wire.timer = Some(engine.arm(qp.task(), until, wire.timer));
            return true;
        }
        let all = !wire.transport.has_responses();
        if all {
            wire.resume(&mut hooks);
        }
        all && !wire.transport.has_responses() && (wire.deferred.is_empty() || wire.receive_wait.is_some())
    }
}
