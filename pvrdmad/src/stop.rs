//! Waits for a descriptor in a thread that can be stopped.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

/// Waits until a descriptor is ready. Returns `false` when `stop` becomes readable or the deadline passes.
pub(crate) fn wait(stop: &OwnedFd, fd: BorrowedFd<'_>, ready: PollFlags, deadline: Option<Instant>) -> bool {
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let mut poll = [PollFd::new(stop, PollFlags::IN), PollFd::from_borrowed_fd(fd, ready)];
        match rustix::event::poll(&mut poll, left.as_ref()) {
            Err(Errno::INTR) => {}
            Err(_) | Ok(0) => return false,
            Ok(_) => return poll.first().is_some_and(|stop| stop.revents().is_empty()),
        }
    }
}
