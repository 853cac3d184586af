//! Authentication of the other end. A separate thread accepts or opens connections, and hands one to the link once both
//! ends have proved their identity. So strangers cost time of this thread, and not of the thread that moves frames.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pvrdma_base::Random;
use pvrdma_link::Connector;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SocketFlags};
use rustls::client::verify_server_name;
use rustls::pki_types::ServerName;
use rustls::server::ParsedCertificate;
use rustls::{ClientConnection, Connection, ServerConnection};

use super::admission::{Admission, Source};
use super::keys::{Identity, PROTOCOL};
use super::session::{End, Session, Stream};
use super::shared::Shared;

/// Time between two batches of accepted connections, and connections per batch. Accepting and closing a connection is
/// cheap. If strangers filled the queue faster than it is emptied, they would keep the peer out before any rule
/// applies.
pub(super) const ACCEPT_INTERVAL: Duration = Duration::from_millis(5);
pub(super) const ACCEPT_BATCH: usize = 64;
/// Time within which a connection must be established and its other end must have proved its identity.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// Time until the next connection attempt. It doubles with each failure, up to the maximum.
pub(super) const FIRST_RETRY: Duration = Duration::from_millis(500);
pub(super) const LAST_RETRY: Duration = Duration::from_secs(30);
/// Pause after polling failed.
const PAUSE: Duration = Duration::from_millis(100);

/// Source of connections.
#[derive(Debug)]
pub(super) enum Origin {
    Listener(Arc<OwnedFd>),
    Connector(Arc<dyn Connector>, SocketAddr),
}

/// Time of the next attempt, independent of any clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Backoff {
    next: Instant,
    interval: Duration,
}

impl Backoff {
    pub(super) const fn new(now: Instant) -> Self {
        Self { next: now, interval: FIRST_RETRY }
    }

    /// Returns the time until the next attempt is permitted.
    pub(super) fn wait(&self, now: Instant) -> Duration {
        self.next.saturating_duration_since(now)
    }

    /// Records that an attempt failed.
    pub(super) fn failed(&mut self, now: Instant) {
        self.next = now + self.interval;
        self.interval = self.interval.saturating_mul(2).min(LAST_RETRY);
    }

    /// Records that an attempt succeeded. The next one is delayed nevertheless.
    pub(super) fn succeeded(&mut self, now: Instant) {
        *self = Self { next: now + FIRST_RETRY, interval: FIRST_RETRY };
    }
}

/// A connection whose other end has not proved its identity.
#[derive(Debug)]
struct Pending {
    socket: OwnedFd,
    peer: SocketAddr,
    /// `None` until the first bytes are read, so that a silent connection costs only its socket.
    stream: Option<Stream>,
    greeted: bool,
    until: Instant,
}

/// Progress of a pending connection.
enum Progress {
    /// Nothing, or only part of a ClientHello, has been received.
    Unanswered,
    Waiting,
    Known,
}

impl Pending {
    fn new(socket: OwnedFd, peer: SocketAddr, now: Instant) -> Self {
        Self { socket, peer, stream: None, greeted: false, until: now + PATIENCE }
    }

    /// Continues as far as possible without waiting.
    fn step(&mut self, identity: &Identity) -> Result<Progress, End> {
        let mut stream = match self.stream.take() {
            Some(stream) => stream,
            None => Stream::new(identity.connection()?),
        };
        let stepped = self.advance(&mut stream, identity.client_name());
        // TLS tells the other end the reason for a failure, if that is still possible.
        let _ = stream.flush(&self.socket);
        self.stream = Some(stream);
        stepped
    }

    fn advance(&mut self, stream: &mut Stream, name: Option<&ServerName<'_>>) -> Result<Progress, End> {
        stream.flush(&self.socket)?;
        let frame = stream.next(&self.socket)?.map(<[u8]>::is_empty);
        if !self.greeted && !stream.tls().is_handshaking() {
            check(stream.tls(), name)?;
            stream.greet()?;
            self.greeted = true;
        }
        match frame {
            Some(true) if self.greeted => Ok(Progress::Known),
            Some(_) => Err(End::NoFrame),
            // The protocol version is agreed once a ClientHello has been answered.
            None if stream.tls().protocol_version().is_none() => Ok(Progress::Unanswered),
            None => Ok(Progress::Waiting),
        }
    }

    /// Returns the events to wait for.
    fn flags(&self) -> PollFlags {
        let writes = self.stream.as_ref().is_some_and(|stream| stream.tls().wants_write());
        if writes { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
    }
}

/// Checks that TLS does not make itself: the application protocol, and the name of the connecting end.
fn check(tls: &Connection, name: Option<&ServerName<'_>>) -> Result<(), End> {
    if tls.alpn_protocol() != Some(PROTOCOL) {
        return Err(rustls::Error::NoApplicationProtocol.into());
    }
    let Some(name) = name else { return Ok(()) };
    let certificate = tls.peer_certificates().and_then(<[_]>::first).ok_or(rustls::Error::NoCertificatesPresented)?;
    Ok(verify_server_name(&ParsedCertificate::try_from(certificate)?, name)?)
}

/// State of the handshake thread.
#[derive(Debug)]
pub(super) struct Handshaker {
    shared: Arc<Shared>,
    origin: Origin,
    identity: Identity,
    pending: Admission<Pending>,
    /// Time of the next connection attempt, or of the next batch to accept.
    next: Backoff,
}

impl Handshaker {
    pub(super) fn new(shared: Arc<Shared>, origin: Origin, identity: Identity) -> Self {
        let now = Instant::now();
        let pending = Admission::new(now, Random::System);
        Self { shared, origin, identity, pending, next: Backoff::new(now) }
    }

    /// Runs until the link is dropped.
    pub(super) fn run(mut self) {
        while !self.shared.stopping.load(Ordering::Acquire) {
            self.wait();
            self.shared.wake.clear();
            self.expire(Instant::now());
            if self.next.wait(Instant::now()).is_zero() {
                self.begin();
            }
            self.answer();
            self.step();
        }
    }

    /// Waits until a connection arrives or can proceed, or a deadline is reached.
    fn wait(&mut self) {
        let now = Instant::now();
        let until = self.pending.iter().map(|(pending, _)| pending.until.saturating_duration_since(now)).min();
        let mut wait = until.into_iter().chain(self.pending.wait(now)).min();
        let wake = self.shared.wake.descriptor();
        let mut fds = vec![PollFd::new(&*wake, PollFlags::IN)];
        // A connection that is ready waits for its turn, so its socket is not polled.
        let (indices, sockets): (Vec<usize>, Vec<PollFd<'_>>) = (self.pending.iter().enumerate())
            .filter(|(_, (_, ready))| !ready)
            .map(|(index, (pending, _))| (index, PollFd::new(&pending.socket, pending.flags())))
            .unzip();
        fds.extend(sockets);
        let due = self.next.wait(now);
        match &self.origin {
            Origin::Listener(listener) if due.is_zero() => fds.push(PollFd::new(&**listener, PollFlags::IN)),
            Origin::Connector(..) if self.is_busy() => {}
            Origin::Listener(_) | Origin::Connector(..) => wait = Some(wait.map_or(due, |wait| wait.min(due))),
        }
        // The timeout is rounded up, so that the deadline has passed when the poll times out.
        let timeout = wait.and_then(|wait| Timespec::try_from(wait + Duration::from_millis(1)).ok());
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => {
                // Log: the system is out of memory; a pause lies between.
                log::error!("{}: cannot wait: {errno}", self.shared.name);
                std::thread::sleep(PAUSE);
            }
        }
        let happened: Vec<bool> = fds.iter().skip(1).map(|fd| !fd.revents().is_empty()).collect();
        for (index, _) in indices.into_iter().zip(happened).filter(|(_, happened)| *happened) {
            self.pending.is_ready(index);
        }
        self.give_way();
    }

    /// Returns `true` if a connecting end has a connection, or is opening one.
    fn is_busy(&self) -> bool {
        !self.pending.is_empty() || self.shared.session().is_some()
    }

    /// Accepts or opens connections, if this is due.
    pub(super) fn begin(&mut self) {
        let now = Instant::now();
        match &self.origin {
            Origin::Listener(listener) => {
                self.next.next = now + ACCEPT_INTERVAL;
                let listener = Arc::clone(listener);
                for _ in 0..ACCEPT_BATCH {
                    match accept(&listener) {
                        Ok(Some((socket, peer))) => {
                            let peeked = rustix::net::recv(&socket, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT);
                            self.pending.admit(peer.into(), Pending::new(socket, peer, now), peeked.is_ok());
                        }
                        // The connection was closed before it was accepted.
                        Ok(None) => {}
                        Err(_) => break,
                    }
                }
                self.give_way();
            }
            Origin::Connector(..) if self.is_busy() => {}
            Origin::Connector(connector, peer) => match connector.connect() {
                Ok(socket) => self.pending.admit_own((*peer).into(), Pending::new(socket, *peer, now)),
                Err(error) => {
                    self.shared.note(log::Level::Info, format_args!("not connected to {peer}: {error}"));
                    self.next.failed(Instant::now());
                }
            },
        }
    }

    /// Closes connections while there are too many.
    fn give_way(&mut self) {
        while let Some(victim) = self.pending.one_too_many() {
            // The counter is incremented before the connection is closed, so that an observer of the close sees it
            // counted.
            self.shared.counters.tls_given_up.increment();
            self.shared.note(log::Level::Warn, format_args!("{} gave way to other connections", victim.peer));
        }
    }

    /// Closes connections that took too long.
    pub(super) fn expire(&mut self, now: Instant) {
        while let Some(late) = self.pending.remove_if(|pending| pending.until <= now) {
            self.refused(late.peer, &End::System(std::io::ErrorKind::TimedOut.into()));
        }
    }

    /// Answers ClientHellos, as their rate permits.
    fn answer(&mut self) {
        while let Some(index) = self.pending.next_speaking(Instant::now()) {
            let Some(pending) = self.pending.get_mut(index) else { return };
            let stepped = pending.step(&self.identity);
            if matches!(stepped, Ok(Progress::Unanswered)) {
                self.pending.is_silent(index);
            } else {
                self.pending.charge(Instant::now());
                self.pending.is_answered(index);
                self.ended(index, stepped);
            }
            self.give_way();
        }
    }

    /// Continues the connections that were answered.
    fn step(&mut self) {
        while let Some(index) = self.pending.next_answered() {
            let Some(pending) = self.pending.get_mut(index) else { return };
            let stepped = pending.step(&self.identity);
            self.ended(index, stepped);
        }
    }

    /// Handles the result of a step, which may have completed or ended the connection.
    fn ended(&mut self, index: usize, stepped: Result<Progress, End>) {
        match stepped {
            Ok(Progress::Unanswered | Progress::Waiting) => {}
            Ok(Progress::Known) => {
                let Some(Pending { socket, peer, stream: Some(stream), .. }) = self.pending.remove(index) else {
                    return;
                };
                match self.origin {
                    Origin::Connector(..) => self.next.succeeded(Instant::now()),
                    Origin::Listener(_) => self.pending.proved(Source::from(peer)),
                }
                self.shared.install(Session::new(socket, peer, stream));
            }
            Err(end) => {
                if let Some(refused) = self.pending.remove(index) {
                    self.refused(refused.peer, &end);
                }
            }
        }
    }

    fn refused(&mut self, peer: SocketAddr, end: &End) {
        self.shared.counters.tls_refused.increment();
        self.shared.note(log::Level::Warn, format_args!("no connection with {peer}: {end}"));
        if matches!(self.origin, Origin::Connector(..)) {
            self.next.failed(Instant::now());
        }
    }
}

/// Accepts the next connection. `None` if it has ended before.
fn accept(listener: &OwnedFd) -> Result<Option<(OwnedFd, SocketAddr)>, Errno> {
    match rustix::net::acceptfrom_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
        Ok((socket, peer)) => Ok(peer.and_then(|peer| Some((socket, SocketAddr::try_from(peer).ok()?)))),
        Err(Errno::CONNABORTED | Errno::INTR) => Ok(None),
        Err(errno) => Err(errno),
    }
}

impl Identity {
    /// Creates the TLS state of a new connection.
    fn connection(&self) -> Result<Connection, rustls::Error> {
        Ok(match self {
            Self::Server(config, _) => ServerConnection::new(Arc::clone(config))?.into(),
            Self::Client(config, name) => ClientConnection::new(Arc::clone(config), name.clone())?.into(),
        })
    }

    /// Returns the name that the connecting end's certificate must contain, if one is configured. TLS itself checks the
    /// name of the listening end.
    const fn client_name(&self) -> Option<&ServerName<'static>> {
        match self {
            Self::Server(_, name) => name.as_ref(),
            Self::Client(..) => None,
        }
    }
}
