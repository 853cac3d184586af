//! A shared receive queue.

use std::sync::Arc;

use pvrdma_guest_memory::Charge;
use pvrdma_handover::Pending;
use pvrdma_verbs::Hca;

use super::Pd;
use crate::ring::{Progress, RingWords};

/// A shared receive queue; its ring is the adapter's.
pub(crate) struct Srq<H: Hca> {
    /// Its handle.
    pub(crate) handle: u32,
    /// Its protection domain.
    pub(crate) pd: Arc<Pd<H>>,
    /// The adapter's object.
    pub(crate) verbs: H::Srq,
    /// Where the indices of its ring are.
    pub(crate) words: RingWords,
    /// How far its ring was looked at, if it may be watched.
    pub(crate) progress: Option<Progress>,
    /// Size in requests.
    pub(crate) max_wr: u32,
    /// SGEs per request.
    pub(crate) max_sge: u32,
    /// Doorbells that were not passed on yet: bits of [`crate::pending_doorbells`].
    pub(crate) pending_doorbells: Pending,
    /// What is kept for it.
    pub(crate) _charge: Charge,
}
