//! Reachability of peers for the queue pairs of a device, and the rules for it.

use std::sync::Arc;

use pvrdma_pacing::PeerWindows;
use pvrdma_verbs_types::Qpn;

use crate::adapter::Adapter;
use crate::counters::Tally;
use crate::gid::BoundGid;
use crate::path::datagram::{Destination, Resolver};
use crate::path::directory::{Directory, Generations, Node};
use crate::port::Port;
use crate::qp::Qp;
use crate::task::Task;

/// Peers that the queue pairs of a device can reach, and the means to reach them. `Q` is a queue pair that can run.
#[derive(Debug)]
pub(crate) struct Fabric<Q> {
    /// The device itself.
    pub(crate) own: Arc<Adapter>,
    /// All devices in this process.
    pub(crate) directory: Arc<Directory<Q>>,
    /// Set if other devices in this process are reached by local delivery. Otherwise only the device itself is.
    pub(crate) local: bool,
    /// The port to other hosts, if the device is plugged in.
    pub(crate) port: Option<Arc<Port>>,
    /// Congestion windows on the port, by peer.
    pub(crate) windows: PeerWindows<Task>,
}

impl<Q> Fabric<Q> {
    /// Returns the device that owns a GID, if it is reached by local delivery.
    pub(crate) fn neighbour(&self, gid: BoundGid) -> Option<Arc<Node<Q>>> {
        self.directory.find(gid).filter(|node| self.local || node.adapter.id == self.own.id)
    }

    /// Returns `true` if both devices' peer rules allow the connection. Loopback is always allowed.
    pub(crate) fn may_meet(&self, from: BoundGid, node: &Node<Q>, to: BoundGid) -> bool {
        let theirs = &node.adapter;
        theirs.id == self.own.id || self.own.rules.allow_peer(to.gid) && theirs.rules.allow_peer(from.gid)
    }
}

impl<Q: AsRef<Arc<Qp>> + Send + Sync + 'static> Resolver for Fabric<Q> {
    fn generation(&self) -> u64 {
        self.directory.generation()
    }

    fn generations(&self) -> Generations {
        self.directory.generations()
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
        if owner.is_none()
            && let Some(meeting) = self.own.iwarp.as_ref().filter(|meeting| meeting.reaches(to.gid))
        {
            return Destination::Iwarp(Arc::clone(meeting));
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
        if node.adapter.paused.is_set() {
            return Destination::Paused(Arc::clone(&node.adapter));
        }
        if !node.adapter.is_link_up() {
            tally.dropped_link_down += 1;
            return Destination::Nowhere;
        }
        let peer = node.qp(qpn).map(|peer| Arc::clone(Q::as_ref(&peer)));
        let Some(peer) = peer.filter(|peer| peer.qp_type.is_datagram()) else {
            tally.ud_dropped_no_qp += 1;
            return Destination::Nowhere;
        };
        Destination::Peer(peer)
    }
}
