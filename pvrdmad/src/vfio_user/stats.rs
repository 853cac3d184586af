//! What happened on a device's socket, for the status output.

use std::sync::atomic::{AtomicBool, Ordering};

use pvrdma_verbs::{LogLimit, counters};

counters! {
    /// Counts of a device's socket over all its clients.
    pub struct ClientCounters {
        /// Clients served so far, with the present one.
        client_connections,
        /// Clients sent away because there was one already.
        client_connections_turned_away,
        /// Connections that we ended because of what the client did, or because we were too slow.
        client_connections_broken,
        /// Connections that ended by a bug of ours; their devices were reset at once.
        client_connections_panicked,
        /// Messages received.
        client_messages,
        /// Messages that wanted no answer. Not 0 means that a client posts writes, which the driver does not survive
        /// for long.
        client_messages_posted,
        /// Error replies.
        client_messages_refused,
    }
}

/// A device's socket.
#[derive(Debug, Default)]
pub struct ConnectionStats {
    /// A client is there now.
    connected: AtomicBool,
    /// For what clients cause, over all of them: who is refused may come again at once.
    pub(crate) log: LogLimit,
    /// What its clients did.
    pub counters: ClientCounters,
}

impl ConnectionStats {
    /// Notes that a client came or went.
    pub(crate) fn set_connected(&self, connected: bool) {
        self.connected.store(connected, Ordering::Relaxed);
    }

    /// Returns `true` while a client is there.
    pub fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Relaxed)
    }
}
