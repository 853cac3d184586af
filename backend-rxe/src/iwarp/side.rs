//! The host's part of the guest's connections: sockets and their startup.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use pvrdma_base::{Count, Random};
use pvrdma_guest_memory::{Charge, Kept};
use pvrdma_ib_cm::terminated::{Accepted, ConnectionData, Counted, HostSide, QpBinding, of_rep, of_req};
use pvrdma_ib_cm::{MAD_LEN, RejectReason, Rep, Req};
use pvrdma_iwarp::{Connection, Limits, REPLY_TIMEOUT, Tuning};
use pvrdma_verbs_types::{Gid, Qpn};

use super::lingering::Lingering;
use super::meeting::Meeting;
use super::poller::{Poller, Watched};
use super::startup::Startup;
use crate::adapter::Adapter;
use crate::counters::Counters;
use crate::gid::BoundGid;
use crate::limits::{MAX_RD_ATOMIC, PORT_MTU};
use crate::path::stream::limits::{PAGE_LISTS, REQUESTS};

/// Bytes that the guest is charged for a connection without a queue pair, with the frames of its startup.
const CONNECTION_BYTES: u64 = 4096;

/// The guest of the device.
pub(super) trait Guest: Send {
    /// Returns `true` if the guest has a queue pair with this number that can be connected.
    fn has_queue_pair(&self, qpn: Qpn) -> bool;

    /// Passes a management datagram of a peer to QP 1. Returns `false` if it is lost.
    fn receive(&self, own: &BoundGid, peer: Gid, mad: &[u8; MAD_LEN]) -> bool;
}

/// The host's part of a connection.
#[derive(Debug)]
pub(super) struct IwarpPart {
    /// `None` once a queue pair may take the connection.
    pub(super) startup: Option<Startup>,
    /// Address of the guest, and address and port of the peer, if the guest began the connection.
    pub(super) begun: Option<(IpAddr, SocketAddr)>,
}

/// Sockets of a device, and the means to make more.
pub(super) struct Side {
    pub(super) adapter: Arc<Adapter>,
    pub(super) meeting: Arc<Meeting>,
    pub(super) guest: Box<dyn Guest>,
    pub(super) poller: Poller,
    pub(super) lingering: Lingering,
    /// Time of the last work, for sockets that are closed.
    pub(super) now: Duration,
    /// Deadlines of connections that the guest has begun, by their keys. They are in order, because all of them have
    /// the same time.
    pub(super) deadlines: VecDeque<(Duration, u32)>,
    random: Random,
}

impl Side {
    /// # Errors
    /// There are no descriptors left.
    pub(super) fn new(adapter: Arc<Adapter>, meeting: Arc<Meeting>, guest: Box<dyn Guest>) -> io::Result<Self> {
        let mut poller = Poller::new()?;
        poller.add_level(&meeting, Watched::Work)?;
        Ok(Self {
            adapter,
            meeting,
            guest,
            poller,
            lingering: Lingering::default(),
            now: Duration::ZERO,
            deadlines: VecDeque::new(),
            random: Random::System,
        })
    }

    /// Returns the parameters of a new connection.
    pub(super) fn tuning(&mut self) -> Tuning {
        let seed = self.random().unwrap_or(1);
        Tuning::default().with_requests(REQUESTS).with_page_lists(PAGE_LISTS).with_seed(seed)
    }

    fn limits(&self, data: &ConnectionData) -> Limits {
        let crc = self.meeting.config.crc;
        Limits { ird: data.responder_resources.into(), ord: data.initiator_depth.into(), crc }
    }

    /// Begins the TCP connection of a connection to a peer.
    pub(super) fn open(
        &mut self,
        now: Duration,
        key: u32,
        (from, to): (IpAddr, SocketAddr),
        connection: Connection,
    ) -> io::Result<Startup> {
        let socket = self.meeting.config.sockets.connect(from, to)?;
        let token = self.poller.add_edge(&socket, Watched::Startup(key))?;
        self.deadlines.push_back((now.saturating_add(REPLY_TIMEOUT), key));
        Ok(Startup::new(socket, token, connection, false))
    }

    /// Takes a deadline that has passed.
    pub(super) fn next_due(&mut self, now: Duration) -> Option<(Duration, u32)> {
        self.deadlines.front().filter(|(deadline, _)| *deadline <= now)?;
        self.deadlines.pop_front()
    }

    /// Ends a startup.
    pub(super) fn finish(&mut self, startup: Startup) {
        let token = startup.token;
        match startup.finish() {
            Some(socket) => self.lingering.push(self.now, &mut self.poller, socket),
            None => self.poller.remove(token),
        }
    }

    /// Passes a connection whose startup is complete to its queue pair.
    fn hand_over(&mut self, key: u32, startup: Startup) -> io::Result<()> {
        let mut established = startup.into_established();
        let Some(link) = self.meeting.link(key) else {
            self.poller.remove(established.token);
            return Err(io::ErrorKind::ConnectionAborted.into());
        };
        let most = self.meeting.config.sockets.segment_size(&established.socket);
        if let Some(stream) = established.connection.stream_mut() {
            stream.set_mss(most);
        }
        self.poller.give(established.token, Watched::Stream(Arc::downgrade(&link)));
        if link.establish(established) { Ok(()) } else { Err(io::ErrorKind::ConnectionAborted.into()) }
    }

    fn counter(&self, event: Counted) -> &Count {
        let counters = &self.adapter.counters;
        match event {
            Counted::Established => &counters.iwarp_connections,
            Counted::Refused => &counters.iwarp_refused,
            Counted::Overflow => &counters.iwarp_overflow,
        }
    }
}

impl HostSide for Side {
    type Own = BoundGid;
    type Part = IwarpPart;
    type Permit = Charge;
    type Error = io::Error;

    fn gid(own: &BoundGid) -> Gid {
        own.gid
    }

    fn random(&mut self) -> Option<u32> {
        self.random.draw().ok()
    }

    fn count(&self, event: Counted) {
        Counters::bump(self.counter(event));
    }

    fn permit(&mut self) -> Option<Charge> {
        self.adapter.budget.charge(Kept::Objects, CONNECTION_BYTES).ok()
    }

    fn reaches(&self, peer: IpAddr) -> bool {
        let peer = peer.into();
        self.meeting.reaches(peer) && self.adapter.rules.allow_peer(peer)
    }

    fn deliver(&mut self, own: &BoundGid, peer: Gid, mad: &[u8; MAD_LEN]) {
        if !self.guest.receive(own, peer, mad) {
            Counters::bump(&self.adapter.counters.iwarp_datagrams_dropped);
        }
    }

    fn claim(&mut self, qpn: Qpn, key: u32) -> bool {
        self.guest.has_queue_pair(qpn) && self.meeting.claim(qpn.get(), key)
    }

    fn claim_prepared(&mut self, qpn: Qpn, key: u32) -> bool {
        self.guest.has_queue_pair(qpn) && self.meeting.claim_prepared(qpn.get(), key)
    }

    fn connect(&mut self, now: Duration, key: u32, own: &BoundGid, to: SocketAddr, req: &Req) -> io::Result<IwarpPart> {
        let (data, tuning) = (of_req(req, MAX_RD_ATOMIC), self.tuning());
        let connection = Connection::initiate(now, self.limits(&data), tuning, &data.private_data);
        let begun = (IpAddr::from(own.gid), to);
        let startup = self.open(now, key, begun, connection.map_err(io::Error::other)?)?;
        Ok(IwarpPart { startup: Some(startup), begun: Some(begun) })
    }

    fn prepare(&mut self, key: u32, part: &mut IwarpPart, binding: QpBinding) -> io::Result<u8> {
        let QpBinding { own, peer_qpn, peer } = binding;
        self.meeting.prepare(key, own.map(Qpn::get), peer_qpn.get(), peer);
        if part.begun.is_some()
            && let Some(startup) = part.startup.take()
        {
            self.hand_over(key, startup)?;
        }
        // iWARP has none. The guest only passes the value on to its queue pair.
        Ok(PORT_MTU as u8)
    }

    fn confirm(&mut self, _: u32, _: &mut IwarpPart) -> io::Result<()> {
        Ok(())
    }

    fn accept(&mut self, _: Duration, key: u32, part: &mut IwarpPart, rep: &Rep) -> io::Result<Accepted> {
        let data = of_rep(rep, MAX_RD_ATOMIC);
        let limits = self.limits(&data);
        let Some(startup) = &mut part.startup else { return Err(io::ErrorKind::ConnectionAborted.into()) };
        startup.accept(limits, &data.private_data).map_err(io::Error::other)?;
        if let Some(startup) = part.startup.take() {
            self.hand_over(key, startup)?;
        }
        Ok(Accepted::Established)
    }

    fn established(&mut self, _: u32) {}

    fn reject(&mut self, part: &mut IwarpPart, private_data: &[u8]) {
        // A peer that was asked has a connection already, which ends when it is released.
        if let Some(startup) = &mut part.startup {
            startup.reject(private_data);
        }
    }

    fn disconnect(&mut self, _: u32, _: &mut IwarpPart) -> bool {
        false
    }

    fn release(&mut self, key: u32, part: Option<IwarpPart>) {
        self.meeting.forget(key);
        if let Some(startup) = part.and_then(|part| part.startup) {
            self.finish(startup);
        }
    }

    fn failed(&mut self, peer: Gid, error: &io::Error) -> RejectReason {
        if error.kind() == io::ErrorKind::ConnectionRefused {
            // A TCP reset: no program listens on the port.
            Counters::bump(&self.adapter.counters.iwarp_refused);
            return RejectReason::INVALID_SERVICE_ID;
        }
        Counters::bump(&self.adapter.counters.iwarp_failed);
        let log = &self.adapter.log;
        log.warn(module_path!(), format_args!("the guest cannot be connected with {peer} by iWARP: {error}"));
        RejectReason::TIMEOUT
    }
}
