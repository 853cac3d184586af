//! State of a connection in local delivery.

use std::sync::{Arc, Weak};

use pvrdma_verbs_types::{Gid, Qpn};
use serde::Serialize;

use crate::adapter::Adapter;
use crate::capture::SyntheticTrace;
use crate::gid::BoundGid;
use crate::qp::Qp;
use crate::qp::contact::Connection;

/// Route to a peer in the same process, kept from request to request.
#[derive(Debug, Default)]
pub(crate) struct LocalRoute {
    /// Generation of the directory at the last lookup.
    pub(crate) generation: u64,
    /// The GID that requests are sent from.
    pub(crate) source: Option<BoundGid>,
    peer: Weak<Qp>,
    /// The adapter of the peer, if it was paused at the last lookup. `peer` is empty then.
    pub(crate) paused: Weak<Adapter>,
    /// Identity of the connection: ties requester and responder together.
    pub(crate) connection: Connection,
    /// State of captures for the connection, until its QP is reset.
    pub(crate) trace: Option<Box<SyntheticTrace>>,
}

/// State of a local route at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct LocalRouteInspect {
    /// The GID that requests are sent from, if it was bound.
    source: Option<Gid>,
    /// The peer, if it exists.
    peer: Option<LocalPeer>,
}

/// A QP in the same process.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct LocalPeer {
    device: String,
    qpn: Qpn,
}

impl LocalRoute {
    /// Creates the route of a connection that was met before. The peer is looked up again.
    pub(crate) fn restore(connection: Connection) -> Self {
        Self { connection, ..Self::default() }
    }

    /// Returns the state of the route for inspection.
    pub(crate) fn inspect(&self) -> LocalRouteInspect {
        let peer = self.peer.upgrade().filter(|peer| !peer.state.is_dead());
        LocalRouteInspect {
            source: self.source.map(|source| source.gid),
            peer: peer.map(|peer| LocalPeer { device: peer.adapter.name.clone(), qpn: peer.qpn }),
        }
    }

    /// Returns the peer, unless it must be looked up again.
    #[inline]
    pub(crate) fn peer(&self, generation: u64) -> Option<Arc<Qp>> {
        if self.generation != generation {
            return None;
        }
        self.peer.upgrade().filter(|peer| !peer.state.is_dead())
    }

    /// Stores the result of a lookup in the directory.
    pub(crate) fn set_peer(&mut self, generation: u64, source: Option<BoundGid>, peer: Option<&Arc<Qp>>) {
        self.generation = generation;
        self.source = source;
        self.peer = peer.map_or_else(Weak::new, Arc::downgrade);
        self.paused = Weak::new();
    }

    /// Forgets the route, because the addresses may have changed.
    pub(crate) fn forget(&mut self) {
        self.set_peer(0, None, None);
    }
}
