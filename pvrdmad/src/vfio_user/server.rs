//! The listening side: one client at a time, any number one after the other.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use log::error;
use pvrdma_verbs::threads::{self, ThreadKind};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::endpoint::Endpoint;
use crate::socket::{SocketAccess, SocketFile, peer};

/// How long to wait after a failed accept, which means that descriptors or memory are short.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves one device. Dropping it disconnects the client and removes the socket.
#[derive(Debug)]
pub struct Server {
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
    /// The socket's file, if it is ours. Gone once the thread has ended.
    file: Option<SocketFile>,
}

impl Server {
    /// Starts serving at a socket that listens already, and whose file is somebody else's.
    ///
    /// # Errors
    /// The system has no room for another thread.
    pub fn start(listener: UnixListener, endpoint: Endpoint) -> io::Result<Self> {
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        let evict = Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (stats, stalled) = (Arc::clone(&endpoint.stats), Arc::clone(&evict));
        endpoint.memory.observe_stalls(move |stall| {
            stats.counters.client_memory_stalls.increment();
            if stall.revoked {
                // The thread is often one of another device, and to shut a socket down wakes all that wait for it,
                // which takes as long as the client likes. So the device's own thread does that.
                let _ = rustix::io::write(&*stalled, &1u64.to_ne_bytes());
            }
        });
        let stopped = stop.try_clone()?;
        let thread = threads::spawn(ThreadKind::Accept, format!("{} accept", endpoint.name), move || {
            Acceptor { listener, endpoint: Arc::new(endpoint), client: None }.run(&stopped, &evict);
        })?;
        Ok(Self { stop, thread: Some(thread), file: None })
    }

    /// Makes a socket and starts serving there.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn listen(path: &Path, endpoint: Endpoint) -> anyhow::Result<Self> {
        let file = SocketFile::bind(path, SocketAccess::default())?;
        let mut server = Self::start(file.listener().try_clone()?, endpoint)?;
        server.file = Some(file);
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(error) = rustix::io::write(&self.stop, &1u64.to_ne_bytes()) {
            // Log: once for a device.
            error!("cannot stop a server: {error}");
            return;
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            // Log: the last of this thread.
            error!("a server thread panicked");
        }
        self.file = None;
    }
}

/// Ends the stream however its thread ends.
struct HangUp(Arc<UnixStream>);

impl Drop for HangUp {
    fn drop(&mut self) {
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

/// The client of the moment.
struct Client {
    stream: Arc<UnixStream>,
    thread: JoinHandle<()>,
}

impl Client {
    /// Returns `true` if the stream has ended, from either side.
    fn gone(&self) -> bool {
        const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut poll = [PollFd::new(&*self.stream, PollFlags::RDHUP)];
        rustix::event::poll(&mut poll, Some(&NOW)) != Ok(0)
    }
}

struct Acceptor {
    listener: UnixListener,
    endpoint: Arc<Endpoint>,
    client: Option<Client>,
}

impl Acceptor {
    fn run(mut self, stop: &OwnedFd, evict: &OwnedFd) {
        loop {
            let listener = self.listener.as_fd();
            let mut poll = [
                PollFd::new(stop, PollFlags::IN),
                PollFd::new(&listener, PollFlags::IN),
                PollFd::new(evict, PollFlags::IN),
            ];
            match rustix::event::poll(&mut poll, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => {
                    // Log: the last of this thread.
                    error!("{}: poll: {errno}", self.endpoint.name);
                    break;
                }
            }
            let [stopped, connecting, evicting] = &poll;
            if !stopped.revents().is_empty() {
                break;
            }
            if !evicting.revents().is_empty() {
                self.evict(evict);
            }
            if connecting.revents().is_empty() {
                continue;
            }
            match self.listener.accept() {
                Ok((stream, _)) => self.admit(stream),
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    self.endpoint.error(format_args!("cannot accept a client: {error}"));
                    thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
        if let Some(client) = self.client.take() {
            // Wakes its thread whatever it waits for.
            let _ = client.stream.shutdown(Shutdown::Both);
            self.finish(client);
        }
    }

    /// Ends the connection of a client whose memory was revoked.
    fn evict(&self, event: &OwnedFd) {
        // Cleared before the look, so that the next revocation is not missed.
        let _ = rustix::io::read(event, &mut [0; 8]);
        // It may be another client by now, whose memory is not.
        if let Some(client) = self.client.as_ref().filter(|_| self.endpoint.memory.is_revoked()) {
            // Its thread finds out why.
            let _ = client.stream.shutdown(Shutdown::Both);
        }
    }

    fn admit(&mut self, stream: UnixStream) {
        match self.client.take() {
            Some(client) if !client.gone() => {
                // Closed at once: the second one fails fast instead of waiting for an answer.
                let holder = self
                    .endpoint
                    .stats
                    .process()
                    .map_or_else(String::new, |process| format!(": process {process} has the device"));
                self.endpoint.warn(format_args!("a second client was turned away{holder}"));
                self.endpoint.stats.counters.client_connections_turned_away.increment();
                self.client = Some(client);
                return;
            }
            // It is being cleaned up after, which does not take long.
            Some(client) => self.finish(client),
            None => {}
        }
        self.endpoint.stats.counters.client_connections.increment();
        self.endpoint.stats.set_process(peer(&stream));
        self.endpoint.stats.set_connected(true);
        let stream = Arc::new(stream);
        let (endpoint, served) = (Arc::clone(&self.endpoint), HangUp(Arc::clone(&stream)));
        let thread = threads::spawn(ThreadKind::Connection, endpoint.name.clone(), move || {
            endpoint.serve(&served.0);
            endpoint.stats.set_connected(false);
        });
        match thread {
            Ok(thread) => self.client = Some(Client { stream, thread }),
            Err(error) => {
                self.endpoint.stats.set_connected(false);
                self.endpoint.error(format_args!("no thread for a client: {error}"));
            }
        }
    }

    fn finish(&self, client: Client) {
        if client.thread.join().is_err() {
            // What a panic leaves is cleared by then; see `Endpoint::serve`.
            self.endpoint.error(format_args!("the connection's thread panicked"));
            self.endpoint.stats.set_connected(false);
        }
    }
}
