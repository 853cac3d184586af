//! Metrics over HTTP, for Prometheus and its like: `GET /metrics`, on a Unix socket or a TCP port.
//!
//! Whoever reaches the place is answered, so all of it is bounded: connections, their time, what is read of them, and
//! how often the networks are asked. What is sent stands ready before the first byte leaves: who reads slowly holds
//! nothing but his connection.

mod request;

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use log::{debug, error};
use parking_lot::Mutex;
use pvrdma_verbs::LogLimit;
use pvrdma_verbs::threads::{self, ThreadKind};
use rustix::event::{EventfdFlags, PollFlags};

use self::request::{MAX_HEAD, Verdict, judge, response_head};
use crate::config::{MetricsAddress, MetricsSpec};
use crate::socket::SocketFile;
use crate::stop::wait;

/// In front of lines of the log.
const SUBJECT: &str = "metrics";

/// Connections at a time. More are closed at once.
const MAX_CONNECTIONS: usize = 8;

/// How long a connection may last.
const CONNECTION_TIME: Duration = Duration::from_secs(10);

/// The same text is given to all who ask within this.
const FRESH: Duration = Duration::from_millis(100);

/// What the text is.
const KIND: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What makes the text.
pub(crate) type Source = Box<dyn Fn() -> Result<String, String> + Send + Sync>;

/// A place that listens.
#[derive(Debug)]
pub(crate) enum Place {
    /// A Unix socket.
    Unix(SocketFile),
    /// A TCP port.
    Tcp(TcpListener),
}

/// A connection.
#[derive(Debug)]
enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Place {
    /// Listens.
    ///
    /// # Errors
    /// The place cannot be had.
    pub(crate) fn open(spec: &MetricsSpec) -> Result<Self> {
        match &spec.address {
            MetricsAddress::Unix(path) => Ok(Self::Unix(SocketFile::bind(path, spec.access)?)),
            MetricsAddress::Tcp(address) => {
                let listener = TcpListener::bind(address).with_context(|| address.to_string())?;
                Ok(Self::Tcp(listener))
            }
        }
    }

    fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Unix(socket) => socket.listener().accept().map(|(stream, _)| Stream::Unix(stream)),
            Self::Tcp(listener) => listener.accept().map(|(stream, _)| Stream::Tcp(stream)),
        }
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(socket) => socket.listener().as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }
}

impl Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(stream) => stream.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
        }
    }

    fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.set_nonblocking(true),
            Self::Tcp(stream) => stream.set_nonblocking(true),
        }
    }

    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.read(bytes),
            Self::Tcp(stream) => stream.read(bytes),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.write(bytes),
            Self::Tcp(stream) => stream.write(bytes),
        }
    }
}

/// Answers until dropped.
#[derive(Debug)]
pub(crate) struct MetricsServer {
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl MetricsServer {
    /// Starts answering.
    ///
    /// # Errors
    /// The system has no room for another thread.
    pub(crate) fn start(place: Place, source: Source) -> io::Result<Self> {
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        let server = Server { stop: stop.try_clone()?, log: LogLimit::new(), source, last: Mutex::new(None) };
        let server = Arc::new(server);
        let thread = threads::spawn(ThreadKind::Supervisor, "metrics", move || accept(&place, &server))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        if rustix::io::write(&self.stop, &1u64.to_ne_bytes()).is_ok()
            && let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            // Log: the last of this thread.
            error!("the thread of metrics panicked");
        }
    }
}

/// What the threads share.
struct Server {
    stop: OwnedFd,
    log: LogLimit,
    source: Source,
    /// What was said last, and when that was complete.
    last: Mutex<Option<(Instant, Arc<str>)>>,
}

/// Has a thread for each connection, until it is time to stop.
fn accept(place: &Place, server: &Arc<Server>) {
    let mut connections: Vec<JoinHandle<()>> = Vec::new();
    while wait(&server.stop, place.as_fd(), PollFlags::IN, None) {
        connections.retain(|connection| !connection.is_finished());
        match place.accept() {
            Ok(_) if connections.len() >= MAX_CONNECTIONS => debug!("too many connections for metrics"),
            Ok(stream) => {
                let shared = Arc::clone(server);
                let thread = threads::spawn(ThreadKind::Supervisor, "metrics client", move || {
                    if let Err(error) = shared.serve(stream) {
                        debug!("metrics: {error}");
                    }
                });
                match thread {
                    Ok(thread) => connections.push(thread),
                    Err(error) => server.log.error(SUBJECT, format_args!("no thread for a connection: {error}")),
                }
            }
            Err(error) => {
                server.log.error(SUBJECT, format_args!("cannot accept a connection: {error}"));
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
    // Their waits end as ours did.
    for connection in connections {
        if connection.join().is_err() {
            // Log: the last of this thread.
            error!("the thread of a connection for metrics panicked");
        }
    }
}

impl Server {
    fn serve(&self, mut stream: Stream) -> io::Result<()> {
        stream.set_nonblocking()?;
        let deadline = Some(Instant::now() + CONNECTION_TIME);
        let mut head = Vec::new();
        let mut chunk = [0; 1024];
        let verdict = loop {
            if !wait(&self.stop, stream.as_fd(), PollFlags::IN, deadline) {
                return Ok(());
            }
            let room = MAX_HEAD.saturating_sub(head.len()).min(chunk.len());
            let count = match stream.read(chunk.get_mut(..room).unwrap_or_default()) {
                Ok(0) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                count => count?,
            };
            head.extend_from_slice(chunk.get(..count).unwrap_or_default());
            if let Some(verdict) = judge(&head) {
                break verdict;
            }
        };
        let (status, kind, body) = match verdict {
            Verdict::Refused(status) => (status, "text/plain", Arc::from("")),
            Verdict::Metrics { .. } => match self.text() {
                Ok(text) => ("200 OK", KIND, text),
                Err(problem) => ("503 Service Unavailable", "text/plain", Arc::from(problem + "\n")),
            },
        };
        self.send(&mut stream, response_head(status, kind, body.len()).as_bytes(), deadline)?;
        if verdict != (Verdict::Metrics { body: false }) {
            self.send(&mut stream, body.as_bytes(), deadline)?;
        }
        Ok(())
    }

    /// The metrics as they are, or were a moment ago. Who comes while they are gathered gets the same.
    fn text(&self) -> Result<Arc<str>, String> {
        let asked = Instant::now();
        let mut last = self.last.lock();
        if let Some((gathered, text)) = &*last
            && is_fresh(*gathered, asked)
        {
            return Ok(Arc::clone(text));
        }
        let text: Arc<str> = (self.source)()?.into();
        *last = Some((Instant::now(), Arc::clone(&text)));
        Ok(text)
    }

    fn send(&self, stream: &mut Stream, mut bytes: &[u8], deadline: Option<Instant>) -> io::Result<()> {
        while !bytes.is_empty() {
            if !wait(&self.stop, stream.as_fd(), PollFlags::OUT, deadline) {
                return Ok(());
            }
            match stream.write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                count => bytes = bytes.get(count?..).unwrap_or_default(),
            }
        }
        Ok(())
    }
}

/// Returns `true` if what was complete then is told to whom asked at `asked`: he waited, or came right behind it.
fn is_fresh(gathered: Instant, asked: Instant) -> bool {
    asked.saturating_duration_since(gathered) < FRESH
}

#[cfg(test)]
mod tests;
