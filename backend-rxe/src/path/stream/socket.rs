//! A connection with its socket, and the bytes between the two.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use pvrdma_iwarp::{Close, Connection, End, Stream};
use pvrdma_verbs_types::{RequesterOps, ResponderOps};
use rustix::net::sockopt;

use super::limits::{INCOMING, LONGEST, OUTGOING};
use crate::iwarp::meeting::{ClosingSocket, Established, HANG_UP, READABLE, WRITABLE};

/// Bytes that were accepted and read since the connection was last told.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Exchanged {
    /// Bytes that the socket has accepted.
    pub(super) accepted: usize,
    /// Bytes that were read.
    pub(super) arrived: usize,
    /// The peer has closed the connection now.
    pub(super) closed: bool,
    /// TCP has lost the connection.
    pub(super) lost: bool,
}

impl Exchanged {
    /// Returns `true` if there is something to tell.
    pub(super) const fn any(self) -> bool {
        self.accepted > 0 || self.arrived > 0 || self.closed || self.lost
    }
}

/// An established connection with its socket.
#[derive(Debug)]
pub(super) struct StreamSocket {
    pub(super) connection: Connection,
    socket: TcpStream,
    token: u64,
    /// Bytes that were read; those in `taken..read` are to be processed.
    incoming: Box<[u8]>,
    taken: usize,
    read: usize,
    /// Bytes to be sent; those in `sent..built` are left.
    outgoing: Box<[u8]>,
    sent: usize,
    built: usize,
    /// The socket may have bytes or room. It reports each only once, so it is used until it has none.
    readable: bool,
    writable: bool,
    /// The peer has closed the connection.
    closed: bool,
    /// The connection is to be closed once everything was sent.
    hang_up: bool,
    /// The sending direction is closed.
    shut: bool,
}

impl StreamSocket {
    /// `timeout`: time after which TCP gives up a peer that acknowledges nothing.
    pub(super) fn new(established: Established, timeout: Duration) -> Self {
        let Established { connection, socket, token } = established;
        // Without it, TCP gives up later.
        let _ = sockopt::set_tcp_user_timeout(&socket, u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX));
        Self {
            connection,
            socket,
            token,
            incoming: vec![0; INCOMING].into_boxed_slice(),
            taken: 0,
            read: 0,
            outgoing: vec![0; OUTGOING].into_boxed_slice(),
            sent: 0,
            built: 0,
            readable: true,
            writable: true,
            closed: false,
            hang_up: false,
            shut: false,
        }
    }

    /// Notes reports about the socket.
    pub(super) const fn note(&mut self, reports: u8) {
        self.readable |= reports & READABLE != 0;
        self.writable |= reports & WRITABLE != 0;
        self.hang_up |= reports & HANG_UP != 0;
    }

    /// Returns the numbers of bytes that are to be sent and processed.
    pub(super) const fn waiting(&self) -> [usize; 2] {
        let incoming = self.read.saturating_sub(self.taken).saturating_add(self.connection.kept());
        [self.built.saturating_sub(self.sent), incoming]
    }

    /// Returns `true` if the socket has not accepted all bytes.
    pub(super) const fn is_full(&self) -> bool {
        self.sent < self.built
    }

    /// Returns `true` if a SEND of the peer waits for a receive.
    pub(super) fn waits_for_receive(&self) -> bool {
        self.connection.stream().is_some_and(Stream::waits_for_receive)
    }

    /// Writes and reads what the socket permits.
    pub(super) fn exchange(&mut self) -> Exchanged {
        let mut exchanged = Exchanged::default();
        self.write(&mut exchanged);
        self.read(&mut exchanged);
        exchanged
    }

    fn write(&mut self, exchanged: &mut Exchanged) {
        while self.writable
            && !exchanged.lost
            && let Some(bytes) = self.outgoing.get(self.sent..self.built).filter(|bytes| !bytes.is_empty())
        {
            match self.socket.write(bytes) {
                Ok(written) => {
                    self.sent = self.sent.saturating_add(written);
                    exchanged.accepted = exchanged.accepted.saturating_add(written);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.writable = false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => exchanged.lost = true,
            }
        }
        if self.sent == self.built {
            (self.sent, self.built) = (0, 0);
        }
    }

    fn read(&mut self, exchanged: &mut Exchanged) {
        if self.taken < self.read || self.waits_for_receive() || self.closed {
            return;
        }
        (self.taken, self.read) = (0, 0);
        while self.readable && !exchanged.lost {
            match self.socket.read(&mut self.incoming) {
                Ok(0) => {
                    (self.closed, exchanged.closed) = (true, true);
                    return;
                }
                Ok(read) => {
                    (self.read, exchanged.arrived) = (read, read);
                    return;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.readable = false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => exchanged.lost = true,
            }
        }
    }

    /// Passes what was exchanged to the connection. `posted`: a receive may have been posted. Returns `true` if there
    /// was something to pass.
    pub(super) fn deliver(
        &mut self,
        now: Duration,
        exchanged: Exchanged,
        posted: bool,
        ops: &mut (impl RequesterOps + ResponderOps),
    ) -> bool {
        let mut passed = exchanged.any() || posted;
        self.connection.taken(exchanged.accepted, ops);
        if self.connection.poll_timeout().is_some_and(|deadline| deadline <= now) {
            self.connection.handle_timeout(now, ops);
        }
        if posted && self.waits_for_receive() {
            self.connection.resume(now, ops);
        }
        if !self.waits_for_receive()
            && let Some(bytes) = self.incoming.get(self.taken..self.read).filter(|bytes| !bytes.is_empty())
        {
            let used = self.connection.handle_bytes(now, bytes, ops);
            self.taken = self.taken.saturating_add(used);
            passed |= used > 0;
        }
        if exchanged.closed {
            self.connection.peer_closed(ops);
        }
        if exchanged.lost {
            self.connection.reset(ops);
        }
        passed
    }

    /// Builds the next FPDU. Returns its length, or `None` if there is none, or no room for it.
    pub(super) fn build(&mut self, ops: &mut (impl RequesterOps + ResponderOps)) -> Option<usize> {
        let room = self.outgoing.len().saturating_sub(self.built);
        if self.shut || room < LONGEST {
            return None;
        }
        let out = self.outgoing.get_mut(self.built..self.built.saturating_add(LONGEST))?;
        let length = self.connection.poll_transmit(out, ops)?;
        self.built = self.built.saturating_add(length);
        Some(length)
    }

    /// Closes the sending direction if the connection is to be closed, and everything was sent.
    pub(super) fn hang_up(&mut self) {
        let whole = |stream: &Stream| stream.is_empty() && stream.close() == Close::Finish;
        if self.hang_up && !self.shut && !self.is_full() && self.connection.stream().is_some_and(whole) {
            // The error of a lost connection is that of the next read, too.
            let _ = self.socket.shutdown(Shutdown::Write);
            self.shut = true;
        }
    }

    /// Ends the connection. Returns its socket if bytes are to be sent, or the peer has to close it.
    pub(super) fn finish(self: Box<Self>) -> Option<ClosingSocket> {
        let Self { connection, socket, token, outgoing, sent, built, closed, shut, .. } = *self;
        let stream = connection.stream()?;
        let how = match stream.end() {
            // The queue pair was reset or destroyed.
            None | Some(End::PeerClosed) => Some(stream.close()),
            Some(_) => connection.close(),
        };
        let rest = outgoing.get(sent..built).unwrap_or_default().to_vec();
        if how == Some(Close::Reset) {
            let _ = sockopt::set_socket_linger(&socket, Some(Duration::ZERO));
            return None;
        }
        if rest.is_empty() && !shut {
            socket.shutdown(Shutdown::Write).ok()?;
        }
        (!closed || !rest.is_empty()).then_some(ClosingSocket { socket, token, rest })
    }
}
