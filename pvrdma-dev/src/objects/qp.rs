//! A queue pair.

use std::sync::Arc;

use pvrdma_guest_memory::Charge;
use pvrdma_handover::Pending;
use pvrdma_verbs::{Hca, QpCaps, QpType};

use super::{Cq, Pd, Srq};
use crate::ring::{Progress, RingWords, StateWords};

/// Handle of the general services QP. Versions before 20 need handle and number to be equal, and its number is 1.
pub(crate) const GSI_HANDLE: u32 = 1;

/// First handle of the other QPs: 0 means "none" to the user library.
pub(crate) const FIRST_HANDLE: u32 = 2;

/// A queue pair; its rings are the adapter's.
pub(crate) struct Qp<H: Hca> {
    /// Transport service.
    pub(crate) qp_type: QpType,
    /// Its protection domain.
    pub(crate) pd: Arc<Pd<H>>,
    /// Where its sends complete.
    pub(crate) send_cq: Arc<Cq<H>>,
    /// Where its receives complete.
    pub(crate) recv_cq: Arc<Cq<H>>,
    /// Where its receives come from, if not from its own ring.
    pub(crate) srq: Option<Arc<Srq<H>>>,
    /// The adapter's object.
    pub(crate) verbs: H::Qp,
    /// Bus address of the page with the indices of its rings.
    pub(crate) state_page: u64,
    /// How far its send ring was looked at, if it may be watched.
    pub(crate) send_progress: Option<Progress>,
    /// How far its receive ring was looked at, if it has one that may be watched.
    pub(crate) recv_progress: Option<Progress>,
    /// Sizes as created.
    pub(crate) caps: QpCaps,
    /// Doorbells that were not passed on yet: bits of [`crate::pending_doorbells`].
    pub(crate) pending_doorbells: Pending,
    /// What is kept for it.
    pub(crate) _charge: Charge,
}

impl<H: Hca> Qp<H> {
    /// Where the indices of its send ring are.
    pub(crate) const fn send_words(&self) -> RingWords {
        RingWords::at(self.state_page, StateWords::Tx, self.caps.max_send_wr)
    }

    /// Where the indices of its receive ring are, if it has one.
    pub(crate) fn recv_words(&self) -> Option<RingWords> {
        let words = RingWords::at(self.state_page, StateWords::Rx, self.caps.max_recv_wr);
        self.srq.is_none().then_some(words)
    }
}
