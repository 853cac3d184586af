//! The request to save a machine: a signal.

use std::path::Path;
use std::thread::Builder;

use anyhow::{Context, Result};
use signal_hook::consts::SIGUSR1;
use signal_hook::iterator::Signals;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::machine::Request;

/// Starts a thread that turns each SIGUSR1 into a request to save the machine to this file.
pub(crate) fn on_signal(path: &Path) -> Result<Request> {
    let event = EventFd::new(EFD_NONBLOCK).context("request to save")?;
    let (mut signals, requested) = (Signals::new([SIGUSR1]).context("request to save")?, event.try_clone()?);
    let wait = move || {
        for _ in signals.forever() {
            // The write fails only if the event was signalled 2^64 times without a read.
            let _ = requested.write(1);
        }
    };
    Builder::new().name("signals".to_owned()).spawn(wait).context("cannot start a thread")?;
    Ok(Request { path: path.to_owned(), event })
}
