//! Connections of a device: messages of the guest, events of the host, and deadlines.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use pvrdma_base::Random;
use pvrdma_ib_cm::{Connection, Event, Mad, Message, RejectReason, Req, State, answer_without_connection};
use pvrdma_verbs_types::{Gid, Qpn, UdDestination};

use super::end::{End, Stage};
use super::listeners::Listeners;
use super::messages::{self, REJ_PRIVATE};
use crate::adapter::Adapter;
use crate::cm_paths::{CmPaths, PathAttributes};
use crate::counters::bump;
use crate::datagram::Datagram;
use crate::gid::Bound;
use crate::rdmacm::{CmId, ConnectionData, EventChannel, HostEvent, HostEventKind, Libraries};

/// Maximum number of connections of a device that are being established.
pub(super) const MAX_IN_PROGRESS: usize = 64;
/// Maximum number of connections that a device has, with those that have ended and still answer late messages.
const MAX_KEPT: usize = 4096;
/// Reason of a REJ: the guest's QP does not exist or has a connection (IBA 12.6.7.2, code 1).
pub(super) const NO_QP: RejectReason = RejectReason(1);
/// States of the host's QPs, as the library's numbers.
const RTR: i32 = 2;
const RTS: i32 = 3;

/// All connections of a device.
pub(super) struct Manager {
    pub(super) adapter: Arc<Adapter>,
    pub(super) channel: Arc<EventChannel>,
    pub(super) listeners: Listeners,
    /// By the communication ID of the daemon's end.
    pub(super) ends: HashMap<u32, End>,
    /// Communication IDs by the address of the host's identifier.
    pub(super) by_host: HashMap<usize, u32>,
    random: Random,
}

impl Manager {
    pub(super) fn new(adapter: &Arc<Adapter>, libraries: &Libraries) -> io::Result<Self> {
        Ok(Self {
            adapter: Arc::clone(adapter),
            channel: EventChannel::open(libraries)?,
            listeners: Listeners::default(),
            ends: HashMap::new(),
            by_host: HashMap::new(),
            random: Random::System,
        })
    }

    /// Returns the files that report work and events of the host.
    pub(super) fn files(&self) -> (&CmPaths, &EventChannel) {
        (&self.adapter.cm_paths, &self.channel)
    }

    /// Returns the time of the next deadline.
    pub(super) fn deadline(&self) -> Option<Duration> {
        self.ends.values().filter_map(|end| end.guest.poll_timeout()).min()
    }

    /// Processes work of the guest.
    pub(super) fn work(&mut self, now: Duration) {
        let work = self.adapter.cm_paths.take_work();
        if work.addresses {
            self.listeners.update(&self.adapter, &self.channel);
        }
        for key in work.ended {
            self.close(now, key, NO_QP, &[]);
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
        let due = |end: &End| end.guest.poll_timeout().is_some_and(|deadline| deadline <= now);
        let keys: Vec<_> = self.ends.iter().filter(|(_, end)| due(end)).map(|(key, _)| *key).collect();
        for key in keys {
            let event = self.ends.get_mut(&key).and_then(|end| end.guest.handle_timeout(now));
            self.guest_event(now, key, event);
        }
    }

    /// Reports that the host's connection manager is unusable. All connections end when the caller drops this value.
    pub(super) fn lost(&self, error: &io::Error) {
        let log = &self.adapter.log;
        log.error(module_path!(), format_args!("the host's connection manager makes no connections any more: {error}"));
    }

    /// Returns an unused communication ID.
    pub(super) fn new_key(&mut self) -> Option<u32> {
        (0..64).find_map(|_| self.number().filter(|key| *key != 0 && !self.ends.contains_key(key)))
    }

    pub(super) fn number(&mut self) -> Option<u32> {
        self.random.draw().ok()
    }

    /// Returns `true` if another connection may begin.
    pub(super) fn has_room(&self) -> bool {
        let in_progress = self.ends.values().filter(|end| end.stage.in_progress()).count();
        in_progress < MAX_IN_PROGRESS && self.ends.len() < MAX_KEPT
    }

    /// Returns the number of READs and atomics in flight that the adapter supports.
    pub(super) fn max_rd_atomic(&self) -> u8 {
        self.adapter.limits.max_rd_atomic
    }

    // Messages of the guest.

    fn datagram(&mut self, now: Duration, source: &Bound, datagram: &Datagram) {
        let is_message = datagram.to.qpn == Qpn::GSI && datagram.immediate.is_none();
        let Some(mad) = Mad::parse(&datagram.payload).ok().filter(|_| is_message) else {
            return bump(&self.adapter.counters.cm_refused);
        };
        let peer = datagram.to.dgid;
        let Some(key) = self.find(&mad, source.gid, peer) else {
            return match mad.message {
                Message::Req(req) => self.connect(now, source, peer, mad.transaction, req),
                _ => {
                    if let Some(answer) = answer_without_connection(&mad) {
                        self.deliver(source, peer, &answer);
                    }
                }
            };
        };
        let event = self.ends.get_mut(&key).and_then(|end| end.guest.handle_message(now, &mad));
        self.guest_event(now, key, event);
    }

    /// Returns the connection that a message belongs to.
    fn find(&self, mad: &Mad, own: Gid, peer: Gid) -> Option<u32> {
        let is_between = |end: &End| (end.own.gid, end.peer) == (own, peer);
        match mad.message.destination() {
            Some(key) if key != 0 => self.ends.get(&key).filter(|end| is_between(end)).map(|_| key),
            // A REQ, which may be a repetition, or a REJ that gives one up.
            _ => self.ends.iter().find_map(|(key, end)| {
                let is_same = end.request.as_ref().is_some_and(|(transaction, req)| {
                    req.local_id == mad.message.source() && *transaction == mad.transaction
                });
                (is_same && is_between(end)).then_some(*key)
            }),
        }
    }

    /// Begins a connection that the guest asks for.
    fn connect(&mut self, now: Duration, source: &Bound, peer: Gid, transaction: u64, req: Box<Req>) {
        let Some(to) = messages::wanted_peer(&req, source.gid, peer) else {
            bump(&self.adapter.counters.cm_refused);
            return self.refuse(now, source, peer, transaction, *req, RejectReason::INVALID_SERVICE_ID);
        };
        if !self.has_room() {
            // The guest repeats its REQ.
            return bump(&self.adapter.counters.cm_overflow);
        }
        let Some(key) = self.new_key() else { return };
        if !self.adapter.cm_paths.claim(req.qpn.get(), key) {
            bump(&self.adapter.counters.cm_refused);
            return self.refuse(now, source, peer, transaction, *req, NO_QP);
        }
        let guest = Connection::incoming(now, key, transaction, (*req).clone());
        let own = *source;
        let request = Some((transaction, req));
        self.ends.insert(key, End { guest, host: None, stage: Stage::Resolving, own, peer, request });
        let from = self.adapter.gids.host_source(&own).filter(|from| from.is_ipv4() == to.is_ipv4());
        let from = from.map(|from| (from, 0).into());
        match CmId::create(&self.channel).and_then(|id| id.resolve_address(from, to).map(|()| id)) {
            Ok(id) => self.attach(key, id),
            Err(error) => self.fail(now, key, &error),
        }
    }

    /// Answers a REQ without keeping a connection.
    fn refuse(&self, now: Duration, own: &Bound, peer: Gid, transaction: u64, req: Req, reason: RejectReason) {
        let mut guest = Connection::incoming(now, 0, transaction, req);
        guest.reject(now, reason, &[]);
        while let Some(bytes) = guest.poll_transmit() {
            self.deliver(own, peer, &bytes);
        }
    }

    pub(super) fn attach(&mut self, key: u32, id: CmId) {
        let Some(end) = self.ends.get_mut(&key) else { return };
        self.by_host.insert(id.address(), key);
        end.host = Some(id);
    }

    /// Handles an event that a message or a deadline has caused, and sends the resulting datagrams.
    pub(super) fn guest_event(&mut self, now: Duration, key: u32, event: Option<Event>) {
        match event {
            None => {}
            Some(Event::Accepted(rep)) => self.accept(now, key, &rep),
            Some(Event::Established) => self.confirm(now, key),
            Some(Event::Rejected(rejected)) => self.give_up(key, &rejected.private_data[..]),
            Some(Event::Disconnected) => self.hang_up(key),
            Some(Event::TimedOut) => self.release(key),
        }
        self.flush(key);
    }

    /// Confirms the peer's answer, as the guest has done.
    fn confirm(&mut self, now: Duration, key: u32) {
        let Some(end) = self.ends.get_mut(&key) else { return };
        end.stage = Stage::Established;
        // An iWARP connection is established already.
        let confirmed = match &end.host {
            Some(id) if !self.adapter.shared.transport.is_iwarp() => id.establish(),
            _ => Ok(()),
        };
        match confirmed {
            Ok(()) => bump(&self.adapter.counters.cm_connections),
            Err(error) => self.fail(now, key, &error),
        }
    }

    /// Rejects the connection, as the guest has done.
    fn give_up(&mut self, key: u32, private_data: &[u8]) {
        if let Some(end) = self.ends.get(&key)
            && let Some(id) = &end.host
            && matches!(end.stage, Stage::Asking | Stage::Offered)
        {
            // An iWARP peer has a connection already, which ends with the identifier.
            let private_data = private_data.get(..REJ_PRIVATE).unwrap_or(private_data);
            if let Err(error) = id.reject(private_data) {
                log::debug!("{}: a connection cannot be rejected: {error}", self.adapter.name);
            }
        }
        self.release(key);
    }

    /// Ends the connection, as the guest has done.
    fn hang_up(&mut self, key: u32) {
        let Some(end) = self.ends.get_mut(&key) else { return };
        self.adapter.cm_paths.forget(key);
        // The identifier stays until the host reports the end, because the kernel repeats its request until then.
        if end.host.as_ref().is_some_and(|id| id.disconnect().is_ok()) {
            end.stage = Stage::Closing;
        } else {
            self.release(key);
        }
    }

    // Events of the host.

    fn host_event(&mut self, now: Duration, event: HostEvent) {
        let HostEvent { id, kind, status, data, new } = event;
        if kind == HostEventKind::Request {
            if let Some(new) = new {
                self.asked(now, id, new, &data);
            }
            return;
        }
        let Some(key) = self.by_host.get(&id).copied() else { return };
        let stage = self.ends.get(&key).map(|end| end.stage);
        match (kind, stage) {
            (HostEventKind::AddressResolved, Some(Stage::Resolving)) => self.resolved(now, key),
            (HostEventKind::RouteResolved, Some(Stage::Resolving)) => self.ask_peer(now, key),
            (HostEventKind::Accepted | HostEventKind::Established, Some(Stage::Connecting)) => {
                self.offer(now, key, &data);
            }
            (HostEventKind::Established, Some(Stage::Accepting)) => self.accepted(key),
            (HostEventKind::Rejected, _) => self.rejected(now, key, status, &data),
            (HostEventKind::Unreachable, _) => self.close(now, key, RejectReason::TIMEOUT, &[]),
            (HostEventKind::Disconnected, Some(Stage::Established | Stage::Offered)) => {
                // This confirms the end to the peer.
                let id = self.ends.get(&key).and_then(|end| end.host.as_ref());
                if let Some(Err(error)) = id.map(CmId::disconnect) {
                    log::debug!("{}: the end of a connection is not confirmed: {error}", self.adapter.name);
                }
                self.close(now, key, RejectReason::TIMEOUT, &[]);
            }
            (HostEventKind::Disconnected | HostEventKind::DeviceRemoved, _) => {
                self.close(now, key, RejectReason::TIMEOUT, &[]);
            }
            _ => {}
        }
        self.flush(key);
    }

    /// Continues once the peer's address is known. The connection must use this adapter.
    fn resolved(&mut self, now: Duration, key: u32) {
        let Some(id) = self.ends.get(&key).and_then(|end| end.host.as_ref()) else { return };
        if !self.is_ours(id) {
            let error = io::Error::other("the host's route to the peer does not use this adapter");
            return self.fail(now, key, &error);
        }
        if let Err(error) = id.resolve_route() {
            self.fail(now, key, &error);
        }
    }

    /// Returns `true` if an identifier uses the adapter's port.
    pub(super) fn is_ours(&self, id: &CmId) -> bool {
        let config = &self.adapter.shared.config;
        id.device().is_some_and(|(name, port)| name == config.device && port == config.port)
    }

    fn ask_peer(&mut self, now: Duration, key: u32) {
        let most = self.max_rd_atomic();
        let Some(end) = self.ends.get_mut(&key) else { return };
        let (Some(id), Some((_, req))) = (&end.host, &end.request) else { return };
        end.stage = Stage::Connecting;
        match id.connect(&messages::of_req(req, most)) {
            Ok(()) => {}
            // A TCP reset: no program listens on the port.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                self.close(now, key, RejectReason::INVALID_SERVICE_ID, &[]);
            }
            Err(error) => self.fail(now, key, &error),
        }
    }

    /// Handles the peer's acceptance: gives the guest the REP, and prepares the host's attributes for its QP.
    fn offer(&mut self, now: Duration, key: u32, data: &ConnectionData) {
        let (psn, invented) = (self.number().unwrap_or(0), self.invented_qpn());
        let Some(end) = self.ends.get_mut(&key) else { return };
        let (Some(id), Some((_, req))) = (&end.host, &end.request) else { return };
        let peer_qpn = if data.qpn == 0 { invented } else { data.qpn };
        let Some(rep) = messages::rep(data, end.peer, peer_qpn, psn) else {
            bump(&self.adapter.counters.cm_refused);
            return self.close(now, key, RejectReason::CONSUMER, &[]);
        };
        let attributes = match path_attributes(id) {
            Ok(attributes) => attributes,
            Err(error) => return self.fail(now, key, &error),
        };
        let paths = &self.adapter.cm_paths;
        paths.prepare(key, Some(req.qpn.get()), peer_qpn, end.peer, attributes);
        if self.adapter.shared.transport.is_iwarp() {
            paths.established(key);
        }
        end.guest.accept(now, rep);
        end.stage = Stage::Offered;
    }

    /// Returns a number for the QP of an iWARP peer, which has none.
    pub(super) fn invented_qpn(&mut self) -> u32 {
        // Not 0 or 1, which are the numbers of management QPs.
        self.number().unwrap_or(0) & 0x00ff_ffff | 0x0080_0000
    }

    fn rejected(&mut self, now: Duration, key: u32, status: i32, data: &ConnectionData) {
        // InfiniBand has reasons, iWARP has an errno.
        let reason = u16::try_from(status).map_or(RejectReason::CONSUMER, RejectReason);
        let private_data = data.private_data.get(..REJ_PRIVATE).unwrap_or(&data.private_data);
        self.close(now, key, reason, private_data);
    }

    // Ends of connections.

    /// Ends a connection that the host refuses.
    pub(super) fn fail(&mut self, now: Duration, key: u32, error: &io::Error) {
        let peer = self.ends.get(&key).map(|end| end.peer).unwrap_or_default();
        bump(&self.adapter.counters.cm_failed);
        let log = &self.adapter.log;
        log.warn(module_path!(), format_args!("the host cannot connect the guest with {peer}: {error}"));
        self.close(now, key, RejectReason::TIMEOUT, &[]);
        self.flush(key);
    }

    /// Ends a connection on both sides: the guest gets a REJ before it is established, and a DREQ afterwards.
    pub(super) fn close(&mut self, now: Duration, key: u32, reason: RejectReason, private_data: &[u8]) {
        if let Some(end) = self.ends.get_mut(&key) {
            match end.guest.state() {
                State::Established => end.guest.disconnect(now),
                _ => end.guest.reject(now, reason, private_data),
            }
        }
        self.release(key);
        self.flush(key);
    }

    /// Drops the host's identifier. The kernel tells the peer.
    pub(super) fn release(&mut self, key: u32) {
        self.adapter.cm_paths.forget(key);
        let Some(end) = self.ends.get_mut(&key) else { return };
        end.stage = Stage::Closed;
        if let Some(id) = end.host.take() {
            self.by_host.remove(&id.address());
        }
    }

    /// Sends the datagrams of a connection, and forgets a connection that is over.
    pub(super) fn flush(&mut self, key: u32) {
        let Some(end) = self.ends.get_mut(&key) else { return };
        let mut outgoing = Vec::new();
        while let Some(bytes) = end.guest.poll_transmit() {
            outgoing.push(bytes);
        }
        let (own, peer, is_done) = (end.own, end.peer, end.guest.state() == State::Done);
        for bytes in &outgoing {
            self.deliver(&own, peer, bytes);
        }
        if is_done {
            self.release(key);
            self.ends.remove(&key);
        }
    }

    fn deliver(&self, own: &Bound, peer: Gid, mad: &[u8]) {
        let to = UdDestination { qpn: Qpn::GSI, dgid: own.gid, hop_limit: 64, ..UdDestination::default() };
        let payload = mad.to_vec();
        let datagram = Datagram { from: peer, to, kind: own.kind, immediate: None, solicited: false, payload };
        let counters = &self.adapter.counters;
        let delivered = self.adapter.member.receive(&datagram);
        bump(if delivered { &counters.cm_received } else { &counters.gsi_dropped });
    }
}

/// Returns the attributes for the QP of a connection.
pub(super) fn path_attributes(id: &CmId) -> io::Result<PathAttributes> {
    Ok(PathAttributes { rtr: id.attributes(RTR)?, rts: id.attributes(RTS)? })
}
