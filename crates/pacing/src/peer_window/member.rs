//! State of a connection that other connections of the window see.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pvrdma_handover::Turn;

/// PSNs of a connection that count even if they are not acknowledged in time: its probe.
pub(super) const PROBE: u64 = 1;

/// A connection.
#[derive(Debug)]
pub(super) struct Member<R> {
    pub(super) runner: Arc<R>,
    pub(super) domain: u64,
    /// [`QUANTUM`](super::QUANTUM) PSNs are counted for a granted turn until it begins.
    pub(super) turn: Turn,
    /// Numbers of PSNs in flight, and acknowledged so far. Only the connection writes them.
    pub(super) in_flight: AtomicU64,
    pub(super) acked: AtomicU64,
    /// PSNs in flight that no longer count.
    pub(super) forgiven: AtomicU64,
}

impl<R> Member<R> {
    /// Returns `true` if the connection has PSNs in flight that count, or is about to send.
    pub(super) fn is_sending(&self) -> bool {
        let in_flight = self.in_flight.load(Ordering::Relaxed);
        in_flight > self.forgiven.load(Ordering::Relaxed).saturating_add(PROBE) || self.turn.is_granted()
    }
}
