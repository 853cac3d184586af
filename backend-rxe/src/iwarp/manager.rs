//! Connections of a device: work of the guest, events of sockets, and deadlines.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use pvrdma_ib_cm::terminated::{ConnectionData, Counted, GuestConnections, HostSide, Maximum, NO_QP, PeerRequest};
use pvrdma_ib_cm::{Mad, RejectReason};
use pvrdma_iwarp::{Connection, Incoming, Negotiated, StartupError};

use super::listeners::Listeners;
use super::meeting::{GuestDatagram, Meeting};
use super::poller::Watched;
use super::side::{Guest, IwarpPart, Side};
use super::startup::{Change, Startup};
use crate::adapter::Adapter;
use crate::counters::Counters;
use crate::gid::BoundGid;
use crate::limits::MAX_RD_ATOMIC;

/// Maximum numbers of connections of a device.
const MAXIMUM: Maximum = Maximum { in_progress: 64, kept: 4096 };
/// Maximum number of sockets that peers have connected and whose requests are incomplete, and of those of one peer. The
/// oldest one is closed for a further one, because a request usually arrives at once.
const MAX_INCOMING: usize = 64;
const MAX_OF_PEER: usize = 16;
/// Maximum number of sockets that are accepted before other work. It exceeds the kernel's queue of connections, so that
/// the next one is reported.
const ACCEPT_BATCH: usize = 4096;
/// Number of retries in a REQ: the largest.
const RETRIES: u8 = 7;

/// Result of a run of the manager.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Served {
    /// There was nothing to do.
    Idle,
    /// There was work.
    Busy,
    /// The device ends.
    Stopped,
}

/// A socket that a peer has connected, until its request is complete.
#[derive(Debug)]
struct IncomingPeer {
    startup: Startup,
    own: BoundGid,
    own_port: u16,
    peer: SocketAddr,
}

/// All connections of a device.
pub(super) struct Manager {
    connections: GuestConnections<Side>,
    listeners: Listeners,
    /// By the numbers of the sockets.
    incoming: HashMap<u64, IncomingPeer>,
}

impl Manager {
    /// # Errors
    /// There are no descriptors left.
    pub(super) fn new(adapter: Arc<Adapter>, meeting: Arc<Meeting>, guest: Box<dyn Guest>) -> io::Result<Self> {
        let side = Side::new(adapter, meeting, guest)?;
        let connections = GuestConnections::new(side, MAXIMUM);
        Ok(Self { connections, listeners: Listeners::default(), incoming: HashMap::new() })
    }

    /// Returns the time of the next deadline.
    pub(super) fn deadline(&self) -> Option<Duration> {
        let side = &self.connections.host;
        let startup = side.deadlines.front().map(|(deadline, _)| *deadline);
        let incoming = self.incoming.values().filter_map(|incoming| incoming.startup.deadline());
        let all = startup.into_iter().chain(incoming).chain(side.lingering.deadline());
        all.chain(self.connections.deadline()).min()
    }

    /// Returns the time on the clock of the engine.
    pub(super) fn now(&self) -> Duration {
        self.connections.host.adapter.engine.now()
    }

    /// Waits for events for `time`, or until the next deadline, and processes them.
    ///
    /// # Errors
    /// The events cannot be read.
    pub(super) fn serve(&mut self, time: Option<Duration>) -> io::Result<Served> {
        let events = self.connections.host.poller.wait(time)?;
        let now = self.now();
        self.connections.host.now = now;
        let due = self.deadline().is_some_and(|deadline| deadline <= now);
        let busy = due || !events.is_empty();
        for (token, watched, ready) in events {
            match watched {
                Watched::Work => {
                    if self.work(now) {
                        return Ok(Served::Stopped);
                    }
                }
                Watched::Listener => self.accept(now, token),
                Watched::Incoming => self.advance_incoming(now, token),
                Watched::Startup(key) => self.advance(now, key),
                Watched::Closing => {
                    let side = &mut self.connections.host;
                    side.lingering.advance(&mut side.poller, token);
                }
                Watched::Stream(link) => match link.upgrade() {
                    Some(link) => link.report(ready),
                    None => self.connections.host.poller.remove(token),
                },
            }
        }
        if due {
            self.timeouts(now);
        }
        Ok(if busy { Served::Busy } else { Served::Idle })
    }

    /// Reports that the device makes no connections any more. All of them end when the caller drops this value.
    pub(super) fn lost(&self, error: &io::Error) {
        let log = &self.connections.host.adapter.log;
        log.error(module_path!(), format_args!("the device makes no iWARP connections any more: {error}"));
    }

    /// Processes work of the guest. Returns `true` if the device ends.
    fn work(&mut self, now: Duration) -> bool {
        let side = &mut self.connections.host;
        let work = side.meeting.take_work();
        for socket in work.closing {
            // At the end of the device, too: this sends the rest, as far as the socket takes it.
            side.lingering.push(now, &mut side.poller, socket);
        }
        if work.stop {
            return true;
        }
        if work.addresses {
            self.listeners.update(&side.adapter, &side.meeting, &mut side.poller);
        }
        if !work.ended.is_empty() {
            side.poller.forget_dead();
        }
        for key in work.ended {
            self.connections.close(now, key, NO_QP, &[]);
        }
        for datagram in work.datagrams {
            self.datagram(now, &datagram);
        }
        false
    }

    fn datagram(&mut self, now: Duration, datagram: &GuestDatagram) {
        let GuestDatagram { own, peer, payload } = datagram;
        match Mad::parse(payload) {
            Ok(mad) => self.connections.message(now, own, *peer, mad),
            // Among others, service ID resolution, for datagram queue pairs.
            Err(_) => Counters::bump(&self.connections.host.adapter.counters.iwarp_datagrams_dropped),
        }
    }

    fn timeouts(&mut self, now: Duration) {
        self.connections.timeouts(now);
        let side = &mut self.connections.host;
        side.lingering.timeouts(now, &mut side.poller);
        while let Some((_, key)) = self.connections.host.next_due(now) {
            let part = self.connections.part(key).and_then(|(part, _)| part.startup.as_mut());
            if let Some(change) = part.and_then(|startup| startup.handle_timeout(now)) {
                self.changed(now, key, change);
            }
        }
        let due = |incoming: &IncomingPeer| incoming.startup.deadline().is_some_and(|deadline| deadline <= now);
        let due: Vec<_> = self.incoming.iter().filter(|(_, incoming)| due(incoming)).map(|(token, _)| *token).collect();
        for token in due {
            self.drop_incoming(token, Counted::Refused);
        }
    }

    // Connections that the guest knows.

    fn advance(&mut self, now: Duration, key: u32) {
        let part = self.connections.part(key).and_then(|(part, _)| part.startup.as_mut());
        if let Some(change) = part.and_then(|startup| startup.advance(now)) {
            self.changed(now, key, change);
        }
    }

    fn changed(&mut self, now: Duration, key: u32, change: Change) {
        match change {
            Change::Accepted(negotiated, private_data) => {
                self.connections.offer(now, key, &accepted_data(&negotiated, private_data));
            }
            Change::Rejected(private_data) => {
                Counters::bump(&self.connections.host.adapter.counters.iwarp_refused);
                self.connections.close(now, key, RejectReason::CONSUMER, &private_data);
            }
            Change::Unreachable(error) => self.connections.fail(now, key, &error),
            Change::Failed(error) => self.startup_failed(now, key, error),
            // The guest has been asked already.
            Change::Requested(_) => {}
        }
    }

    /// Ends a connection whose startup has failed, or requests it again in the first revision of the protocol.
    fn startup_failed(&mut self, now: Duration, key: u32, error: StartupError) {
        let Some((part, _)) = self.connections.part(key) else { return };
        let Some(begun) = part.begun else {
            // The peer does not wait for the guest's answer.
            return self.connections.close(now, key, RejectReason::TIMEOUT, &[]);
        };
        let failed = if error == StartupError::Closed {
            let startup = part.startup.take();
            self.fall_back(now, key, begun, startup).err()
        } else {
            Some(io::Error::other(error))
        };
        if let Some(error) = failed {
            self.connections.fail(now, key, &error);
        }
    }

    fn fall_back(
        &mut self,
        now: Duration,
        key: u32,
        begun: (IpAddr, SocketAddr),
        startup: Option<Startup>,
    ) -> io::Result<()> {
        let side = &mut self.connections.host;
        startup.iter().for_each(|startup| side.poller.remove(startup.token));
        let connection = startup.and_then(|startup| startup.fallback(now)).ok_or(io::ErrorKind::ConnectionReset)?;
        let startup = side.open(now, key, begun, connection)?;
        if let Some((part, _)) = self.connections.part(key) {
            part.startup = Some(startup);
        }
        Ok(())
    }

    // Connections that peers ask for.

    fn accept(&mut self, now: Duration, token: u64) {
        for _ in 0..ACCEPT_BATCH {
            let Some((listener, own, own_port)) = self.listeners.find(token) else { return };
            let (socket, address) = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // This connection is gone already. Others may wait behind it.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => {
                    let log = &self.connections.host.adapter.log;
                    log.warn(module_path!(), format_args!("a connection of a peer cannot be accepted: {error}"));
                    return;
                }
            };
            let side = &self.connections.host;
            let peer = side.meeting.config.sockets.peer(address);
            if !side.reaches(peer.ip()) {
                side.count(Counted::Refused);
                continue;
            }
            self.limit_incoming(peer.ip());
            if let Err(error) = self.begin_incoming(now, socket, own, own_port, peer) {
                log::debug!("a connection of {peer} cannot be used: {error}");
            }
        }
    }

    /// Closes a socket without a complete request, if there are too many.
    fn limit_incoming(&mut self, peer: IpAddr) {
        let of_peer = |incoming: &&IncomingPeer| incoming.peer.ip() == peer;
        let crowded = self.incoming.values().filter(of_peer).count() >= MAX_OF_PEER;
        if crowded || self.incoming.len() >= MAX_INCOMING {
            let candidates = self.incoming.iter().filter(|(_, incoming)| !crowded || of_peer(incoming));
            // Numbers of sockets are in the order in which they were accepted.
            if let Some(oldest) = candidates.map(|(token, _)| *token).min() {
                self.drop_incoming(oldest, Counted::Overflow);
            }
        }
    }

    fn begin_incoming(
        &mut self,
        now: Duration,
        socket: TcpStream,
        own: BoundGid,
        own_port: u16,
        peer: SocketAddr,
    ) -> io::Result<()> {
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        let side = &mut self.connections.host;
        let connection = Connection::respond(now, side.tuning());
        let token = side.poller.add_edge(&socket, Watched::Incoming)?;
        let startup = Startup::new(socket, token, connection, true);
        self.incoming.insert(token, IncomingPeer { startup, own, own_port, peer });
        self.advance_incoming(now, token);
        Ok(())
    }

    fn advance_incoming(&mut self, now: Duration, token: u64) {
        let Some(incoming) = self.incoming.get_mut(&token) else { return };
        match incoming.startup.advance(now) {
            None => {}
            Some(Change::Requested(request)) => self.ask(now, token, &request),
            Some(_) => self.drop_incoming(token, Counted::Refused),
        }
    }

    /// Passes the request of a peer to the guest.
    fn ask(&mut self, now: Duration, token: u64, request: &Incoming) {
        let Some(IncomingPeer { startup, own, own_port, peer }) = self.incoming.remove(&token) else { return };
        let data = requested_data(request);
        let part = IwarpPart { startup: Some(startup), begun: None };
        match self.connections.ask(now, PeerRequest { own, own_port, peer, data: &data }, part) {
            Ok(key) => self.connections.host.poller.give(token, Watched::Startup(key)),
            Err(part) => {
                if let Some(mut startup) = part.startup {
                    startup.reject(&[]);
                    self.connections.host.finish(startup);
                }
            }
        }
    }

    /// Ends a connection whose request is invalid or late.
    fn drop_incoming(&mut self, token: u64, reason: Counted) {
        if let Some(incoming) = self.incoming.remove(&token) {
            let side = &mut self.connections.host;
            side.count(reason);
            side.finish(incoming.startup);
        }
    }
}

/// Returns the parameters of a connection that the peer has accepted, as seen by this end.
fn accepted_data(negotiated: &Negotiated, private_data: Vec<u8>) -> ConnectionData {
    ConnectionData {
        private_data,
        responder_resources: reads(negotiated.ird),
        initiator_depth: reads(negotiated.ord),
        rnr_retry: RETRIES,
        ..ConnectionData::default()
    }
}

/// Returns the parameters of a connection that the peer asks for, as seen by this end.
fn requested_data(request: &Incoming) -> ConnectionData {
    ConnectionData {
        private_data: request.private_data().to_vec(),
        responder_resources: request.peer_ord().map_or(MAX_RD_ATOMIC, reads),
        initiator_depth: request.peer_ird().map_or(MAX_RD_ATOMIC, reads),
        retry_count: RETRIES,
        rnr_retry: RETRIES,
        ..ConnectionData::default()
    }
}

fn reads(number: u16) -> u8 {
    u8::try_from(number).unwrap_or(u8::MAX).min(MAX_RD_ATOMIC)
}
