//! Metrics over HTTP for Prometheus and similar programs: `GET /metrics`, on a Unix socket or a TCP port.
//!
//! Any client that can reach the address is answered, so everything is bounded: connections, their lifetime, the bytes
//! read from them, and the rate of requests to the networks. One thread serves all connections and blocks on none;
//! another one asks the networks. When the [`Table`] is full, a connection of the origin with the most connections is
//! closed. A connection without a complete request never displaces one that has sent its request.

mod connection;
mod request;
mod table;

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, TryRecvError, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use log::error;
use pvrdma_base::{
    LogLimit, Random,
    threads::{self, ThreadKind},
};
use pvrdma_vfio_user_server::socket::{FileIdentity, SocketFile};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use self::connection::{Connection, Stage, Stream, Text, Texts};
use self::table::Table;
use crate::config::{MetricsAddress, MetricsSpec};

/// Prefix of log lines.
const SUBJECT: &str = "metrics";

/// Maximum number of connections accepted at a time, so that existing connections make progress.
const ACCEPT_BATCH: usize = 64;

/// Lifetime of a connection.
const CONNECTION_TIME: Duration = Duration::from_secs(10);

/// Requests within this time get the same text.
const FRESH: Duration = Duration::from_millis(100);

/// Pause after the system refuses to accept or to wait.
const PAUSE: Duration = Duration::from_millis(100);

/// Function that produces the metrics as OpenMetrics.
pub(crate) type Source = Box<dyn Fn() -> Result<String, String> + Send + Sync>;

/// A listening socket.
#[derive(Debug)]
pub(crate) enum Place {
    /// A Unix socket.
    Unix(SocketFile),
    /// A TCP port.
    Tcp(TcpListener),
}

impl Place {
    /// Opens the socket.
    ///
    /// # Errors
    /// The address is unavailable.
    pub(crate) fn open(spec: &MetricsSpec) -> Result<Self> {
        match &spec.address {
            MetricsAddress::Unix(path) => Ok(Self::Unix(SocketFile::bind(path, spec.access)?)),
            MetricsAddress::Tcp(address) => {
                let listener = TcpListener::bind(address).with_context(|| address.to_string())?;
                Ok(Self::Tcp(listener))
            }
        }
    }

    /// Describes the socket for a process that takes it over.
    pub(crate) fn describe(&self) -> DescribedPlace {
        match self {
            Self::Unix(socket) => DescribedPlace::Unix(socket.identity().cloned()),
            Self::Tcp(_) => DescribedPlace::Tcp,
        }
    }

    /// Uses a socket that another process has opened. That process owns its file until [`Self::own`] is called.
    pub(crate) fn adopt(described: DescribedPlace, fd: OwnedFd) -> Self {
        match described {
            DescribedPlace::Unix(file) => Self::Unix(SocketFile::adopt(fd.into(), file)),
            DescribedPlace::Tcp => Self::Tcp(fd.into()),
        }
    }

    /// Makes this process the owner of an adopted socket.
    ///
    /// # Errors
    /// The system refuses.
    pub(crate) fn own(&self) -> io::Result<()> {
        match self {
            Self::Unix(socket) => socket.own(),
            Self::Tcp(_) => Ok(()),
        }
    }

    fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Unix(socket) => socket.listener().accept().map(|(stream, _)| Stream::Unix(stream)),
            Self::Tcp(listener) => listener.accept().map(|(stream, _)| Stream::Tcp(stream)),
        }
    }

    fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Self::Unix(socket) => socket.listener().set_nonblocking(true),
            Self::Tcp(listener) => listener.set_nonblocking(true),
        }
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(socket) => socket.listener().as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }
}

/// A listening socket that another process takes over, without its descriptor.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DescribedPlace {
    /// A Unix socket with its file.
    Unix(Option<FileIdentity>),
    /// A TCP port.
    Tcp,
}

/// The metrics server. Dropping it stops it.
#[derive(Debug)]
pub(crate) struct MetricsServer {
    stop: OwnedFd,
    threads: Vec<JoinHandle<()>>,
}

impl MetricsServer {
    /// Starts the server.
    ///
    /// # Errors
    /// No thread can be started.
    pub(crate) fn start(place: Arc<Place>, source: Source) -> io::Result<Self> {
        place.set_nonblocking()?;
        let event = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let (stop, gathered) = (event()?, Arc::new(event()?));
        let ((ask, asked), (tell, told)) = (sync_channel(1), channel());
        let server = Server {
            stop: stop.try_clone()?,
            place,
            table: Table::new(Random::System),
            gathered: Arc::clone(&gathered),
            ask,
            told,
            is_gathering: false,
            last: None,
            log: LogLimit::new(),
        };
        let gather = move || gather(&source, &asked, &tell, &gathered);
        let gatherer = threads::spawn(ThreadKind::Supervisor, "metrics source", gather)?;
        let server = threads::spawn(ThreadKind::Supervisor, "metrics", move || server.run())?;
        // The gathering thread ends once the server has ended.
        Ok(Self { stop, threads: vec![server, gatherer] })
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        if rustix::io::write(&self.stop, &1u64.to_ne_bytes()).is_err() {
            return;
        }
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                // Log: the last message of this thread.
                error!("a thread of metrics panicked");
            }
        }
    }
}

/// Asks the networks once for each message, until the server has ended.
fn gather(source: &Source, asked: &Receiver<()>, tell: &Sender<(Instant, Text)>, gathered: &OwnedFd) {
    while asked.recv().is_ok() {
        let text = source().map(Texts::new);
        if tell.send((Instant::now(), text)).is_err() || rustix::io::write(gathered, &1u64.to_ne_bytes()).is_err() {
            return;
        }
    }
}

/// State of the thread that serves all connections.
struct Server {
    stop: OwnedFd,
    place: Arc<Place>,
    table: Table,
    /// Readable when the text has arrived.
    gathered: Arc<OwnedFd>,
    ask: SyncSender<()>,
    told: Receiver<(Instant, Text)>,
    is_gathering: bool,
    /// The last text, and the time at which it was complete.
    last: Option<(Instant, Texts)>,
    log: LogLimit,
}

impl Server {
    fn run(mut self) {
        while self.wait() {
            let now = Instant::now();
            self.table.expire(now);
            self.accept(now);
            self.hear();
            self.table.each(Connection::step);
            self.answer(now);
        }
    }

    /// Waits for an event. Returns `false` if the thread has to stop.
    fn wait(&mut self) -> bool {
        let now = Instant::now();
        let timeout = self.table.deadline().map(|until| until.saturating_duration_since(now));
        // The timeout is rounded up, so that the deadline has passed when the wait ends.
        let timeout = timeout.and_then(|left| Timespec::try_from(left + Duration::from_millis(1)).ok());
        let mut fds = vec![
            PollFd::new(&self.stop, PollFlags::IN),
            PollFd::from_borrowed_fd(self.place.as_fd(), PollFlags::IN),
            PollFd::new(&*self.gathered, PollFlags::IN),
        ];
        fds.extend(
            self.table.iter().map(|connection| PollFd::from_borrowed_fd(connection.as_fd(), connection.flags())),
        );
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => {
                self.log.error(module_path!(), SUBJECT, format_args!("cannot wait for connections: {errno}"));
                std::thread::sleep(PAUSE);
            }
        }
        let mut fds = fds.iter().map(|fd| !fd.revents().is_empty());
        let stops = fds.next().unwrap_or(true);
        let happened: Vec<bool> = fds.skip(2).collect();
        self.table.iter_mut().zip(happened).for_each(|(connection, happened)| connection.ready |= happened);
        !stops
    }

    fn accept(&mut self, now: Instant) {
        for _ in 0..ACCEPT_BATCH {
            match self.place.accept().and_then(|stream| Connection::new(stream, now + CONNECTION_TIME)) {
                Ok(connection) => self.table.push(connection),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => {
                    self.log.error(module_path!(), SUBJECT, format_args!("cannot accept a connection: {error}"));
                    std::thread::sleep(PAUSE);
                    break;
                }
            }
        }
    }

    /// Takes the gathered text and answers all connections that wait for it.
    fn hear(&mut self) {
        // The descriptor is an event counter. The read fails if nothing has arrived.
        let _ = rustix::io::read(&self.gathered, &mut [0; 8]);
        match self.told.try_recv() {
            Ok((when, text)) => {
                self.is_gathering = false;
                self.last = text.as_ref().ok().map(|texts| (when, texts.clone()));
                self.table.each(|connection| connection.answer(&text));
            }
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => self.is_gathering = false,
        }
    }

    /// Starts gathering the text, or answers with the last one, if a connection waits for it.
    fn answer(&mut self, now: Instant) {
        self.table.give_way();
        if !self.table.iter().any(|connection| matches!(connection.stage, Stage::Asked { .. })) {
            return;
        }
        match &self.last {
            Some((gathered, text)) if is_fresh(*gathered, now) => {
                let text = Ok(text.clone());
                self.table.each(|connection| connection.answer(&text));
            }
            _ if self.is_gathering => {}
            _ if self.ask.try_send(()).is_ok() => self.is_gathering = true,
            _ => {
                let text = Err("the thread that asks the networks has ended".to_owned());
                self.table.each(|connection| connection.answer(&text));
            }
        }
    }
}

/// Returns `true` if a text that was complete at `gathered` may answer a request that arrived at `asked`.
fn is_fresh(gathered: Instant, asked: Instant) -> bool {
    asked.saturating_duration_since(gathered) < FRESH
}

#[cfg(test)]
mod tests;
