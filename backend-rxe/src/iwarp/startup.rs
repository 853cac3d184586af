//! A socket until its connection is established: the end of TCP's handshake, and the MPA startup.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use pvrdma_iwarp::{Close, Connection, Event, Incoming, Limits, Negotiated, StartupError};
use rustix::net::sockopt;

use super::meeting::{ClosingSocket, Established};
use super::no_ops::NoOps;

/// Bytes of a buffer for frames of the startup.
const FRAME: usize = 1024;

/// Change of a connection that is being established.
#[derive(Debug)]
pub(super) enum Change {
    /// The peer asks for a connection.
    Requested(Incoming),
    /// The peer has accepted.
    Accepted(Negotiated, Vec<u8>),
    /// The peer has rejected the connection.
    Rejected(Vec<u8>),
    /// TCP cannot connect.
    Unreachable(io::Error),
    /// The startup has failed.
    Failed(StartupError),
}

/// A connection that is being established.
#[derive(Debug)]
pub(super) struct Startup {
    socket: TcpStream,
    /// Number of the socket.
    pub(super) token: u64,
    connection: Connection,
    /// TCP's handshake is complete.
    connected: bool,
    /// Frames that the socket has not accepted.
    outgoing: Vec<u8>,
}

impl Startup {
    /// Creates the startup of a connection that this end has begun, or that it has accepted if `connected`.
    pub(super) const fn new(socket: TcpStream, token: u64, connection: Connection, connected: bool) -> Self {
        Self { socket, token, connection, connected, outgoing: Vec::new() }
    }

    /// Time at which [`Self::handle_timeout`] is due.
    pub(super) fn deadline(&self) -> Option<Duration> {
        self.connection.poll_timeout()
    }

    /// Ends the startup if it has taken too long.
    pub(super) fn handle_timeout(&mut self, now: Duration) -> Option<Change> {
        self.connection.handle_timeout(now, &mut NoOps);
        self.change()
    }

    /// Does what the socket permits.
    pub(super) fn advance(&mut self, now: Duration) -> Option<Change> {
        if !self.connected {
            match self.has_connected() {
                Ok(false) => return None,
                Ok(true) => self.connected = true,
                Err(error) => return Some(Change::Unreachable(error)),
            }
        }
        self.send();
        loop {
            if let Some(change) = self.change() {
                self.send();
                return Some(change);
            }
            let mut bytes = [0; FRAME];
            match self.socket.read(&mut bytes) {
                Ok(0) => self.connection.peer_closed(&mut NoOps),
                Ok(read) => {
                    self.connection.handle_bytes(now, bytes.get(..read).unwrap_or_default(), &mut NoOps);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.connection.reset(&mut NoOps),
            }
            // A connection that has failed is not read to its end.
            if self.connection.close().is_some() {
                return self.change();
            }
        }
    }

    fn has_connected(&self) -> io::Result<bool> {
        if let Some(error) = self.socket.take_error()? {
            return Err(error);
        }
        match self.socket.peer_addr() {
            Ok(_) => self.socket.set_nodelay(true).map(|()| true),
            Err(error) if error.kind() == ErrorKind::NotConnected => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn change(&mut self) -> Option<Change> {
        loop {
            return Some(match self.connection.poll_event()? {
                Event::Requested(incoming) => Change::Requested(incoming),
                Event::Established { negotiated, private_data } => Change::Accepted(negotiated, private_data),
                Event::Rejected { private_data } => Change::Rejected(private_data),
                Event::Failed(error) => Change::Failed(error),
                Event::Ended(_) => continue,
            });
        }
    }

    /// Sends frames of the startup, as far as the socket accepts them.
    fn send(&mut self) {
        // An established connection is left to its queue pair: its first message must not be built without it.
        if self.connection.stream().is_none() {
            let mut frame = [0; FRAME];
            while let Some(length) = self.connection.poll_transmit(&mut frame, &mut NoOps) {
                self.outgoing.extend_from_slice(frame.get(..length).unwrap_or_default());
            }
        }
        while !self.outgoing.is_empty() {
            // The error of a lost connection is that of the next read, too.
            let Ok(written @ 1..) = self.socket.write(&self.outgoing) else { return };
            self.outgoing.drain(..written);
            self.connection.taken(written, &mut NoOps);
        }
    }

    /// Accepts the request of the peer.
    pub(super) fn accept(&mut self, limits: Limits, private_data: &[u8]) -> Result<Negotiated, StartupError> {
        self.connection.accept(limits, private_data)
    }

    /// Rejects the request of the peer.
    pub(super) fn reject(&mut self, private_data: &[u8]) {
        // Private data of a REJ always fits.
        if self.connection.reject(private_data).is_ok() {
            self.send();
        }
    }

    /// Returns the connection, for a new socket, with a request of revision 1, if the peer has closed the old one
    /// instead of replying to a request of revision 2.
    pub(super) fn fallback(self, now: Duration) -> Option<Connection> {
        self.connection.fallback(now)
    }

    /// Returns the socket and the connection for a queue pair.
    pub(super) fn into_established(self) -> Established {
        let Self { socket, token, connection, .. } = self;
        Established { connection, socket, token }
    }

    /// Ends the connection. Returns its socket if bytes are to be sent, or the peer has to close it.
    pub(super) fn finish(mut self) -> Option<ClosingSocket> {
        self.connection.flush(&mut NoOps);
        self.send();
        let Self { socket, token, connection, outgoing, connected } = self;
        if !connected {
            return None;
        }
        if connection.close() == Some(Close::Reset) {
            // The peer resets its end as well.
            let _ = sockopt::set_socket_linger(&socket, Some(Duration::ZERO));
            return None;
        }
        if outgoing.is_empty() {
            socket.shutdown(Shutdown::Write).ok()?;
        }
        Some(ClosingSocket { socket, token, rest: outgoing })
    }
}
