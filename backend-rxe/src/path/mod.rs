//! The paths from a requester to a responder: local delivery to a peer in the same process, streams to iWARP peers, the
//! wire to any other peer.
//!
//! # Path of a request
//!
//! A destination GID that is bound in this process is reached by local delivery, any other through the port, if there
//! is one. A connected QP decides with its first request and keeps the path until RESET, because PSNs on the wire and
//! positions in local delivery cannot be converted into each other. State for the wire is allocated when it is needed,
//! so that other QPs do not pay for it. As a consequence, connections do not follow a GID that moves from the network
//! to a device of this process, or back: they fail with "retry exceeded", as if the peer's host had died. The exception
//! is a device that moves to another host with its state: [`crate::moved`]. A datagram QP decides with each request.
//!
//! A peer that is reached by iWARP is found when the guest moves its QP to RTR: only a connection that the guest's
//! `rdma_cm` has made leads to it ([`stream`]).
//!
//! Only [`crate::drive`] chooses a path. A path borrows the state that it needs: the QP, its requester half, the state
//! of the route, and guest memory.

pub(crate) mod datagram;
pub(crate) mod directory;
pub(crate) mod local;
pub(crate) mod stream;
pub(crate) mod wire;

use std::time::Duration;

use pvrdma_verbs_types::QpType;
use serde::Serialize;

use crate::flows::Road;
use datagram::DatagramRoute;
use local::{LocalRoute, LocalRouteInspect};
use stream::{StreamRoute, StreamRouteInspect};
use wire::rc::{WireRequester, WireRequesterInspect};

/// Path of a QP's requests to their peer, with the state of that path.
#[derive(Debug)]
pub(crate) enum Route {
    /// A connected QP that has not found its peer yet, with the state of local delivery so far.
    Unresolved(LocalRoute),
    /// The peer is in this process.
    Local(LocalRoute),
    /// The peer is on the network.
    Wire(Box<WireRequester>),
    /// The peer is reached by iWARP.
    Stream(Box<StreamRoute>),
    /// A datagram QP: each request has its own path.
    Datagram(Box<DatagramRoute>),
}

/// State of a route at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(tag = "path", rename_all = "snake_case")]
pub(crate) enum RouteInspect {
    /// The peer was not found yet.
    Unresolved,
    /// The peer is in this process.
    Local(LocalRouteInspect),
    /// The peer is on the network.
    Wire(Box<WireRequesterInspect>),
    /// The peer is reached by iWARP.
    Stream(Box<StreamRouteInspect>),
    /// Each request has its own path.
    Datagram,
}

impl Route {
    /// Returns the state of the route for inspection.
    pub(crate) fn inspect(&self, now: Duration) -> RouteInspect {
        match self {
            Self::Unresolved(_) => RouteInspect::Unresolved,
            Self::Local(local) => RouteInspect::Local(local.inspect()),
            Self::Wire(wire) => RouteInspect::Wire(Box::new(wire.inspect(now))),
            Self::Stream(stream) => RouteInspect::Stream(Box::new(stream.inspect())),
            Self::Datagram(_) => RouteInspect::Datagram,
        }
    }

    /// Returns the name of the variant, as [`Self::inspect`] reports it.
    pub(crate) const fn word(&self) -> &'static str {
        match self {
            Self::Unresolved(_) => "unresolved",
            Self::Local(_) => "local",
            Self::Wire(_) => "wire",
            Self::Stream(_) => "stream",
            Self::Datagram(_) => "datagram",
        }
    }

    /// Returns the path of all requests of a QP. `None`: each request has its own path, or the path has not been chosen
    /// yet.
    #[inline]
    pub(crate) const fn road(&self) -> Option<Road> {
        match self {
            Self::Local(_) => Some(Road::Local),
            Self::Wire(_) | Self::Stream(_) => Some(Road::Wire),
            Self::Unresolved(_) | Self::Datagram(_) => None,
        }
    }

    /// Returns the route of a QP that has not sent anything.
    pub(crate) fn new(qp_type: QpType) -> Self {
        if qp_type.is_datagram() { Self::Datagram(Box::default()) } else { Self::Unresolved(LocalRoute::default()) }
    }
}
