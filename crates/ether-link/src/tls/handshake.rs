//! Who is at the other end: a thread of its own takes or makes connections, and gives one to the link when both ends
//! have proved who they are. Whatever strangers do costs this thread, and not the one that moves frames.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pvrdma_base::Random;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SocketFlags};
use rustls::client::verify_server_name;
use rustls::pki_types::ServerName;
use rustls::server::ParsedCertificate;
use rustls::{ClientConnection, Connection, ServerConnection};

use super::Shared;
use super::admission::{Admission, Source};
use super::keys::{Identity, PROTOCOL};
use super::session::{End, Session, Stream};
use crate::Connector;

/// Time between two batches of connections that are accepted, and connections in one. To accept and close one is
/// cheap, and a queue that strangers fill faster than it is emptied keeps the peer out before any rule is asked.
pub(super) const ACCEPT_INTERVAL: Duration = Duration::from_millis(5);
pub(super) const ACCEPT_BATCH: usize = 64;
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
    /// None until the first bytes are read: a silent connection costs no more than its socket.
    stream: Option<Stream>,
    greeted: bool,
    until: Instant,
}

/// How far it is.
enum Progress {
    /// Nothing, or part of a ClientHello, has come.
    Unanswered,
    Waiting,
    Known,
}

impl Pending {
    fn new(socket: OwnedFd, peer: SocketAddr, now: Instant) -> Self {
        Self { socket, peer, stream: None, greeted: false, until: now + PATIENCE }
    }

    /// Goes on as far as that goes without waiting.
    fn step(&mut self, identity: &Identity) -> Result<Progress, End> {
        let mut stream = match self.stream.take() {
            Some(stream) => stream,
            None => Stream::new(identity.connection()?),
        };
        let stepped = self.advance(&mut stream, identity.client_name());
        // TLS tells the other side what is wrong, if it can.
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
            // The version is agreed by the answer to a ClientHello.
            None if stream.tls().protocol_version().is_none() => Ok(Progress::Unanswered),
            None => Ok(Progress::Waiting),
        }
    }

    /// What to wait for.
    fn flags(&self) -> PollFlags {
        let writes = self.stream.as_ref().is_some_and(|stream| stream.tls().wants_write());
        if writes { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
    }
}

/// Checks what TLS does not check by itself: what is spoken inside, and the name of who connected.
fn check(tls: &Connection, name: Option<&ServerName<'_>>) -> Result<(), End> {
    if tls.alpn_protocol() != Some(PROTOCOL) {
        return Err(rustls::Error::NoApplicationProtocol.into());
    }
    let Some(name) = name else { return Ok(()) };
    let certificate = tls.peer_certificates().and_then(<[_]>::first).ok_or(rustls::Error::NoCertificatesPresented)?;
    Ok(verify_server_name(&ParsedCertificate::try_from(certificate)?, name)?)
}

/// The thread's own.
#[derive(Debug)]
pub(super) struct Handshaker {
    shared: Arc<Shared>,
    origin: Origin,
    identity: Identity,
    pending: Admission<Pending>,
    /// When the next connection is made, or the next ones are accepted.
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

    /// Waits until a connection comes or goes on, or it is time for something.
    fn wait(&mut self) {
        let now = Instant::now();
        let until = self.pending.iter().map(|(pending, _)| pending.until.saturating_duration_since(now)).min();
        let mut wait = until.into_iter().chain(self.pending.wait(now)).min();
        let wake = self.shared.wake.descriptor();
        let mut fds = vec![PollFd::new(&*wake, PollFlags::IN)];
        // What is ready waits for its turn, not for its socket.
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
        let happened: Vec<bool> = fds.iter().skip(1).map(|fd| !fd.revents().is_empty()).collect();
        for (index, _) in indices.into_iter().zip(happened).filter(|(_, happened)| *happened) {
            self.pending.is_ready(index);
        }
        self.give_way();
    }

    /// Returns `true` if who connects has a connection, or makes one.
    fn is_busy(&self) -> bool {
        !self.pending.is_empty() || self.shared.session().is_some()
    }

    /// Accepts or makes connections, if that is due.
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
                        // One that was gone before it was accepted.
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
            // Counted before it is closed.
            self.shared.counters.tls_given_up.increment();
            self.shared.note(log::Level::Warn, format_args!("{} gave way to other connections", victim.peer));
        }
    }

    /// Connections that took too long end.
    pub(super) fn expire(&mut self, now: Instant) {
        while let Some(late) = self.pending.remove_if(|pending| pending.until <= now) {
            self.refused(late.peer, &End::System(std::io::ErrorKind::TimedOut.into()));
        }
    }

    /// Answers ClientHellos, as their rate allows.
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

    /// Goes on with the connections that were answered.
    fn step(&mut self) {
        while let Some(index) = self.pending.next_answered() {
            let Some(pending) = self.pending.get_mut(index) else { return };
            let stepped = pending.step(&self.identity);
            self.ended(index, stepped);
        }
    }

    /// A connection went on, perhaps to its end.
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

/// The next connection, if there is one. `None`: it ended before.
fn accept(listener: &OwnedFd) -> Result<Option<(OwnedFd, SocketAddr)>, Errno> {
    match rustix::net::acceptfrom_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
        Ok((socket, peer)) => Ok(peer.and_then(|peer| Some((socket, SocketAddr::try_from(peer).ok()?)))),
        Err(Errno::CONNABORTED | Errno::INTR) => Ok(None),
        Err(errno) => Err(errno),
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
