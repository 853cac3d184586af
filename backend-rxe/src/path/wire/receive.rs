//! Frames that came for a device: which queue pair, which half, or why not.

use std::sync::{Arc, Weak};

use pvrdma_ether_link::Frames;
use pvrdma_roce::wire::{Opcode, Packet};
use pvrdma_roce::{DropReason, admit};
use pvrdma_verbs::{QpType, Qpn};

use super::{cnp, ud};
use crate::drive::Endpoint;
use crate::gid::BoundGid;
use crate::path::directory::{Directory, Node};
use crate::port::counters::PortCounters;
use crate::port::{Port, RoceReceiver};

/// What the frames of a batch leave to do. Responses are sent when the batch is through, so that one acknowledgement
/// covers many packets.
#[derive(Debug)]
pub(crate) struct Inbox {
    /// The device behind the port, which is made anew whenever the guest's driver starts.
    node: Weak<Node<Endpoint>>,
    directory: Arc<Directory<Endpoint>>,
    /// Responders that owe responses, in the order in which they began to.
    owing: Vec<Weak<Endpoint>>,
    /// Requesters that got responses.
    answered: Vec<Arc<Endpoint>>,
    /// Congestion notifications, which go first.
    notifications: Frames,
}

impl Inbox {
    pub(crate) fn new(node: &Arc<Node<Endpoint>>, directory: Arc<Directory<Endpoint>>) -> Self {
        let (owing, answered, notifications) = (Vec::new(), Vec::new(), Frames::default());
        Self { node: Arc::downgrade(node), directory, owing, answered, notifications }
    }

    fn take(&mut self, port: &Port, node: &Node<Endpoint>, frame: &[u8]) {
        let counters = &port.counters;
        PortCounters::bump(&counters.wire_frames_received);
        PortCounters::add(&counters.wire_received_bytes, frame.len() as u64);
        let Ok(packet) = Packet::parse(frame) else { return PortCounters::bump(&counters.wire_dropped_malformed) };
        let header = &packet.header;
        let (kind, gid) = (header.network.kind(), header.network.destination());
        let to = BoundGid::on_network(kind, gid, header.ethernet.vlan_id());
        let gids = &node.adapter.gids;
        if !gids.contains(to) {
            return PortCounters::bump(match gids.is_in_other_vlan(to) {
                true => &counters.wire_dropped_vlan,
                false => &counters.wire_dropped_address,
            });
        }
        // A local GID as source of a wire packet is spoofed: local peers never use the wire.
        if self.directory.find(to.beside(header.network.source())).is_some() {
            return PortCounters::bump(&counters.wire_dropped_address);
        }
        if header.bth.opcode == Opcode::CNP {
            return cnp::notified(port, node, &packet);
        }
        let Some(endpoint) = node.qp(header.bth.destination) else {
            return PortCounters::bump(&counters.wire_dropped_no_qp);
        };
        let qp = endpoint.qp();
        let taken = match qp.qp_type {
            QpType::Ud | QpType::Gsi => admit(&packet, qp.qp_type).map(|_| ud::deliver(port, qp, &packet)),
            QpType::Rc => self.connected(port, &endpoint, &packet, frame),
        };
        match taken {
            Ok(()) => cnp::marked(port, &endpoint, &packet, &mut self.notifications),
            Err(DropReason::Damaged(_)) => PortCounters::bump(&counters.wire_dropped_damaged),
            Err(DropReason::Address) => PortCounters::bump(&counters.wire_dropped_address),
            Err(DropReason::State) => PortCounters::bump(&counters.wire_dropped_state),
            Err(DropReason::Version | DropReason::Opcode | DropReason::Pkey) => {
                PortCounters::bump(&counters.wire_dropped_refused);
            }
        }
    }

    fn connected(
        &mut self,
        port: &Port,
        endpoint: &Arc<Endpoint>,
        packet: &Packet<'_>,
        frame: &[u8],
    ) -> Result<(), DropReason> {
        let operation = packet.header.bth.opcode.info().map(|info| info.operation);
        if operation.is_some_and(|operation| operation.is_response()) {
            endpoint.take_response(port, packet)?;
            if !self.answered.iter().any(|known| Arc::ptr_eq(known, endpoint)) {
                self.answered.push(Arc::clone(endpoint));
            }
            return Ok(());
        }
        endpoint.take_request(port, packet, frame)?;
        self.owe(endpoint);
        Ok(())
    }

    /// A responder sends what it owes when the batch is through.
    fn owe(&mut self, endpoint: &Arc<Endpoint>) {
        if !self.owing.iter().any(|known| std::ptr::eq(known.as_ptr(), Arc::as_ptr(endpoint))) {
            self.owing.push(Arc::downgrade(endpoint));
        }
    }
}

impl RoceReceiver for Inbox {
    fn receive(&mut self, port: &Port, frame: &[u8]) -> bool {
        let node = self.node.upgrade();
        if let Some(node) = &node {
            self.take(port, node, frame);
        }
        node.is_some()
    }

    fn respond(&mut self, port: &Port, resumed: Vec<Qpn>) -> bool {
        if !self.notifications.is_empty() {
            port.send(std::mem::take(&mut self.notifications));
        }
        if let Some(node) = self.node.upgrade() {
            for endpoint in resumed.into_iter().filter_map(|qpn| node.qp(qpn)) {
                self.owe(&endpoint);
            }
        }
        for endpoint in self.answered.drain(..) {
            endpoint.run_inline();
        }
        // Those that are not through come after the others in the next round.
        self.owing.retain(|endpoint| endpoint.upgrade().is_some_and(|endpoint| !endpoint.respond(port)));
        !self.owing.is_empty() && !port.uplink.is_full()
    }
}
