//! Counters of a TLS link.

use pvrdma_base::{Counter, counters};

counters! {
    /// Counters of a TLS link, in addition to those that every link has.
    pub(super) struct TlsCounters {
        /// Connections whose peer was authenticated.
        tls_connected,
        /// Connections that were refused: no TLS 1.3, no certificate, another authority or name, or too late.
        tls_refused,
        /// Connections that were closed in favour of others before they authenticated.
        tls_given_up,
        /// Connections of the peer that ended because of damaged data or an invalid frame.
        tls_malformed,
    }
}

/// Returns all counters of a TLS link, at zero.
pub(crate) fn all_counters() -> Vec<Counter> {
    TlsCounters::default().list()
}
