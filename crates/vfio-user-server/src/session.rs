//! State of the connection to the current client that a hand-over needs.
//!
//! The lock separates messages. The connection's thread takes it before it receives the first byte of a message, and
//! holds it until the message is answered. While it waits for a message it only peeks, so it has received nothing. A
//! thread that holds the lock therefore knows that every message has either been answered or is still in the socket.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use parking_lot::Mutex;

/// Session of one server.
#[derive(Debug, Default)]
pub(crate) struct Session(pub(crate) Mutex<SessionState>);

/// State behind the lock.
#[derive(Debug, Default)]
pub(crate) struct SessionState {
    /// Connected client.
    pub(crate) client: Option<SessionClient>,
    pub(crate) service: Service,
}

/// Relation of this server to its client.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) enum Service {
    /// This server serves the client, and accepts the next one.
    #[default]
    Active,
    /// The client was described by another server, which still serves it.
    Prepared,
    /// The client belongs to another server. No more messages are received, and the connection is left unchanged.
    Given,
}

/// Connected client.
#[derive(Debug)]
pub(crate) struct SessionClient {
    pub(crate) stream: Arc<UnixStream>,
    pub(crate) protocol: Protocol,
}

/// Result of the version negotiation.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Protocol {
    /// The negotiation has completed.
    pub(crate) negotiated: bool,
    /// The client gives up on replies after a timeout.
    pub(crate) impatient: bool,
}
