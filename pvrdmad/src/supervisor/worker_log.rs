//! Forwards the standard error of a worker to that of the supervisor.
//!
//! A worker limits the log lines that its guests and peers can cause, but a compromised worker limits nothing. Lines
//! are therefore bounded in length and rate, control characters are replaced, and the number of dropped lines is
//! logged. The pipe is always drained, so that a thread of the worker that logs is not blocked.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use super::timing::{Budget, Rate};
use crate::logging;
use crate::text::printable_text;

/// Most bytes of a line that are forwarded.
const MAX_LINE: usize = 4096;
/// Bytes per read: the capacity of a pipe.
const CHUNK: usize = 64 << 10;
/// Reads after the worker has ended: more than its pipe holds, even if another process still writes to it.
const LAST_READS: usize = 16;

/// Standard error of a worker. Dropping it forwards the remaining data.
#[derive(Debug)]
pub(super) struct WorkerLog<R: Read, W: Write> {
    /// Non-blocking.
    from: R,
    to: W,
    network: String,
    line: Vec<u8>,
    budget: Budget,
    swallowed: u64,
}

impl<R: Read, W: Write> WorkerLog<R, W> {
    pub(super) fn new(from: R, to: W, network: &str, rate: Rate) -> Self {
        let budget = Budget::new(rate, Instant::now());
        Self { from, to, network: network.to_owned(), line: Vec::new(), budget, swallowed: 0 }
    }

    /// Reads and forwards pending data. Returns `false` at the end of the stream.
    pub(super) fn take(&mut self) -> bool {
        let mut chunk = [0; CHUNK];
        match self.from.read(&mut chunk) {
            Ok(0) => false,
            Ok(count) => {
                self.feed(chunk.get(..count).unwrap_or_default());
                true
            }
            Err(error) => matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
        }
    }

    fn feed(&mut self, bytes: &[u8]) {
        for part in bytes.split_inclusive(|&byte| byte == b'\n') {
            let (text, ends) = part.strip_suffix(b"\n").map_or((part, false), |text| (text, true));
            let room = MAX_LINE.saturating_sub(self.line.len());
            self.line.extend_from_slice(text.get(..room).unwrap_or(text));
            if ends {
                self.pass();
            }
        }
    }

    /// Forwards a line, if the budget allows it.
    fn pass(&mut self) {
        let line = std::mem::take(&mut self.line);
        if !self.budget.take(Instant::now()) {
            self.swallowed = self.swallowed.saturating_add(1);
            return;
        }
        self.tell_swallowed();
        self.write(&printable_text(&String::from_utf8_lossy(&line)));
    }

    fn tell_swallowed(&mut self) {
        if self.swallowed > 0 {
            let line = format!("network {}: {} lines of its worker are left out", self.network, self.swallowed);
            self.write(&line);
            self.swallowed = 0;
        }
    }
}

impl<R: Read, W: Write> WorkerLog<R, W> {
    fn write(&mut self, line: &str) {
        if !logging::relay(&self.network, line) {
            // The supervisor's standard error may be closed.
            let _ = writeln!(self.to, "{line}");
        }
    }
}

impl<W: Write> AsFd for WorkerLog<std::fs::File, W> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.from.as_fd()
    }
}

impl<R: Read, W: Write> Drop for WorkerLog<R, W> {
    fn drop(&mut self) {
        for _ in 0..LAST_READS {
            if !self.take() {
                break;
            }
        }
        if !self.line.is_empty() {
            self.pass();
        }
        self.tell_swallowed();
    }
}

/// Creates a pipe for a worker: a non-blocking end to read and a blocking end to write.
///
/// # Errors
/// No descriptors are available.
pub(super) fn pipe() -> io::Result<(std::fs::File, OwnedFd)> {
    let (ours, theirs) = io::pipe()?;
    rustix::io::ioctl_fionbio(&ours, true)?;
    Ok((OwnedFd::from(ours).into(), theirs.into()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Returns the output for `bytes` with a budget of `burst` lines.
    fn passed(bytes: &[u8], burst: u32) -> String {
        let mut out = Vec::new();
        let rate = Rate { burst, each: Duration::from_secs(3600) };
        drop(WorkerLog::new(bytes, &mut out, "red", rate));
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn lines_pass_without_control_characters() {
        assert_eq!(passed(b"one\ntwo", 9), "one\ntwo\n");
        assert_eq!(passed(b"\x1b[31mred\xff\r\n\n", 9), "\u{fffd}[31mred\u{fffd}\u{fffd}\n\n");
        assert_eq!(passed(b"", 9), "");
    }

    #[test]
    fn a_flood_is_counted() {
        let said = passed(&b"again\n".repeat(10_000), 3);
        assert_eq!(said, "again\nagain\nagain\nnetwork red: 9997 lines of its worker are left out\n");
    }

    #[test]
    fn a_line_without_end_takes_no_memory() {
        let said = passed(&[&[b'x'; 300_000][..], b"\nnext\n"].concat(), 3);
        assert_eq!(said, format!("{}\nnext\n", "x".repeat(MAX_LINE)));
    }

    #[test]
    fn our_end_does_not_wait_for_a_silent_worker() {
        let (ours, theirs) = pipe().unwrap();
        let mut out = Vec::new();
        let mut log = WorkerLog::new(ours, &mut out, "red", Rate { burst: 9, each: Duration::from_secs(3600) });
        assert!(log.take());
        rustix::io::write(&theirs, b"said\n").unwrap();
        assert!(log.take());
        drop(theirs);
        assert!(!log.take());
        drop(log);
        assert_eq!(out, b"said\n");
    }
}
