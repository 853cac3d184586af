//! Whether it is quiet on the way to a peer, which all its connections ask before they send.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_roce::Quiet;

/// [`Quiet`] of several threads.
#[derive(Debug, Default)]
pub(super) struct SharedQuiet {
    /// When it is over, in nanoseconds: it hardly ever is quiet, and whoever does not see at once that it is sends one
    /// batch more.
    ends: AtomicU64,
    quiet: Mutex<Quiet>,
}

impl SharedQuiet {
    pub(super) fn ask(&self, now: Duration, rtt: Option<Duration>) -> bool {
        let mut quiet = self.quiet.lock();
        let begins = quiet.ask(now, rtt);
        self.ends.store(nanoseconds(quiet.ends()), Ordering::Relaxed);
        begins
    }

    #[inline]
    pub(super) fn wait(&self, now: Duration, starved: bool) -> Option<Duration> {
        let over = nanoseconds(now) >= self.ends.load(Ordering::Relaxed);
        if over { None } else { self.quiet.lock().wait(now, starved) }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
