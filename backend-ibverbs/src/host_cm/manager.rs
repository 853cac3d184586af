//! Connections of a device: work of the guest, events of the host, and deadlines.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use pvrdma_base::Count;
use pvrdma_ib_cm::terminated::{
    ConnectionData, GuestConnections, HostSide, Maximum, NO_QP, PeerRequest, Stage, of_req,
};
use pvrdma_ib_cm::{Mad, RejectReason};
use pvrdma_verbs_types::Qpn;

use super::listeners::Listeners;
use super::side::{HostPart, Side};
use crate::adapter::Adapter;
use crate::cm_paths::CmPaths;
use crate::counters::bump;
use crate::datagram::Datagram;
use crate::gid::Bound;
use crate::rdmacm::{CmId, EventChannel, HostEvent, HostEventKind, Libraries};

/// Maximum numbers of connections of a device.
pub(super) const MAXIMUM: Maximum = Maximum { in_progress: 64, kept: 4096 };

/// All connections of a device.
pub(super) struct Manager {
    adapter: Arc<Adapter>,
    channel: Arc<EventChannel>,
    listeners: Listeners,
    pub(super) connections: GuestConnections<Side>,
}

impl Manager {
    pub(super) fn new(adapter: &Arc<Adapter>, libraries: &Libraries) -> io::Result<Self> {
        let channel = EventChannel::open(libraries)?;
        let side = Side::new(adapter, Arc::clone(&channel));
        Ok(Self {
            adapter: Arc::clone(adapter),
            channel,
            listeners: Listeners::default(),
            connections: GuestConnections::new(side, MAXIMUM),
        })
    }

    /// Returns the files that report work and events of the host.
    pub(super) fn files(&self) -> (&CmPaths, &EventChannel) {
        (&self.adapter.cm_paths, &self.channel)
    }

    /// Returns the time of the next deadline.
    pub(super) fn deadline(&self) -> Option<Duration> {
        self.connections.deadline()
    }

    /// Processes work of the guest.
    pub(super) fn work(&mut self, now: Duration) {
        let work = self.adapter.cm_paths.take_work();
        if work.addresses {
            self.listeners.update(&self.adapter, &self.channel);
        }
        for key in work.ended {
            self.connections.close(now, key, NO_QP, &[]);
        }
        for (source, datagram) in work.datagrams {
            self.datagram(now, &source, &datagram);
        }
    }

    /// Processes up to `most` events of the host.
    pub(super) fn host_events(&mut self, now: Duration, most: usize) -> io::Result<()> {
        for _ in 0..most {
            let Some(event) = self.channel.next_event()? else { break };
            self.host_event(now, event);
        }
        Ok(())
    }

    /// Processes deadlines that have passed.
    pub(super) fn timeouts(&mut self, now: Duration) {
        self.connections.timeouts(now);
    }

    /// Reports that the host's connection manager is unusable. All connections end when the caller drops this value.
    pub(super) fn lost(&self, error: &io::Error) {
        let log = &self.adapter.log;
        log.error(module_path!(), format_args!("the host's connection manager makes no connections any more: {error}"));
    }

    fn datagram(&mut self, now: Duration, source: &Bound, datagram: &Datagram) {
        let is_message = datagram.to.qpn == Qpn::GSI && datagram.immediate.is_none();
        let Some(mad) = Mad::parse(&datagram.payload).ok().filter(|_| is_message) else {
            return bump(&self.adapter.counters.cm_refused);
        };
        self.connections.message(now, source, datagram.to.dgid, mad);
    }

    fn host_event(&mut self, now: Duration, event: HostEvent) {
        let HostEvent { id, kind, status, data, new } = event;
        if kind == HostEventKind::Request {
            if let Some(new) = new {
                self.asked(now, id, new, &data);
            }
            return;
        }
        let connections = &mut self.connections;
        let Some(key) = connections.host.by_host.get(&id).copied() else { return };
        let stage = connections.stage(key);
        match (kind, stage) {
            (HostEventKind::AddressResolved | HostEventKind::RouteResolved, Some(Stage::Connecting)) => {
                self.resolved(now, key, kind);
            }
            (HostEventKind::Accepted | HostEventKind::Established, Some(Stage::Connecting)) => {
                connections.offer(now, key, &data);
            }
            (HostEventKind::Established, Some(Stage::Accepting)) => connections.accepted(key),
            (HostEventKind::Rejected, _) => {
                // InfiniBand has reasons, iWARP has an errno.
                let reason = u16::try_from(status).map_or(RejectReason::CONSUMER, RejectReason);
                connections.close(now, key, reason, &data.private_data);
            }
            (HostEventKind::Disconnected, Some(Stage::Established | Stage::Offered)) => {
                // This confirms the end to the peer.
                if let Some(Err(error)) = connections.part(key).map(|(part, _)| part.id.disconnect()) {
                    log::debug!("{}: the end of a connection is not confirmed: {error}", self.adapter.name);
                }
                connections.close(now, key, RejectReason::TIMEOUT, &[]);
            }
            (HostEventKind::Unreachable | HostEventKind::Disconnected | HostEventKind::DeviceRemoved, _) => {
                connections.close(now, key, RejectReason::TIMEOUT, &[]);
            }
            _ => {}
        }
    }

    /// Continues once the peer's address or path is known. The connection must use this adapter.
    fn resolved(&mut self, now: Duration, key: u32, kind: HostEventKind) {
        let most = self.connections.host.max_rd_atomic();
        let Some((part, Some(req))) = self.connections.part(key) else { return };
        if part.asked {
            return;
        }
        let continued = match kind {
            HostEventKind::AddressResolved if !is_ours(&self.adapter, &part.id) => {
                Err(io::Error::other("the host's route to the peer does not use this adapter"))
            }
            HostEventKind::AddressResolved => part.id.resolve_route(),
            _ => {
                part.asked = true;
                part.id.connect(&of_req(req, most))
            }
        };
        if let Err(error) = continued {
            self.connections.fail(now, key, &error);
        }
    }

    /// Handles a peer's request for a connection to a port of the guest.
    fn asked(&mut self, now: Duration, listener: usize, id: CmId, data: &ConnectionData) {
        let part = HostPart { id, asked: false };
        let refused = match self.admit(listener, &part.id) {
            Ok((own, own_port, peer)) => {
                self.connections.ask(now, PeerRequest { own, own_port, peer, data }, part).err()
            }
            Err(counter) => {
                bump(counter);
                Some(part)
            }
        };
        if let Some(mut part) = refused {
            self.connections.host.by_host.remove(&part.id.address());
            self.connections.host.reject(&mut part, &[]);
        }
    }

    /// Returns the guest's address and port, and the peer's, or the counter of requests that are refused like this one.
    fn admit(&self, listener: usize, id: &CmId) -> Result<(Bound, u16, SocketAddr), &Count> {
        let counters = &self.adapter.counters;
        let (own, port) = self.listeners.find(listener).ok_or(&counters.cm_refused)?;
        let ours = is_ours(&self.adapter, id);
        let [_, peer] = id.addresses().filter(|_| ours).ok_or(&counters.cm_refused)?;
        if self.adapter.shared.fabric.may_meet(&self.adapter.member, own.gid, peer.ip().into()) {
            Ok((own, port, peer))
        } else {
            Err(&counters.peers_refused)
        }
    }
}

/// Returns `true` if an identifier uses the adapter's port.
fn is_ours(adapter: &Adapter, id: &CmId) -> bool {
    let config = &adapter.shared.config;
    id.device().is_some_and(|(name, port)| name == config.device && port == config.port)
}
