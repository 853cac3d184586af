//! Recovery of a client whose server has ended without giving the client away: its process has crashed.
//!
//! The keeper has the client's socket, so the client sees no end of its connection. The next server reads the
//! client's state from the keeper ([`crate::kept`]), and serves the client with a function in reset.
//!
//! # Messages
//!
//! The client numbers its messages, and the stream must be between two of them when the next server begins to read.
//! The first server may have ended at any moment:
//!
//! | it ended | the stream | the client |
//! | --- | --- | --- |
//! | while it waited, or after a peek | is before the message | is answered by the next server |
//! | after one read of a message, before the answer | is behind the message | waits for its timeout, then continues |
//! | between several reads of a message, or writes of an answer | may be inside | is disconnected |
//!
//! A read or write of bytes that are there, or have room, is not interrupted by a signal, not even by SIGKILL. So a
//! message that was peeked as a whole is received as a whole or not at all, and needs no mark. Before a message is
//! received in any other way, the keeper notes that the stream may be inside a message
//! ([`Key::PARTIAL`](crate::keeper::notes::Key::PARTIAL)); afterwards the note is removed. Answers of up to
//! [`ATOMIC_ANSWER`](crate::stream::ATOMIC_ANSWER) bytes are likewise sent as a whole or not at all.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};

use crate::endpoint::Endpoint;
use crate::kept;
use crate::server::{Acceptor, Server};

/// Result of [`Server::recover`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Recovery {
    /// There was no client.
    Nothing,
    /// The client is served. Its function is in reset, and its driver was told.
    Recovered,
    /// The client is served. Its function is in reset, but its driver was not told, for this reason.
    Untold(String),
    /// The client was disconnected, for this reason.
    Lost(String),
}

impl Server {
    /// Starts serving as [`Self::start`] does, and serves the client that an earlier server has left at the endpoint's
    /// keeper. The function is in reset, with the configuration space that the client knows.
    ///
    /// # Errors
    /// The system cannot start another thread.
    pub fn recover(listener: UnixListener, endpoint: Endpoint) -> io::Result<(Self, Recovery)> {
        let seat = endpoint.keeper.clone();
        let mut acceptor = Acceptor::new(listener, endpoint)?;
        let recalled = match seat.map(|seat| seat.recall()) {
            None | Some(Ok(None)) => return Ok((acceptor.start()?, Recovery::Nothing)),
            Some(Ok(Some(recalled))) => recalled,
            Some(Err(error)) => return Ok((acceptor.start()?, Recovery::Lost(error.to_string()))),
        };
        let stream = UnixStream::from(recalled.stream.try_clone()?);
        let adopted = kept::read(recalled)
            .map_err(|error| error.to_string())
            .and_then(|(connection, outline)| acceptor.recover(connection, outline).map_err(|error| error.to_string()));
        match adopted {
            Ok((client, told)) => {
                let server = acceptor.start()?;
                server.endpoint().stats.counters.client_connections_recovered.increment();
                client.serve();
                Ok((server, told.map_or(Recovery::Recovered, Recovery::Untold)))
            }
            Err(reason) => {
                let _ = stream.shutdown(Shutdown::Both);
                acceptor.abandon_recovery(stream);
                Ok((acceptor.start()?, Recovery::Lost(reason)))
            }
        }
    }
}
