//! The request to save or to move a machine: a signal.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::Builder;
use std::time::Duration;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::link::Cancel;

/// Place that a machine leaves to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Target {
    /// A file.
    File(PathBuf),
    /// The socket of another process, and the maximum time for the migration.
    Socket(PathBuf, Duration),
}

/// The target of a machine, and the event that requests to leave to it.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) target: Target,
    pub(crate) event: EventFd,
    pub(crate) cancel: Arc<Cancel>,
}

/// Starts a thread that turns each SIGUSR1 into a request. SIGUSR2 cancels a migration.
pub(crate) fn on_signal(target: Target) -> Result<Request> {
    let handled = match target {
        Target::File(_) => &[SIGUSR1][..],
        Target::Socket(..) => &[SIGUSR1, SIGUSR2],
    };
    let (event, cancel) = (EventFd::new(EFD_NONBLOCK).context("event")?, Arc::new(Cancel::default()));
    let mut signals = Signals::new(handled).context("cannot handle a signal")?;
    let (requested, cancelled) = (event.try_clone()?, Arc::clone(&cancel));
    let wait = move || {
        for signal in signals.forever() {
            match signal {
                SIGUSR2 => cancelled.cancel(),
                // The write fails only if the event was signalled 2^64 times without a read.
                _ => drop(requested.write(1)),
            }
        }
    };
    Builder::new().name("signals".to_owned()).spawn(wait).context("cannot start a thread")?;
    Ok(Request { target, event, cancel })
}
