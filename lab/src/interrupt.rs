//! Ctrl-C, and the signals by which a CI system ends a job.

use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// The first signal that has arrived.
static SIGNAL: Mutex<Option<i32>> = Mutex::new(None);

/// Catches the signals from now on. The first one calls `stop` in another thread, and the program is expected to end by
/// itself then; the second one ends it.
///
/// # Errors
/// The system refuses.
pub(crate) fn catch(stop: impl Fn() + Send + 'static) -> Result<()> {
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM]).context("cannot catch signals")?;
    std::thread::spawn(move || {
        for signal in signals.forever() {
            if SIGNAL.lock().unwrap_or_else(PoisonError::into_inner).replace(signal).is_some() {
                std::process::exit(i32::from(status_of(signal)));
            }
            stop();
        }
    });
    Ok(())
}

/// Returns `true` once a signal has arrived.
pub(crate) fn is_requested() -> bool {
    status().is_some()
}

/// Returns the exit status for the signal that has arrived.
pub(crate) fn status() -> Option<u8> {
    SIGNAL.lock().unwrap_or_else(PoisonError::into_inner).map(status_of)
}

/// Returns the exit status that a shell reports for a signal.
fn status_of(signal: i32) -> u8 {
    u8::try_from(signal).ok().and_then(|signal| signal.checked_add(128)).unwrap_or(u8::MAX)
}
