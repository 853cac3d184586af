//! Shared receive queues.

use std::sync::Arc;

use pvrdma_guest_memory::Charge;
use pvrdma_handover::Pending;
use pvrdma_verbs::Hca;

use super::Pd;
use crate::ring::{Progress, RingWords, StateWords};

/// Shared receive queue; the adapter holds its ring.
pub(crate) struct Srq<H: Hca> {
    /// Its handle.
    pub(crate) handle: u32,
    /// Its protection domain.
    pub(crate) pd: Arc<Pd<H>>,
    /// Object of the adapter.
    pub(crate) verbs: H::Srq,
    /// Location of the indices of its ring.
    pub(crate) words: RingWords,
    /// Progress of the last look at its ring, if the ring may be watched.
    pub(crate) progress: Option<Progress>,
    /// Size in requests.
    pub(crate) max_wr: u32,
    /// SGEs per request.
    pub(crate) max_sge: u32,
    /// Doorbells not yet forwarded: bits of [`crate::pending_doorbells`].
    pub(crate) pending_doorbells: Pending,
    /// Charge for its memory.
    pub(crate) _charge: Charge,
}

impl<H: Hca> Srq<H> {
    /// Creates a queue that the guest has destroyed and a QP still uses.
    pub(crate) fn ended(pd: Arc<Pd<H>>, verbs: H::Srq, charge: Charge) -> Self {
        Self {
            handle: u32::MAX,
            pd,
            verbs,
            words: RingWords::at(0, StateWords::Rx, 1),
            progress: None,
            max_wr: 1,
            max_sge: 1,
            pending_doorbells: Pending::new(),
            _charge: charge,
        }
    }
}
