//! The giver's side of a hand-over.

use std::io::{BufWriter, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use log::error;
use pvrdma_pci_function::Migratable;

use super::wire::{Answer, Client, Go, PATIENCE, Part, get, put, put_descriptors};
use crate::vfio_user::{HeldClient, Server};

/// Time limit for the current message of a client, because a client can send half a message and wait.
const MESSAGE: Duration = Duration::from_millis(100);

/// Size of the buffer in front of the socket, in bytes.
const BUFFER: usize = 64 << 10;

/// A function to be given.
pub(crate) struct GivenFunction<'a> {
    /// Name of the device.
    pub(crate) device: &'a str,
    /// It is the network function beside the device.
    pub(crate) nic: bool,
    pub(crate) server: &'a Server,
    pub(crate) function: Arc<dyn Migratable>,
}

/// Gives functions to the taker at the other end of a socket. After success, this process must end without touching the
/// guests' memory again: the functions stay paused, and the clients belong to the taker.
///
/// # Errors
/// The functions cannot be given, or the taker refuses them. They are served as before.
pub(crate) fn give(functions: &[GivenFunction<'_>], to: &UnixStream) -> Result<()> {
    to.set_read_timeout(Some(PATIENCE))?;
    to.set_write_timeout(Some(PATIENCE))?;
    let mut held = Vec::with_capacity(functions.len());
    for given in functions {
        held.push(given.server.hold(MESSAGE).with_context(|| format!("device {}", given.device))?);
    }
    for given in functions {
        given.function.pause();
    }
    let offered = offer(functions, &held, to).and_then(|()| put(to, &Go {}));
    if let Err(error) = offered {
        for given in functions {
            if let Err(problem) = given.function.resume() {
                // Log: once for a function of a hand-over.
                error!("{}: cannot resume: {problem}", given.device);
            }
        }
        return Err(error);
    }
    held.into_iter().for_each(HeldClient::give_away);
    Ok(())
}

/// Sends the functions, and waits until the taker is ready.
fn offer(functions: &[GivenFunction<'_>], held: &[HeldClient<'_>], to: &UnixStream) -> Result<()> {
    let sent = send(functions, held, to);
    // A taker that refuses a function sends the reason before it hangs up.
    match (sent, get(to)) {
        (Ok(()), Ok(Some(Answer::Ready {}))) => Ok(()),
        (_, Ok(Some(Answer::Refused { reason }))) => bail!("{reason}"),
        (Err(error), _) | (Ok(()), Err(error)) => Err(error),
        (Ok(()), Ok(None)) => Err(anyhow!("the next worker ended")),
    }
}

fn send(functions: &[GivenFunction<'_>], held: &[HeldClient<'_>], to: &UnixStream) -> Result<()> {
    for (given, held) in functions.iter().zip(held) {
        let connection = held.connection().with_context(|| format!("device {}", given.device))?;
        let (client, fds) = connection.map(Client::of).unzip();
        put(to, &Part::Function { device: given.device.to_owned(), nic: given.nic, client })?;
        put_descriptors(to, &fds.unwrap_or_default())?;
        let mut out = BufWriter::with_capacity(BUFFER, to);
        given.function.save(&mut out).map_err(|error| anyhow!("device {}: {error}", given.device))?;
        out.flush()?;
    }
    put(to, &Part::End {})
}
