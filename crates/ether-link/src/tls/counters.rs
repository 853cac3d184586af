//! What a TLS link counts.

use pvrdma_base::{Counter, counters};

counters! {
    /// Counts of a TLS link, except what every link counts.
    pub(super) struct TlsCounters {
        /// Connections of other ends that proved who they are.
        tls_connected,
        /// Connections of somebody else: no TLS 1.3, no certificate, another authority or name, or not in time.
        tls_refused,
        /// Connections that were given up before they had proved anything, for others.
        tls_given_up,
        /// Connections of the other end that ended because what came on them is damaged, or no frame.
        tls_malformed,
    }
}

/// Everything that a TLS link counts, at zero.
pub(crate) fn all_counters() -> Vec<Counter> {
    TlsCounters::default().list()
}
