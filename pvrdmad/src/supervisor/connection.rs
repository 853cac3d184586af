//! The supervisor's end of a worker's socket: what was asked and waits for its reply.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Instant;

use parking_lot::Mutex;
use thiserror::Error;

use crate::protocol::frame::{encode, send};
use crate::protocol::{Incoming, Outgoing, Reply, Request};

/// Requests that may wait for their replies. A worker that owes so many is asked nothing more.
const MAX_OPEN: usize = 16;
/// Bytes of a reply around its body.
const ENVELOPE: usize = 64;

/// Why there is no reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub(super) enum CallError {
    /// The worker does not answer in time.
    #[error("its worker does not respond")]
    Unresponsive,
    /// There is no worker now.
    #[error("its worker is being restarted")]
    Gone,
    /// The worker had the request, with its descriptors, and ended before it replied.
    #[error("its worker is being restarted")]
    Ended,
}

/// What no worker of ours does.
#[derive(Debug, Error)]
pub(super) enum Violation {
    /// The reply is none, or not one to the request.
    #[error("its reply is not understood: {0}")]
    Content(#[from] serde_json::Error),
    /// It is one to something else.
    #[error("its reply is not one to the request")]
    Kind,
    /// Nobody asked.
    #[error("it replied to request {0}, which is not open")]
    NotAsked(u64),
    /// It is longer than any reply to the request.
    #[error("its reply has {length} bytes, at most {most} are taken")]
    TooLong {
        /// Bytes of the reply.
        length: usize,
        /// Bytes that are taken.
        most: usize,
    },
}

/// A connection to a worker. Anybody asks; the thread that watches the worker reads.
#[derive(Debug)]
pub(super) struct Connection {
    /// Never waits.
    stream: UnixStream,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    last: u64,
    /// By number. Those that nobody waits for any more stay: their replies may still come.
    requests: BTreeMap<u64, OpenRequest>,
    ended: bool,
}

#[derive(Debug)]
struct OpenRequest {
    request: Request,
    most: usize,
    since: Instant,
    reply: SyncSender<Reply>,
}

impl Connection {
    pub(super) fn new(stream: UnixStream) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self { stream, open: Mutex::default() })
    }

    /// What to read replies from.
    pub(super) const fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Asks, and gives where the reply comes. `devices` is how many the worker has, but for those that it is asked to
    /// begin or to end with.
    ///
    /// # Errors
    /// The worker does not take it.
    pub(super) fn ask(
        &self,
        request: Request,
        fds: &[BorrowedFd<'_>],
        devices: usize,
    ) -> Result<Receiver<Reply>, CallError> {
        let mut open = self.open.lock();
        if open.ended {
            return Err(CallError::Gone);
        }
        if open.requests.len() >= MAX_OPEN {
            return Err(CallError::Unresponsive);
        }
        open.last = open.last.wrapping_add(1);
        let id = open.last;
        let frame = encode(&Outgoing { id, body: &request }).map_err(|_| CallError::Unresponsive)?;
        if send(&self.stream, &frame, fds).is_err() {
            // Part of it may be there: nothing can follow. The thread that reads sees the end.
            self.hang_up();
            return Err(CallError::Gone);
        }
        let (reply, receiver) = sync_channel(1);
        let changes = open.requests.values().filter(|open| open.request.changes_devices()).count();
        let most = request.max_reply(devices.saturating_add(changes));
        open.requests.insert(id, OpenRequest { request, most, since: Instant::now(), reply });
        Ok(receiver)
    }

    /// Bytes of the longest frame that may come now.
    pub(super) fn longest(&self) -> usize {
        let open = self.open.lock();
        open.requests.values().map(|request| request.most.saturating_add(ENVELOPE)).max().unwrap_or(0)
    }

    /// When the oldest request that waits was asked.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.open.lock().requests.values().map(|request| request.since).min()
    }

    /// Gives a reply to whoever waits for it.
    ///
    /// # Errors
    /// It is not one that this worker may send.
    pub(super) fn settle(&self, frame: &[u8]) -> Result<(), Violation> {
        let Incoming { id, body } = serde_json::from_slice(frame)?;
        let Some(request) = self.open.lock().requests.remove(&id) else { return Err(Violation::NotAsked(id)) };
        let (length, most) = (body.get().len(), request.most);
        if length > most {
            return Err(Violation::TooLong { length, most });
        }
        let reply = Reply::parse(body)?;
        if !request.request.is_answered_by(&reply) {
            return Err(Violation::Kind);
        }
        // Whoever asked may have given up.
        let _ = request.reply.try_send(reply);
        Ok(())
    }

    /// Ends the connection, and so the worker.
    pub(super) fn hang_up(&self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }

    /// Nobody waits any more.
    pub(super) fn end(&self) {
        let mut open = self.open.lock();
        open.ended = true;
        open.requests.clear();
    }
}

/// Waits for a reply.
///
/// # Errors
/// None comes in time, or ever.
pub(super) fn reply_by(receiver: &Receiver<Reply>, deadline: Instant) -> Result<Reply, CallError> {
    receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())).map_err(|error| match error {
        RecvTimeoutError::Timeout => CallError::Unresponsive,
        RecvTimeoutError::Disconnected => CallError::Ended,
    })
}
