//! The giver's side of a hand-over.

use std::io::{BufWriter, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use log::error;
use pvrdma_pci_function::Migratable;
use pvrdma_vfio_user_server::{HeldClient, Server};

use super::wire::{Answer, Client, Go, PATIENCE, PERMIT, Part, READY, get};
use crate::doorbells::{Doorbells, HeldPages};
use crate::protocol::exchange::{put, put_descriptors};
use crate::status::FormerCounts;

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
    /// Its doorbell pages, if it has some.
    pub(crate) doorbells: Option<&'a Doorbells>,
    /// Returns the values of its counters.
    pub(crate) counts: Box<dyn Fn() -> FormerCounts + 'a>,
}

/// Gives functions to the taker at the other end of a socket. With a permit the functions go only once the other end of
/// that socket permits it: several networks go at once, or none of them. On success this process must end without
/// touching the guests' memory again: the functions stay paused, and the clients belong to the taker.
///
/// # Errors
/// The functions cannot be given, or the taker refuses them. They are served as before.
pub(crate) fn give(functions: &[GivenFunction<'_>], to: &UnixStream, permit: Option<&UnixStream>) -> Result<()> {
    to.set_read_timeout(Some(PATIENCE))?;
    to.set_write_timeout(Some(PATIENCE))?;
    let mut held = Vec::with_capacity(functions.len());
    for given in functions {
        held.push(given.server.hold(MESSAGE).with_context(|| format!("device {}", given.device))?);
    }
    for given in functions {
        given.function.pause();
    }
    let (offered, pages) = match hold_pages(functions) {
        Ok(pages) => (offer(functions, &held, &pages, to), pages),
        Err(error) => (Err(error), Vec::new()),
    };
    let permitted = offered.and_then(|()| permit.map_or(Ok(()), wait_for_permit));
    let offered = permitted.and_then(|()| put(to, &Go {}));
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
    pages.into_iter().flatten().for_each(HeldPages::give_away);
    Ok(())
}

/// Stops serving the doorbell pages of functions. A processor of a guest that touches an absent page waits from here
/// on, so that the touch reaches the worker that serves the page next.
fn hold_pages<'a>(functions: &[GivenFunction<'a>]) -> Result<Vec<Option<HeldPages<'a>>>> {
    let hold = |given: &GivenFunction<'a>| match given.doorbells {
        Some(doorbells) => doorbells.hold().with_context(|| format!("device {}: doorbells", given.device)),
        None => Ok(None),
    };
    functions.iter().map(hold).collect()
}

/// Reports at the socket that the taker is ready, and waits for a byte that permits the rest.
fn wait_for_permit(mut permit: &UnixStream) -> Result<()> {
    permit.set_read_timeout(Some(PERMIT))?;
    permit.write_all(&[READY])?;
    permit.read_exact(&mut [0]).context("the hand-over is called off")
}

/// Sends the functions, and waits until the taker is ready.
fn offer(
    functions: &[GivenFunction<'_>],
    held: &[HeldClient<'_>],
    pages: &[Option<HeldPages<'_>>],
    to: &UnixStream,
) -> Result<()> {
    let sent = send(functions, held, pages, to);
    // A taker that refuses a function sends the reason before it hangs up.
    match (sent, get(to)) {
        (Ok(()), Ok(Some(Answer::Ready {}))) => Ok(()),
        (_, Ok(Some(Answer::Refused { reason }))) => bail!("{reason}"),
        (_, Ok(None)) => Err(anyhow!("the next worker ended")),
        (Err(error), _) | (Ok(()), Err(error)) => Err(error),
    }
}

fn send(
    functions: &[GivenFunction<'_>],
    held: &[HeldClient<'_>],
    pages: &[Option<HeldPages<'_>>],
    to: &UnixStream,
) -> Result<()> {
    for ((given, held), pages) in functions.iter().zip(held).zip(pages) {
        let connection = held.connection().with_context(|| format!("device {}", given.device))?;
        let (client, fds) = connection.map(Client::of).unzip();
        let (doorbells, page_fds) = pages.as_ref().map(HeldPages::give).transpose()?.unzip();
        let (device, counts) = (given.device.to_owned(), (given.counts)());
        put(to, &Part::Function { device, nic: given.nic, client, doorbells, counts })?;
        put_descriptors(to, &fds.unwrap_or_default())?;
        put_descriptors(to, &page_fds.unwrap_or_default())?;
        let mut out = BufWriter::with_capacity(BUFFER, to);
        given.function.save(&mut out).map_err(|error| anyhow!("device {}: {error}", given.device))?;
        out.flush()?;
    }
    put(to, &Part::End {})
}
