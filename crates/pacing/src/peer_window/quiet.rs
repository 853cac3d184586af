//! Backoff shared by all connections to a peer: while one of them is starved, the others pause.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_roce::Quiet;

/// [`Quiet`] shared by several threads.
#[derive(Debug, Default)]
pub(super) struct SharedQuiet {
    /// End of the quiet period in nanoseconds. An atomic, so that the common case of no quiet period takes no lock. A
    /// thread that sees a store late sends one more batch, which does no harm.
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
