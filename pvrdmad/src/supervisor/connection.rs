//! The supervisor's end of a worker's socket: open requests and their replies.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Instant;

use parking_lot::Mutex;
use thiserror::Error;

use crate::protocol::frame::{encode, send};
use crate::protocol::{Incoming, Outgoing, Reply, Request};

/// Most requests that may be open. A worker that owes this many replies is sent no further request.
const MAX_OPEN: usize = 16;
/// Bytes of a reply around its body.
const ENVELOPE: usize = 64;

/// Reason why there is no reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub(super) enum CallError {
    /// The worker does not reply in time.
    #[error("its worker does not respond")]
    Unresponsive,
    /// There is no worker at the moment.
    #[error("its worker is being restarted")]
    Gone,
    /// The worker received the request with its descriptors, and ended before it replied.
    #[error("its worker is being restarted")]
    Ended,
}

/// Protocol violations, which a genuine worker never commits.
#[derive(Debug, Error)]
pub(super) enum Violation {
    /// The message is no reply, or no valid reply to the request.
    #[error("its reply is not understood: {0}")]
    Content(#[from] serde_json::Error),
    /// The reply belongs to another kind of request.
    #[error("its reply is not one to the request")]
    Kind,
    /// The reply names a request that is not open.
    #[error("it replied to request {0}, which is not open")]
    NotAsked(u64),
    /// The reply is longer than any valid reply to the request.
    #[error("its reply has {length} bytes, at most {most} are taken")]
    TooLong {
        /// Length of the reply in bytes.
        length: usize,
        /// Most bytes that are accepted.
        most: usize,
    },
}

/// A connection to a worker. Any thread may send requests; only the thread that monitors the worker reads.
#[derive(Debug)]
pub(super) struct Connection {
    /// Non-blocking.
    stream: UnixStream,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    last: u64,
    /// Open requests by number. Requests whose caller has given up stay, because their replies may still arrive.
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

    /// Returns the stream from which replies are read.
    pub(super) const fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends a request and returns the receiver of its reply. `devices` is the number of devices that the worker has,
    /// without those that the request itself adds.
    ///
    /// # Errors
    /// The worker does not accept the request.
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
            // A part of the frame may have been written, so nothing can follow it. The reading thread sees the end of
            // the stream.
            self.hang_up();
            return Err(CallError::Gone);
        }
        let (reply, receiver) = sync_channel(1);
        let changes = open.requests.values().filter(|open| open.request.changes_devices()).count();
        let most = request.max_reply(devices.saturating_add(changes));
        open.requests.insert(id, OpenRequest { request, most, since: Instant::now(), reply });
        Ok(receiver)
    }

    /// Returns the length in bytes of the longest frame that may arrive now.
    pub(super) fn longest(&self) -> usize {
        let open = self.open.lock();
        open.requests.values().map(|request| request.most.saturating_add(ENVELOPE)).max().unwrap_or(0)
    }

    /// Returns the time at which the oldest open request was sent.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.open.lock().requests.values().map(|request| request.since).min()
    }

    /// Delivers a reply to the caller that waits for it.
    ///
    /// # Errors
    /// The reply violates the protocol.
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
        // The caller may have given up.
        let _ = request.reply.try_send(reply);
        Ok(())
    }

    /// Closes the connection, which ends the worker.
    pub(super) fn hang_up(&self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }

    /// Drops all open requests, so that their callers stop waiting.
    pub(super) fn end(&self) {
        let mut open = self.open.lock();
        open.ended = true;
        open.requests.clear();
    }
}

/// Waits for a reply until `deadline`.
///
/// # Errors
/// None arrives in time, or the connection has ended.
pub(super) fn reply_by(receiver: &Receiver<Reply>, deadline: Instant) -> Result<Reply, CallError> {
    receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())).map_err(|error| match error {
        RecvTimeoutError::Timeout => CallError::Unresponsive,
        RecvTimeoutError::Disconnected => CallError::Ended,
    })
}
