//! Who is at the other end: a thread of its own takes or makes connections, and gives one to the link when both ends
//! have proved who they are. Whatever strangers do costs this thread, and not the one that moves frames.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use rustls::client::verify_server_name;
use rustls::pki_types::ServerName;
use rustls::server::ParsedCertificate;
use rustls::{ClientConnection, Connection, ServerConnection};

use super::Shared;
use super::keys::{Identity, PROTOCOL};
use super::session::{End, Session, Stream};
use crate::Connector;

/// Connections that have proved nothing yet. The oldest one gives way.
pub(super) const MAX_PENDING: usize = 16;
/// Time between two connections that are taken, so that strangers cannot have the thread compute all the time.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(5);
/// Within this a connection has to be made and to have proved who it is.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// Time until the next attempt to connect: doubled with each that fails.
pub(super) const FIRST_RETRY: Duration = Duration::from_millis(500);
pub(super) const LAST_RETRY: Duration = Duration::from_secs(30);
/// Pause when waiting fails.
const PAUSE: Duration = Duration::from_millis(100);

/// Where connections come from.
#[derive(Debug)]
pub(super) enum Origin {
    Listener(Arc<OwnedFd>),
    Connector(Arc<dyn Connector>, SocketAddr),
}

/// When to try again. A value, on any clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Backoff {
    next: Instant,
    interval: Duration,
}

impl Backoff {
    pub(super) const fn new(now: Instant) -> Self {
        Self { next: now, interval: FIRST_RETRY }
    }

    /// Time until the next attempt may be.
    pub(super) fn wait(&self, now: Instant) -> Duration {
        self.next.saturating_duration_since(now)
    }

    /// An attempt failed.
    pub(super) fn failed(&mut self, now: Instant) {
        self.next = now + self.interval;
        self.interval = self.interval.saturating_mul(2).min(LAST_RETRY);
    }

    /// An attempt succeeded. The next one is not at once all the same.
    pub(super) fn succeeded(&mut self, now: Instant) {
        *self = Self { next: now + FIRST_RETRY, interval: FIRST_RETRY };
    }
}

/// A connection whose other end has not proved who it is.
#[derive(Debug)]
struct Pending {
    socket: OwnedFd,
    peer: SocketAddr,
    stream: Stream,
    greeted: bool,
    until: Instant,
}

/// How far it is.
enum Progress {
    Waiting,
    Known,
}

impl Pending {
    /// Goes on as far as that goes without waiting.
    fn step(&mut self, name: Option<&ServerName<'_>>) -> Result<Progress, End> {
        let stepped = self.advance(name);
        // TLS tells the other side what is wrong, if it can.
        let _ = self.stream.flush(&self.socket);
        stepped
    }

    fn advance(&mut self, name: Option<&ServerName<'_>>) -> Result<Progress, End> {
        self.stream.flush(&self.socket)?;
        let frame = self.stream.next(&self.socket)?.map(<[u8]>::is_empty);
        if !self.greeted && !self.stream.tls().is_handshaking() {
            self.check(name)?;
            self.stream.greet()?;
            self.greeted = true;
        }
        match frame {
            Some(true) if self.greeted => Ok(Progress::Known),
            Some(_) => Err(End::NoFrame),
            None => Ok(Progress::Waiting),
        }
    }

    /// Checks what TLS does not check by itself: what is spoken inside, and the name of who connected.
    fn check(&self, name: Option<&ServerName<'_>>) -> Result<(), End> {
        let tls = self.stream.tls();
        if tls.alpn_protocol() != Some(PROTOCOL) {
            return Err(rustls::Error::NoApplicationProtocol.into());
        }
        let Some(name) = name else { return Ok(()) };
        let certificate =
            tls.peer_certificates().and_then(<[_]>::first).ok_or(rustls::Error::NoCertificatesPresented)?;
        Ok(verify_server_name(&ParsedCertificate::try_from(certificate)?, name)?)
    }

    /// What to wait for.
    fn flags(&self) -> PollFlags {
        if self.stream.tls().wants_write() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
    }
}

/// The thread's own.
#[derive(Debug)]
pub(super) struct Handshaker {
    shared: Arc<Shared>,
    origin: Origin,
    identity: Identity,
    pending: Vec<Pending>,
    /// When the next connection is made or taken.
    next: Backoff,
}

impl Handshaker {
    pub(super) fn new(shared: Arc<Shared>, origin: Origin, identity: Identity) -> Self {
        Self { shared, origin, identity, pending: Vec::new(), next: Backoff::new(Instant::now()) }
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
            self.step();
        }
    }

    /// Waits until a connection comes or goes on, or it is time for something.
    fn wait(&self) {
        let now = Instant::now();
        let mut wait = self.pending.iter().map(|pending| pending.until.saturating_duration_since(now)).min();
        let wake = self.shared.wake.descriptor();
        let mut fds = vec![PollFd::new(&*wake, PollFlags::IN)];
        fds.extend(self.pending.iter().map(|pending| PollFd::new(&pending.socket, pending.flags())));
        let due = self.next.wait(now);
        match &self.origin {
            Origin::Listener(listener) if due.is_zero() => fds.push(PollFd::new(&**listener, PollFlags::IN)),
            Origin::Connector(..) if self.is_busy() => {}
            Origin::Listener(_) | Origin::Connector(..) => wait = Some(wait.map_or(due, |wait| wait.min(due))),
        }
        // Rounded up: nothing is due a moment early.
        let timeout = wait.and_then(|wait| Timespec::try_from(wait + Duration::from_millis(1)).ok());
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => {
                // Log: the system is out of memory; a pause lies between.
                log::error!("{}: cannot wait: {errno}", self.shared.name);
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// Returns `true` if who connects has a connection, or makes one.
    fn is_busy(&self) -> bool {
        !self.pending.is_empty() || self.shared.session().is_some()
    }

    /// Takes or makes a connection, if that is due.
    pub(super) fn begin(&mut self) {
        let now = Instant::now();
        let (socket, peer) = match &self.origin {
            Origin::Listener(listener) => {
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                let Ok((socket, peer)) = rustix::net::acceptfrom_with(listener, flags) else { return };
                let Some(peer) = peer.and_then(|peer| SocketAddr::try_from(peer).ok()) else { return };
                self.next.next = now + ACCEPT_INTERVAL;
                (socket, peer)
            }
            Origin::Connector(..) if self.is_busy() => return,
            Origin::Connector(connector, peer) => match connector.connect() {
                Ok(socket) => (socket, *peer),
                Err(error) => {
                    self.shared.note(log::Level::Info, format_args!("not connected to {peer}: {error}"));
                    self.next.failed(Instant::now());
                    return;
                }
            },
        };
        if self.pending.len() >= MAX_PENDING {
            // Counted before it is closed.
            self.shared.counters.tls_given_up.increment();
            let oldest = self.pending.remove(0);
            self.shared.note(log::Level::Warn, format_args!("{} gave way to newer connections", oldest.peer));
        }
        match self.identity.connection() {
            Ok(tls) => {
                let stream = Stream::new(tls);
                self.pending.push(Pending { socket, peer, stream, greeted: false, until: now + PATIENCE });
            }
            Err(error) => self.refused(peer, &error.into()),
        }
    }

    /// Connections that took too long end.
    pub(super) fn expire(&mut self, now: Instant) {
        while let Some(index) = self.pending.iter().position(|pending| pending.until <= now) {
            let late = self.pending.remove(index);
            self.refused(late.peer, &End::System(std::io::ErrorKind::TimedOut.into()));
        }
    }

    /// Goes on with all connections.
    fn step(&mut self) {
        let mut index = 0;
        while let Some(pending) = self.pending.get_mut(index) {
            match pending.step(self.identity.client_name()) {
                Ok(Progress::Waiting) => index += 1,
                Ok(Progress::Known) => {
                    let Pending { socket, peer, stream, .. } = self.pending.remove(index);
                    if matches!(self.origin, Origin::Connector(..)) {
                        self.next.succeeded(Instant::now());
                    }
                    self.shared.install(Session::new(socket, peer, stream));
                }
                Err(end) => {
                    let refused = self.pending.remove(index);
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

impl Identity {
    /// A connection at its beginning.
    fn connection(&self) -> Result<Connection, rustls::Error> {
        Ok(match self {
            Self::Server(config, _) => ServerConnection::new(Arc::clone(config))?.into(),
            Self::Client(config, name) => ClientConnection::new(Arc::clone(config), name.clone())?.into(),
        })
    }

    /// The name that who connects has to have, if any has to. Of who is connected to TLS checks it.
    const fn client_name(&self) -> Option<&ServerName<'static>> {
        match self {
            Self::Server(_, name) => name.as_ref(),
            Self::Client(..) => None,
        }
    }
}
