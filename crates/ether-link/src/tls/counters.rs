//! Counters of a TLS link.

use pvrdma_base::{Counter, counters};

counters! {
    /// Counters of a TLS link, in addition to those that every link has.
    pub(super) struct TlsCounters {
        /// Connections whose other end proved its identity.
        tls_connected,
        /// Connections that were refused: no TLS 1.3, no certificate, another authority or name, or not in time.
        tls_refused,
        /// Connections that were closed in favour of others before they had proved anything.
        tls_given_up,
        /// Connections of the other end that ended because the received data were damaged, or were not a frame.
        tls_malformed,
    }
}

/// Returns all counters of a TLS link, at zero.
pub(crate) fn all_counters() -> Vec<Counter> {
    TlsCounters::default().list()
}
