//! Connections of a guest: its messages, reports of the host, and deadlines.

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use pvrdma_verbs_types::{Gid, Qpn};

use super::end::{End, Stage};
use super::host_side::{Accepted, Counted, HostSide, QpBinding};
use super::messages::{self, Asked, ConnectionData, REJ_PRIVATE, REQ_PRIVATE};
use crate::connection::{Connection, Event, State, answer_without_connection};
use crate::mad::Mad;
use crate::message::{Message, RejectReason, Rep};
use crate::req::Req;

/// Reason of a REJ: the guest's QP does not exist or has a connection (IBA 12.6.7.2, code 1).
pub const NO_QP: RejectReason = RejectReason(1);

/// Maximum numbers of connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Maximum {
    /// Connections that are being established.
    pub in_progress: usize,
    /// All connections, with those that have ended and still answer late messages.
    pub kept: usize,
}

/// Request of a peer for a connection to a port of the guest.
#[derive(Clone, Copy, Debug)]
pub struct PeerRequest<'a, Own> {
    /// Address of the guest.
    pub own: Own,
    /// Port of the guest.
    pub own_port: u16,
    /// Address and port of the peer.
    pub peer: SocketAddr,
    /// Parameters of the connection.
    pub data: &'a ConnectionData,
}

/// All connections of a guest.
pub struct GuestConnections<H: HostSide> {
    /// The owner.
    pub host: H,
    maximum: Maximum,
    /// By the communication ID of this end.
    ends: HashMap<u32, End<H>>,
}

impl<H: HostSide> fmt::Debug for GuestConnections<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuestConnections").field("connections", &self.ends.len()).finish_non_exhaustive()
    }
}

impl<H: HostSide> GuestConnections<H> {
    /// Creates the state without connections.
    pub fn new(host: H, maximum: Maximum) -> Self {
        Self { host, maximum, ends: HashMap::new() }
    }

    /// Number of connections, with those that have ended and still answer late messages.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns `true` if there is no connection.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns the time of the next deadline.
    pub fn deadline(&self) -> Option<Duration> {
        self.ends.values().filter_map(|end| end.guest.poll_timeout()).min()
    }

    /// Returns the progress of a connection.
    pub fn stage(&self, key: u32) -> Option<Stage> {
        self.ends.get(&key).map(|end| end.stage)
    }

    /// Returns the host's part of a connection, with the guest's REQ if the guest began it.
    pub fn part(&mut self, key: u32) -> Option<(&mut H::Part, Option<&Req>)> {
        let end = self.ends.get_mut(&key)?;
        Some((end.part.as_mut()?, end.request.as_ref().map(|(_, req)| &**req)))
    }

    /// Returns the permission to keep another connection, if there may be one. Connections that have ended make room
    /// for it: otherwise a peer could keep out others by connections that end at once.
    fn permit(&mut self) -> Option<H::Permit> {
        let in_progress = self.ends.values().filter(|end| end.stage.in_progress()).count();
        if in_progress >= self.maximum.in_progress {
            return None;
        }
        if self.ends.len() >= self.maximum.kept {
            let ended = self.ends.iter().filter(|(_, end)| end.stage == Stage::Closed);
            let oldest = ended.min_by_key(|(_, end)| end.guest.poll_timeout()).map(|(key, _)| *key)?;
            self.ends.remove(&oldest);
        }
        self.host.permit()
    }

    /// Processes deadlines that have passed.
    pub fn timeouts(&mut self, now: Duration) {
        let due = |end: &End<H>| end.guest.poll_timeout().is_some_and(|deadline| deadline <= now);
        let keys: Vec<_> = self.ends.iter().filter(|(_, end)| due(end)).map(|(key, _)| *key).collect();
        for key in keys {
            let event = self.ends.get_mut(&key).and_then(|end| end.guest.handle_timeout(now));
            self.guest_event(now, key, event);
        }
    }

    // Messages of the guest.

    /// Processes a message of the guest to the address of a peer.
    pub fn message(&mut self, now: Duration, own: &H::Own, peer: Gid, mad: Mad) {
        let Some(key) = self.find(&mad, H::gid(own), peer) else {
            return match mad.message {
                Message::Req(req) => self.connect(now, own, peer, mad.transaction, req),
                _ => {
                    if let Some(answer) = answer_without_connection(&mad) {
                        self.host.deliver(own, peer, &answer);
                    }
                }
            };
        };
        let event = self.ends.get_mut(&key).and_then(|end| end.guest.handle_message(now, &mad));
        self.guest_event(now, key, event);
    }

    /// Returns the connection that a message belongs to.
    fn find(&self, mad: &Mad, own: Gid, peer: Gid) -> Option<u32> {
        let is_between = |end: &End<H>| (H::gid(&end.own), end.peer) == (own, peer);
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
    fn connect(&mut self, now: Duration, own: &H::Own, peer: Gid, transaction: u64, req: Box<Req>) {
        let to = messages::wanted_peer(&req, H::gid(own), peer).filter(|to| self.host.reaches(to.ip()));
        let Some(to) = to else {
            self.host.count(Counted::Refused);
            return self.refuse(now, own, peer, transaction, *req, RejectReason::INVALID_SERVICE_ID);
        };
        let Some(permit) = self.permit() else {
            // The guest repeats its REQ.
            return self.host.count(Counted::Overflow);
        };
        let Some(key) = self.new_key() else { return };
        if !self.host.claim(req.qpn, key) {
            self.host.count(Counted::Refused);
            return self.refuse(now, own, peer, transaction, *req, NO_QP);
        }
        let guest = Connection::incoming(now, key, transaction, (*req).clone());
        let connected = self.host.connect(now, key, own, to, &req);
        let request = Some((transaction, req));
        let stage = Stage::Connecting;
        let mut end = End { guest, part: None, stage, own: *own, peer, request, _permit: permit };
        let failed = connected.map(|part| end.part = Some(part)).err();
        self.ends.insert(key, end);
        if let Some(error) = failed {
            self.fail(now, key, &error);
        }
    }

    /// Answers a REQ without keeping a connection.
    fn refuse(&mut self, now: Duration, own: &H::Own, peer: Gid, transaction: u64, req: Req, reason: RejectReason) {
        let mut guest = Connection::incoming(now, 0, transaction, req);
        guest.reject(now, reason, &[]);
        while let Some(bytes) = guest.poll_transmit() {
            self.host.deliver(own, peer, &bytes);
        }
    }

    /// Handles an event that a message or a deadline has caused, and sends the resulting datagrams.
    fn guest_event(&mut self, now: Duration, key: u32, event: Option<Event>) {
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

    /// Accepts the request of a peer, as the guest has done.
    fn accept(&mut self, now: Duration, key: u32, rep: &Rep) {
        // The queue pair that the guest names must be its own, and the one that it has moved to RTR.
        let claimed = self.host.claim_prepared(rep.qpn, key);
        if !claimed {
            self.host.count(Counted::Refused);
        }
        let Some(end) = self.ends.get_mut(&key) else { return };
        let Some(part) = &mut end.part else { return };
        if !claimed {
            self.host.reject(part, &[]);
            return self.close(now, key, NO_QP, &[]);
        }
        end.stage = Stage::Accepting;
        match self.host.accept(now, key, part, rep) {
            Ok(Accepted::Pending) => {}
            Ok(Accepted::Established) => self.accepted(key),
            Err(error) => self.fail(now, key, &error),
        }
    }

    /// Confirms the peer's answer, as the guest has done.
    fn confirm(&mut self, now: Duration, key: u32) {
        let Some(end) = self.ends.get_mut(&key) else { return };
        end.stage = Stage::Established;
        match end.part.as_mut().map_or(Ok(()), |part| self.host.confirm(key, part)) {
            Ok(()) => self.host.count(Counted::Established),
            Err(error) => self.fail(now, key, &error),
        }
    }

    /// Rejects the connection, as the guest has done.
    fn give_up(&mut self, key: u32, private_data: &[u8]) {
        if let Some(end) = self.ends.get_mut(&key)
            && let Some(part) = &mut end.part
            && matches!(end.stage, Stage::Asking | Stage::Offered)
        {
            // An iWARP peer has a connection already, which ends with the host's part.
            self.host.reject(part, private_data.get(..REJ_PRIVATE).unwrap_or(private_data));
        }
        self.release(key);
    }

    /// Ends the connection, as the guest has done.
    fn hang_up(&mut self, key: u32) {
        let Some(end) = self.ends.get_mut(&key) else { return };
        if end.part.as_mut().is_some_and(|part| self.host.disconnect(key, part)) {
            end.stage = Stage::Closing;
        } else {
            self.release(key);
        }
    }

    // Reports of the host.

    /// Passes the acceptance of a peer to the guest.
    pub fn offer(&mut self, now: Duration, key: u32, data: &ConnectionData) {
        let (psn, invented) = (self.host.random().unwrap_or(0), self.invented_qpn());
        let Some(end) = self.ends.get_mut(&key).filter(|end| end.stage == Stage::Connecting) else { return };
        let (Some(part), Some((_, req))) = (&mut end.part, &end.request) else { return };
        let peer_qpn = if data.qpn == 0 { invented } else { Qpn::new(data.qpn) };
        let Some(rep) = messages::rep(data, end.peer, peer_qpn.get(), psn) else {
            self.host.count(Counted::Refused);
            return self.close(now, key, RejectReason::CONSUMER, &[]);
        };
        let binding = QpBinding { own: Some(req.qpn), peer_qpn, peer: end.peer };
        if let Err(error) = self.host.prepare(key, part, binding) {
            return self.fail(now, key, &error);
        }
        end.guest.accept(now, rep);
        end.stage = Stage::Offered;
        self.flush(key);
    }

    /// Passes the request of a peer to the guest. Returns the part if that is impossible; a peer to which nothing was
    /// said yet is then to be rejected.
    pub fn ask(&mut self, now: Duration, request: PeerRequest<'_, H::Own>, mut part: H::Part) -> Result<u32, H::Part> {
        let PeerRequest { own, own_port, peer, data } = request;
        let Some(permit) = self.permit() else {
            self.host.count(Counted::Overflow);
            return Err(part);
        };
        if data.private_data.len() > REQ_PRIVATE {
            self.host.count(Counted::Refused);
            return Err(part);
        }
        let (invented, psn) = (self.invented_qpn(), self.host.random().unwrap_or(0));
        let (Some(key), Some(transaction)) = (self.new_key(), self.host.random()) else { return Err(part) };
        let peer_qpn = if data.qpn == 0 { invented } else { Qpn::new(data.qpn) };
        let gid = peer.ip().into();
        let path_mtu = match self.host.prepare(key, &mut part, QpBinding { own: None, peer_qpn, peer: gid }) {
            Ok(path_mtu) => path_mtu,
            Err(error) => {
                let _ = self.host.failed(gid, &error);
                return Err(part);
            }
        };
        let asked = Asked { own: H::gid(&own), own_port, peer, peer_qpn: peer_qpn.get(), path_mtu, psn };
        let Some(req) = messages::req(data, &asked, key) else {
            self.host.release(key, None);
            return Err(part);
        };
        let guest = Connection::outgoing(now, transaction.into(), req);
        let (stage, part) = (Stage::Asking, Some(part));
        self.ends.insert(key, End { guest, part, stage, own, peer: gid, request: None, _permit: permit });
        self.flush(key);
        Ok(key)
    }

    /// Confirms to the guest that the connection that it has accepted can be used.
    pub fn accepted(&mut self, key: u32) {
        let Some(end) = self.ends.get_mut(&key).filter(|end| end.stage == Stage::Accepting) else { return };
        end.stage = Stage::Established;
        end.guest.confirm();
        self.host.count(Counted::Established);
        self.host.established(key);
        self.flush(key);
    }

    /// Ends a connection that the host refuses.
    pub fn fail(&mut self, now: Duration, key: u32, error: &H::Error) {
        let peer = self.ends.get(&key).map(|end| end.peer).unwrap_or_default();
        let reason = self.host.failed(peer, error);
        self.close(now, key, reason, &[]);
    }

    /// Ends a connection on both sides: the guest gets a REJ before it is established, and a DREQ afterwards.
    pub fn close(&mut self, now: Duration, key: u32, reason: RejectReason, private_data: &[u8]) {
        if let Some(end) = self.ends.get_mut(&key) {
            match end.guest.state() {
                State::Established => end.guest.disconnect(now),
                _ => end.guest.reject(now, reason, private_data.get(..REJ_PRIVATE).unwrap_or(private_data)),
            }
        }
        self.release(key);
        self.flush(key);
    }

    /// Ends the host's part of a connection.
    fn release(&mut self, key: u32) {
        let Some(end) = self.ends.get_mut(&key) else { return };
        end.stage = Stage::Closed;
        let part = end.part.take();
        self.host.release(key, part);
    }

    /// Sends the datagrams of a connection, and forgets a connection that is over.
    fn flush(&mut self, key: u32) {
        let Some(end) = self.ends.get_mut(&key) else { return };
        while let Some(bytes) = end.guest.poll_transmit() {
            self.host.deliver(&end.own, end.peer, &bytes);
        }
        if end.guest.state() == State::Done {
            self.release(key);
            self.ends.remove(&key);
        }
    }

    // Numbers.

    /// Returns an unused communication ID.
    fn new_key(&mut self) -> Option<u32> {
        (0..64).find_map(|_| self.host.random().filter(|key| *key != 0 && !self.ends.contains_key(key)))
    }

    /// Returns a number for the QP of a peer that has none. It is not 0 or 1, which are the numbers of management QPs.
    fn invented_qpn(&mut self) -> Qpn {
        Qpn::new(self.host.random().unwrap_or(0) & 0x00ff_ffff | 0x0080_0000)
    }
}
