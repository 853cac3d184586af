//! Sockets of connections that have ended: they send the rest, and wait until the peers have closed them as well. A
//! socket that is closed with unread bytes would reset the connection, and the peer could miss the last bytes.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::time::Duration;

use super::meeting::ClosingSocket;
use super::poller::{Poller, Watched};

/// Time after which the socket is closed whether the peer has closed it or not.
const MOST: Duration = Duration::from_secs(10);
/// Maximum number of these sockets of a device. The oldest is closed for a further one.
const SOCKETS: usize = 256;
/// Bytes of the peer that are discarded at a time, so that a peer that sends without end does not keep the thread.
const DISCARD: usize = 16;

/// The sockets, by their numbers.
#[derive(Debug, Default)]
pub(super) struct Lingering(HashMap<u64, (Duration, ClosingSocket)>);

impl Lingering {
    /// Returns the time at which the next socket is closed.
    pub(super) fn deadline(&self) -> Option<Duration> {
        self.0.values().map(|(deadline, _)| *deadline).min()
    }

    /// Takes a socket.
    pub(super) fn push(&mut self, now: Duration, poller: &mut Poller, socket: ClosingSocket) {
        if self.0.len() >= SOCKETS
            && let Some(oldest) = self.0.iter().min_by_key(|(_, (deadline, _))| *deadline).map(|(token, _)| *token)
        {
            self.remove(poller, oldest);
        }
        let token = socket.token;
        poller.give(token, Watched::Closing);
        self.0.insert(token, (now.saturating_add(MOST), socket));
        self.advance(poller, token);
    }

    /// Does what a socket permits.
    pub(super) fn advance(&mut self, poller: &mut Poller, token: u64) {
        if self.0.get_mut(&token).is_some_and(|(_, socket)| !continues(socket)) {
            self.remove(poller, token);
        }
    }

    /// Closes sockets whose time has passed.
    pub(super) fn timeouts(&mut self, now: Duration, poller: &mut Poller) {
        let due: Vec<_> =
            self.0.iter().filter(|(_, (deadline, _))| *deadline <= now).map(|(token, _)| *token).collect();
        due.into_iter().for_each(|token| self.remove(poller, token));
    }

    fn remove(&mut self, poller: &mut Poller, token: u64) {
        poller.remove(token);
        self.0.remove(&token);
    }
}

/// Sends what is left, and discards what arrives. Returns `false` if the connection is over.
fn continues(closing: &mut ClosingSocket) -> bool {
    let ClosingSocket { socket, rest, .. } = closing;
    while !rest.is_empty() {
        match socket.write(rest) {
            Ok(written @ 1..) => {
                rest.drain(..written);
                if rest.is_empty() && socket.shutdown(Shutdown::Write).is_err() {
                    return false;
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            _ => return false,
        }
    }
    let mut bytes = [0; 4096];
    for _ in 0..DISCARD {
        match socket.read(&mut bytes) {
            Ok(1..) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            _ => return false,
        }
    }
    // The peer only had to close the connection, and sends much instead.
    false
}
