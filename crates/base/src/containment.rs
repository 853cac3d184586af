//! What a panic ends.
//!
//! A panic is a bug of ours, and what it leaves behind is half done: locks are released, and nothing says that what
//! they protect is not what it should be. So it ends whatever may be torn, at once and with a line in the log, and
//! never leaves a thread missing that others rely on:
//!
//! - On the thread of a connection it ends that connection: its device is reset and its memory unmapped, which needs
//!   nothing of what was half done.
//! - On the thread of a capture it ends that capture.
//! - In what several guests share ([`EndOnPanic`]), and on every other thread, it ends the process, whose supervisor
//!   starts another one. A process that embeds a device ends, too: the state of its guest's peers is not to be trusted
//!   any more.

use std::process::abort;
use std::thread::panicking;

use crate::threads::ThreadKind;

/// Ends the process if it is dropped by a panic. It guards what several guests share.
#[derive(Debug)]
#[must_use]
pub struct EndOnPanic {
    what: &'static str,
    /// It was made while a panic that began elsewhere cleans up.
    late: bool,
}

impl EndOnPanic {
    /// Guards what the log is to call `what`.
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

/// What the panic of a thread that started by [`threads::spawn`](crate::threads::spawn) ends, unless there is a hook.
pub(crate) fn thread_panicked(kind: ThreadKind, name: &str) {
    if kind == ThreadKind::Capture {
        // Log: a bug of ours, once for a thread.
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
