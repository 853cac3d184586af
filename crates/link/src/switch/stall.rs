//! Detection of a stalled uplink, whose other end does not read. Frames that wait for such an uplink would hold up the
//! frames to other ports behind them, so a remote peer could stop the local traffic.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Maximum time for which frames wait for an uplink that takes nothing. After it, frames for the uplink are dropped, as
/// in a congested network, until it takes some again.
pub(super) const LIMIT: Duration = Duration::from_secs(1);

/// Start of the period in which the uplink takes nothing.
#[derive(Debug, Default)]
pub(super) struct Stall {
    /// Nanoseconds plus one. 0: the uplink took all frames of the last batch.
    since: AtomicU64,
}

impl Stall {
    /// Records that the uplink took all offered frames.
    pub(super) fn took_all(&self) {
        if self.since.load(Ordering::Relaxed) != 0 {
            self.since.store(0, Ordering::Relaxed);
        }
    }

    /// Records that the uplink took some of the offered frames, or none. Returns `true` if the rest must be dropped.
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
