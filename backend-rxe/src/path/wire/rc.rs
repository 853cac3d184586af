//! Reliable connections over the wire: the transport's halves inside those of a queue pair.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

use pvrdma_verbs::{Psn, QpAttrs, QpState, Qpn};

use super::hooks::{RequesterHooks, ResponderHooks, requests};
use super::peer_window::WindowShare;
use super::timeout_grace::TimeoutGrace;
use super::{BATCH, connected_path};
use crate::counters::Tally;
use crate::hca::BoundGid;
use crate::port::Port;
use crate::port::counters::PortCounters;
use crate::qp::requester::{Requester, Route};
use crate::qp::responder::Responder;
use crate::qp::{Budget, Qp, Run};
use crate::sg::Memory;
use crate::sg::MemoryGuard;
use crate::timer::TimerKey;
use pvrdma_ether_link::Frames;
use pvrdma_roce::wire::{MAX_FRAME, Packet};
use pvrdma_roce::{DropReason, Handled, Path, ReorderBuffer, Tuning, admit_connected};

/// Packets that wait for answers to leave before them. More are lost and come again.
const MAX_DEFERRED: usize = 128;
/// Batches of answers that a responder gives before it is another one's turn.
const ANSWER_TURNS: u32 = 4;

/// What a requester holds for the wire.
#[derive(Debug)]
pub(crate) struct WireRequester {
    transport: pvrdma_roce::Requester,
    path: Path,
    source: BoundGid,
    share: WindowShare,
    /// The rate of the QP has it wait until then.
    paced: Option<Duration>,
    unread: TimeoutGrace,
}

impl WireRequester {
    /// State of a QP whose peer is on the wire. `None`: it is not, or there is no wire.
    pub(crate) fn new(qp: &Qp, attrs: &QpAttrs) -> Option<Box<Self>> {
        let (path, source) = connected_path(&qp.adapter, &attrs.av, qp.qpn, attrs.dest_qpn)?;
        let transport = pvrdma_roce::Requester::new(attrs, path, Tuning::default());
        let share = WindowShare::new(qp.adapter.port.as_ref()?.flight(attrs.av.dgid), qp);
        Some(Box::new(Self { transport, path, source, share, paced: None, unread: TimeoutGrace::default() }))
    }

    /// Takes over attributes that a modify request changed.
    pub(crate) fn set_attrs(&mut self, qp: &Qp, attrs: &QpAttrs) {
        // Without a path the old one stays. Its source is not bound any more, so nothing leaves through it.
        if let Some((path, source)) = connected_path(&qp.adapter, &attrs.av, qp.qpn, attrs.dest_qpn) {
            (self.path, self.source) = (path, source);
        }
        self.transport.set_attrs(attrs, self.path);
    }

    /// In SQD nothing new is started.
    pub(crate) const fn set_draining(&mut self, draining: bool) {
        self.transport.set_draining(draining);
    }

    /// Whether nothing is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.transport.is_idle()
    }

    /// The QP is in its error state: ends everything that was taken from the ring.
    pub(crate) fn flush(&mut self, qp: &Qp, requester: &mut Requester, memory: Memory<'_>, tally: &mut Tally) {
        self.transport.flush(&mut RequesterHooks { qp, requester, memory, tally });
        self.share.pause(0);
    }
}

/// Runs requests of a QP whose peer is on the wire.
#[inline(never)]
pub(crate) fn run(qp: &Qp, requester: &mut Requester, budget: &mut Budget, tally: &mut Tally) -> Run {
    let Some(port) = &qp.adapter.port else { return Run::Idle };
    // Taken out, because the transport calls back into the rest of the requester.
    let Some(mut sender) = requester.wire.take() else { return Run::Again };
    let before = sender.transport.stats();
    let run = loop {
        if !requests(qp) {
            break Run::Again;
        }
        if budget.spent() {
            break Run::More;
        }
        let mut frames = port.buffer();
        let progress = turn(qp, requester, &mut sender, port, &mut frames, budget, tally);
        // Guest memory is given back; the requester is still ours, so nobody overtakes these.
        port.send(frames);
        if !progress {
            break if requests(qp) { Run::Idle } else { Run::Again };
        }
    };
    port.counters.requester(&before, &sender.transport.stats());
    if run != Run::More {
        sender.share.pause(sender.transport.under_way());
    }
    let deadline = sender.unread.deadline(sender.transport.poll_timeout()).into_iter().chain(sender.paced).min();
    if run == Run::Idle
        && let Some(deadline) = deadline
    {
        requester.arm(qp, deadline);
    }
    requester.wire = Some(sender);
    run
}

/// Takes requests from the ring and builds a batch of packets. Whether there was anything to do.
fn turn(
    qp: &Qp,
    requester: &mut Requester,
    sender: &mut WireRequester,
    port: &Port,
    frames: &mut Frames,
    budget: &mut Budget,
    tally: &mut Tally,
) -> bool {
    let held = MemoryGuard::open(&qp.adapter, None);
    let memory = held.own();
    let generation = qp.adapter.shared.fabric.generation();
    if requester.route.generation != generation {
        let source = qp.adapter.gid(requester.attrs.av.sgid_index);
        requester.route = Route { generation, source, peer: Weak::new() };
    }
    let bound = requester.route.source == Some(sender.source);
    sender.paced = None;
    let now = qp.adapter.shared.engine.now();
    let WireRequester { transport, share, paced, unread, .. } = sender;
    let mut host = RequesterHooks { qp, requester, memory, tally };
    // Also when nothing can be sent: otherwise the deadline would come again and again.
    if unread.is_over(transport.poll_timeout(), now, port) {
        transport.handle_timeout(now, &mut host);
    }
    if port.uplink.wait_for_room(qp) {
        return false;
    }
    let mut progress = false;
    while qp.state() == QpState::Rts && transport.has_room() && !budget.spent() {
        let mut work = transport.spare();
        match host.requester.pop(memory.view, &mut work) {
            Ok(true) => transport.post(work, &mut host),
            Ok(false) => break,
            Err(error) => {
                qp.fail_ring(memory.view, error);
                return false;
            }
        }
        budget.take_request();
        progress = true;
    }
    if qp.brake.is_on() {
        transport.ask();
    }
    while requests(qp) && frames.len() < BATCH && !budget.spent() && (transport.resends() || share.may_send()) {
        *paced = qp.brake.blocked_until(port, now);
        if paced.is_some() {
            break;
        }
        if share.ends_turn() {
            transport.ask();
        }
        let before = frames.bytes();
        if !frames.push_with(MAX_FRAME, |room| transport.poll_transmit(now, &mut host, room)) {
            break;
        }
        share.sent(transport.under_way());
        let bytes = frames.bytes().saturating_sub(before) as u64;
        qp.brake.sent(now, bytes);
        budget.take_bytes(bytes);
        progress = true;
    }
    if !bound {
        // As with local delivery: what is sent from a GID that is gone is lost, and tried again in time.
        frames.clear();
    }
    if qp.state() == QpState::Sqd && transport.is_idle() {
        host.requester.drained(qp, memory.view);
    }
    progress
}

/// Gives an answer to the requester. It goes on when it is driven next.
pub(crate) fn take_answer(port: &Port, qp: &Qp, packet: &Packet<'_>) -> Result<(), DropReason> {
    qp.with_requester(|requester| {
        let Some(mut sender) = requester.wire.take() else { return Err(DropReason::Address) };
        let admitted = admit_connected(packet, qp.qpn, &sender.path);
        if admitted.is_ok() && requests(qp) {
            let mut tally = Tally::default();
            let before = sender.transport.stats();
            let held = MemoryGuard::open(&qp.adapter, None);
            let mut host = RequesterHooks { qp, requester, memory: held.own(), tally: &mut tally };
            sender.transport.handle_packet(qp.adapter.shared.engine.now(), packet, &mut host);
            port.counters.requester(&before, &sender.transport.stats());
            sender.share.confirmed(sender.transport.under_way());
            qp.adapter.counters.fold(&mut tally);
        }
        requester.wire = Some(sender);
        admitted.map(|_| ())
    })
}

/// What a responder holds for the wire.
#[derive(Debug)]
pub(crate) struct WireResponder {
    transport: pvrdma_roce::Responder,
    path: Path,
    /// Packets that must not overtake answers.
    deferred: VecDeque<Box<[u8]>>,
    /// Packets behind one that was lost.
    reorder: ReorderBuffer,
    /// The QP ended while a request of the peer was looked at: what is owed says so, and is still to be sent.
    refused: bool,
    /// Timer of the QP's rate.
    paced: Option<TimerKey>,
}

impl WireResponder {
    fn new(port: &Port, attrs: &QpAttrs, path: Path) -> Box<Self> {
        let transport = pvrdma_roce::Responder::new(attrs, path);
        let reorder = ReorderBuffer::new(Arc::clone(&port.buffered));
        Box::new(Self { transport, path, deferred: VecDeque::new(), reorder, refused: false, paced: None })
    }

    /// Takes over attributes that a modify request changed.
    pub(crate) fn set_attrs(&mut self, qp: &Qp, attrs: &QpAttrs) {
        if let Some((path, _)) = connected_path(&qp.adapter, &attrs.av, qp.qpn, attrs.dest_qpn) {
            self.path = path;
        }
        self.transport.set_attrs(attrs, self.path);
    }

    /// Packets that wait and answers that are owed.
    #[cfg(test)]
    pub(crate) fn load(&self) -> (usize, usize) {
        (self.deferred.len(), self.transport.answers_owed())
    }

    /// Executes a packet, or keeps it for later.
    fn take(&mut self, port: &Port, packet: &Packet<'_>, frame: &[u8], host: &mut ResponderHooks<'_>) {
        let psn = packet.header.bth.psn;
        self.reorder.observe(self.transport.expected_psn(), psn);
        if self.deferred.is_empty() {
            match self.handle(packet, host) {
                Handled::Deferred => {}
                Handled::Ahead => return self.keep(psn, frame),
                Handled::Done | Handled::Dropped => return self.catch_up(host),
            }
        }
        if self.deferred.len() < MAX_DEFERRED {
            self.deferred.push_back(frame.into());
        } else {
            PortCounters::bump(&port.counters.wire_dropped_deferred);
        }
    }

    /// Keeps a packet that came before its time.
    fn keep(&mut self, psn: Psn, frame: &[u8]) {
        let missing = self.reorder.insert(self.transport.expected_psn(), psn, frame);
        self.transport.name_missing(psn, missing);
    }

    /// Executes packets that came before their time and are expected now.
    fn catch_up(&mut self, host: &mut ResponderHooks<'_>) {
        if self.reorder.is_empty() {
            return;
        }
        while host.qp.receives()
            && let Some(frame) = self.reorder.pop_expected(self.transport.expected_psn())
        {
            // It was parsed when it came.
            let Ok(packet) = Packet::parse(&frame) else { continue };
            if self.handle(&packet, host) == Handled::Deferred {
                self.deferred.push_back(frame);
                return;
            }
        }
        if !self.reorder.is_empty() {
            self.transport.report_missing();
        }
    }

    fn handle(&mut self, packet: &Packet<'_>, host: &mut ResponderHooks<'_>) -> Handled {
        let handled = self.transport.handle_packet(packet, host);
        self.refused |= !host.qp.receives();
        handled
    }

    /// Executes kept packets until one must wait again.
    fn resume(&mut self, host: &mut ResponderHooks<'_>) {
        while host.qp.receives()
            && let Some(frame) = self.deferred.pop_front()
        {
            // It was parsed when it came.
            let Ok(packet) = Packet::parse(&frame) else { continue };
            match self.handle(&packet, host) {
                Handled::Deferred => return self.deferred.push_front(frame),
                Handled::Ahead => self.keep(packet.header.bth.psn, &frame),
                Handled::Done | Handled::Dropped => {}
            }
        }
        if self.deferred.is_empty() {
            self.catch_up(host);
        }
    }
}

/// Gives a request to the responder.
pub(crate) fn take_request(port: &Port, qp: &Qp, packet: &Packet<'_>, frame: &[u8]) -> Result<(), DropReason> {
    let held = MemoryGuard::open(&qp.adapter, None);
    let responder = &mut *qp.responder.lock();
    if !qp.receives() {
        return Err(DropReason::Opcode);
    }
    let mut receiver = match responder.wire.take() {
        Some(receiver) => receiver,
        None => {
            let attrs = &responder.attrs;
            let path = connected_path(&qp.adapter, &attrs.av, qp.qpn, attrs.dest_qpn);
            let (path, _) = path.ok_or(DropReason::Address)?;
            // Only the peer is worth memory.
            admit_connected(packet, qp.qpn, &path)?;
            WireResponder::new(port, attrs, path)
        }
    };
    let admitted = admit_connected(packet, qp.qpn, &receiver.path);
    if admitted.is_ok() {
        let before = receiver.transport.stats();
        receiver.take(port, packet, frame, &mut ResponderHooks { qp, responder, memory: held.own() });
        port.counters.responder(&before, &receiver.transport.stats());
    }
    responder.wire = Some(receiver);
    admitted.map(|_| ())
}

/// Sends what the responder owes. Whether that was all; otherwise it wants another turn.
pub(crate) fn answer(port: &Port, qp: &Qp) -> bool {
    for _ in 0..ANSWER_TURNS {
        if port.uplink.is_full() {
            return false;
        }
        let mut frames = port.buffer();
        let done = answer_batch(port, qp, &mut frames);
        port.send(frames);
        if done {
            return true;
        }
    }
    false
}

fn answer_batch(port: &Port, qp: &Qp, frames: &mut Frames) -> bool {
    let held = MemoryGuard::open(&qp.adapter, None);
    let responder: &mut Responder = &mut qp.responder.lock();
    let Some(mut receiver) = responder.wire.take() else { return true };
    if !qp.receives() {
        // What is owed for the packet that ended the QP is still sent. Nobody executes what waits behind it.
        if !receiver.refused {
            receiver.transport.end();
        }
        receiver.deferred.clear();
        receiver.reorder.clear();
    }
    let mut host = ResponderHooks { qp, responder, memory: held.own() };
    let mut paced = None;
    let engine = &qp.adapter.shared.engine;
    while frames.len() < BATCH {
        let before = frames.bytes();
        if qp.brake.is_on() && receiver.transport.next_is_data() {
            paced = qp.brake.blocked_until(port, engine.now());
        }
        if paced.is_some() || !frames.push_with(MAX_FRAME, |room| receiver.transport.poll_transmit(&mut host, room)) {
            break;
        }
        if qp.brake.is_on() {
            qp.brake.sent(engine.now(), frames.bytes().saturating_sub(before) as u64);
        }
    }
    // The memory of a READ may have been taken away, which ends the QP with one last answer.
    receiver.refused |= !qp.receives();
    if let Some(until) = paced {
        // The QP's next run brings us back.
        qp.brake.hold_responder();
        receiver.paced = Some(engine.arm(qp, until, receiver.paced));
        responder.wire = Some(receiver);
        return true;
    }
    let all = frames.len() < BATCH;
    if all {
        receiver.resume(&mut host);
    }
    let done = all && !receiver.transport.has_answers() && receiver.deferred.is_empty();
    responder.wire = Some(receiver);
    done
}

/// The rate that a responder waited for allows it to go on.
#[cold]
pub(crate) fn resume_answers(qp: &Qp) {
    if let Some(port) = &qp.adapter.port {
        port.resume(qp);
    }
}

/// Where the requester or the responder of a QP on the wire sends to, and to which QP.
pub(crate) fn path(qp: &Qp, requester: bool) -> Option<(Path, Qpn)> {
    if requester {
        qp.with_requester(|requester| Some((requester.wire.as_ref()?.path, requester.attrs.dest_qpn)))
    } else {
        let responder = qp.responder.lock();
        Some((responder.wire.as_ref()?.path, responder.attrs.dest_qpn))
    }
}
