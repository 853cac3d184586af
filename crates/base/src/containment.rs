//! Panic containment: limits the damage of a panic to the connection, capture or process whose state it may have left
//! inconsistent.
//!
//! A panic is a bug in this code. Unwinding releases locks, but nothing marks the data behind them as half changed.
//! Therefore a panic immediately ends everything whose state may be inconsistent, with a line in the log, and never
//! leaves the process without a thread that others rely on:
//!
//! - A panic on a connection's thread ends that connection: its device is reset and its memory unmapped. Neither step
//!   uses the half-changed state.
//! - A panic on a capture's thread ends that capture.
//! - A panic while state shared by several guests is changed ([`EndOnPanic`]), or on any other thread, ends the
//!   process; its supervisor starts another one. A process that embeds a device ends as well, because the state of its
//!   guest's peers can no longer be trusted.

use std::process::abort;
use std::thread::panicking;

use crate::thread_kind::ThreadKind;

/// Ends the process if a panic drops it. Guards changes of state that several guests share.
#[derive(Debug)]
#[must_use]
pub struct EndOnPanic {
    what: &'static str,
    /// `true` if the guard was created during the unwinding of an earlier panic.
    late: bool,
}

impl EndOnPanic {
    /// Creates a guard for the state that the log names `what`.
    #[inline]
    pub fn new(what: &'static str) -> Self {
        Self { what, late: panicking() }
    }
}

impl Drop for EndOnPanic {
    #[inline]
    fn drop(&mut self) {
        if panicking() && !self.late {
            end(self.what);
        }
    }
}

/// Handles an uncaught panic of a thread started by [`threads::spawn`](crate::threads::spawn) when no panic hook is
/// set.
pub(crate) fn thread_panicked(kind: ThreadKind, name: &str) {
    if kind == ThreadKind::Capture {
        // Log: a bug in this code, once for a thread.
        log::error!("a capture ends by a panic: {name}");
    } else {
        end(&format!("thread {name} ({kind})"));
    }
}

#[cold]
fn end(what: &str) -> ! {
    // Log: the last line of the process.
    log::error!("a panic in {what} may have left the state of guests torn: this process ends");
    abort();
}
