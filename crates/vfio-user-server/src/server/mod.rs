//! Listening side of the server: one client at a time, any number of clients in turn.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use log::error;
use parking_lot::{Mutex, MutexGuard};
use pvrdma_base::threads::{self, ThreadKind};
use pvrdma_pci_function::Outline;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::client_connection::ClientConnection;
use super::connection::{Adoption, Ended};
use super::endpoint::Endpoint;
use super::session::{Protocol, Service, Session, SessionClient, SessionState};
use super::transfer::{AdoptError, AdoptedClient, HeldClient, HoldError};
use crate::socket::{SocketAccess, SocketError, SocketFile, peer};

/// Pause after a failed accept, which means that descriptors or memory are short.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Time that a client's thread has to end after its connection is shut down.
///
/// The thread ends at once unless it is in a system call that no signal interrupts. A client can cause that: it sends a
/// descriptor of a file on a FUSE file system that it serves itself, and `close(2)` waits for the answer to FUSE_FLUSH.
const CLIENT_END: Duration = Duration::from_secs(1);

/// Server of one device. Dropping it disconnects the client and removes the socket.
#[derive(Debug)]
pub struct Server {
    stop: OwnedFd,
    endpoint: Arc<Endpoint>,
    session: Arc<Session>,
    thread: Option<Accepting>,
    /// File of the socket, if this server created it. `None` once the server has ended.
    file: Option<SocketFile>,
}

/// Handle of the thread that accepts clients.
#[derive(Debug)]
struct Accepting {
    thread: JoinHandle<()>,
    /// Disconnected when the thread ends. A message on it means that the thread waits for a client's thread, possibly
    /// forever.
    end: Mutex<Receiver<()>>,
}

/// Threads of a stopped device whose client thread does not return from a system call. They keep the device alive until
/// it does.
#[derive(Debug)]
pub struct StuckClient(JoinHandle<()>);

impl StuckClient {
    /// Returns `true` if the system call has returned and the device is freed.
    pub fn is_gone(&self) -> bool {
        self.0.is_finished()
    }
}

impl Server {
    /// Starts serving at a socket that is already listening and whose file belongs to the caller.
    ///
    /// # Errors
    /// The system cannot start another thread.
    pub fn start(listener: UnixListener, endpoint: Endpoint) -> io::Result<Self> {
        Acceptor::new(listener, endpoint)?.start()
    }

    /// Starts serving as [`Self::start`] does, and prepares to serve a client that another server has described: maps
    /// its memory and installs its interrupts. No message of the client is received before [`AdoptedClient::serve`].
    ///
    /// # Errors
    /// The description is refused, or the system cannot start another thread. The other server still has the client.
    pub fn adopt(
        listener: UnixListener,
        endpoint: Endpoint,
        connection: ClientConnection,
    ) -> Result<(Self, AdoptedClient), AdoptError> {
        let mut acceptor = Acceptor::new(listener, endpoint)?;
        let (adopted, _) = acceptor.adopt(connection, None)?;
        Ok((acceptor.start()?, adopted))
    }

    /// Creates a socket and starts serving there.
    ///
    /// # Errors
    /// The socket cannot be created.
    pub fn listen(path: &Path, endpoint: Endpoint) -> Result<Self, SocketError> {
        let file = SocketFile::bind(path, SocketAccess::default())?;
        let listener = file.listener().try_clone();
        let started = listener.and_then(|listener| Self::start(listener, endpoint));
        let mut server = started.map_err(|error| SocketError::making(path, error))?;
        server.file = Some(file);
        Ok(server)
    }
}

impl Server {
    /// Holds the client: once this returns, its messages wait in the socket, no message is half received or half
    /// executed, and no other client is accepted. Dropping the result resumes the service.
    ///
    /// # Errors
    /// The current message is not finished within `patience`, or the connection is about to end.
    pub fn hold(&self, patience: Duration) -> Result<HeldClient<'_>, HoldError> {
        let state = self.session.0.try_lock_for(patience).ok_or(HoldError::Busy)?;
        if state.service != Service::Active {
            return Err(HoldError::Busy);
        }
        if self.endpoint.memory.is_revoked() {
            return Err(HoldError::Ending);
        }
        if self.endpoint.stats.is_migrating() {
            return Err(HoldError::Migrating);
        }
        Ok(HeldClient { endpoint: &self.endpoint, state })
    }

    /// Disconnects the client and removes the socket, within a bounded time. Returns a handle if the client's thread
    /// does not end.
    #[must_use]
    pub fn end(mut self) -> Option<StuckClient> {
        self.end_threads()
    }

    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    fn end_threads(&mut self) -> Option<StuckClient> {
        let Accepting { thread, end } = self.thread.take()?;
        if let Err(error) = rustix::io::write(&self.stop, &1u64.to_ne_bytes()) {
            // Log: once for a device.
            error!("cannot stop a server: {error}");
            return Some(StuckClient(thread));
        }
        // The thread may already be waiting for an earlier client, then waits for this one, and reports the result.
        let stuck = end.into_inner().recv_timeout(CLIENT_END.saturating_mul(3)) != Err(RecvTimeoutError::Disconnected);
        self.file = None;
        if stuck {
            return Some(StuckClient(thread));
        }
        if thread.join().is_err() {
            // Log: the last of this thread.
            error!("a server thread panicked");
        }
        None
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A stuck client's threads continue without a handle.
        drop(self.end_threads());
    }
}

/// Shuts the stream down when its thread ends, including by a panic, unless the client was given away.
struct HangUp {
    stream: Arc<UnixStream>,
    given: bool,
}

impl Drop for HangUp {
    fn drop(&mut self) {
        if !self.given {
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }
}

/// Current client.
struct Client {
    stream: Arc<UnixStream>,
    thread: JoinHandle<()>,
    /// Disconnected when the thread ends.
    end: Receiver<()>,
}

impl Client {
    /// Returns `true` if either side has ended the stream.
    fn gone(&self) -> bool {
        const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut poll = [PollFd::new(&*self.stream, PollFlags::RDHUP)];
        rustix::event::poll(&mut poll, Some(&NOW)) != Ok(0)
    }

    /// Waits for the end of the thread, for a bounded time. Returns `true` if it has ended.
    fn ends(&self) -> bool {
        self.end.recv_timeout(CLIENT_END) == Err(RecvTimeoutError::Disconnected)
    }
}

/// Accepts clients on a thread of its own.
pub(crate) struct Acceptor {
    listener: UnixListener,
    endpoint: Arc<Endpoint>,
    session: Arc<Session>,
    client: Option<Client>,
    /// Written when accesses to the client's memory have stalled too often.
    evict: Arc<OwnedFd>,
}

impl Acceptor {
    pub(crate) fn new(listener: UnixListener, endpoint: Endpoint) -> io::Result<Self> {
        let evict = Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (stats, stalled) = (Arc::clone(&endpoint.stats), Arc::clone(&evict));
        endpoint.memory.observe_stalls(move |stall| {
            stats.counters.client_memory_stalls.increment();
            if stall.revoked {
                // This runs on the thread that stalled, which often belongs to another device. `shutdown` wakes all
                // waiters of the socket, and the client chooses their number, so the call is left to this device's own
                // thread.
                let _ = rustix::io::write(&*stalled, &1u64.to_ne_bytes());
            }
        });
        Ok(Self { listener, endpoint: Arc::new(endpoint), session: Arc::default(), client: None, evict })
    }

    pub(crate) fn start(self) -> io::Result<Server> {
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        let stopped = stop.try_clone()?;
        let (endpoint, session) = (Arc::clone(&self.endpoint), Arc::clone(&self.session));
        let (ended, end) = sync_channel(1);
        let thread = threads::spawn(ThreadKind::Accept, format!("{} accept", endpoint.name), move || {
            self.run(&stopped, &ended);
        })?;
        Ok(Server { stop, endpoint, session, thread: Some(Accepting { thread, end: Mutex::new(end) }), file: None })
    }

    fn run(mut self, stop: &OwnedFd, waits: &SyncSender<()>) {
        loop {
            let listener = self.listener.as_fd();
            let mut poll = [
                PollFd::new(stop, PollFlags::IN),
                PollFd::new(&listener, PollFlags::IN),
                PollFd::new(&*self.evict, PollFlags::IN),
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
            let (evicting, connecting) = (!evicting.revents().is_empty(), !connecting.revents().is_empty());
            if evicting {
                self.evict();
            }
            if !connecting {
                continue;
            }
            self.reap();
            // A client that connects during a hand-over waits here for its result. A client that will be turned away
            // must not wait: the holder of the lock may execute a message that never ends.
            let session = Arc::clone(&self.session);
            let state = self.client.is_none().then(|| session.0.lock());
            if state.as_ref().is_some_and(|state| state.service == Service::Given) {
                break;
            }
            match self.listener.accept() {
                Ok((stream, _)) => match state {
                    Some(state) => self.admit(stream, state),
                    None => self.turn_away(stream),
                },
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    self.endpoint.error(module_path!(), format_args!("cannot accept a client: {error}"));
                    thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
        if let Some(client) = self.client.take() {
            // The lock is not waited for: the client's thread may keep it forever.
            if self.session.0.try_lock().is_some_and(|state| state.service != Service::Active) {
                return;
            }
            // Wakes the client's thread from any wait on the socket.
            let _ = client.stream.shutdown(Shutdown::Both);
            if !client.ends() {
                self.abandon(waits);
            }
            self.finish(client);
        }
    }

    /// Takes the device from a client whose thread does not end, as far as that is possible without the thread. The
    /// worker continues to serve its other devices.
    fn abandon(&self, waits: &SyncSender<()>) {
        // Log: once for a device.
        error!("{}: the thread of its client does not come back from a system call", self.endpoint.name);
        let _ = waits.try_send(());
        // The same steps as at the end of the client's thread, which repeats them if its system call returns.
        self.endpoint.function.reset();
        self.endpoint.memory.unmap_all();
        self.endpoint.irqs.clear();
    }

    /// Ends the connection of a client whose memory was revoked.
    fn evict(&self) {
        // Cleared before `is_revoked` is read, so that a revocation in between leaves the event set and is not missed.
        let _ = rustix::io::read(&*self.evict, &mut [0; 8]);
        // The event may be due to an earlier client; the memory of the current one is then not revoked.
        if let Some(client) = self.client.as_ref().filter(|_| self.endpoint.memory.is_revoked()) {
            // The client's thread finds the reason itself.
            let _ = client.stream.shutdown(Shutdown::Both);
        }
    }

    /// Cleans up after a client that is gone, if its thread has ended.
    fn reap(&mut self) {
        if let Some(client) = self.client.take_if(|client| client.gone() && client.ends()) {
            self.finish(client);
        }
    }

    /// Closes the connection of a client at once, so that it fails fast instead of waiting for an answer.
    fn turn_away(&self, stream: UnixStream) {
        drop(stream);
        self.endpoint.stats.counters.client_connections_turned_away.increment();
        if self.client.as_ref().is_some_and(Client::gone) {
            // The former client's thread would reset the device under the next client.
            self.endpoint.warn(
                module_path!(),
                format_args!(
                    "a client was turned away: the thread of the last one does not come back from a system call"
                ),
            );
            return;
        }
        let process = self.endpoint.stats.process();
        let holder = process.map_or_else(String::new, |process| format!(": process {process} has the device"));
        self.endpoint.warn(module_path!(), format_args!("a second client was turned away{holder}"));
    }

    fn admit(&mut self, stream: UnixStream, mut state: MutexGuard<'_, SessionState>) {
        self.endpoint.stats.counters.client_connections.increment();
        let stream = Arc::new(stream);
        state.client = Some(SessionClient { stream: Arc::clone(&stream), protocol: Protocol::default() });
        match self.start_client(stream, None) {
            Ok(client) => self.client = Some(client),
            Err(error) => {
                state.client = None;
                self.endpoint.error(module_path!(), format_args!("no thread for a client: {error}"));
            }
        }
    }

    /// Prepares to serve a client whose server has crashed, with its function in reset. Also returns the reason if the
    /// driver was not told.
    pub(crate) fn recover(
        &mut self,
        connection: ClientConnection,
        outline: Outline,
    ) -> Result<(AdoptedClient, Option<String>), AdoptError> {
        self.adopt(connection, Some(outline))
    }

    /// Gives up a client that cannot be recovered, whose socket is shut down.
    pub(crate) fn abandon_recovery(&mut self, stream: UnixStream) {
        match self.client.take() {
            Some(client) => {
                drop(stream);
                self.finish(client);
            }
            // Its keeper is asked as soon as the next client is served.
            None => drop(stream),
        }
        *self.session.0.lock() = SessionState::default();
    }

    /// Starts the thread of a client that another server has described, and waits until it is ready to serve. With an
    /// outline, the function is recovered.
    fn adopt(
        &mut self,
        connection: ClientConnection,
        outline: Option<Outline>,
    ) -> Result<(AdoptedClient, Option<String>), AdoptError> {
        let stream = Arc::new(UnixStream::from(connection.stream.try_clone()?));
        let protocol = Protocol::default();
        let client = Some(SessionClient { stream: Arc::clone(&stream), protocol });
        *self.session.0.lock() = SessionState { client, service: Service::Prepared };
        let ((ready, prepared), (go, permission)) = (sync_channel(1), sync_channel(1));
        self.client = Some(self.start_client(stream, Some(Adoption { connection, outline, ready, go: permission }))?);
        // Disconnected only by a panic of that thread.
        let told = prepared.recv().map_err(io::Error::other)??;
        let stats = Arc::clone(&self.endpoint.stats);
        Ok((AdoptedClient { session: Arc::clone(&self.session), stats, go }, told))
    }

    fn start_client(&self, stream: Arc<UnixStream>, adoption: Option<Adoption>) -> io::Result<Client> {
        self.endpoint.stats.set_process(peer(&stream));
        // The client of another server connects here when it is served: until then it may stay there.
        self.endpoint.stats.set_connected(adoption.is_none());
        let (endpoint, session) = (Arc::clone(&self.endpoint), Arc::clone(&self.session));
        let hang_up = HangUp { stream: Arc::clone(&stream), given: adoption.is_some() };
        let (ended, end) = sync_channel::<()>(0);
        let thread = threads::spawn(ThreadKind::Connection, endpoint.name.clone(), move || {
            let (_ended, mut served) = (ended, hang_up);
            served.given = endpoint.serve_session(&served.stream, &session, adoption) == Ended::Given;
            if served.given { endpoint.stats.set_given() } else { endpoint.stats.set_connected(false) }
        });
        match thread {
            Ok(thread) => Ok(Client { stream, thread, end }),
            Err(error) => {
                self.endpoint.stats.set_connected(false);
                Err(error)
            }
        }
    }

    fn finish(&self, client: Client) {
        if client.thread.join().is_err() {
            // `Endpoint::serve` has already cleared the state that the panic left.
            self.endpoint.error(module_path!(), format_args!("the connection's thread panicked"));
            self.endpoint.stats.set_connected(false);
        }
        // Closing the last descriptor of the socket also closes the descriptors that the client has sent and that were
        // not received. The client decides how long that takes, so the keeper holds the last one.
        drop(client.stream);
        if let Some(keeper) = &self.endpoint.keeper {
            keeper.release();
        }
    }
}

#[cfg(test)]
mod tests;
