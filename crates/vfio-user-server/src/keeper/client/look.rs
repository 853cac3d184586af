//! Query of a daemon to a keeper that an earlier daemon has left.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;

use super::super::wire::{Operation, SEATS};
use super::{Ask, KeeperError, Line};

/// Returns for the device and its network function whether the keeper holds a client.
///
/// # Errors
/// The keeper does not answer correctly within `patience`.
pub fn has_clients(keeper: OwnedFd, patience: Duration) -> io::Result<[bool; SEATS]> {
    let ask = Ask { operation: Operation::Look, seat: 0, tail: &[], fds: &[], most: 0 };
    let mut seats = [0; SEATS];
    let answer = Line::new(keeper).exchange(&ask, None, patience, &mut seats).map_err(|error| match error {
        // The keeper has closed the connection before the question, without reading it.
        KeeperError::System(Errno::PIPE | Errno::CONNRESET) => io::Error::other(KeeperError::Gone),
        error => io::Error::other(error),
    })?;
    match seats.map(|seat| (seat <= 1).then_some(seat == 1)) {
        [Some(device), Some(nic)] if answer.bytes == SEATS => Ok([device, nic]),
        _ => Err(io::Error::other("its answer is not understood")),
    }
}
