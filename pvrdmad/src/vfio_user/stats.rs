//! What happened on a device's socket, for the status output.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// Counters of one device's socket over all its clients.
#[derive(Debug, Default)]
pub struct ConnectionStats {
    /// A client is there now.
    pub(crate) connected: AtomicBool,
    /// Clients served so far, with the present one.
    pub(crate) clients: AtomicU64,
    /// Clients sent away because there was one already.
    pub(crate) turned_away: AtomicU64,
    /// Messages received.
    pub(crate) messages: AtomicU64,
    /// Messages that wanted no answer. Not 0 means that a client posts writes, which the driver does not survive for long.
    pub(crate) posted: AtomicU64,
    /// Error replies.
    pub(crate) refused: AtomicU64,
    /// Connections that we ended because of what the client did, or because we were too slow.
    pub(crate) broken: AtomicU64,
}

/// The counters at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StatsSnapshot {
    /// A client is there now.
    pub connected: bool,
    /// Clients served so far, with the present one.
    pub clients: u64,
    /// Clients sent away because there was one already.
    pub turned_away: u64,
    /// Messages received.
    pub messages: u64,
    /// Messages that wanted no answer.
    pub posted: u64,
    /// Error replies.
    pub refused: u64,
    /// Connections that we ended.
    pub broken: u64,
}

impl ConnectionStats {
    pub(crate) fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// The counters now.
    pub fn snapshot(&self) -> StatsSnapshot {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        StatsSnapshot {
            connected: self.connected.load(Ordering::Relaxed),
            clients: load(&self.clients),
            turned_away: load(&self.turned_away),
            messages: load(&self.messages),
            posted: load(&self.posted),
            refused: load(&self.refused),
            broken: load(&self.broken),
        }
    }
}
