//! What local delivery remembers of a connection.

use std::sync::{Arc, Weak};

use pvrdma_verbs::{Gid, Qpn};
use serde::Serialize;

use crate::capture::SyntheticTrace;
use crate::gid::BoundGid;
use crate::qp::Qp;
use crate::qp::contact::Connection;

/// The way to a peer of this process, remembered from request to request.
#[derive(Debug, Default)]
pub(crate) struct LocalRoute {
    /// The directory's generation when it was looked up.
    pub(crate) generation: u64,
    /// The GID we send from.
    pub(crate) source: Option<BoundGid>,
    peer: Weak<Qp>,
    /// Whose requests these are, and for whom.
    pub(crate) connection: Connection,
    /// What a capture has seen of the connection, until its QP is reset.
    pub(crate) trace: Option<Box<SyntheticTrace>>,
}

/// The way to a peer of this process, at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct LocalRouteInspect {
    /// The GID we send from, if it was bound.
    source: Option<Gid>,
    /// The peer, if it is there.
    peer: Option<LocalPeer>,
}

/// A QP of this process.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct LocalPeer {
    device: String,
    qpn: Qpn,
}

impl LocalRoute {
    /// Describes itself.
    pub(crate) fn inspect(&self) -> LocalRouteInspect {
        let peer = self.peer.upgrade().filter(|peer| !peer.state.is_dead());
        LocalRouteInspect {
            source: self.source.map(|source| source.gid),
            peer: peer.map(|peer| LocalPeer { device: peer.adapter.name.clone(), qpn: peer.qpn }),
        }
    }

    /// The peer, unless it must be looked up again.
    #[inline]
    pub(crate) fn peer(&self, generation: u64) -> Option<Arc<Qp>> {
        if self.generation != generation {
            return None;
        }
        self.peer.upgrade().filter(|peer| !peer.state.is_dead())
    }

    /// Takes over what the directory says.
    pub(crate) fn set_peer(&mut self, generation: u64, source: Option<BoundGid>, peer: Option<&Arc<Qp>>) {
        self.generation = generation;
        self.source = source;
        self.peer = peer.map_or_else(Weak::new, Arc::downgrade);
    }

    /// Forgets the way: the addresses may have changed.
    pub(crate) fn forget(&mut self) {
        self.set_peer(0, None, None);
    }
}
