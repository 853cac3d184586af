//! Counters of an adapter and of the host's connection manager.

use pvrdma_verbs::{Count, Counter, Unit, counters};

counters! {
    /// Counts of an adapter.
    pub(crate) struct Counters {
        /// Send requests that the host's queue pairs took.
        sends_posted,
        /// Receive requests that the host's queues took.
        receives_posted,
        /// Completions that reached a guest.
        completions,
        /// Completions of the host that report an error, flushes included.
        completion_errors,
        /// Send requests that ended with an error before the host saw them.
        local_errors,
        /// Completions of the host for requests that are over.
        stale_completions,
        /// Completions lost because a queue was full.
        cq_overruns,
        /// Times that the host's completion channel woke the adapter's thread.
        wakeups,
        /// Asynchronous events of the host.
        async_events,
        /// Memory regions that ended because their memory or the host's device went away.
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
        /// Addresses that the guest wanted to bind and may not have.
        gids_refused,
        /// Requests, each time they are tried, and datagrams to a peer that one of the two may not talk to.
        peers_refused,
        /// Management datagrams sent through the host.
        cm_sent,
        /// Management datagrams of the network that reached a guest.
        cm_received,
        /// Management datagrams that are no messages of the connection manager, or whose source address is gone.
        cm_refused,
        /// Management datagrams for which there was no room in the queue to the host.
        cm_overflow,
        /// Management datagrams that the host did not take.
        cm_failed,
    }
}

counters! {
    /// Counts of the connection manager that belong to no device. It is one number for the process.
    pub(crate) struct Strays {
        /// Management datagrams of the network that do not parse.
        cm_process_malformed,
        /// Management datagrams of the network for an address that no device has.
        cm_process_unowned,
    }
}

/// Returns the number of bytes of memory that are currently registered with the host.
pub(crate) fn registered_bytes(bytes: u64) -> Counter {
    Counter::gauge("registered_bytes", Unit::Bytes, "Guest memory that is registered with the host.", bytes)
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
