//! Counters of an adapter and of the host's connection manager.

use pvrdma_base::{Count, Counter, Unit, counters};

counters! {
    /// Counts of an adapter.
    pub(crate) struct Counters {
        /// Send requests posted to the host.
        sends_posted,
        /// Receive requests posted to the host.
        receives_posted,
        /// Completions that reached a guest.
        completions,
        /// Completions of the host in error, including flushes.
        completion_errors,
        /// Send requests that completed in error before they were posted to the host.
        local_errors,
        /// Completions of the host for requests that have ended.
        stale_completions,
        /// Completions that were lost because a queue was full.
        cq_overruns,
        /// Wake-ups of the adapter's thread by the host's completion channel.
        wakeups,
        /// Asynchronous events of the host.
        async_events,
        /// Memory regions that ended because their memory or the host's device was removed.
        regions_revoked,
        /// Fast registrations.
        fast_registrations,
        /// Management datagrams that reached a guest of this process.
        gsi_delivered,
        /// Management datagrams that no guest received.
        gsi_dropped,
        /// Addresses of guests that were added to the host's interface.
        addresses_added,
        /// Addresses of guests that could not be added to the host's interface.
        addresses_refused,
        /// Addresses that the guest may not bind.
        gids_refused,
        /// Requests (each attempt) and datagrams to a peer that the rules of either device refuse.
        peers_refused,
        /// Management datagrams sent through the host, or passed to its connection manager.
        cm_sent,
        /// Management datagrams from the network, or from the daemon for the network, that reached a guest.
        cm_received,
        /// Management datagrams that are not messages of the connection manager, or whose source address is gone;
        /// requests for connections that are invalid.
        cm_refused,
        /// Management datagrams that found no room in the queue to the host, and requests beyond the connections that
        /// may be in progress.
        cm_overflow,
        /// Management datagrams that the host did not accept, and connections that it could not make.
        cm_failed,
        /// Connections that the host's connection manager made for the guest.
        cm_connections,
    }
}

counters! {
    /// Counts of the connection manager that belong to no device. It is one number for the process.
    pub(crate) struct Strays {
        /// Invalid management datagrams from the network.
        cm_process_malformed,
        /// Management datagrams from the network for an address that no device has.
        cm_process_unowned,
    }
}

/// Returns the number of bytes of memory that are currently registered with the host.
pub(crate) fn registered_bytes(bytes: u64) -> Counter {
    Counter::gauge("registered_bytes", Unit::Bytes, "Guest memory registered with the host.", bytes)
}

/// Returns all counters of an adapter and of the connection manager, at zero.
pub(crate) fn all_counters() -> Vec<Counter> {
    let mut list = Counters::default().list();
    list.push(registered_bytes(0));
    list.extend(Strays::default().list());
    list
}

/// Adds one to a counter.
pub(crate) fn bump(counter: &Count) {
    counter.increment();
}
