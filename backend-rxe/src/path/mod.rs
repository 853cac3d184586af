//! The paths from a requester to a responder: local delivery to a peer of this process, the wire to one of another.
//!
//! # Which path a request takes
//!
//! A destination GID that is bound in this process is reached by local delivery, any other through the port if there is
//! one. A connected QP decides with its first request and stays with it until RESET: PSNs on the wire and positions in
//! local delivery cannot be told from each other. State for the wire is made when it is needed, so that other QPs do
//! not pay for it. So when a GID moves, from the network to a device of this process or back, its connections do not
//! move along: existing connections fail with "retry exceeded", as if the peer's host had died. A datagram QP decides
//! with each request.
//!
//! [`crate::drive`] is the only place that chooses. A path gets what it needs lent: the QP, its requester half, the
//! route's own state, guest memory.

pub(crate) mod datagram;
pub(crate) mod directory;
pub(crate) mod local;
pub(crate) mod wire;

use std::time::Duration;

use pvrdma_verbs::QpType;
use serde::Serialize;

use crate::flows::Road;
use datagram::DatagramRoute;
use local::{LocalRoute, LocalRouteInspect};
use wire::rc::{WireRequester, WireRequesterInspect};

/// How the requests of a QP get to their peer, with what the path remembers between them.
#[derive(Debug)]
pub(crate) enum Route {
    /// A connected QP that has not found its peer yet. What local delivery has seen so far is kept.
    Unresolved(LocalRoute),
    /// The peer is in this process.
    Local(LocalRoute),
    /// The peer is on the network.
    Wire(Box<WireRequester>),
    /// A datagram QP: each request has a path of its own.
    Datagram(Box<DatagramRoute>),
}

/// A route at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(tag = "path", rename_all = "snake_case")]
pub(crate) enum RouteInspect {
    /// The peer was not found yet.
    Unresolved,
    /// The peer is in this process.
    Local(LocalRouteInspect),
    /// The peer is on the network.
    Wire(Box<WireRequesterInspect>),
    /// Each request has a path of its own.
    Datagram,
}

impl Route {
    /// Describes itself.
    pub(crate) fn inspect(&self, now: Duration) -> RouteInspect {
        match self {
            Self::Unresolved(_) => RouteInspect::Unresolved,
            Self::Local(local) => RouteInspect::Local(local.inspect()),
            Self::Wire(wire) => RouteInspect::Wire(Box::new(wire.inspect(now))),
            Self::Datagram(_) => RouteInspect::Datagram,
        }
    }

    /// What it is, as [`Self::inspect`] says.
    pub(crate) const fn word(&self) -> &'static str {
        match self {
            Self::Unresolved(_) => "unresolved",
            Self::Local(_) => "local",
            Self::Wire(_) => "wire",
            Self::Datagram(_) => "datagram",
        }
    }

    /// How all requests of a QP get to its peer. `None`: each has a way of its own, or none was found yet.
    #[inline]
    pub(crate) const fn road(&self) -> Option<Road> {
        match self {
            Self::Local(_) => Some(Road::Local),
            Self::Wire(_) => Some(Road::Wire),
            Self::Unresolved(_) | Self::Datagram(_) => None,
        }
    }

    /// The route of a QP that has sent nothing.
    pub(crate) fn new(qp_type: QpType) -> Self {
        if qp_type.is_datagram() { Self::Datagram(Box::default()) } else { Self::Unresolved(LocalRoute::default()) }
    }
}
