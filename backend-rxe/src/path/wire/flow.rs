//! Flows of received packets.

use pvrdma_packet::MacAddr;
use pvrdma_roce::wire::Packet;
use pvrdma_verbs_types::{Gid, Qpn};

use crate::gid::BoundGid;

/// Identity of packets that take the same path to the same queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Flow {
    pub(super) to: BoundGid,
    pub(super) from: Gid,
    /// Source Ethernet address.
    pub(super) station: MacAddr,
    pub(super) qpn: Qpn,
}

impl Flow {
    pub(super) fn of(packet: &Packet<'_>) -> Self {
        let header = &packet.header;
        let network = &header.network;
        let to = BoundGid::on_network(network.kind(), network.destination(), header.ethernet.vlan_id());
        Self { to, from: network.source(), station: header.ethernet.source, qpn: header.bth.destination }
    }
}
