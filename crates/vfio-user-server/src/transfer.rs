//! Transfer of a connected client from one server to another, in this process or in another one.
//!
//! The client does not notice: it keeps its socket, and no message is lost or answered twice.
//!
//! 1. The first server holds its client ([`Server::hold`](crate::Server::hold)). From then on, the client's messages
//!    wait in the socket.
//! 2. [`HeldClient::connection`] describes the connection. The description consists of descriptors and plain values, so
//!    it can be sent to another process.
//! 3. The second server adopts the connection ([`Server::adopt`](crate::Server::adopt)). It checks the description like
//!    a client's messages, maps the memory and installs the interrupts, but does not receive messages yet.
//! 4. The first server gives its client away ([`HeldClient::give_away`]), or its process ends.
//! 5. The second server serves the client ([`AdoptedClient::serve`]).
//!
//! If any step fails before the fourth, both objects are dropped, and the first server continues.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use parking_lot::MutexGuard;
use rustix::io::Errno;
use thiserror::Error;

use crate::client_connection::{ClientConnection, ClientRange, FilePart};
use crate::endpoint::Endpoint;
use crate::session::{Service, Session, SessionClient, SessionState};
use crate::stats::ConnectionStats;

/// Reason why a client cannot be held.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum HoldError {
    /// A message of the client is incomplete, or its execution takes too long.
    #[error("a message of the client is still being received or executed")]
    Busy,
    /// The client migrates the device, and the next server would know nothing of it.
    #[error("the client migrates the device")]
    Migrating,
    /// The client's memory was revoked, and its connection is about to end.
    #[error("the connection of the client is ending: its memory was taken away")]
    Ending,
}

/// Reason why a described connection is not adopted.
#[derive(Debug, Error)]
pub enum AdoptError {
    /// A range, or its file, is refused. The log says why.
    #[error("the memory at {address:#x} is refused: {errno}")]
    Memory {
        /// First bus address of the range.
        address: u64,
        /// Error that the client would get.
        errno: Errno,
    },
    /// The interrupts are refused.
    #[error("the interrupts are refused: {0}")]
    Interrupts(Errno),
    /// The keeper does not accept the client.
    #[error("{0}")]
    Keeper(String),
    /// The system refuses a thread or a descriptor.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Client whose messages wait. Dropping it resumes the service.
#[derive(Debug)]
pub struct HeldClient<'a> {
    pub(crate) endpoint: &'a Endpoint,
    pub(crate) state: MutexGuard<'a, SessionState>,
}

/// Time for the interrupts that a thread of the device still has to signal. They normally take microseconds.
const INTERRUPTS: Duration = Duration::from_millis(100);

impl HeldClient<'_> {
    /// Describes the connection. Returns `None` if no client is connected. The function is paused, so that it raises no
    /// more interrupts: those that were raised before are signalled when this returns. The next server raises those of
    /// events and completions again, but not the one that announces the response to a command.
    ///
    /// # Errors
    /// The process has too few descriptors, or the client makes the signals last.
    pub fn connection(&self) -> io::Result<Option<ClientConnection>> {
        let Some(SessionClient { stream, protocol }) = &self.state.client else { return Ok(None) };
        if !self.endpoint.irqs.drain(INTERRUPTS) {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "an interrupt is still being delivered"));
        }
        let (mut ranges, mut files) = (Vec::new(), Files::default());
        let view = self.endpoint.memory.view();
        for range in view.ranges() {
            let memory = match &range.backing {
                Some(backing) => {
                    let within = backing.mapping.file_offset().ok_or(io::ErrorKind::InvalidData)?;
                    let offset = within.start().saturating_add(backing.offset as u64);
                    Some(FilePart { file: files.index(within.arc())?, offset })
                }
                None => None,
            };
            ranges.push(ClientRange { address: range.iova, size: range.len, writable: range.writable, memory });
        }
        Ok(Some(ClientConnection {
            stream: stream.as_fd().try_clone_to_owned()?,
            negotiated: protocol.negotiated,
            impatient: protocol.impatient,
            ranges,
            files: files.descriptors,
            interrupts: self.endpoint.irqs.describe()?,
        }))
    }

    /// Leaves the client to another server. This server receives no more messages and accepts no other client. It
    /// neither resets its device nor shuts the client's socket down. The connection's thread ends when it sees the
    /// client's next message.
    pub fn give_away(mut self) {
        self.state.service = Service::Given;
    }
}

/// Files of a description, each once.
#[derive(Default)]
struct Files {
    known: Vec<Arc<File>>,
    descriptors: Vec<OwnedFd>,
}

impl Files {
    fn index(&mut self, file: &Arc<File>) -> io::Result<usize> {
        if let Some(index) = self.known.iter().position(|known| Arc::ptr_eq(known, file)) {
            return Ok(index);
        }
        self.descriptors.push(file.as_fd().try_clone_to_owned()?);
        self.known.push(Arc::clone(file));
        Ok(self.known.len().saturating_sub(1))
    }
}

/// Client of another server that this server is ready to serve. Dropping it leaves the client to the other server.
#[must_use = "the client is served only when `serve` is called"]
#[derive(Debug)]
pub struct AdoptedClient {
    pub(crate) session: Arc<Session>,
    pub(crate) stats: Arc<ConnectionStats>,
    pub(crate) go: SyncSender<()>,
}

impl AdoptedClient {
    /// Receives the client's messages from now on. The other server has given the client away, or its process has
    /// ended.
    pub fn serve(self) {
        self.session.0.lock().service = Service::Active;
        self.stats.set_connected(true);
        // Fails only if the connection's thread has ended by a panic.
        let _ = self.go.send(());
    }
}
