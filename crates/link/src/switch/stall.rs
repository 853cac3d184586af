//! An uplink that takes nothing any more: its other end does not read. What waits for it would hold up what ports have
//! for each other behind it, and a peer would stop the traffic between those who are here.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// For so long an uplink may take nothing. Then frames for it are lost, as on a network that is congested, until it
/// takes some again.
pub(super) const LIMIT: Duration = Duration::from_secs(1);

/// Since when the uplink takes nothing.
#[derive(Debug, Default)]
pub(super) struct Stall {
    /// Nanoseconds, and one. 0: it took all that it was given last.
    since: AtomicU64,
}

impl Stall {
    /// The uplink took all that it was given.
    pub(super) fn took_all(&self) {
        if self.since.load(Ordering::Relaxed) != 0 {
            self.since.store(0, Ordering::Relaxed);
        }
    }

    /// The uplink took some of it, or nothing. Returns `true` if what is left is not to wait any longer.
    pub(super) fn refused(&self, some: bool, now: Duration) -> bool {
        let now = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX).saturating_add(1);
        let since = self.since.load(Ordering::Relaxed);
        if some || since == 0 {
            self.since.store(now, Ordering::Relaxed);
            return false;
        }
        Duration::from_nanos(now.saturating_sub(since)) >= LIMIT
    }
}
