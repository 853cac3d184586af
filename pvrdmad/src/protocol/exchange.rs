//! Messages between two processes that hand devices over: frames on a blocking stream socket, with any number of
//! descriptors after a message.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::frame::{FrameReader, MAX_DESCRIPTORS, Received, encode, send};

/// Time within which all networks of a daemon must be ready to be handed over at once. Their guests stand still
/// meanwhile, and QEMU gives up on a message after 5 s.
pub(crate) const ALL_READY: Duration = Duration::from_millis(2500);

/// Longest frame in bytes that accompanies descriptors: their number.
const MAX_COUNT: usize = 16;

/// Sends a message.
///
/// # Errors
/// The socket fails, or its timeout expires.
pub(crate) fn put<T: Serialize>(stream: &UnixStream, message: &T) -> Result<()> {
    Ok(send(stream, &encode(message)?, &[])?)
}

/// Sends descriptors.
///
/// # Errors
/// The socket fails, or its timeout expires.
pub(crate) fn put_descriptors(stream: &UnixStream, fds: &[OwnedFd]) -> Result<()> {
    for fds in fds.chunks(MAX_DESCRIPTORS) {
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        send(stream, &encode(&fds.len())?, &fds)?;
    }
    Ok(())
}

/// Receives a message of at most `most` bytes. Returns `None` at the end of the stream.
///
/// # Errors
/// The socket fails, its timeout expires, or the message is not understood.
pub(crate) fn get<T: DeserializeOwned>(stream: &UnixStream, most: usize) -> Result<Option<T>> {
    Ok(receive(stream, most)?.map(|(message, _)| message))
}

/// Receives this number of descriptors.
///
/// # Errors
/// The socket fails, its timeout expires, or other descriptors arrive.
pub(crate) fn get_descriptors(stream: &UnixStream, wanted: usize) -> Result<Vec<OwnedFd>> {
    let mut fds = Vec::new();
    while fds.len() < wanted {
        let (count, more): (usize, _) = receive(stream, MAX_COUNT)?.context("the other end is closed")?;
        ensure!(count == more.len() && count > 0, "descriptors are missing");
        fds.extend(more);
    }
    ensure!(fds.len() == wanted, "too many descriptors");
    Ok(fds)
}

fn receive<T: DeserializeOwned>(stream: &UnixStream, most: usize) -> Result<Option<(T, Vec<OwnedFd>)>> {
    // The reader takes no byte beyond the frame, so other data may follow.
    match FrameReader::with_descriptors().receive(stream, most)? {
        Received::Frame(frame) => Ok(Some((serde_json::from_slice(&frame.body)?, frame.fds))),
        Received::Pending => bail!("the other process does not continue"),
        Received::Closed => Ok(None),
    }
}
