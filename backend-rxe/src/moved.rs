//! Connections of a device that moves to another host without its local peers.
//!
//! Two queue pairs of one process are connected by local delivery, which has no PSNs. When one of their devices moves,
//! they continue on the network. Both ends still have the first PSNs on which their owners agreed, and no packet has
//! used them, so the connection starts there. A message in progress starts from its beginning: it is retransmitted into
//! the receive that it had taken. No request was completed at one end only, because the device that moves is paused.
//!
//! A connection between two queue pairs of the device itself stays local.

use std::collections::HashSet;
use std::sync::Arc;

use pvrdma_verbs::VerbsError;
use pvrdma_verbs_types::QpState;

use crate::drive::{Endpoint, Parts};
use crate::hca::RxeHca;
use crate::path::Route;
use crate::path::directory::Node;
use crate::path::local::LocalRoute;
use crate::qp::contact::Connection;
use crate::qp::error_cause::ErrorCause;

/// Local connections of a queue pair in the two directions, or [`Connection::NONE`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Directions {
    requests: Connection,
    responses: Connection,
}

impl Directions {
    fn of(parts: &Parts<'_>) -> Self {
        let requests = match &*parts.route {
            Route::Unresolved(local) | Route::Local(local) => local.connection,
            Route::Wire(_) | Route::Stream(_) | Route::Datagram(_) => Connection::NONE,
        };
        Self { requests, responses: parts.responder.connection }
    }
}

/// Lets the two halves look for their peer on the network, if `ends` holds for their connection. A requester that has
/// found its peer, and has had no request accepted, looks for it again in any case.
fn part(parts: &mut Parts<'_>, ends: impl Fn(Connection) -> bool) {
    if ends(parts.responder.connection) {
        parts.responder.connection = Connection::NONE;
    }
    if let Route::Unresolved(local) | Route::Local(local) = &*parts.route
        && (local.connection == Connection::NONE || ends(local.connection))
    {
        *parts.route = Route::Unresolved(LocalRoute::default());
        parts.requester.start_over();
    }
}

impl RxeHca {
    /// Makes restored queue pairs look for their peers on the network, if these were local in the process in which the
    /// device was saved.
    ///
    /// # Errors
    /// There is no uplink, or its packets are too short.
    pub(crate) fn move_restored(&self) -> Result<(), VerbsError> {
        let endpoints = self.node.qps();
        let (mut requests, mut responses) = (HashSet::new(), HashSet::new());
        for endpoint in &endpoints {
            let directions = endpoint.with_parts(|parts| Directions::of(&parts));
            requests.extend(Some(directions.requests).filter(|connection| connection.is_local()));
            responses.extend(Some(directions.responses).filter(|connection| connection.is_local()));
        }
        let ends = |connection: Connection| {
            connection.is_local() && !(requests.contains(&connection) && responses.contains(&connection))
        };
        for endpoint in &endpoints {
            let port_mtu = endpoint.port_mtu();
            endpoint.with_parts(|mut parts| {
                let Directions { requests, responses } = Directions::of(&parts);
                let moves = ends(requests) || ends(responses);
                if moves && parts.fabric.port.is_none() {
                    return Err(VerbsError::Invalid("a peer on the network without an uplink"));
                }
                if moves && parts.responder.attrs.path_mtu.bytes() > port_mtu.bytes() {
                    return Err(VerbsError::Invalid("a path MTU above that of the port"));
                }
                parts.responder.left_peer = ends(parts.responder.connection);
                part(&mut parts, ends);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Ends restored connections: their queue pairs enter the error state, and owe their peers nothing. Returns their
    /// number.
    pub(crate) fn end_restored(&self) -> usize {
        let connected = |endpoint: &&Arc<Endpoint>| {
            let state = endpoint.qp().state();
            !endpoint.qp().qp_type.is_datagram() && !matches!(state, QpState::Reset | QpState::Init | QpState::Error)
        };
        let endpoints = self.node.qps();
        let ended: Vec<_> = endpoints.iter().filter(connected).collect();
        for endpoint in &ended {
            endpoint.with_parts(|parts| {
                parts.wire.reset(&parts.qp.adapter.engine);
                parts.qp.state.enter_error(ErrorCause::Command);
            });
        }
        ended.len()
    }

    /// Makes queue pairs of other devices of the process that are connected to this device look for it on the network.
    /// The adapter is paused, and its addresses are about to be unbound.
    pub(crate) fn leave_process(&self) {
        for endpoint in self.node.qps() {
            let Some((node, peer)) = self.neighbour(&endpoint) else { continue };
            if Arc::ptr_eq(&node, &self.node) {
                continue;
            }
            let own = endpoint.with_parts(|parts| Directions::of(&parts));
            // At the peer, the directions are exchanged.
            let met =
                |connection: Connection| connection.is_local() && [own.requests, own.responses].contains(&connection);
            peer.with_parts(|mut parts| part(&mut parts, met));
            peer.ring();
        }
    }

    /// Describes the connections that cannot continue on another host: those by iWARP, and those to devices of this
    /// process, without an uplink on which they could.
    pub(crate) fn bound_connections(&self) -> Vec<String> {
        let is_stream = |endpoint: &&Arc<Endpoint>| {
            self.adapter().iwarp.is_some() && endpoint.with_parts(|parts| matches!(parts.route, Route::Stream(_)))
        };
        let describe = |endpoint: &Arc<Endpoint>| {
            format!("QP {} is connected by iWARP, over a socket of this host", endpoint.qp().qpn)
        };
        let mut bound: Vec<_> = self.node.qps().iter().filter(is_stream).map(describe).collect();
        bound.extend(self.local_connections());
        bound
    }

    /// Describes the connections to devices of this process, unless they can continue on an uplink.
    fn local_connections(&self) -> Vec<String> {
        if self.fabric.port.as_ref().is_some_and(|port| port.uplink.link.leaves_process()) {
            return Vec::new();
        }
        let describe = |endpoint: &Arc<Endpoint>| {
            let (node, _) = self.neighbour(endpoint).filter(|(node, _)| !Arc::ptr_eq(node, &self.node))?;
            let (qpn, peer) = (endpoint.qp().qpn, &node.adapter.name);
            Some(format!("QP {qpn} is connected to device {peer} of this network, which has no uplink"))
        };
        self.node.qps().iter().filter_map(describe).collect()
    }

    /// Returns the queue pair of this process to which a queue pair is connected, with its device.
    fn neighbour(&self, endpoint: &Endpoint) -> Option<(Arc<Node<Endpoint>>, Arc<Endpoint>)> {
        if endpoint.qp().qp_type.is_datagram() || !endpoint.qp().state.receives() {
            return None;
        }
        let attrs = endpoint.with_parts(|parts| parts.responder.attrs);
        let source = endpoint.qp().source(attrs.av.sgid_index)?;
        let node = self.fabric.neighbour(source.beside(attrs.av.dgid))?;
        let peer = node.qp(attrs.dest_qpn)?;
        Some((node, peer))
    }
}
