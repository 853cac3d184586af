//! Congestion notification packets (IBA annex A17.9): sends them for marked packets, and handles those that arrive for
//! queue pairs of this device.

use pvrdma_link::Frames;
use pvrdma_roce::{
    Path, admit_notification,
    wire::{Ecn, MAX_FRAME, Network, Operation, Packet},
};
use pvrdma_verbs_types::{Qpn, UdDestination};

use crate::drive::Endpoint;
use crate::gid::BoundGid;
use crate::path::directory::Node;
use crate::port::Port;
use crate::port::counters::PortCounters;

/// Notifies the sender of a packet that arrived with a congestion mark and that a QP has accepted. The sender then
/// slows down.
pub(super) fn marked(port: &Port, endpoint: &Endpoint, packet: &Packet<'_>, out: &mut Frames) {
    let header = &packet.header;
    if header.network.ecn() != Ecn::Congested || matches!(header.network, Network::V1(_)) {
        return;
    }
    PortCounters::bump(&port.counters.wire_marked);
    let Some(config) = port.congestion() else { return };
    let now = endpoint.qp().adapter.engine.now();
    if !endpoint.rate().is_notification_due(packet, config, now) {
        return;
    }
    let operation = header.bth.opcode.info().map(|info| info.operation);
    let target = match header.extension.deth() {
        Some(deth) => datagram_path(endpoint, packet, deth.source).map(|path| (path, deth.source)),
        None if operation == Some(Operation::ReadResponse) => endpoint.request_path(),
        // The marked packet need not be the last one: kept packets may have been handled behind it.
        None => endpoint.path_of(packet),
    };
    if let Some((path, remote)) = target
        && out.push_with(MAX_FRAME, |room| path.notification(remote, config, room))
    {
        PortCounters::bump(&port.counters.wire_cnps_sent);
    }
}

/// Returns the path back to the sender of a datagram.
fn datagram_path(endpoint: &Endpoint, packet: &Packet<'_>, source: Qpn) -> Option<Path> {
    let (qp, header) = (endpoint.qp(), &packet.header);
    let network = &header.network;
    let bound = BoundGid::on_network(network.kind(), network.destination(), header.ethernet.vlan_id());
    let (dgid, dmac) = (header.network.source(), header.ethernet.source);
    let to = UdDestination { qpn: source, dgid, dmac, ..UdDestination::default() };
    Path::datagram(&qp.adapter.origin(bound), &to, qp.qpn)
}

/// Handles a notification for a queue pair of this device.
pub(super) fn notified(port: &Port, node: &Node<Endpoint>, packet: &Packet<'_>) {
    let counters = &port.counters;
    PortCounters::bump(&counters.wire_cnps_received);
    let config = port.congestion().filter(|_| admit_notification(packet).is_ok());
    let endpoint = node.qp(packet.header.bth.destination);
    // Only the peer of a connection can slow it down. A datagram QP has many peers and no rate.
    match (config, endpoint) {
        (Some(config), Some(endpoint)) if is_from_peer(&endpoint, packet) => {
            let [a, b, c, d, e, f] = packet.header.ethernet.destination.0;
            let seed = u64::from_be_bytes([0, 0, a, b, c, d, e, f]) << 16 ^ u64::from(endpoint.qp().qpn.get());
            let port = packet.header.network.source_port();
            let cut = endpoint.rate().notify(config, node.adapter.engine.now(), seed, port);
            PortCounters::add(&counters.wire_rate_cuts, cut.into());
        }
        _ => PortCounters::bump(&counters.wire_cnps_ignored),
    }
}

fn is_from_peer(endpoint: &Endpoint, packet: &Packet<'_>) -> bool {
    if let Some((path, _)) = endpoint.response_path() {
        return path.leads_back(packet);
    }
    endpoint.request_path().is_some_and(|(path, _)| path.leads_back(packet))
}
