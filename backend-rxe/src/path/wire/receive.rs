//! Frames that came for the device: which queue pair, which half, or why not.

use std::sync::{Arc, Weak};

use pvrdma_verbs::QpType;

use super::{gid_kind, rate_limiter, rc, ud};
use crate::hca::{Adapter, BoundGid};
use crate::port::Port;
use crate::port::counters::PortCounters;
use crate::qp::Qp;
use pvrdma_ether_link::Frames;
use pvrdma_roce::wire::{Opcode, Packet};
use pvrdma_roce::{DropReason, admit};

/// What the frames of a batch leave to do. Answers are given when the batch is through, so that one acknowledgement confirms
/// many packets.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    /// Responders that owe answers, in the order in which they began to.
    owing: Vec<Weak<Qp>>,
    /// Requesters that got answers.
    answered: Vec<Arc<Qp>>,
    /// Congestion notifications, which go first.
    notifications: Frames,
}

impl Inbox {
    /// Takes one frame.
    pub(crate) fn take(&mut self, port: &Port, adapter: &Arc<Adapter>, frame: &[u8]) {
        let counters = &port.counters;
        PortCounters::bump(&counters.wire_frames_received);
        PortCounters::add(&counters.wire_bytes_received, frame.len() as u64);
        let Ok(packet) = Packet::parse(frame) else { return PortCounters::bump(&counters.wire_dropped_malformed) };
        let header = &packet.header;
        let kind = gid_kind(header.network.kind());
        let to = BoundGid { gid: header.network.destination(), kind, vlan: header.ethernet.vlan_id() };
        if !adapter.has_gid(to) {
            let tag_is_wrong = adapter.is_in_other_vlan(to);
            return PortCounters::bump(match tag_is_wrong {
                true => &counters.wire_dropped_vlan,
                false => &counters.wire_dropped_address,
            });
        }
        // Whoever has a GID of our own fabric would be delivered to directly, and says so on the wire only to deceive.
        if adapter.shared.fabric.find(to.beside(header.network.source())).is_some() {
            return PortCounters::bump(&counters.wire_dropped_address);
        }
        if header.bth.opcode == Opcode::CNP {
            return rate_limiter::notified(port, adapter, &packet);
        }
        let Some(qp) = adapter.qp(header.bth.destination) else {
            return PortCounters::bump(&counters.wire_dropped_no_qp);
        };
        let taken = match qp.qp_type {
            QpType::Ud | QpType::Gsi => admit(&packet, qp.qp_type).map(|_| ud::deliver(port, &qp, &packet)),
            QpType::Rc => self.connected(port, &qp, &packet, frame),
        };
        match taken {
            Ok(()) => rate_limiter::marked(port, &qp, &packet, &mut self.notifications),
            Err(DropReason::Damaged(_)) => PortCounters::bump(&counters.wire_dropped_damaged),
            Err(DropReason::Address) => PortCounters::bump(&counters.wire_dropped_address),
            Err(DropReason::Version | DropReason::Opcode | DropReason::Pkey) => {
                PortCounters::bump(&counters.wire_dropped_refused);
            }
        }
    }

    fn connected(&mut self, port: &Port, qp: &Arc<Qp>, packet: &Packet<'_>, frame: &[u8]) -> Result<(), DropReason> {
        let operation = packet.header.bth.opcode.info().map(|info| info.operation);
        if operation.is_some_and(|operation| operation.is_response()) {
            rc::take_answer(port, qp, packet)?;
            if !self.answered.iter().any(|known| Arc::ptr_eq(known, qp)) {
                self.answered.push(Arc::clone(qp));
            }
            return Ok(());
        }
        rc::take_request(port, qp, packet, frame)?;
        if !self.owing.iter().any(|known| Weak::ptr_eq(known, &qp.me)) {
            self.owing.push(Weak::clone(&qp.me));
        }
        Ok(())
    }

    /// Has requesters go on and responders answer. Whether there is more to do at once.
    pub(crate) fn answer(&mut self, port: &Port) -> bool {
        if !self.notifications.is_empty() {
            port.send(std::mem::take(&mut self.notifications));
        }
        port.take_resumed(&mut self.owing);
        for qp in self.answered.drain(..) {
            qp.drive_inline();
        }
        // Those that are not through come after the others in the next round.
        self.owing.retain(|qp| qp.upgrade().is_some_and(|qp| !rc::answer(port, &qp)));
        !self.owing.is_empty() && !port.uplink.is_full()
    }
}
