//! Queue pairs.

use std::sync::Arc;

use pvrdma_guest_memory::Charge;
use pvrdma_handover::Pending;
use pvrdma_verbs::Hca;
use pvrdma_verbs_types::{QpCaps, QpType};

use super::{Cq, Pd, Srq};
use crate::ring::{Progress, RingWords, StateWords};

/// Handle of the general services QP. Versions before 20 require handle and QPN to be equal, and the QPN is 1.
pub(crate) const GSI_HANDLE: u32 = 1;

/// First handle of the other QPs: the user library reads 0 as "none".
pub(crate) const FIRST_HANDLE: u32 = 2;

/// Queue pair; the adapter holds its rings.
pub(crate) struct Qp<H: Hca> {
    /// Transport service.
    pub(crate) qp_type: QpType,
    /// Its protection domain.
    pub(crate) pd: Arc<Pd<H>>,
    /// Completion queue of its sends.
    pub(crate) send_cq: Arc<Cq<H>>,
    /// Completion queue of its receives.
    pub(crate) recv_cq: Arc<Cq<H>>,
    /// Shared receive queue, if it has no receive ring of its own.
    pub(crate) srq: Option<Arc<Srq<H>>>,
    /// Object of the adapter.
    pub(crate) verbs: H::Qp,
    /// Bus address of the page with the indices of its rings.
    pub(crate) state_page: u64,
    /// Progress of the last look at its send ring, if the ring may be watched.
    pub(crate) send_progress: Option<Progress>,
    /// Progress of the last look at its receive ring, if it has one that may be watched.
    pub(crate) recv_progress: Option<Progress>,
    /// Sizes at creation.
    pub(crate) caps: QpCaps,
    /// Doorbells not yet forwarded: bits of [`crate::pending_doorbells`].
    pub(crate) pending_doorbells: Pending,
    /// Charge for its memory.
    pub(crate) _charge: Charge,
}

impl<H: Hca> Qp<H> {
    /// Returns the location of the indices of its send ring.
    pub(crate) const fn send_words(&self) -> RingWords {
        RingWords::at(self.state_page, StateWords::Tx, self.caps.max_send_wr)
    }

    /// Returns the location of the indices of its receive ring, if it has one.
    pub(crate) fn recv_words(&self) -> Option<RingWords> {
        let words = RingWords::at(self.state_page, StateWords::Rx, self.caps.max_recv_wr);
        self.srq.is_none().then_some(words)
    }
}
