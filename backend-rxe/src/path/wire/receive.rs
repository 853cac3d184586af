//! Received frames of a device: finds the queue pair and the half for each frame, or the reason to drop it.

use std::collections::VecDeque;
use std::iter;
use std::sync::{Arc, Weak};

use pvrdma_link::Frames;
use pvrdma_roce::{
    DropReason, admit,
    wire::{Aeth, Ecn, Extension, NakCode, Opcode, Packet, Syndrome},
};
use pvrdma_verbs_types::{Gid, QpType, Qpn};

use super::admitted::Admitted;
use super::flow::Flow;
use super::hold::Hold;
use super::sources::{Sources, Verdict};
use super::{cnp, ud};
use crate::budget::Budget;
use crate::drive::Endpoint;
use crate::faults::{Fault, Site};
use crate::path::directory::Node;
use crate::port::counters::PortCounters;
use crate::port::{Arrival, PASS_BYTES, Port, RoceReceiver};
use crate::qp::Qp;

/// Maximum number of bytes in a turn of one queue pair: a batch of packets of the largest path MTU.
const TURN_BYTES: u64 = 128 << 10;
/// Maximum number of requests that one queue pair takes from its ring in a turn.
const TURN_REQUESTS: u32 = 128;
/// Code of a NAK that IBA 9.7.5.2.8 does not define.
const UNDEFINED_NAK: u8 = 31;
/// Minimum cost of a turn, in bytes.
const TURN_COST: u64 = 256;

/// Work that the frames of a receive queue have caused. Responses are sent after the batch, so that one acknowledgement
/// covers many packets.
#[derive(Debug)]
pub(crate) struct Inbox {
    /// The device behind the port, which is recreated whenever the guest's driver starts.
    node: Weak<Node<Endpoint>>,
    sources: Sources,
    /// Responders that owe responses since the last pass.
    newly_owing: Vec<Weak<Endpoint>>,
    /// Responders that owe more, and take turns.
    owing: VecDeque<Weak<Endpoint>>,
    /// Requesters that got responses and may have packets to send. They take turns, too.
    answered: VecDeque<Weak<Endpoint>>,
    /// Congestion notifications, which are sent first.
    notifications: Frames,
    /// Answers while the device is paused.
    hold: Hold,
}

/// A received packet.
type Received<'p> = (Packet<'p>, Arrival<'p>);

fn is_response(packet: &Packet<'_>) -> bool {
    packet.header.bth.opcode.info().is_some_and(|info| info.operation.is_response())
}

fn is_request(packet: &Packet<'_>) -> bool {
    packet.header.bth.opcode != Opcode::CNP && !is_response(packet)
}

fn is_marked(packet: &Packet<'_>) -> bool {
    packet.header.network.ecn() == Ecn::Congested
}

/// Returns `true` if a requested fault of the device loses a packet to this GID. Another fault makes a response
/// contradict the protocol.
#[cold]
fn is_lost(qp: &Qp, to: Gid, packet: &mut Packet<'_>) -> bool {
    if qp.adapter.faults.is_cut(to) {
        return true;
    }
    if !is_response(packet) {
        return qp.fault(Site::Arrival).is_some();
    }
    match qp.fault(Site::Response) {
        Some(Fault::BadResponse) => {
            packet.header.bth.opcode = Opcode::ACKNOWLEDGE;
            let syndrome = Syndrome::Nak(NakCode::Reserved(UNDEFINED_NAK));
            packet.header.extension = Extension::Aeth(Aeth { syndrome, msn: 0 });
            false
        }
        lost => lost.is_some(),
    }
}

fn count_dropped(port: &Port, reason: DropReason) {
    let counters = &port.counters;
    PortCounters::bump(match reason {
        DropReason::Damaged(_) => &counters.wire_dropped_damaged,
        DropReason::Address => &counters.wire_dropped_address,
        DropReason::State => &counters.wire_dropped_state,
        DropReason::Version | DropReason::Opcode | DropReason::Pkey => &counters.wire_dropped_refused,
    });
}

impl Inbox {
    pub(crate) fn new(node: &Arc<Node<Endpoint>>, sources: Sources) -> Self {
        let node = Arc::downgrade(node);
        let (newly_owing, owing, answered) = (Vec::new(), VecDeque::new(), VecDeque::new());
        Self { node, sources, newly_owing, owing, answered, notifications: Frames::default(), hold: Hold::default() }
    }

    /// Returns `true` if the device is paused. The receive queue is locked, and a pause that begins later waits for
    /// that lock.
    fn is_paused(&self) -> bool {
        self.node.upgrade().is_some_and(|node| node.adapter.paused.is_set())
    }

    /// Returns the packets of this flow that the device accepts. Counts the reason if it accepts none.
    fn admits(&mut self, port: &Port, node: &Node<Endpoint>, flow: Flow) -> Option<Admitted> {
        let (counters, gids) = (&port.counters, &node.adapter.gids);
        let dropped = if gids.contains(flow.to) {
            match self.sources.judge(node, flow.to.beside(flow.from), flow.station) {
                Verdict::Taken => return Some(Admitted::All),
                Verdict::Neighbour => return Some(Admitted::Connections),
                Verdict::Spoofed => &counters.wire_dropped_address,
                Verdict::Refused => &counters.wire_dropped_peer,
            }
        } else if gids.is_in_other_vlan(flow.to) {
            &counters.wire_dropped_vlan
        } else {
            &counters.wire_dropped_address
        };
        PortCounters::bump(dropped);
        None
    }

    /// Handles a packet, and the packets directly behind it that are requests to the same queue pair.
    fn take<'p>(
        &mut self,
        port: &Port,
        endpoint: &Arc<Endpoint>,
        admitted: Admitted,
        (packet, arrival): Received<'p>,
        behind: impl Iterator<Item = Received<'p>>,
    ) {
        let qp = endpoint.qp();
        let taken = match qp.qp_type {
            QpType::Ud | QpType::Gsi => admit(&packet, qp.qp_type).map(|_| ud::deliver(port, qp, &packet)),
            QpType::Rc if is_response(&packet) => endpoint.take_response(port, &packet).map(|()| {
                if endpoint.turns().begin_requests() {
                    self.answered.push_back(Arc::downgrade(endpoint));
                }
            }),
            QpType::Rc => {
                let (mut any, packets) = (false, iter::once((packet, arrival)).chain(behind));
                endpoint.take_requests(port, admitted, packets, |taken| match taken {
                    Ok(()) => any = true,
                    Err(reason) => count_dropped(port, reason),
                });
                if !any {
                    return;
                }
                self.owe(endpoint);
                Ok(())
            }
        };
        match taken {
            Ok(()) => cnp::marked(port, endpoint, &packet, &mut self.notifications),
            Err(reason) => count_dropped(port, reason),
        }
    }

    /// Records that a responder has to send responses after the batch.
    fn owe(&mut self, endpoint: &Arc<Endpoint>) {
        if endpoint.turns().begin_responses() {
            self.newly_owing.push(Arc::downgrade(endpoint));
        }
    }

    /// Runs requesters in turns, until none has packets to send or about `most` bytes have been sent.
    fn drive_answered(&mut self, most: u64) {
        let mut left = most;
        while left > 0
            && let Some(endpoint) = self.answered.pop_front()
        {
            let Some(alive) = endpoint.upgrade() else { continue };
            // The flag is cleared before the run: a response that arrives from now on queues the requester again.
            alive.turns().end_requests();
            let run = alive.run_on_port(Budget::new(TURN_BYTES.min(left), TURN_REQUESTS));
            left = left.saturating_sub(run.cost);
            if run.more && alive.turns().begin_requests() {
                self.answered.push_back(endpoint);
            }
        }
    }

    /// Makes responders send in turns, until none owes responses or about `most` bytes have been sent. Returns `true`
    /// if there is more to send at once.
    fn drive_owing(&mut self, port: &Port, most: u64) -> bool {
        // Each new responder first sends one packet. Most owe only an acknowledgement, which must not wait behind the
        // data of others.
        let mut sent = 0_u64;
        for endpoint in std::mem::take(&mut self.newly_owing) {
            sent = sent.saturating_add(self.respond_once(port, endpoint, 1));
        }
        let may = !self.owing.is_empty() && port.may_send_data();
        if may {
            let most = port.share.limit(Budget::new(most.saturating_sub(sent), 0), || port.now()).bytes();
            sent = sent.saturating_add(self.send_to_readers(port, most));
        }
        port.has_sent_data(sent);
        // Others may have filled the uplink since the last check.
        may && !self.owing.is_empty() && !port.wait_for_room()
    }

    /// Makes responders that owe more than one packet send up to `most` bytes in turns. Returns the number of bytes
    /// sent.
    fn send_to_readers(&mut self, port: &Port, most: u64) -> u64 {
        let mut sent = 0_u64;
        while sent < most
            && !port.uplink.is_full()
            && let Some(endpoint) = self.owing.pop_front()
        {
            let turn = TURN_BYTES.min(most.saturating_sub(sent));
            sent = sent.saturating_add(self.respond_once(port, endpoint, turn));
        }
        sent
    }

    /// Makes a responder send up to about `most` bytes. Returns the number of bytes sent, at least the cost of a turn.
    fn respond_once(&mut self, port: &Port, endpoint: Weak<Endpoint>, most: u64) -> u64 {
        let Some(alive) = endpoint.upgrade() else { return 0 };
        let mut sent = 0;
        if alive.respond(port, most, &mut sent) {
            alive.turns().end_responses();
        } else {
            self.owing.push_back(endpoint);
        }
        sent.max(TURN_COST)
    }
}

impl RoceReceiver for Inbox {
    fn receive<'p>(&mut self, port: &Port, arrivals: &mut dyn Iterator<Item = Arrival<'p>>) {
        let Some(node) = self.node.upgrade() else { return };
        if node.adapter.paused.is_set() {
            return self.hold.receive(port, &node, &mut self.sources, arrivals);
        }
        let faulty = node.adapter.faults.is_active();
        let (counters, mut frames, mut bytes) = (&port.counters, 0, 0);
        let parse = |arrival: Arrival<'p>| {
            frames += 1;
            bytes += arrival.frame.len() as u64;
            let packet = Packet::parse(arrival.frame);
            packet.inspect_err(|_| PortCounters::bump(&counters.wire_dropped_malformed)).ok().map(|it| (it, arrival))
        };
        let mut packets = arrivals.filter_map(parse).peekable();
        // Packets of a flow often arrive in a row. The lookups for the first one stay valid for the others until an
        // address changes.
        let mut last: Option<(Flow, u64, Arc<Endpoint>)> = None;
        while let Some((mut packet, arrival)) = packets.next() {
            let (flow, generation) = (Flow::of(&packet), self.sources.generation());
            let known = last.take().filter(|(known, since, _)| (*known, *since) == (flow, generation));
            let admitted = if known.is_some() { Some(Admitted::All) } else { self.admits(port, &node, flow) };
            let Some(admitted) = admitted else { continue };
            if packet.header.bth.opcode == Opcode::CNP {
                cnp::notified(port, &node, &packet);
                continue;
            }
            let Some(endpoint) = known.map(|(.., endpoint)| endpoint).or_else(|| node.qp(flow.qpn)) else {
                PortCounters::bump(&counters.wire_dropped_no_qp);
                continue;
            };
            if admitted == Admitted::Connections && endpoint.qp().qp_type.is_datagram() {
                PortCounters::bump(&counters.wire_dropped_address);
                continue;
            }
            if faulty && is_lost(endpoint.qp(), flow.to.gid, &mut packet) {
                continue;
            }
            // A marked packet is handled alone, because its sender must be notified.
            let marked = is_marked(&packet);
            let alike = |(next, _): &Received<'_>| {
                !marked && !faulty && is_request(next) && !is_marked(next) && Flow::of(next) == flow
            };
            self.take(port, &endpoint, admitted, (packet, arrival), iter::from_fn(|| packets.next_if(alike)));
            last = Some((flow, generation, endpoint));
        }
        drop(packets);
        PortCounters::add(&counters.wire_frames_received, frames);
        PortCounters::add(&counters.wire_received_bytes, bytes);
    }

    fn is_slow(&self) -> bool {
        self.node.upgrade().is_some_and(|node| node.adapter.memory.is_slow())
    }

    fn send_data(&mut self, port: &Port, budget: &mut Budget) -> bool {
        if self.is_paused() {
            return false;
        }
        let sent = self.send_to_readers(port, budget.bytes().min(PASS_BYTES));
        budget.take_bytes(sent);
        !self.owing.is_empty()
    }

    fn respond(&mut self, port: &Port, resumed: Vec<Qpn>, most: u64) -> bool {
        if self.is_paused() {
            // The end of the pause names all responders again.
            return false;
        }
        self.sources.end_batch();
        if !self.notifications.is_empty() {
            port.send_urgent(&self.notifications);
            self.notifications.clear();
        }
        if let Some(node) = self.node.upgrade() {
            for endpoint in resumed.into_iter().filter_map(|qpn| node.qp(qpn)) {
                self.owe(&endpoint);
            }
        }
        let owing = !self.newly_owing.is_empty() || !self.owing.is_empty();
        self.drive_answered(if owing { most / 2 } else { most });
        let more = owing && self.drive_owing(port, most / 2);
        more || !self.answered.is_empty()
    }
}
