//! What the queue pairs of a device can reach, and who may talk to whom.

use std::sync::Arc;

use pvrdma_verbs::Qpn;

use crate::adapter::Adapter;
use crate::counters::Tally;
use crate::drive::Endpoint;
use crate::gid::BoundGid;
use crate::path::datagram::{Destination, Resolver};
use crate::path::directory::{Directory, Node};
use crate::path::wire::peer_window::PeerWindows;
use crate::port::Port;

/// What the queue pairs of a device can reach, and how.
#[derive(Debug)]
pub(crate) struct Fabric {
    /// The device.
    pub(crate) own: Arc<Adapter>,
    /// Everybody in this process.
    pub(crate) directory: Arc<Directory<Endpoint>>,
    /// Others in this process are reached directly. Otherwise only the device itself is.
    pub(crate) local: bool,
    /// The way to other hosts, if the device is plugged in.
    pub(crate) port: Option<Arc<Port>>,
    /// What is in flight on it, by peer.
    pub(crate) windows: PeerWindows,
}

impl Fabric {
    /// The device that has a GID, if it is reached directly.
    pub(crate) fn neighbour(&self, gid: BoundGid) -> Option<Arc<Node<Endpoint>>> {
        self.directory.find(gid).filter(|node| self.local || node.adapter.id == self.own.id)
    }

    /// Returns `true` if neither device minds the other. One may always talk to itself.
    pub(crate) fn may_meet(&self, from: BoundGid, node: &Node<Endpoint>, to: BoundGid) -> bool {
        let theirs = &node.adapter;
        theirs.id == self.own.id || self.own.rules.allow_peer(to.gid) && theirs.rules.allow_peer(from.gid)
    }
}

impl Resolver for Fabric {
    fn generation(&self) -> u64 {
        self.directory.generation()
    }

    fn find(&self, source: BoundGid, to: BoundGid, qpn: Qpn, tally: &mut Tally) -> Destination {
        let owner = self.neighbour(to);
        let allowed = match &owner {
            Some(node) => self.may_meet(source, node, to),
            None => self.own.rules.allow_peer(to.gid),
        };
        if !allowed {
            tally.peers_refused += 1;
            return Destination::Nowhere;
        }
        if owner.is_none() && self.port.is_some() {
            return Destination::Wire;
        }
        if owner.is_none() && to.gid.is_multicast() {
            self.own.log.warn(
                module_path!(),
                format_args!("a datagram to group {}: members are beyond an uplink only", to.gid),
            );
        }
        let Some(node) = owner.filter(|node| node.adapter.gids.contains(to)) else {
            tally.ud_dropped_no_route += 1;
            return Destination::Nowhere;
        };
        if !node.adapter.is_link_up() {
            tally.dropped_link_down += 1;
            return Destination::Nowhere;
        }
        let Some(peer) = node.qp(qpn).filter(|peer| peer.qp().qp_type.is_datagram()) else {
            tally.ud_dropped_no_qp += 1;
            return Destination::Nowhere;
        };
        Destination::Peer(Arc::clone(peer.qp()))
    }
}
